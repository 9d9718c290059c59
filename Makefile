# Every target makes .venv and installs what it needs first, and does nothing twice. `make` alone lists them.
PYTHON ?= python3
BIN    := .venv/bin
READY  := .venv/.ready
.DEFAULT_GOAL := help
.PHONY: help demo test docs bench stress clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "make %-7s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# The stamp is newer than settings.ini and setup.py exactly when the environment holds what they ask for.
$(READY): settings.ini setup.py
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	@-git rev-parse --git-dir >/dev/null 2>&1 && $(BIN)/nbdev_install_hooks
	@touch $@

demo: $(READY) ## the six models of Figure 1 on scikit-learn's digits: a table, and a picture in demo/
	$(BIN)/python -m hierproto.figure1 --data digits --threads 1

test: $(READY) ## everything that must pass: package and notebooks in step, every notebook, pytest
	$(BIN)/python tools/test.py

docs: $(READY) ## build the docs site into _docs/
	$(BIN)/python tools/docs.py

bench: $(READY) ## measure speed and memory as ratios, into results/bench.csv
	$(BIN)/python -m hierproto.bench

stress: $(READY) ## properties, bad input, faults and an hour of trainings at full counts, into results/stress.csv
	$(BIN)/python tools/stress.py

clean: ## remove what the other targets made
	rm -rf .venv _docs _proc demo build *.egg-info
