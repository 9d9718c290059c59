"Metrics of two processes equal those of one, although fastai pads the last batch with samples it has already given"
import json, os, pytest, torch, torch.nn as nn
from fastai.data.core import DataLoaders
from fastai.distributed import DistributedDL
from fastai.learner import Learner
from hierproto.hierarchy import Hierarchy
from hierproto.metrics import MeansDistortion, hier_metrics

h = Hierarchy.from_paths([('animal','pet','cat'), ('animal','pet','dog'), ('animal','horse'), ('plant','oak'),
                          ('plant','rose')])
sizes = 3, 101   # with two processes each gets one sample of padding: a third of one batch, and one of many

class GlooDL(DistributedDL):
    "fastai broadcasts the order of the samples through CUDA; the sets here have one order"
    def _broadcast(self, t, rank):
        t = torch.tensor(t)
        torch.distributed.broadcast(t, rank)
        return t.tolist()

class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.protos = nn.Parameter(torch.randn(5, 3))
    def forward(self, x): return -torch.cdist(x.movedim(1,-1), self.protos).movedim(-1,1)

def values(n, maps, wrap=None):
    "Metrics of a random model over `n` samples, through the loader `wrap` makes of the plain one"
    torch.manual_seed(n)
    x,y = torch.randn(n, 2, *([4,5] if maps else [])), torch.randint(5, (n, *([4,5] if maps else [])))
    if maps: y[torch.rand(y.shape) < .3] = 255
    model = nn.Sequential(nn.Conv2d(2, 3, 1) if maps else nn.Linear(2, 3), Head())
    ms = hier_metrics(h, 'all', ignore_index=255) + [MeansDistortion(model[1], h, ignore_index=255)]
    ds = list(zip(x, y))
    learn = Learner(DataLoaders.from_dsets(ds, ds, bs=8, num_workers=0, device='cpu'), model,
                    loss_func=nn.CrossEntropyLoss(ignore_index=255), metrics=ms)
    with learn.no_bar(), learn.no_logging(): return list(learn.validate(dl=wrap(learn.dls.valid) if wrap else None))[1:]

def work(rank, folder):
    os.environ.update(RANK=str(rank), WORLD_SIZE='2')
    torch.set_num_threads(1)
    torch.distributed.init_process_group('gloo', init_method=f'file://{folder}/meet', rank=rank, world_size=2)
    res = [values(n, maps, GlooDL) for n in sizes for maps in (False, True)]
    (folder/f'{rank}.json').write_text(json.dumps(res))
    torch.distributed.destroy_process_group()

def test_two_processes_report_what_one_reports(tmp_path):
    torch.multiprocessing.spawn(work, (tmp_path,), nprocs=2)
    want = [values(n, maps) for n in sizes for maps in (False, True)]
    for rank in (0, 1):
        got = json.loads((tmp_path/f'{rank}.json').read_text())
        assert len(got) == len(want) == 4
        for g,w in zip(got, want): assert g == pytest.approx(w, abs=1e-6, nan_ok=True)
