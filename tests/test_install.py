"The distribution as others get it: metadata from `settings.ini`, packaged trees, an import that works from anywhere."
import subprocess, sys, zipfile
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
    assert set(m.get_all('Provides-Extra')) == {k.removesuffix('_requirements') for k in cfg if k.endswith('_requirements')}
    assert len([r for r in requires('hierproto') if 'extra ==' not in r]) == len(cfg['requirements'].split())

def test_version_in_package():
    import hierproto
    assert hierproto.__version__ == cfg['version']

def test_imports_from_another_folder(tmp_path):
    code = "from hierproto.hierarchy import Hierarchy; print(len(Hierarchy.named('inat19')))"
    out = subprocess.run([sys.executable, '-c', code], cwd=tmp_path, capture_output=True, text=True)
    assert out.stdout.strip() == '1010', out.stderr

def test_wheel_holds_the_trees(tmp_path):
    cmd = [sys.executable, '-m', 'pip', 'wheel', '--quiet', '--no-deps', '--no-build-isolation', '-w', tmp_path, root]
    done = subprocess.run(cmd, capture_output=True, text=True)
    if done.returncode and 'setuptools' in done.stderr: pytest.skip('setuptools and wheel are not installed')
    assert not done.returncode, done.stderr
    with zipfile.ZipFile(next(tmp_path.glob('*.whl'))) as z: names = z.namelist()
    assert {f'hierproto/trees/{f.name}' for f in (root/'hierproto'/'trees').iterdir()} <= set(names)

@pytest.mark.parametrize('script', cfg.get('console_scripts', '').split() or [None])
def test_console_scripts_explain_themselves(script):
    if script is None: pytest.skip('no console scripts are defined')
    name = script.split('=')[0]
    assert name in {e.name for e in entry_points(group='console_scripts')}
    out = subprocess.run([Path(sys.executable).parent/name, '--help'], capture_output=True, text=True)
    assert out.returncode == 0 and 'usage' in out.stdout.lower(), out.stderr
