"What a notebook cannot show about learners: an exported one is loaded by a process that knows nothing of how it was made"
import json, subprocess, sys
from functools import partial
import pytest, torch
from torch import nn
from fastai.basics import Learner, accuracy, set_seed
from hierproto.backbones.convnet import convnet
from hierproto.callbacks import MetricGuide, PrototypePlot, ScaleRecorder
from hierproto.data.digits import digits
from hierproto.learner import proto_learner
from hierproto.prototypes import DataLoss, PrototypeHead

other = """
import json, sys, torch, warnings
warnings.simplefilter('ignore')
from fastai.learner import load_learner
learn = load_learner(sys.argv[1])
with learn.no_bar(): label, _, probs = learn.predict(torch.load(sys.argv[2]))
print(json.dumps([str(label), probs.tolist(), len(learn.metric_guide.log)]))
"""


def own(dls, h, path):
    "A user's own Learner"
    return Learner(dls, nn.Sequential(convnet(2), PrototypeHead(2, len(h))), loss_func=DataLoss(), metrics=accuracy, path=path, lr=1e-2,
                   cbs=[MetricGuide(h), ScaleRecorder(h), PrototypePlot(names=h.leaves)])


def ours(dls, h, path):
    return proto_learner(dls, convnet(8), h, 'rank', m=8, project=False, path=path, lr=1e-2, lam=partial(max, .5), proto_lr=10., proto_wd=0.)


@pytest.mark.parametrize('make', [own, ours])
def test_exported_learner_predicts_elsewhere(make, tmp_path):
    set_seed(0)
    dls, h = digits(bs=256, protocol=None)
    learn = make(dls, h, tmp_path)
    with learn.no_bar(), learn.no_logging(): learn.fit(2)
    x = dls.valid_ds[0][0].as_subclass(torch.Tensor)
    with learn.no_bar(): label, _, probs = learn.predict(x)
    learn.export('learn.pkl')
    torch.save(x, tmp_path/'x.pt')
    run = subprocess.run([sys.executable, '-c', other, tmp_path/'learn.pkl', tmp_path/'x.pt'], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    got = json.loads(run.stdout.splitlines()[-1])
    assert got[0] == str(label) and got[2] == len(learn.metric_guide.log) == 2*len(dls.train)
    assert got[1] == pytest.approx(probs.tolist(), abs=1e-5)
