"""Models and learners written by version 0.2 load with the same scores and answers, see tests/fixtures/v02/README.md"""
import tarfile
from pathlib import Path
import numpy as np, pytest, torch
from fastai.data.core import DataLoaders
from fastai.learner import load_learner
from fastcore.basics import noop
from torch import nn
from hierproto.all import *
from hierproto.saving import load_classifier

V02 = Path(__file__).parent/'fixtures'/'v02'
FOLDERS = sorted(f.stem for f in V02.glob('*.npz') if f.stem != 'learners')
LEARNERS = sorted(k.removesuffix('.scores') for k in np.load(V02/'learners.npz') if k.endswith('.scores'))

def unpack(name, to):
    with tarfile.open(V02/f'{name}.tar.xz') as t: t.extractall(to, filter='data')
    return to

def close(scores, want): np.testing.assert_allclose(scores, want, rtol=1e-5, atol=1e-5)

def custom_body():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())

def as_images(x):
    "The bytes `x` (N, C, H, W) as arrays (H, W) or (H, W, 3)"
    return [o[0] if len(o) == 1 else o.transpose(1, 2, 0) for o in x]


def test_the_fixtures_are_complete():
    "A folder and a learner for each of the 22 methods of 0.2, each rule, and each kind of body"
    methods = {o.removeprefix('head_') for o in FOLDERS if o.startswith('head_')}
    assert len(methods) == 22 and methods == set(LEARNERS)
    assert {'rule_argmax', 'rule_crm', 'rule_back_off', 'arch_resnet18', 'arch_timm', 'arch_custom'} < set(FOLDERS)


@pytest.mark.parametrize('name', FOLDERS)
def test_saved_models_of_02_load(name, tmp_path):
    "Scores, and the answers of every rule, are those of version 0.2"
    if name == 'arch_timm': pytest.importorskip('timm')
    want = np.load(V02/f'{name}.npz')
    p = load_classifier(unpack(name, tmp_path)/name, body=custom_body() if name == 'arch_custom' else None)
    scores = p.scores(as_images(want['x']))
    close(scores, want['scores'])
    for rule in {'own', 'argmax', 'crm', 'back_off'} & set(want):
        answers = ['/'.join(o.names) for o in p.paths(scores, None if rule == 'own' else rule)]
        assert answers == want[rule].tolist(), rule
    if name.startswith('rule_'): assert p.settings['rule'] == name.removeprefix('rule_')


@pytest.fixture(scope='module')
def learners(tmp_path_factory): return unpack('learners', tmp_path_factory.mktemp('learners'))

@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('name', LEARNERS)
def test_learners_exported_by_02_load(name, learners):
    "Scores of the test loader and answers of `predict_path` are those of version 0.2"
    want = np.load(V02/'learners.npz')
    learn = load_learner(learners/f'{name}.pkl')
    items = list(torch.from_numpy(want['x']))
    with learn.no_bar():
        scores = learn.get_preds(dl=learn.dls.test_dl(items), act=noop)[0]
        answers = ['/'.join(predict_path(learn, o).names) for o in items]
    close(scores, want[f'{name}.scores'])
    assert answers == want[f'{name}.answers'].tolist()


@pytest.mark.filterwarnings('ignore')
def test_a_learner_exported_by_02_trains_on(learners):
    "With new data the loss, the guide, its metrics and its callbacks still work"
    learn = load_learner(learners/'gp_disto.pkl')
    x = torch.from_numpy(np.load(V02/'learners.npz')['x'][:7])/255
    data = type(learn.dls.train_ds)(x, torch.arange(7), learn.dls.vocab, split_idx=0)
    learn.dls = DataLoaders(*[dl.new(data) for dl in learn.dls])
    with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-3)
    losses = learn.recorder.values[-1]
    assert len(losses) > 3 and np.isfinite(losses).all()
