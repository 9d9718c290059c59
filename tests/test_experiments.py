"A sweep that is killed at random moments, or shared by several processes, ends with the rows of an undisturbed one"
import csv, hashlib, json, os, subprocess, sys
from pathlib import Path
import pandas as pd, pytest

KILLS = int(os.environ.get('HIERPROTO_KILLS', 3))  # twenty when it matters; results/kills.csv then says what came of it
EPOCHS = max(3, KILLS)  # long enough to be killed so often
TIMELESS = ['run_id', 'method', 'seed', 'er', 'ahc', 'loss', 'distortion', 'scale', 'best_epoch', 'n_train', 'params']

# All libraries are loaded before the first fork, so that a child is at work at once and a kill hits the sweep rather
# than its imports.
PROGRAM = '''
import os, random, signal, sys, time
import torch; torch.set_num_threads(1)
from hierproto.files import finished
from hierproto.paper.recipes import sweep_recipes
from hierproto.paper.runs import results_file
from hierproto.paper.sweeps import run_sweep
import hierproto.methods
out, kills, processes, epochs = sys.argv[1], *map(int, sys.argv[2:])
rs = sweep_recipes('digits', 'cross_entropy,gp_disto', seeds=2, tier='smoke', epochs=epochs, n_train=96, n_test=64)

def child():
    pid = os.fork()
    if not pid: os._exit(len(run_sweep(rs, out, wait=.05)))
    return pid
def wait(pid): return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

random.seed(kills)
killed = 0
while killed < kills:
    pid = child(); time.sleep(random.uniform(0, 1.5)); os.kill(pid, signal.SIGKILL)
    killed += wait(pid) == -signal.SIGKILL
    if len(finished(results_file(rs[0], out))) == len(rs): break
codes = [wait(pid) for pid in [child() for _ in range(processes)]]
print(killed); sys.exit(max(codes))
'''


def sweep(out, kills=0, processes=1):
    ("Rows of a sweep that is killed `kills` times, unless it ends before, then finished by `processes` at once; "
     "and how often it was killed")
    res = subprocess.run([sys.executable, '-W', 'ignore', '-c', PROGRAM, str(out), str(kills), str(processes),
                          str(EPOCHS)], capture_output=True, text=True,
                         env={**os.environ, 'OMP_NUM_THREADS': '1'}, timeout=3000)
    logs = [f.read_text() for f in Path(out).rglob('*.log')]
    assert res.returncode == 0, '\n'.join([res.stderr, *logs])
    return (pd.read_csv(Path(out)/'digits_smoke.csv').sort_values('run_id')[TIMELESS].to_csv(index=False),
            int(res.stdout))


@pytest.fixture(scope='module')
def straight(tmp_path_factory):
    out = tmp_path_factory.mktemp('straight')
    return sweep(out)[0], out


def left_over(out): return sorted(f.name for f in Path(out).rglob('*') if f.suffix in ('.ckpt', '.claim', '.part'))


def test_undisturbed(straight):
    rows, out = straight
    assert len(rows.splitlines()) == 5 and not left_over(out)


def write_down(killed, rows, equal):
    "One row about this test in results/kills.csv"
    from hierproto.files import add_row, commit, versions
    row = dict(kills=killed, runs=4, epochs=EPOCHS, rows=len(rows.splitlines())-1, equal=equal, commit=commit(),
               versions=versions())
    row['run_id'] = hashlib.sha1(repr(sorted(row.items())).encode()).hexdigest()[:12]
    add_row(Path(__file__).parents[1]/'results'/'kills.csv', row, ['run_id', *row][:-1])


def test_killed(straight, tmp_path):
    rows, killed = sweep(tmp_path, kills=KILLS)
    if 'HIERPROTO_KILLS' in os.environ:
        write_down(killed, rows, rows == straight[0])
        assert killed == KILLS, f'the sweep was finished after {killed} kills: more epochs are needed'
    assert rows == straight[0]
    assert not left_over(tmp_path)
    for f in straight[1].glob('digits_smoke/*.csv'):
        assert f.read_bytes() == (tmp_path/'digits_smoke'/f.name).read_bytes()


def test_shared_folder(straight, tmp_path):
    assert sweep(tmp_path, kills=1, processes=3)[0] == straight[0]
    assert not left_over(tmp_path)


LAUNCHED = """
import sys, torch; torch.set_num_threads(1)
from hierproto.paper.recipes import resolve
from hierproto.paper.runs import train_run
for m in sys.argv[2].split(','): train_run(resolve('digits', m, 'smoke', epochs=2, n_train=96, n_test=63), sys.argv[1])
torch.distributed.destroy_process_group()
"""


def test_accelerate(tmp_path):
    "Two processes on a CPU train a model together and write one row; HIERPROTO_METHODS=all does so for every method"
    pytest.importorskip('accelerate', reason='training on several processes needs accelerate')
    from hierproto.paper.recipes import parse_methods
    methods = [m for m, _ in parse_methods(os.environ.get('HIERPROTO_METHODS', 'gp_disto,cross_entropy'))]
    (tmp_path/'launched.py').write_text(LAUNCHED)
    # its own --cpu starts one process
    res = subprocess.run([sys.executable, '-W', 'ignore', '-m', 'accelerate.commands.launch',
                          '--multi_gpu', '--num_processes', '2', '--num_machines', '1', '--main_process_port', '0',
                          '--mixed_precision', 'no', '--dynamo_backend', 'no', '--num_cpu_threads_per_process', '1',
                          str(tmp_path/'launched.py'), str(tmp_path/'out'), ','.join(methods)],
                         capture_output=True, text=True, timeout=900,
                         env={**os.environ, 'OMP_NUM_THREADS': '1', 'ACCELERATE_USE_CPU': 'true'})
    assert res.returncode == 0, res.stderr[-3000:]
    df = pd.read_csv(tmp_path/'out'/'digits_smoke.csv')
    assert df.method.tolist() == methods and (df.n_test == 63).all()
    assert ((df.er*63).round(6) % 1 == 0).all(), 'an error rate is a count of 63, padding left out'


def test_recipes_know_the_networks():
    "Every `arch` that a recipe may name can be imported"
    from hierproto.body import ARCHS, arch_func
    assert all(callable(arch_func(o)) for o in ARCHS)


NONSENSE = [dict(method='magic'), dict(set='epochs=-3'), dict(set='lam=nan'), dict(fraction=float('nan')),
            dict(fold=99), dict(hierarchy='no/such.csv'), dict(hierarchy='oak'), dict(set='magic=1'),
            dict(set='arch=magic'), dict(seed=-1), dict(threads=-2), dict(log='paper'), dict(tier='magic'),
            dict(data='magic')]

@pytest.mark.parametrize('program', ['train', 'sweep'])
@pytest.mark.parametrize('dry', [False, True])
@pytest.mark.parametrize('kw', NONSENSE, ids=str)
def test_nonsense_is_refused_before_any_work(kw, dry, program, tmp_path, monkeypatch):
    "One line that names the culprit; no row, no folder, no training, also in a dry run"
    from hierproto import cli
    from hierproto.paper import sweeps as E
    from hierproto.paper.recipes import RecipeError
    monkeypatch.setattr(E, 'run_claimed', lambda *a, **k: pytest.fail('it starts'))
    (name, value), = kw.items()
    if program == 'sweep':
        kw = dict(method=dict(methods='hxe,magic'), seed=dict(seeds=-1), fold=dict(set='fold=99'),
                  fraction=dict(fraction='nan')).get(name, kw)
    with pytest.raises((RecipeError, cli.OptionError)) as e:
        cli._function(program)(**{**dict(data="digits", tier="smoke", out=str(tmp_path/'out'), dry_run=dry), **kw})
    culprit = str(value).split('=')[-1]
    assert '\n' not in str(e.value) and (culprit in str(e.value) or 'fold' in str(e.value)), e.value
    assert not (tmp_path/'out').exists()


# --- ids ---
RESULTS = Path(__file__).parents[1]/'results'
def files_with_ids():
    "All committed files whose rows have a `run_id`"
    return [f for f in sorted(RESULTS.rglob('*.csv')) if f.open().readline().startswith('run_id,')]

def recipe_id(r, file):
    "The id of the recipe of the row `r`, resolved today"
    from hierproto.paper.recipes import resolve
    trees = [o/'trees'/r.hierarchy for o in (file.parent, RESULTS)]
    tree = next((str(o) for o in trees if o.is_file()), r.hierarchy)
    today = resolve(r.data, r.method, r.tier, r.seed, r.fold, r.fraction, tree, **json.loads(r.overrides))
    return today['run_id']

def table_id(r, file): return f'{r.data}_{r.model}_{r.seed}'

def kills_id(r, file):
    row = {k: v for k, v in r._asdict().items() if k not in ('Index', 'run_id')}
    return hashlib.sha1(repr(sorted(row.items())).encode()).hexdigest()[:12]

def study_id(r, file):
    from hierproto.paper.studies import recipe
    fine = None if pd.isna(r.fine) else int(r.fine)
    return recipe(r.data, r.study, r.method, r.seed, fine, r.up, **json.loads(r.settings))['run_id']

def suspects_id(r, file):
    from hierproto.paper.studies import recipe
    return recipe(r.data, 'suspects', 'cross_entropy', r.seed, share=r.share, **json.loads(r.settings))['run_id']

def scales_id(r, file):
    from hierproto.paper.studies import recipe
    return recipe(r.data, 'scale', 'gp_disto', r.seed, **json.loads(r.settings))['run_id']

def curves_id(r, file):
    from hierproto.paper.studies import recipe
    return recipe(r.data, 'curves', r.method, r.seed, **json.loads(r.settings))['run_id']

def new_classes_id(r, file):
    from hierproto.paper.new_classes import new_class_recipe
    examples = None if pd.isna(r.examples) else int(r.examples)
    return new_class_recipe(r.method, r.seed, r.how, examples)['run_id']

def ids_digest(df): return hashlib.sha1(' '.join(df.run_id).encode()).hexdigest()

# rows of a recipe that no longer exists: their ids cannot be recomputed, and stay as they are
FROZEN = {'mnist_figure1_raw.csv': '98a6ce797aa26df696704761b06dfe160baf7fb2'}
OTHER_IDS = {
    'tables.csv': table_id,
    'kills.csv': kills_id,
    'suspects.csv': suspects_id,
    'scales.csv': scales_id,
    'curves.csv': curves_id,
    'new_classes.csv': new_classes_id}

@pytest.mark.parametrize('file', files_with_ids(), ids=lambda f: f.name)
def test_committed_rows_keep_their_ids(file):
    "The id of each committed row, computed today, is that of the row"
    from hierproto.files import read_rows
    df = read_rows(file)
    with file.open(newline='') as f: assert len(df) == sum(1 for _ in csv.reader(f)) - 1, 'rows that cannot be read'
    if file.name in FROZEN: assert ids_digest(df) == FROZEN[file.name]
    else:
        id_of = study_id if file.parent.name == 'studies' else OTHER_IDS.get(file.name, recipe_id)
        changed = [(r.run_id, r) for r in df.itertuples() if id_of(r, file) != r.run_id]
        assert not changed, f'{len(changed)} of {len(df)} rows have another id, such as {changed[0]}'


def test_every_committed_result_has_its_id_checked():
    "The files of runs are found: scratch, features, fine-tuned and studies"
    names = {f.name for f in files_with_ids()}
    tiers = ['cpu', 'study', 'features', 'features_study', 'finetune', 'finetune_study']
    assert {f'cifar100_{o}.csv' for o in tiers} <= names
    assert {'nyudv2_features.csv', 'nyudv2_features_study.csv', 's2agri_cpu.csv', 'mnist_figure1.csv'} <= names


def test_selected_runs_follow_the_tier(monkeypatch):
    "Rows from before a change of the tier are not picked"
    from hierproto.paper import recipes
    from hierproto.paper.report import load_results, select
    df = load_results('cifar100', 'cpu', RESULTS)
    assert len(select(df, 'gp_disto')) >= 3
    monkeypatch.setitem(recipes.TIERS['cpu'], 'cifar100', dict(recipes.TIERS['cpu']['cifar100'], epochs=13))
    assert len(select(df, 'gp_disto')) == 0


def test_recipes_ask_the_method(monkeypatch):
    "A registered variant has the settings of its family, whatever it is called"
    from hierproto.methods import METHODS
    from hierproto.paper.recipes import resolve
    variant = METHODS['gp_disto'].variant(scale=2.)
    if not hasattr(variant, 'guided'): variant.guided = variant.protos = True
    monkeypatch.setitem(METHODS, 'my_variant', variant)
    mine, theirs = [resolve('cifar100', m, 'cpu', fraction=.1) for m in ('my_variant', 'gp_disto')]
    assert ([mine.get(k) for k in ('lam', 'proto_lr', 'proto_wd')]
            == [theirs[k] for k in ('lam', 'proto_lr', 'proto_wd')] == [20., 10., 0.])


def test_mnist_trains_the_published_protocol():
    from hierproto.paper.recipes import resolve
    r = resolve('mnist', 'gp_disto', 'paper')
    assert (r['protocol'], r['normalize'], r['args']) == ('published', True, dict(hidden=False, init='cube'))


@pytest.mark.parametrize('data, tier', [('cifar100', 'finetune'), ('cifar100', 'finetune_study'),
                                        ('nyudv2', 'features'), ('nyudv2', 'features_study')])
def test_pretrained_tiers(data, tier, tmp_path, monkeypatch):
    "The tiers of pretrained networks, on toys and from random weights"
    pytest.importorskip('timm')
    from fastai.data.external import fastai_cfg
    from hierproto.paper.recipes import resolve
    from hierproto.paper.runs import run_data, run_learner, train_run
    from hierproto.paper.toys import TOYS
    monkeypatch.setenv('HIERPROTO_DATA', str(tmp_path))
    monkeypatch.setitem(fastai_cfg().d, 'data_path', str(tmp_path/'cache'))
    TOYS[data](tmp_path/data)
    study = dict(holdout=.3) if tier.endswith('study') else {}
    own = dict(cifar100=dict(method='gp_disto', bs=64, n_valid=20), nyudv2=dict(method='soft_labels', n_valid=4))[data]
    r = resolve(data, tier=tier, size=48, pretrained=False, epochs=1, **own, **study)
    dls, h = run_data(r)
    learn = run_learner(r, dls, h)
    x, y = dls.one_batch()
    assert learn.model(x).shape == (len(x), len(h), *y.shape[1:])
    if data == 'cifar100':
        # what the weights expect
        assert x.shape[-2] == 48 and dls.train.after_batch.normalize.mean.flatten().tolist()[:3] == [.5, .5, .5]
    else:
        assert y.shape[1:] == (24, 32) and dls.valid.one_batch()[1].shape[1:] == (48, 64)
    row = train_run(r, tmp_path/'out')
    n_train, n_test = dict(cifar100=(200, 100), nyudv2=(16, 16))[data]
    assert (row['n_train'], row['n_test']) == (n_train, n_test) or study and row['n_train']+row['n_test'] == n_train
    assert 0 <= row['er'] <= 1 and ('er_crm' in row) == (data == 'cifar100')
    if data == 'nyudv2': assert row['features'] == dls.features and len(dls.features) == 16
