("The installed distribution: metadata from `settings.ini`, packaged trees, imports from any folder, "
 "commands that start at once.")
import os, resource, subprocess, sys, zipfile
from configparser import ConfigParser
from importlib.metadata import entry_points, metadata, requires
from pathlib import Path

import pytest

root = Path(__file__).resolve().parent.parent
ini = ConfigParser(delimiters=['='])
ini.read(root/'settings.ini', encoding='utf-8')
cfg = ini['DEFAULT']

def test_metadata_comes_from_settings():
    m = metadata('hierproto')
    assert (m['Version'], m['Summary']) == (cfg['version'], cfg['description'])
    assert set(m.get_all('Provides-Extra')) == {k.removesuffix('_requirements')
                                                for k in cfg if k.endswith('_requirements')}
    assert len([r for r in requires('hierproto') if 'extra ==' not in r]) == len(cfg['requirements'].split())

def test_version_in_package():
    import hierproto
    assert hierproto.__version__ == cfg['version']

def test_imports_from_another_folder(tmp_path):
    code = "from hierproto.hierarchy import Hierarchy; print(len(Hierarchy.named('inat19')))"
    out = subprocess.run([sys.executable, '-c', code], cwd=tmp_path, capture_output=True, text=True)
    assert out.stdout.strip() == '1010', out.stderr

def test_wheel_holds_trees_and_page(tmp_path):
    cmd = [sys.executable, '-m', 'pip', 'wheel', '-v', '--no-deps', '--no-build-isolation', '-w', tmp_path, root]
    done = subprocess.run(cmd, capture_output=True, text=True)
    if done.returncode and 'setuptools' in done.stderr: pytest.skip('setuptools and wheel are not installed')
    assert not done.returncode, done.stderr
    with zipfile.ZipFile(next(tmp_path.glob('*.whl'))) as z: names = z.namelist()
    assert 'is absent from the `packages`' not in done.stdout + done.stderr
    assert {f'hierproto/{o}/{f.name}' for o in ('trees', 'page') for f in (root/'hierproto'/o).iterdir()} <= set(names)

SCRIPTS = dict(o.split('=') for o in cfg['console_scripts'].split())

def test_console_scripts_are_installed():
    installed = {e.name: e.value for e in entry_points(group='console_scripts') if e.name in SCRIPTS}
    assert installed == SCRIPTS, 'install again: pip install -e .'

def start(name, *argv):
    "The command `name` as its entry point starts it, with the CPU seconds it took"
    module, function = SCRIPTS[name].split(':')
    code = f'from {module} import {function}; {function}()'
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = {**os.environ, 'COLUMNS': '100'}
    out = subprocess.run([sys.executable, '-c', code, *argv], capture_output=True, text=True, env=env)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return out, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

@pytest.mark.parametrize('name', SCRIPTS)
def test_help_is_quick_and_quiet(name):
    out, seconds = start(name, '--help')
    assert out.returncode == 0 and 'usage: '+name in out.stdout and not out.stderr
    assert seconds < 1, f'{seconds:.1f} s'

def test_a_typo_is_reported_at_once():
    out, seconds = start('hierproto_fit', 'images', 'classes.csv', '--epoch', '3')
    assert out.returncode == 2 and 'did you mean --epochs?' in out.stderr and seconds < 1
    out, seconds = start('hierproto_predict', 'model', 'x.png', '--rule', 'best')
    assert out.returncode == 2 and "invalid choice: 'best'" in out.stderr and seconds < 1
