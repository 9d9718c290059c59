("The installed distribution: metadata from `settings.ini`, packaged trees, imports from any folder, "
 "commands that start at once.")
import os, re, resource, subprocess, sys, zipfile
from configparser import ConfigParser
from importlib.metadata import entry_points, metadata, requires
from pathlib import Path

import pytest

root = Path(__file__).resolve().parent.parent
ini = ConfigParser(delimiters=['='])
ini.read(root/'settings.ini', encoding='utf-8')
cfg = ini['DEFAULT']

@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
    "The wheel of this checkout, as an open zip file"
    folder = tmp_path_factory.mktemp('wheel')
    cmd = [sys.executable, '-m', 'pip', 'wheel', '-v', '--no-deps', '--no-build-isolation', '-w', folder, root]
    done = subprocess.run(cmd, capture_output=True, text=True)
    if done.returncode and 'setuptools' in done.stderr: pytest.skip('setuptools and wheel are not installed')
    assert not done.returncode, done.stderr
    assert 'is absent from the `packages`' not in done.stdout + done.stderr
    with zipfile.ZipFile(next(folder.glob('*.whl'))) as z: yield z

def test_metadata_comes_from_settings():
    m = metadata('hierproto')
    assert (m['Version'], m['Summary']) == (cfg['version'], cfg['description'])
    assert set(m.get_all('Provides-Extra')) == {k.removesuffix('_requirements')
                                                for k in cfg if k.endswith('_requirements')}
    assert len([r for r in requires('hierproto') if 'extra ==' not in r]) == len(cfg['requirements'].split())

def test_every_dependency_has_its_reason():
    "CONTRIBUTING.md has a line for each requirement in `settings.ini`, extras too, and for nothing else"
    text = (root/'CONTRIBUTING.md').read_text(encoding='utf-8').split('## Dependencies')[1]
    lines = [o for o in text.splitlines() if o.startswith('- ')]
    assert all(o.partition(': ')[2] for o in lines)
    named = {n for o in lines for n in re.findall(r'`([\w-]+)`', re.sub(r'\([^)]*\)', '', o.partition(': ')[0]))}
    wanted = ' '.join(v for k, v in cfg.items() if k.endswith('requirements')).split()
    wanted = {re.split(r'[<>=\[]', o)[0] for o in wanted}
    assert named == wanted, (named - wanted, wanted - named)

def test_pythons_are_those_of_settings(wheel):
    "From the oldest to the newest, in the metadata and on the front page; CI runs both ends"
    oldest, newest = (cfg[k] for k in ('min_python', 'newest_python'))
    text = next(wheel.read(o) for o in wheel.namelist() if o.endswith('.dist-info/METADATA')).decode()
    listed = re.findall('^Classifier: .* Python :: (3[.].*)$', text, re.M)
    assert (listed[0], listed[-1]) == (oldest, newest)
    assert f'Python {oldest} to {newest}' in (root/'README.md').read_text(encoding='utf-8')
    ci = (root/'.github/workflows/test.yml').read_text(encoding='utf-8')
    assert f"'{oldest}'" in ci and f"'{newest}'" in ci

def test_version_in_package():
    import hierproto
    assert hierproto.__version__ == cfg['version']

def test_imports_from_another_folder(tmp_path):
    code = "from hierproto.hierarchy import Hierarchy; print(len(Hierarchy.named('inat19')))"
    out = subprocess.run([sys.executable, '-c', code], cwd=tmp_path, capture_output=True, text=True)
    assert out.stdout.strip() == '1010', out.stderr

def test_wheel_holds_trees_and_page(wheel):
    files = {f'hierproto/{o}/{f.name}' for o in ('trees', 'page') for f in (root/'hierproto'/o).iterdir()}
    assert files <= set(wheel.namelist())

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

WRONG = [('figure1', '--threads -1', '--threads must be between 0 and 1024, got -1'),
         ('train', '--method gp_dist', 'did you mean gp_disto?'),
         ('train', '--data nyudv2 --tier finetune', '--tier finetune is for cifar100'),
         ('train', '--hierarchy missing.csv', 'no such file: missing.csv'),
         ('sweep', '--fraction 2', '--fraction must be numbers above 0 and up to 1'),
         ('sweep', '--methods all,hxee', 'did you mean hxe?'),
         ('report', '--out missing', 'no such folder: missing'),
         ('fit', 'missing cifar100', 'images must be a folder: there is no such folder: missing'),
         ('fit', '. missing.csv', 'no such file: missing.csv'),
         ('fit', '. cifar100 --epochs 0', '--epochs must be between 1 and 100000, got 0'),
         ('fit', '. cifar100 --lr nan', '--lr must be between'),
         ('fit', '. cifar100 --method magic', "--method must be one of cross_entropy"),
         ('fit', '. cifar100 --pretrained perhaps', '--pretrained must be yes, no, a file of weights'),
         ('fit', '. cifar100 --out model', 'this folder has a model'),
         ('predict', 'missing x.png', 'no such folder: missing'),
         ('predict', '. x.png --top 2 --out x.csv', '--top is for printed answers'),
         ('predict', '. x.png --rule crm --threshold .5', '--threshold needs --rule back_off'),
         ('predict', '. x.png --out x.txt', '.csv or .jsonl'),
         ('audit', 'missing.csv cifar100', 'no such file: missing.csv'),
         ('audit', 'model/settings.json cifar100 --shuffles -1', '--shuffles must be between 0'),
         ('compare', '. cifar100 --jobs 2000', '--jobs must be between 1 and 1024 or 0, got 2000'),
         ('compare', '. cifar100 --weights missing.pth', 'no such file: missing.pth')]

@pytest.mark.parametrize('name,options,why', WRONG, ids=lambda o: str(o)[:40])
def test_options_are_checked_before_torch_is_imported(name, options, why, tmp_path, monkeypatch):
    "One line within a second"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('PYTHONPATH', str(root))
    (tmp_path/'model').mkdir()
    (tmp_path/'model'/'settings.json').touch()
    out, seconds = start(f'hierproto_{name}', *options.split())
    assert out.returncode == 2 and why in out.stderr, out.stderr
    assert len(out.stderr.splitlines()) == 1 and out.stderr.startswith(f'hierproto_{name}: ')
    assert seconds < 1, f'{seconds:.1f} s'
