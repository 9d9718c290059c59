"What notebooks cannot show about learners: other processes, counted calls, and every route to a learner"
import cProfile, inspect, json, pstats, subprocess, sys
from functools import partial
from unittest import mock
import pytest, torch
from torch import nn
from torch.utils.data import TensorDataset
from fastai.basics import Callback, CancelStepException, DataLoader, DataLoaders, Learner, accuracy, set_seed
from fastai.callback.fp16 import MixedPrecision
from fastai.data.all import Categorize, Datasets, Normalize, Transform
from fastai.vision.core import TensorImage
from fastai.vision.learner import TimmBody
from hierproto import learner
from hierproto.backbones.convnet import convnet
from hierproto.callbacks import MetricGuide, ProtoRates, ProtoWatch, ScaleRecorder, SoundCheck
from hierproto.digits import digits
from hierproto.distortion import sampled_disto_loss
from hierproto.hierarchy import Hierarchy
from hierproto.interpret import HierInterpretation, PrototypePlot
from hierproto.learner import hier_learner, proto_learner
from hierproto.methods import METHODS, get_method
from hierproto.metrics import average_cost
from hierproto.prototypes import DataLoss, PrototypeHead

other = """
import json, sys, torch, warnings
warnings.simplefilter('ignore')
from fastai.learner import load_learner
learn = load_learner(sys.argv[1])
with learn.no_bar(): label, _, probs = learn.predict(torch.load(sys.argv[2]))
print(json.dumps([str(label), probs.tolist(), len(learn.metric_guide.log)]))
"""
tree = Hierarchy.from_nested(dict(animal=['cat', 'dog'], plant=['oak', 'fir']))


def quiet(learn, *args, **kw):
    with learn.no_bar(), learn.no_logging(): learn.fit(*args, **kw)
    return learn


def vector_dls(K=4, n=64, m=3, bs=16, vocab=None):
    x, y = torch.randn(n, m), torch.arange(n) % K
    dls = DataLoaders(*[DataLoader(TensorDataset(x, y), bs=bs) for _ in range(2)])
    if vocab is not None: dls.vocab = vocab
    return dls


def plain(cbs=None, K=4, h=None, **kw):
    set_seed(0)
    return Learner(vector_dls(K), nn.Sequential(nn.Linear(3, 8), PrototypeHead(8, K)), loss_func=DataLoss(),
                   cbs=cbs, lr=.1, **kw)


# --- exported learners ---
def own(dls, h, path):
    "A custom Learner"
    return Learner(dls, nn.Sequential(convnet(2), PrototypeHead(2, len(h))), loss_func=DataLoss(), metrics=accuracy,
                   path=path, lr=1e-2, cbs=[MetricGuide(h), ScaleRecorder(h), PrototypePlot(names=h.leaves)])


def ours(dls, h, path):
    return proto_learner(dls, convnet(8), h, 'rank', m=8, project=False, path=path, lr=1e-2, lam=partial(max, .5),
                         proto_lr=10., proto_wd=0.)


@pytest.mark.parametrize('make', [own, ours])
def test_exported_learner_predicts_elsewhere(make, tmp_path):
    set_seed(0)
    dls, h = digits(bs=256, protocol=None)
    learn = quiet(make(dls, h, tmp_path), 2)
    x = dls.valid_ds[0][0].as_subclass(torch.Tensor)
    with learn.no_bar(): label, _, probs = learn.predict(x)
    learn.export('learn.pkl')
    torch.save(x, tmp_path/'x.pt')
    run = subprocess.run([sys.executable, '-c', other, tmp_path/'learn.pkl', tmp_path/'x.pt'],
                         capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    got = json.loads(run.stdout.splitlines()[-1])
    assert got[0] == str(label) and got[2] == len(learn.metric_guide.log) == 2*len(dls.train)
    assert got[1] == pytest.approx(probs.tolist(), abs=1e-5)


# --- the guide ---
def test_a_step_validates_nothing_and_never_reads_from_the_device():
    learn = quiet(plain(MetricGuide(tree)), 1)
    learn.training, learn.loss_grad, guide = True, torch.tensor(1., requires_grad=True), learn.metric_guide
    profile = cProfile.Profile()
    profile.runcall(guide.after_loss)
    names = [f'{file}:{name}' for file, _, name in pstats.Stats(profile).stats]
    bad = [n for n in names if any(w in n for w in ("'item'", "'tolist'", "'__bool__'", "'cpu'", "'nonzero'",
                                                    'as_costs', ':smooth_scale'))]
    assert not bad, bad
    assert pstats.Stats(profile).total_calls < 150


@pytest.mark.parametrize('guide', ['sampled', sampled_disto_loss])
@pytest.mark.parametrize('K', [1, 2, 500])
def test_a_sampled_guide_builds_no_matrix(guide, K):
    h = Hierarchy.from_paths([(f'g{k % 7}', f'c{k}') for k in range(K)])
    with mock.patch.object(Hierarchy, 'costs', side_effect=AssertionError('the matrix was built')):
        learn = quiet(proto_learner(vector_dls(K), nn.Linear(3, 8), h, guide, m=8, project=False), 2)
    assert learn.metric_guide.log.notna().all().all() and hasattr(learn, 'proto_watch')


def test_watch_looks_at_few_prototypes():
    "100,000 prototypes would have 40 GB of distances"
    learn = plain()
    watch = ProtoWatch()
    watch.found = PrototypeHead(4, 100_000)
    assert all(map(torch.isfinite, map(torch.tensor, watch._distances())))


def test_a_head_with_scores_for_all_nodes_is_refused():
    learn = Learner(vector_dls(), nn.Sequential(nn.Linear(3, 8), PrototypeHead(8, tree.n_nodes)), loss_func=DataLoss(),
                    cbs=MetricGuide(tree))
    with pytest.raises(ValueError, match='scores 7 classes, the costs have 4: pass `n_classes=4`'): quiet(learn, 1)


# --- rates of prototypes ---
class Skip(Callback):
    "Cancel steps as mixed precision does when gradients overflow"
    def __init__(self, at, order): self.at, self.order = at, order
    def before_step(self):
        if self.iter in self.at: raise CancelStepException()


@pytest.mark.parametrize('order', [MixedPrecision.order, ProtoRates.order+1])
def test_a_skipped_step_moves_no_prototype(order):
    def moves(at):
        learn, seen = plain([ProtoRates(10., wd=.5), Skip(at, order)]), []
        class See(Callback):
            run_valid = False
            def before_batch(self): seen.append(self.model[1].protos.detach().clone())
        quiet(learn, 1, cbs=See())
        seen.append(learn.model[1].protos.detach().clone())
        return [(b-a).norm().item() for a, b in zip(seen, seen[1:])]
    for at in [(0,), (1,), (0, 1, 2, 3)]:
        assert [i for i, d in enumerate(moves(at)) if d == 0] == list(at)


# --- one factory ---
def test_a_variant_keeps_the_facts_of_its_method():
    METHODS['guided_x'] = METHODS['gp_disto'].variant(lam=3., source='here')
    try: new, old = get_method('guided_x'), METHODS['gp_disto']
    finally: del METHODS['guided_x']
    assert (new.guided, new.protos, new.tree, new.make, new.formula) == (True, True, False, old.make, old.formula)
    assert new.params == dict(guide='disto', lam=3.) and old.params == dict(guide='disto')
    assert new.variant(guided=False).params == new.params


def test_both_names_make_the_same_learner():
    def make(f, *args, **kw):
        set_seed(0)
        return f(vector_dls(), nn.Linear(3, 8), tree, *args, m=8, project=False, lam=2., proto_wd=0., **kw)
    a, b = make(proto_learner), make(hier_learner, 'gp_disto')
    assert [type(o) for o in a.cbs] == [type(o) for o in b.cbs] and a.method == b.method == 'gp_disto'
    assert len(inspect.signature(proto_learner).parameters) <= 16
    for p, q in zip(quiet(a, 1).model.parameters(), quiet(b, 1).model.parameters()): assert torch.equal(p, q)


def test_all_parts_of_a_learner_agree_on_the_order_of_classes(tmp_path):
    file = tmp_path/'classes.csv'
    file.write_text('group,class\nplant,oak\nanimal,dog\nplant,fir\nanimal,cat\n')
    vocab = ['cat', 'dog', 'fir', 'oak']
    learn = quiet(hier_learner(vector_dls(vocab=vocab), nn.Linear(3, 8), file, m=8, project=False), 1)
    want = tree.align(vocab)
    assert learn.hierarchy.leaves == vocab and torch.equal(learn.metric_guide.costs, want.costs(hidden=True))
    with learn.no_bar():
        interp, values = HierInterpretation.from_learner(learn, D=tree), learn.validate()
    cost = average_cost(interp.decoded, interp.targs, want).item()
    assert values[2] == pytest.approx(cost) and interp.top_costs()[0].mean().item() == pytest.approx(cost)


@pytest.mark.parametrize('arch,said', [(nn.Linear, r'Linear\(\)'), ('resnet81', 'resnet18'),
                                       ('eficientnet_b0', 'efficientnet_b0')])
def test_what_is_not_an_architecture(arch, said):
    with pytest.raises((TypeError, ValueError), match=said): hier_learner(vector_dls(), arch, tree, m=8)


# --- normalisation ---
class Blank(Transform):
    def encodes(self, o): return TensorImage(torch.full((3, 32, 32), .75))


def image_dls(*tfms):
    return Datasets(range(8), [Blank(), [lambda o: 'ab'[o % 2], Categorize()]]).dataloaders(bs=4, num_workers=0,
                                                                                            after_batch=[*tfms])


def pixel(dls, arch, **kw):
    hier_learner(dls, arch, Hierarchy.from_paths(['a', 'b']), m=4, **kw)
    return dls.one_batch()[0][0, 0, 0, 0].item()


imagenet = (.75-.485)/.229

@pytest.mark.parametrize('arch,want', [('tf_efficientnet_lite0', .5), ('timm/resnet10t', imagenet),
                                       ('resnet18', imagenet)])
@pytest.mark.filterwarnings('error::UserWarning')
def test_weights_from_a_file_get_the_statistics_of_their_network(arch, want, tmp_path):
    if arch != 'resnet18': pytest.importorskip('timm')
    torch.save(learner.embedder(arch, 4).state_dict(), tmp_path/'body.pth')
    dls = image_dls()
    for _ in range(2): assert pixel(dls, arch, weights=tmp_path/'body.pth') == pytest.approx(want, abs=1e-3)
    assert [type(o) for o in dls.after_batch.fs] == [Normalize]
    assert pixel(image_dls(), arch, pretrained=False) == .75


def test_modules_of_timm_are_normalised_too():
    timm = pytest.importorskip('timm')
    body = lambda: TimmBody(timm.create_model('tf_efficientnet_lite0', num_classes=0))
    assert pixel(image_dls(), body()) == pytest.approx(.5, abs=1e-3)
    assert pixel(image_dls(), body(), normalize=False) == .75
    mine = image_dls(Normalize.from_stats([.485, .456, .406], [.229, .224, .225]))
    with pytest.warns(UserWarning, match='weights expect mean'):
        assert pixel(mine, body()) == pytest.approx(imagenet, abs=1e-3)


# --- docs ---
def test_every_method_of_a_callback_that_the_docs_show_is_described():
    for cls in (MetricGuide, ProtoRates, ProtoWatch, PrototypePlot, ScaleRecorder, SoundCheck, HierInterpretation):
        for name, f in vars(cls).items():
            if inspect.isfunction(f) and not name.startswith('_') and f.__qualname__ == name:
                assert f.__doc__, f'{cls.__name__}.{name}'
