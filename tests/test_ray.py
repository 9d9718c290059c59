"Sweeps, features and answers on a local Ray of two workers are those of this process"
import os, subprocess, sys, warnings
from pathlib import Path

import numpy as np, pandas as pd, pytest, torch
from PIL import Image
from sklearn.datasets import load_digits

ray = pytest.importorskip('ray', reason='Ray is an extra')

from fastai.vision.all import ImageDataLoaders, PILImageBW, Resize, set_seed
from hierproto.cli import run_command
from hierproto.features import features
from hierproto.hierarchy import Hierarchy
from hierproto.learner import hier_learner
from hierproto.saving import ModelError, save_classifier
from hierproto.shards import map_tasks, start_ray

ASKED = dict(data='digits', methods='cross_entropy,hxe,learnt,gp_disto', seeds=1, tier='smoke',
             set='epochs=2,n_train=96,n_test=64', threads=1)
PROGRAM = 'import sys; from hierproto.cli import sweep; sweep(**eval(sys.argv[1]))'
TIMELESS = ['run_id', 'method', 'seed', 'er', 'ahc', 'loss', 'distortion', 'scale', 'best_epoch', 'n_train', 'params']


def call(**kwargs):
    "A sweep in its own process"
    env = {**os.environ, 'RAY_USAGE_STATS_ENABLED': '0'}
    return subprocess.run([sys.executable, '-W', 'ignore', '-c', PROGRAM, repr(kwargs)],
                          capture_output=True, text=True, env=env, timeout=900)


def sweep(out, **more):
    "Rows of a sweep, and what it said"
    res = call(**ASKED, out=str(out), **more)
    logs = [f.read_text() for f in Path(out).rglob('*.log')]
    assert res.returncode == 0, '\n'.join([res.stdout[-2000:], res.stderr[-2000:], *logs])
    return (pd.read_csv(Path(out)/'digits_smoke.csv',
                        dtype=dict(run_id=str)).sort_values('run_id')[TIMELESS].reset_index(drop=True), res.stdout)


def test_ray(tmp_path):
    (rays, said), (plain, _) = sweep(tmp_path/'ray', ray=True, workers=2), sweep(tmp_path/'plain')
    assert len(plain) == 4 and said.count('finished: ') == 4
    pd.testing.assert_frame_equal(rays, plain, check_exact=True)
    assert not [f for f in (tmp_path/'ray').rglob('*') if f.suffix in ('.ckpt', '.claim', '.part')]


def test_ray_failure(tmp_path):
    "A run that fails on a worker is told like any other"
    res = call(data='digits', methods='learnt', seeds=1, tier='smoke', hierarchy='cifar100', ray=True, workers=1,
               out=str(tmp_path))
    assert (res.returncode == 1 and '1 of 1 runs failed' in res.stderr
            and 'HierarchyError' in res.stderr), res.stderr[-2000:]


@pytest.fixture(scope='module')
def two_workers():
    os.environ['RAY_USAGE_STATS_ENABLED'] = '0'
    yield start_ray(2)
    ray.shutdown()

@pytest.fixture(scope='module')
def digits(tmp_path_factory):
    "100 digits as files, one of them damaged, and an untrained model"
    folder = tmp_path_factory.mktemp('digits')
    data = load_digits()
    for i, (x, y) in enumerate(zip(data.images[:100], data.target)):
        file = folder/'images'/str(y)/f'{i}.png'
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((x*15.9).astype(np.uint8)).resize((28, 28)).save(file)
    dls = ImageDataLoaders.from_folder(folder/'images', valid_pct=.5, seed=0, img_cls=PILImageBW,
                                       item_tfms=Resize(28), bs=16, num_workers=0)
    set_seed(0)
    learn = hier_learner(dls, 'convnet', Hierarchy.named('mnist_visual'), 'gp_disto', m=16)
    save_classifier(learn, folder/'model')
    (folder/'images'/'1'/'torn.png').write_text('not an image')
    return folder

def dying_once(marker):
    "`map_tasks` whose first worker is killed before its first task; nested, so that it travels by value"
    def map_once(make, tasks, workers=0):
        def dying():
            import os, signal
            job = make()
            def run(task):
                try: os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
                except FileExistsError: return job(task)
                os.kill(os.getpid(), signal.SIGKILL)
            return run
        return map_tasks(dying, tasks, workers)
    return map_once

def test_answers_are_the_same_although_a_worker_is_killed(two_workers, digits, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr('hierproto.predict.map_tasks', dying_once(str(tmp_path/'killed')))
    words = [digits/'model', digits/'images', '--bs', 2, '--out']
    def errors(*more):
        with pytest.raises(SystemExit): run_command('predict', [*words, *more])
        return capsys.readouterr().err.splitlines()[-2:]
    alone = errors(tmp_path/'here.csv')
    assert errors(tmp_path/'shards', '--ray', '--workers', 2) == alone and 'torn.png' in alone[0]
    assert (tmp_path/'killed').exists()

    shards = sorted((tmp_path/'shards').iterdir())
    times = [o.stat().st_mtime_ns for o in shards]
    shards[1].unlink()
    assert errors(tmp_path/'shards', '--ray') == alone
    again = [o.stat().st_mtime_ns for o in shards]
    assert len(shards) == 4 and [i for i in range(4) if again[i] != times[i]] == [1]

    named = pd.read_parquet(tmp_path/'shards')
    want = pd.read_csv(tmp_path/'here.csv', dtype=dict(prediction=str))
    pd.testing.assert_frame_equal(named, want, check_dtype=False, check_exact=True)

def test_features_are_the_same_although_a_worker_is_killed(two_workers, digits, tmp_path, monkeypatch):
    monkeypatch.setattr('hierproto.features.map_tasks', dying_once(str(tmp_path/'killed')))
    def compute(file, **kwargs):
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            return features(digits/'images', 'convnet', pretrained=False, size=28, flip=True,
                            file=tmp_path/file, progress=False, **kwargs)
    here, there = compute('here'), compute('there', engine='ray', workers=2)
    assert (tmp_path/'killed').exists() and not [*tmp_path.glob('*.batches')]
    for a, b in zip(here.loaders, there.loaders):
        assert torch.equal(a.dataset.x, b.dataset.x) and torch.equal(a.dataset.y, b.dataset.y)
        assert a.dataset.items == b.dataset.items
    assert here.features == there.features

def test_an_error_on_a_worker_is_raised_here(two_workers, tmp_path):
    def make():
        from hierproto.saving import load_classifier
        return load_classifier('/nowhere')
    with pytest.raises(ModelError, match='nowhere'): map_tasks(make, [dict(i=1)])
