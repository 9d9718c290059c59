("Distances, heads, losses and guides in every precision and at every scale, "
 "and their gradients against finite differences")
import functools, math
import pytest, torch
from torch.autograd import gradcheck, gradgradcheck
from hierproto.baselines.emd import EMDLoss, tree_emd
from hierproto.baselines.frame import FrameHead
from hierproto.baselines.hxe import HXELoss
from hierproto.baselines.hyperspherical import SquaredCosineLoss, separation, sphere_guide, squared_cosine, unit
from hierproto.baselines.soft_labels import SoftLabelLoss
from hierproto.baselines.yolo import LogProbLoss, TreeSoftmax, YOLOHead
from hierproto.distortion import *
from hierproto.hierarchy import Hierarchy, HierarchyError
from hierproto.inference import crm, expected_cost
from hierproto.methods import METHODS
from hierproto.prototypes import DataLoss, FocalDataLoss, LinearHead, PrototypeHead
from hierproto.subtree import SubtreeSum
from hierproto.testing import random_tree

h = random_tree(7, 3, seed=1, weights=True)
K, D = len(h), h.costs()
SCALES = [1e-12, 1e-6, 1., 1e6, 1e12]
# what half a unit in the last place of an input does to a result, with room for a sum over a few of them
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5}

class OnClasses(LogProbLoss):
    "The loss of a softmax over siblings, of scores of classes; those of the groups are zero"
    def __init__(self, **kwargs):
        super().__init__(K, **kwargs)
        self.tree = TreeSoftmax(h)
    def terms(self, scores, targets):
        return super().terms(self.tree(torch.nn.functional.pad(scores, (0, h.n_nodes - 1 - K))), targets)

losses = dict(data=DataLoss, focal=functools.partial(FocalDataLoss, 2.),
              hxe=lambda **k: HXELoss(h, **k), hxe_focal=lambda **k: HXELoss(h, gamma=1., count='leaf', **k),
              soft_labels=lambda **k: SoftLabelLoss(h, **k), soft_focal=lambda **k: SoftLabelLoss(h, gamma=1., **k),
              emd=lambda **k: EMDLoss(h, **k), emd_focal=lambda **k: EMDLoss(h, gamma=1., **k), yolo=LogProbLoss,
              yolo_nodes=OnClasses, sphere=SquaredCosineLoss)
guides = dict(disto=disto_loss, disto_fixed=functools.partial(disto_loss, scale=1.),
              distortion=distortion, scale_free=scale_free_distortion,
              rank=functools.partial(rank_loss, n=None), rank_paper=functools.partial(rank_loss, n=None, ties='paper'),
              sphere=functools.partial(sphere_guide, n=None), separation=lambda p, D: separation(p))
heads = dict(euclidean=lambda: PrototypeHead(4, K), squared=lambda: PrototypeHead(4, K, distance='squared'),
             pseudo_huber=lambda: PrototypeHead(4, K, distance='pseudo_huber'),
             cosine=lambda: PrototypeHead(4, K, distance='cosine'),
             sphere=lambda: PrototypeHead(4, K, distance=squared_cosine), frame=lambda: FrameHead(4, h),
             yolo=lambda: YOLOHead(4, h), linear=lambda: LinearHead(4, K))

def data(seed=0, n=12, m=4, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(n, m, generator=g, dtype=torch.double).to(dtype),
            torch.randn(K, m, generator=g, dtype=torch.double).to(dtype), torch.randint(K, (n,), generator=g))
def made(name):
    torch.manual_seed(0)
    return heads[name]()
def grad(f, x):
    x = x.detach().clone().requires_grad_()
    v = f(x)
    return v.detach(), torch.autograd.grad(v.sum(), x)[0]


# --- gradients against finite differences, in double precision ---
@pytest.mark.parametrize('name', losses)
def test_gradient_of_losses(name):
    x, _, y = data(m=K, dtype=torch.double)
    y[3] = -100
    if name == 'yolo': x = x.log_softmax(1)
    for kw in (dict(), dict(reduction='sum', weight=torch.rand(K)+.1), dict(reduction='none')):
        assert gradcheck(lambda x: losses[name](**kw)(x, y), x.detach().requires_grad_())

@pytest.mark.parametrize('name', distances)
def test_gradient_of_distances(name):
    x, y, _ = data(dtype=torch.double)
    f, off = distances[name], ~torch.eye(K, dtype=torch.bool)
    assert gradcheck(f, (x.requires_grad_(), y.requires_grad_())) and gradcheck(lambda y: f(y, y)[off], y)

@pytest.mark.parametrize('name', [n for n in guides if n != 'scale_free'])
def test_gradient_of_guides(name):
    _, p, _ = data(dtype=torch.double)
    assert gradcheck(lambda p: guides[name](p, D.double()), p.requires_grad_())

@pytest.mark.parametrize('seed', range(5))
def test_gradient_of_the_scale_free_distortion(seed):
    ("At the best scale one pair fits exactly, and |x| has no slope at 0: finite differences are taken a step aside, "
     "and that pair is left out of the comparison")
    _, p, _ = data(seed, dtype=torch.double)
    held = optimal_scale(p, D)
    assert gradcheck(lambda p: distortion(1.001*held*p, D.double()), p.requires_grad_())
    i, j = torch.triu_indices(K, K, 1)
    off = (held*distances['euclidean'](p, p)/D - 1)[i, j].abs()
    at = off.argmin()
    assert off[at] < 1e-12 and (off.sort().values[1] > 1e-6)
    a, b = (grad(lambda p: scale_free_distortion(p, D.double()), p)[1],
            grad(lambda p: distortion(held*p, D.double()), p)[1])
    rest = [k for k in range(K) if k not in (i[at], j[at])]
    torch.testing.assert_close(a[rest], b[rest])

@pytest.mark.parametrize('name', heads)
def test_gradient_of_heads(name):
    head = made(name).double()
    x = data(dtype=torch.double)[0].requires_grad_()
    assert gradcheck(head, x) and gradcheck(head, x.detach()[:4].reshape(1, 4, 2, 2).requires_grad_())

def test_gradient_of_the_softmax_on_a_tree():
    t = TreeSoftmax(h)
    assert gradcheck(t, torch.randn(3, h.n_nodes-1, dtype=torch.double, requires_grad=True))
    p, q = (torch.rand(3, K, dtype=torch.double) for _ in range(2))
    assert gradcheck(lambda p: tree_emd(p, q, h), p.requires_grad_())


# --- half precision ---
@pytest.mark.parametrize('dtype', TOLERANCE)
@pytest.mark.parametrize('name', distances)
def test_precision_of_distances(name, dtype):
    x, y, _ = data(dtype=torch.double)
    got, want, scale = distances[name](x.to(dtype), y.to(dtype)), distances[name](x, y), distances[name](x, y).max()
    assert got.dtype == torch.float32 and (got - want).abs().max() <= TOLERANCE[dtype]*scale

@pytest.mark.parametrize('dtype', TOLERANCE)
@pytest.mark.parametrize('name', losses)
def test_precision_of_losses(name, dtype):
    x, _, y = data(m=K, dtype=torch.double)
    if name == 'yolo': x = x.log_softmax(1)
    (v, g), (want, dg) = grad(lambda x: losses[name]()(x, y), x.to(dtype)), grad(lambda x: losses[name]()(x, y), x)
    assert (v.isfinite() and abs(v - want) <= TOLERANCE[dtype]*(1 + want.abs())
            and (g - dg).abs().max() <= TOLERANCE[dtype]*dg.abs().max()*4)

@pytest.mark.parametrize('dtype', TOLERANCE)
@pytest.mark.parametrize('name', guides)
def test_precision_of_guides(name, dtype):
    p = data(dtype=torch.double)[1]
    v, want = guides[name](p.to(dtype), D), guides[name](p, D.double())
    assert v.isfinite() and abs(v - want) <= TOLERANCE[dtype]*(1 + want.abs())

@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('name', heads)
def test_precision_of_heads(name, dtype):
    "Under autocast, as mixed precision trains"
    head, x = made(name), data()[0]
    want = head(x)
    with torch.autocast('cpu', dtype=dtype): got = head(x.to(dtype))
    assert (got.float() - want).abs().max() <= TOLERANCE[dtype]*max(1., want.abs().max())*2


# --- scales ---
@pytest.mark.parametrize('scale', SCALES)
@pytest.mark.parametrize('name', distances)
def test_scales_of_distances(name, scale):
    x, y, _ = data()
    got, g = grad(lambda x: distances[name](x, y*scale), x*scale)
    want, dg = grad(lambda x: distances[name](x, y.double()*scale), x.double()*scale)
    assert got.isfinite().all() and g.isfinite().all()
    assert (got - want).abs().max() <= 1e-5*want.max() and (g - dg).norm() <= 1e-4*dg.norm()

@pytest.mark.parametrize('costs', SCALES)
@pytest.mark.parametrize('scale', SCALES)
def test_scales_of_guides(scale, costs):
    "With a free scale neither the unit of the prototypes nor that of the costs matters"
    p = data()[1]
    for f in (disto_loss, scale_free_distortion):
        torch.testing.assert_close(f(p*scale, D*costs), f(p, D), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(smooth_scale(p*scale, D*costs)*scale/costs, smooth_scale(p, D), rtol=1e-4, atol=0)
    torch.testing.assert_close(optimal_scale(p*scale, D*costs)*scale/costs, optimal_scale(p, D), rtol=1e-4, atol=0)
    v, g = grad(lambda p: disto_loss(p, D*costs), p*scale)
    torch.testing.assert_close(g*scale, grad(lambda p: disto_loss(p, D), p)[1], rtol=1e-3, atol=1e-6)
    for f in guides.values():
        v, g = grad(lambda p: f(p, D*costs), p*scale)
        assert f in (guides['disto_fixed'], guides['distortion']) or (v.isfinite() and g.isfinite().all())

@pytest.mark.parametrize('scale', SCALES)
@pytest.mark.parametrize('name', losses)
def test_scales_of_losses(name, scale):
    x, _, y = data(m=K)
    x = x*scale
    if name == 'yolo': x = x.log_softmax(1)
    v, g = grad(lambda x: losses[name]()(x, y), x)
    want, dg = grad(lambda x: losses[name]()(x, y), x.double())
    assert v.isfinite() and g.isfinite().all()
    assert abs(v - want) <= 1e-4*(1 + want.abs()) and (g - dg).abs().max() <= 1e-4*max(1, dg.abs().max())

@pytest.mark.parametrize('scale', SCALES)
@pytest.mark.parametrize('name', heads)
def test_scales_of_heads(name, scale):
    head, x = made(name), data()[0]*scale
    out, g = grad(head, x)
    assert out.isfinite().all() and g.isfinite().all()
    loss = LogProbLoss() if name == 'yolo' else DataLoss()
    v, g = grad(lambda x: loss(head(x), data()[2]), x)
    assert v.isfinite() and g.isfinite().all()

@pytest.mark.parametrize('scale', SCALES)
def test_scales_of_costs(scale):
    "Another unit of the costs changes no decision, and every cost by one factor"
    x = data(m=K)[0]
    assert torch.equal(crm(x, D*scale), crm(x, D))
    torch.testing.assert_close(expected_cost(x, D*scale)/scale, expected_cost(x, D), rtol=1e-4, atol=1e-6)
    tall = Hierarchy.from_paths(h.nodes[:K], weights={n: float(w)*scale for n, w in zip(h.nodes[:-1], h.edge_weights)})
    torch.testing.assert_close(tall.costs()/scale, D, rtol=1e-5, atol=1e-6)

def test_weights_that_would_be_lost_are_refused():
    "An edge of length one below an edge of 1e12: the costs of its classes would be zero"
    with pytest.raises(HierarchyError, match='lost in rounding'):
        Hierarchy.from_paths([('a', 'x'), ('a', 'y'), ('b',)], weights={'a': 1e12})

@pytest.mark.parametrize('name', [n for n in heads if n not in ('linear', 'yolo')])
def test_embeddings_of_zeros(name):
    "A ReLU may give zeros: scores are finite, and the gradient is of ordinary size"
    out, g = grad(made(name), torch.zeros(3, 4))
    assert out.isfinite().all() and g.abs().max() < 100

@pytest.mark.parametrize('distance', distances)
def test_prototypes_that_coincide(distance):
    for p in (torch.ones(K, 4), torch.zeros(K, 4)):
        v, g = grad(lambda p: disto_loss(p, D, distance), p)
        assert v.isfinite() and g.isfinite().all()


# --- a training that goes wrong stops ---
def stopped(method, tmp_path, spoil, **kw):
    ("What a `hier_learner` says that is spoiled by `spoil(learn, x)` before a training on the inputs `x`; "
     "batches are in order")
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from torch.utils.data import TensorDataset
    from hierproto.callbacks import NotFinite
    from hierproto.learner import hier_learner
    torch.manual_seed(0)
    x, tree = torch.randn(12, 2), Hierarchy.from_paths([('a', 'x'), ('a', 'y'), ('b',)])
    dls = DataLoaders(*[DataLoader(TensorDataset(x, torch.arange(12) % 3), bs=4) for _ in range(2)])
    learn = hier_learner(dls, torch.nn.Linear(2, 4), tree, method, m=4, project=False, pool=False, path=tmp_path,
                         lr=1e-3, **kw)
    spoil(learn, x)
    with learn.no_bar(), learn.no_logging(), pytest.raises(NotFinite) as e: learn.fit(2)
    return str(e.value), learn

@pytest.mark.parametrize('method', ['cross_entropy', 'hxe', 'soft_labels', 'emd', 'yolo', 'deep_ncm', 'learnt',
                                    'gp_rank', 'gp_disto', 'frame', 'haframe', 'hie', 'hier_cos', 'hace'])
def test_a_sample_that_is_nan_stops_every_method(method, tmp_path):
    def spoil(learn, x): x[5, 0] = float('nan')
    said, learn = stopped(method, tmp_path, spoil)
    assert ('at batch 2 of 3 in epoch 1: the loss is nan because of the input: 1 of 4 samples' in said
            and 'Look at the samples' in said), said
    assert all(p.isfinite().all() for p in learn.model.parameters())

def test_a_guide_that_is_infinite_is_blamed(tmp_path):
    "An infinite weight is refused; one that becomes infinite, or too large for 32 bits, is found out in training"
    with pytest.raises(ValueError, match='lam must be a number >= 0'):
        stopped('gp_disto', tmp_path, lambda learn, x: None, lam=float('inf'))
    said, _ = stopped('gp_disto', tmp_path, lambda learn, x: None, lam=lambda share: float('inf'))
    assert "because of the guide" in said, said
    said, _ = stopped('gp_disto', tmp_path, lambda learn, x: None, lam=1e300)
    assert 'at batch 1 of 3 in epoch 1: the loss is inf because of the guide' in said and 'Lower `lam`' in said, said

def test_weights_that_are_nan_are_named(tmp_path):
    def spoil(learn, x): learn.model[1].protos.data[1] = float('nan')
    said, _ = stopped('gp_disto', tmp_path, spoil)
    assert ('at batch 1 of 3 in epoch 1: the loss is nan because of the prototypes' in said
            and 'lower the learning rate' in said), said

@pytest.mark.parametrize('method', ['cross_entropy', 'hxe', 'soft_labels', 'emd', 'yolo', 'haframe', 'hie', 'hier_cos',
                                    'hace'])
def test_second_derivatives(method):
    h = Hierarchy.from_paths([('a', 'x'), ('a', 'y'), ('b', 'z'), ('b', 'w')])
    head, loss, _ = METHODS[method](h, 3)
    z = torch.randn(5, 3, dtype=torch.double, requires_grad=True)
    assert gradgradcheck(lambda z: loss(head.double()(z), torch.tensor([0, 1, 2, 3, 0])), z)

@pytest.mark.parametrize('name', ['sphere', 'frame'])
def test_gradient_along_an_axis(name):
    "Vectors along an axis have a norm of exactly 1 after division by their largest entry, and still no radial gradient"
    x = torch.tensor([[2., 0, 0, 0], [0, -3, 0, 0]], dtype=torch.double, requires_grad=True)
    head = made(name).double()
    assert gradcheck(head, x) and gradcheck(unit, x) and gradgradcheck(unit, x)
    assert (torch.autograd.grad(head(x).sum(), x)[0]*x).sum(1).abs().max() < 1e-12

@pytest.mark.parametrize('name', [n for n in losses if n not in ('yolo', 'sphere')])
def test_classes_that_underflow(name):
    "True classes whose probability is 0 in float32 have the loss and the gradient of float64"
    x, _, y = data(n=64, m=K)
    x = 200*x
    assert (x.softmax(1)[range(64), y] == 0).float().mean() > .3
    (v, g), (want, dg) = (grad(lambda x: losses[name](reduction='none')(x, y), o) for o in (x, x.double()))
    torch.testing.assert_close(v.double(), want, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(g.double(), dg, rtol=1e-3, atol=1e-5)

def test_sums_over_subtrees():
    sums, x = SubtreeSum(h), torch.randn(5, K, dtype=torch.double, requires_grad=True)
    z = torch.randn(5, h.n_nodes - 1, dtype=torch.double, requires_grad=True)
    for f, o in ((sums, x), (sums.logsumexp, x), (sums.tree_log_softmax, z)):
        assert gradcheck(f, o) and gradgradcheck(f, o)
    torch.testing.assert_close(sums(x), x @ h.ancestry().double().t())
    far = 1e4*x.detach()
    torch.testing.assert_close(sums.logsumexp(far), torch.stack([far[:, a].logsumexp(1) for a in h.ancestry()], 1))
