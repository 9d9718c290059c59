"The layers of the house hold: what import-linter sees, and the ways around it that only a look at the code finds."
import subprocess, sys
from pathlib import Path

root = Path(__file__).resolve().parent.parent

def run(*cmd): return subprocess.run(cmd, cwd=root, capture_output=True, text=True)

def test_no_module_imports_from_a_higher_layer():
    "The contracts are in .importlinter; a missing layer or a cycle breaks them too"
    res = run(Path(sys.executable).with_name('lint-imports'), '--no-cache')
    assert not res.returncode, res.stdout[-3000:] + res.stderr[-1000:]

def test_no_import_goes_around_the_layers():
    "No import by string except the listed ones, no private name of another module, no `exporti` to pass one on"
    res = run(sys.executable, 'tools/layers.py')
    assert not res.returncode, res.stdout
