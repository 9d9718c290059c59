"TensorBoard and Weights & Biases watch a run without changing it, interrupted or not"
import os, subprocess, sys
from pathlib import Path
import pandas as pd, pytest

ASKED = dict(data='digits', method='gp_disto', tier='smoke', set='epochs=2,n_train=96,n_test=64', threads=1, quiet=True)
PROGRAM = 'import sys; from hierproto.cli import train; train(**eval(sys.argv[1]))'
TIMELESS = ['run_id', 'er', 'ahc', 'loss', 'distortion', 'scale']

# the plug is pulled in the second epoch, and the run goes on
BROKEN = '''
import sys, torch; torch.set_num_threads(1)
from fastai.callback.core import Callback
from hierproto.paper.recipes import resolve
from hierproto.paper.runs import train_run
class PullPlug(Callback):
    def after_batch(self):
        if self.training and self.train_iter==5: raise KeyError('dark')
r = resolve('digits', 'gp_disto', 'smoke', epochs=2, n_train=96, n_test=64)
try: train_run(r, sys.argv[1], log=sys.argv[2], cbs=PullPlug())
except KeyError: train_run(r, sys.argv[1], log=sys.argv[2])
'''


def call(*args, cwd):
    return subprocess.run([sys.executable, '-W', 'ignore', '-c', *args],
                          capture_output=True, text=True, cwd=cwd, timeout=900,
                          env={**os.environ, 'OMP_NUM_THREADS': '1', 'WANDB_MODE': 'offline', 'WANDB_SILENT': 'true'})


def row(out): return pd.read_csv(Path(out)/'digits_smoke.csv', dtype=dict(run_id=str))[TIMELESS].to_csv(index=False)


def train(out, **more):
    "The row of a training in its own folder, so that files of a logger outside the results would show"
    Path(out).mkdir()
    res = call(PROGRAM, repr(dict(ASKED, out=str(out/'results'), **more)), cwd=out)
    assert res.returncode == 0 and 'finished: ' in res.stdout, res.stdout+res.stderr
    assert os.listdir(out) == ['results']
    return row(out/'results')


@pytest.fixture(scope='module')
def plain(tmp_path_factory): return train(tmp_path_factory.mktemp('log')/'plain')


def scalars(out):
    "Names and steps of what TensorBoard reads"
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    folder, = (Path(out)/'tensorboard').iterdir()
    acc = EventAccumulator(str(folder))
    acc.Reload()
    return {o: [e.step for e in acc.Scalars(o)] for o in acc.Tags()['scalars']}


def test_tensorboard(plain, tmp_path):
    pytest.importorskip('tensorboard', reason='TensorBoard is an extra')
    assert train(tmp_path/'t', log='tensorboard') == plain
    seen = scalars(tmp_path/'t'/'results')
    assert {'train_loss', 'lr_0', 'error_rate', 'average_cost'} <= set(seen), set(seen)
    assert seen['error_rate'] == [3, 6], '96 samples are three batches of 32'


def test_tensorboard_resumed(plain, tmp_path):
    pytest.importorskip('tensorboard', reason='TensorBoard is an extra')
    res = call(BROKEN, str(tmp_path), 'tensorboard', cwd=tmp_path)
    assert res.returncode == 0, res.stderr
    assert row(tmp_path) == plain and scalars(tmp_path)['error_rate'] == [3, 6]


def test_wandb(plain, tmp_path):
    pytest.importorskip('wandb', reason='Weights & Biases is an extra')
    assert train(tmp_path/'w', log='wandb') == plain
    assert list((tmp_path/'w'/'results'/'wandb').glob('offline-run-*/*.wandb'))


def test_wandb_resumed(plain, tmp_path):
    pytest.importorskip('wandb', reason='Weights & Biases is an extra')
    res = call(BROKEN, str(tmp_path), 'wandb', cwd=tmp_path)
    assert res.returncode == 0, res.stderr
    assert row(tmp_path) == plain


def test_unknown_log(tmp_path):
    res = call(PROGRAM, repr(dict(ASKED, out=str(tmp_path), log='carbon_copy')), cwd=tmp_path)
    assert res.returncode == 1 and "--log must be" in res.stderr and "'carbon_copy'" in res.stderr


def test_log_that_is_not_installed(tmp_path):
    "Found before a run begins"
    res = call("import sys; sys.modules['wandb'] = None\n"+PROGRAM,
               repr(dict(ASKED, out=str(tmp_path/'results'), log='wandb')), cwd=tmp_path)
    assert res.returncode == 1 and "pip install 'hierproto[log]'" in res.stderr, res.stderr
    assert not (tmp_path/'results').exists()
