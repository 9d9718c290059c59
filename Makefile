# Every target makes .venv and installs what it needs first, and does nothing twice. `make` alone lists them.
PYTHON ?= python3
BIN    := .venv/bin
READY  := .venv/.ready-$(firstword $(shell cat settings.ini setup.py | cksum))
NEWEST := $(addprefix tests/test_, $(addsuffix .py, distortion hierarchy learner numerics properties regressions v02))
.DEFAULT_GOAL := help
.PHONY: help demo test test-newest docs bench stress clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# The stamp's name has a checksum of settings.ini and setup.py: it exists exactly when the
# environment holds what they ask for.
$(READY):
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	@-git rev-parse --git-dir >/dev/null 2>&1 && $(BIN)/nbdev_install_hooks
	@rm -f .venv/.ready*
	@touch $@

demo: $(READY) ## the six models of Figure 1 on scikit-learn's digits: a table, and a picture in demo/
	$(BIN)/python -W ignore::FutureWarning -m hierproto.paper.figure1 --data digits --threads 1

test: $(READY) ## everything that must pass: package and notebooks in step, every notebook, pytest
	$(BIN)/python tools/test.py

# nbdev below 3 needs an older fastcore than the newest fastai: the package itself works with both
test-newest: ## the tests that need no nbdev, with the newest version of everything, in .venv-newest
	test -x .venv-newest/bin/python || $(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager pip '.[onnx,serve,weights]' pytest hypothesis httpx
	.venv-newest/bin/python -m pip uninstall --quiet --yes hierproto
	PYTHONPATH=. OMP_NUM_THREADS=1 .venv-newest/bin/python -m pytest -q $(NEWEST)

docs: $(READY) ## build the docs site into _docs/
	$(BIN)/python tools/docs.py

bench: $(READY) ## measure speed and memory as ratios, into results/bench.csv
	$(BIN)/python -m hierproto.paper.bench

stress: $(READY) ## properties, bad input, faults and an hour of trainings at full counts, into results/stress.csv
	$(BIN)/python tools/stress.py

clean: ## remove what the other targets made
	rm -rf .venv .venv-newest _docs _proc demo build *.egg-info
