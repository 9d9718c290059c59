("Two processes that talk through gloo train the model that one process trains on the whole batch, "
 "and report the same metrics")
import os, socket, sys
from functools import partial
import pytest, torch
from torch import nn

pytest.importorskip('accelerate', reason="fastai's distributed training needs accelerate")
N, BS, EPOCHS = 512, 64, 3  # 97 digits are left for validation: an odd number, so one process is given a sample twice


def learner(bs, order=None):
    "A guided model without batch norm on scikit-learn's digits, the same in each process"
    from fastai.basics import SGD, Learner, set_seed
    from sklearn.datasets import load_digits
    from hierproto.callbacks import MetricGuide, ProtoRates
    from hierproto.images import TensorDL, TensorDS
    from fastai.data.core import DataLoaders
    from hierproto.hierarchy import Hierarchy
    from hierproto.metrics import hier_metrics
    from hierproto.prototypes import DataLoss, PrototypeHead
    digits = load_digits()
    x, y = torch.tensor(digits.images, dtype=torch.float32)[:, None]/16, torch.tensor(digits.target)
    order = torch.arange(N) if order is None else order
    h = Hierarchy.named('mnist_visual').align([str(i) for i in range(10)])
    dss = TensorDS(x[order], y[order], h.leaves, 0), TensorDS(x[-97:], y[-97:], h.leaves, 1)
    dls = DataLoaders(*[TensorDL(ds, bs=bs, device='cpu') for ds in dss], device='cpu')
    set_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)),
                          PrototypeHead(8, h.n_nodes, len(h)))
    return Learner(dls, model, loss_func=DataLoss(), opt_func=partial(SGD, mom=.9), lr=.1,
                   metrics=hier_metrics(h, 'all'), wd=1e-3, cbs=[MetricGuide(h, lam=2.), ProtoRates(lr=2., wd=0.)])


def fit(learn):
    "Train quietly; parameters, metrics of the last epoch, and what the guide has seen"
    from fastai.callback.progress import ProgressCallback
    learn.remove_cb(ProgressCallback)
    with learn.no_logging(): learn.fit(EPOCHS)
    return dict(state=learn.model.state_dict(),
                metrics=dict(zip([m.name for m in learn.metrics], learn.recorder.values[-1][2:])),
                guide=learn.metric_guide.log.guide.tolist())


def worker(rank, port, out):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE='2', MASTER_ADDR='127.0.0.1',
                      MASTER_PORT=str(port), ACCELERATE_USE_CPU='true')
    torch.set_num_threads(1)
    from fastai.distributed import teardown_distrib
    from hierproto.callbacks import cpu_distrib
    cpu_distrib()
    learn = learner(BS)
    with learn.distrib_ctx(sync_bn=False, cpu=True): res = fit(learn)
    torch.save(res, f'{out}/{rank}.pt')
    teardown_distrib()


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    out = tmp_path_factory.mktemp('gloo')
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(worker, (port, str(out)), nprocs=2)
    # process 0 reads the first half of the samples and process 1 the second: a batch of both is one of each
    order = torch.arange(N).view(2, -1, BS).transpose(0, 1).flatten()
    return [torch.load(out/f'{r}.pt') for r in range(2)], fit(learner(2*BS, order))


def test_same_model(runs):
    (a, b), one = runs
    for k in one['state']:
        assert torch.equal(a['state'][k], b['state'][k]), f'{k} differs between the processes'
        torch.testing.assert_close(a['state'][k], one['state'][k], atol=1e-5, rtol=1e-4)


def test_guide_counts_once(runs):
    (a, b), one = runs
    assert len(one['guide']) == EPOCHS*N//(2*BS) and a['guide'] == b['guide']
    torch.testing.assert_close(torch.tensor(a['guide']), torch.tensor(one['guide']), atol=1e-5, rtol=1e-4)
    assert one['guide'][-1] < one['guide'][0]


def test_same_metrics(runs):
    (a, b), one = runs
    assert a['metrics'] == b['metrics']
    assert a['metrics'].keys() == one['metrics'].keys()
    for k in one['metrics']: assert a['metrics'][k] == pytest.approx(one['metrics'][k], abs=1e-4), k


def test_metrics_of_same_weights_are_exact(runs):
    "Padding does not count: one process with the weights of two reports their metrics to the last digit"
    (a, _), _ = runs
    learn = learner(2*BS)
    learn.model.load_state_dict(a['state'])
    with learn.no_bar(): values = learn.validate()[1:]
    values = {m.name: v for m, v in zip(learn.metrics, values)}
    k = 'calibration_error'  # a sum of probabilities: the order of samples changes the last digit
    assert abs(values.pop(k) - a['metrics'][k]) < 1e-6
    assert values == {k: a['metrics'][k] for k in values}
