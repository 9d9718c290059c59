"A sweep on a local Ray of two workers writes the rows that a plain sweep writes"
import os, subprocess, sys
from pathlib import Path
import pandas as pd, pytest

pytest.importorskip('ray', reason='Ray is an extra')

ASKED = dict(data='digits', methods='cross_entropy,hxe,learnt,gp_disto', seeds=1, tier='smoke',
             set='epochs=2,n_train=96,n_test=64', threads=1)
PROGRAM = 'import sys; from hierproto.paper.sweeps import sweep; sweep(**eval(sys.argv[1]))'
TIMELESS = ['run_id', 'method', 'seed', 'er', 'ahc', 'loss', 'distortion', 'scale', 'best_epoch', 'n_train', 'params']


def call(**kwargs):
    "A sweep in its own process"
    res = subprocess.run([sys.executable, '-W', 'ignore', '-c', PROGRAM, repr(kwargs)], capture_output=True, text=True,
                         env={**os.environ, 'RAY_USAGE_STATS_ENABLED': '0'}, timeout=900)
    if 'timed out during startup' in res.stderr:
        pytest.skip('Ray gives itself fifteen seconds to start, which this machine is too busy for')
    return res


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
