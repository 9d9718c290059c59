"Guides, methods, bodies and learners: what went wrong once, and the published variants"
import warnings
import pytest, torch
from torch import nn
from fastcore.basics import first
from fastai.basics import set_seed
from hierproto.callbacks import MetricGuide
from hierproto.distortion import RunningScale, sampled_disto_loss
from hierproto.hierarchy import Hierarchy
from hierproto.methods import METHODS

pets = Hierarchy.from_nested(dict(animal=['cat', 'dog'], plant=['oak', 'fir']))


@pytest.mark.parametrize('lam', [-1, -1e-9, float('nan'), float('inf')])
def test_a_weight_of_the_guide_that_is_negative_or_not_finite(lam):
    with pytest.raises(ValueError, match='lam must be a number >= 0'): MetricGuide(pets, lam=lam)
    for method in ('gp_disto', 'gp_rank', 'hyperspherical_learnt'):
        with pytest.raises(ValueError, match='lam must be a number >= 0'): METHODS[method](pets, 4, lam=lam)


def test_the_sampled_guide_warns_of_few_pairs():
    "With the scale of 64 other pairs the estimate is 8% too high, with that of 16 pairs 29%"
    tree, protos = Hierarchy.named('cifar100'), torch.randn(100, 4)
    with pytest.warns(UserWarning, match='too high'): sampled_disto_loss(protos, tree, n=64)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        for kw in (dict(n=512), dict(n=16, scale=1.), dict(n=16, scale=RunningScale())):
            sampled_disto_loss(protos, tree, **kw)


# --- published variants: arguments that change nothing unless they are given ---
def made(method, **kw):
    set_seed(0)
    return METHODS[method](pets, 4, **kw)


def test_ties_of_the_rank_guide():
    "Eq. 14 gives a tie the target 0"
    assert first(made('gp_rank', ties='paper')[2]).guide.keywords == dict(ties='paper')
    assert first(made('gp_rank')[2]).guide.keywords == {}
    with pytest.raises(TypeError, match='ties'): made('learnt', ties='paper')


def test_weights_of_hxe_as_published():
    "They grow from the root to the class: .67 to 1 for five levels"
    tree = Hierarchy.named('cifar100')
    def weights(**kw): return METHODS['hxe'](tree, 4, **kw)[1].lam[:, 0]
    torch.testing.assert_close(weights(count='leaf')[[0, -1]], torch.tensor([.67, 1.]), atol=.005, rtol=0)
    torch.testing.assert_close(weights()[[0, -1]], torch.tensor([.90, .61]), atol=.01, rtol=0)


def test_the_hyperspherical_loss_as_a_sum():
    head, loss, _ = made('hyperspherical', reduction='sum')
    z, y = torch.randn(6, 4), torch.arange(6) % 4
    torch.testing.assert_close(loss(head(z), y), 6*made('hyperspherical')[1](head(z), y))


@pytest.mark.parametrize('method', ['cross_entropy', 'hxe', 'soft_labels', 'emd', 'yolo', 'learnt', 'haframe', 'hie'])
def test_the_focal_factor_detached(method):
    "The value is that of the focal loss, the gradient that of the weighted logarithm"
    values, grads = [], []
    for detach in (False, True):
        head, loss, _ = made(method, gamma=2., detach_focal=detach)
        z = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
        values.append(loss(head(z), torch.arange(6) % 4))
        grads += torch.autograd.grad(values[-1], z)
    torch.testing.assert_close(*values)
    assert not torch.allclose(*grads)


def test_deep_ncm_as_published():
    "A running mean of the means of batches"
    z = torch.tensor([[0.], [3.], [3.]]).expand(-1, 4)
    for mean, want in (('samples', 2.), ('batches', 1.5)):
        head, *_ = made('deep_ncm', mean=mean)
        head.update(z[:1], torch.zeros(1))
        head.update(z[1:], torch.zeros(2))
        assert head.protos[0].tolist() == [want]*4
