"What holds for every tree, every vocabulary and every split into batches; `make stress` tries more of them"
import functools, os, random
from collections import Counter
import networkx as nx, numpy as np, pytest, torch
from hypothesis import given, settings, strategies as st
from hierproto.baselines.cross_entropy import *
from hierproto.baselines.emd import EMDLoss, tree_emd
from hierproto.baselines.hxe import HXELoss
from hierproto.baselines.hyperspherical import SquaredCosineLoss, sphere_guide
from hierproto.baselines.soft_labels import SoftLabelLoss
from hierproto.baselines.yolo import LogProbLoss, YOLOHead
from hierproto.callbacks import costs_for
from hierproto.distortion import *
from hierproto.hierarchy import Hierarchy, as_costs
from hierproto.inference import argmax_rule, back_off, crm, expected_cost, subtree_probs
from hierproto.methods import METHODS, get_method
from hierproto.metrics import Batch, hier_metrics, hier_report, hops
from hierproto.prototypes import DataLoss, FocalDataLoss

EXAMPLES = int(os.environ.get('HIERPROTO_EXAMPLES', 15))
PROPERTIES, TRIED = {}, Counter()


def holds(*strategies, share=1.):
    "A property of whatever the `strategies` draw, tried `share` times as often as others"
    def decorate(f):
        @functools.wraps(f)
        def counted(*args, **kwargs):
            TRIED[f.__name__] += 1
            f(*args, **kwargs)
        conf = settings(max_examples=max(3, round(share*EXAMPLES)), derandomize=True, database=None, deadline=None)
        PROPERTIES[f.__name__] = res = conf(given(*strategies)(counted))
        return res
    return decorate


def tree(seed, n, depth, width, chains, weighted):
    ("`n` leaves at different depths, groups of at most `width` on a level; "
     "some leaves hang on chains of single children")
    rng = random.Random(seed)
    def path(k):
        p = tuple(f'{"abcdefghijkl"[l]}{rng.randrange(width)}' for l in range(rng.randint(0, depth-1)))
        return (p + tuple(f'only {k}.{l}' for l in range(rng.randint(0, depth-1-len(p)) if chains else 0))
                + (f'leaf {k}',))
    paths = [path(k) for k in range(n)]
    below = {p[:i]: None for p in paths for i in range(1, len(p)+1)}
    return Hierarchy.from_paths(paths, weights={p: 10**rng.uniform(-2, 2) for p in below} if weighted else None)

def trees(most=40):
    sizes = st.integers(2, most) if most <= 40 else st.integers(2, 40) | st.sampled_from([most//10, most])
    return st.builds(tree, st.integers(0, 2**20), sizes, st.integers(1, 12), st.integers(1, 4), st.booleans(),
                     st.booleans())

seeds = st.integers(0, 2**20)
def gen(seed): return torch.Generator().manual_seed(seed)
def close(a, b, tol=1e-5):
    torch.testing.assert_close(torch.as_tensor(a).double(), torch.as_tensor(b).double(), rtol=tol, atol=tol)


@holds(trees(2000), seeds)
def test_costs_are_a_metric(h, seed):
    D, rng = h.costs(), random.Random(seed)
    K = len(h)
    assert D.shape == (K, K) and (D == D.T).all() and (D.diagonal() == 0).all()
    assert (D + torch.eye(K) > 0).all() and D.isfinite().all()
    for l in rng.sample(range(K), min(K, 20)): assert (D <= (D[:,l,None] + D[l])*(1 + 1e-6)).all()


@holds(trees(2000), seeds)
def test_costs_are_the_paths_of_networkx(h, seed):
    g, rng = h.to_networkx().to_undirected(), random.Random(seed)
    D = h.costs(hidden=True) if h.n_nodes <= 1000 else None
    for i in rng.sample(range(h.n_nodes), min(h.n_nodes, 8)):
        theirs = nx.single_source_dijkstra_path_length(g, h.nodes[i], weight='weight')
        theirs = torch.tensor([theirs[p] for p in h.nodes])
        ours = h.pair_costs(i, torch.arange(h.n_nodes))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        if D is not None: assert torch.equal(D[i], ours)


@holds(trees(2000))
def test_the_books_of_a_tree(h):
    "Parents, levels, ancestors and ancestry tell one story"
    K, A, paths = len(h), h.ancestry(), h.path_table()
    assert h.parent[-1] == -1 and (h.parent[:-1] >= K).all() and h.nodes[-1] == ()
    assert [h.nodes[p] for p in h.parent[:-1].tolist()] == [n[:-1] for n in h.nodes[:-1]]
    assert h.levels.tolist() == [len(n) for n in h.nodes] and h.depth == max(map(len, h.nodes))
    assert torch.equal(A.sum(0), h.levels[:K]+1) and A[-1].all() and A[torch.arange(K), torch.arange(K)].all()
    for l in range(h.depth+1):
        a = h.ancestors(l)
        assert A[a, torch.arange(K)].all() and (h.levels[a] == h.levels[:K].clamp(max=l)).all()
    close(h.mean_cost(), h.costs().double().sum()/(K*(K-1)))


def shuffled(h, seed):
    "The same tree with another order of classes, and for each of its nodes the number that it had"
    names = h.leaves[:]
    random.Random(seed).shuffle(names)
    new = h.align(names)
    at = {p: i for i, p in enumerate(h.nodes)}
    return new, torch.tensor([at[p] for p in new.nodes])

@holds(trees(), seeds)
def test_another_order_of_classes_permutes_costs(h, seed):
    new, at = shuffled(h, seed)
    K = len(h)
    assert torch.equal(new.costs(hidden=True), h.costs(hidden=True)[at][:,at])
    assert (torch.equal(new.costs(), h.costs()[at[:K]][:,at[:K]])
            and torch.equal(new.ancestry(), h.ancestry()[at][:,at[:K]]))
    assert new.align(h.leaves) == h and (new == h) == (new.leaves == h.leaves)
    close(new.mean_cost(), h.mean_cost())

@holds(trees(), seeds)
def test_another_order_of_classes_changes_no_metric(h, seed):
    new, at = shuffled(h, seed)
    K, g = len(h), gen(seed)
    x, y = torch.randn(50, K, generator=g), torch.randint(K, (50,), generator=g)
    a, b = hier_report(x, y, h), hier_report(x[:,at[:K]], torch.argsort(at[:K])[y], new)
    assert a.keys() == b.keys()
    for k in a: assert a[k] == pytest.approx(b[k], abs=1e-6, nan_ok=True), k
    assert torch.equal(at[crm(x[:,at[:K]], new)], crm(x, h))
    assert torch.equal(at[back_off(x[:,at[:K]], new)], back_off(x, h))
    close(subtree_probs(x[:,at[:K]], new), subtree_probs(x, h)[:,at])

@holds(trees(), seeds)
def test_ties_do_not_make_hops_depend_on_the_order_of_classes(h, seed):
    "Scores of few values, and rounded probabilities, many of which are 0"
    new, at = shuffled(h, seed)
    K, g = len(h), gen(seed)
    x, y = torch.randint(3, (50, K), generator=g).float(), torch.randint(K, (50,), generator=g)
    p = torch.randn(50, K, generator=g).softmax(1).mul(10).round()
    p[:,0] += 1 # no row is empty
    for scores in (x, p.log()):
        for k in {None, 1, 2, min(5, K)}:
            assert hops(scores, y, h, k) == hops(scores[:,at[:K]], torch.argsort(at[:K])[y], new, k)

losses = dict(cross_entropy=lambda h: DataLoss(), focal=lambda h: FocalDataLoss(), hxe=lambda h: HXELoss(h),
              hxe_focal=lambda h: HXELoss(h, gamma=1., count='leaf'), soft_labels=SoftLabelLoss,
              soft_focal=lambda h: SoftLabelLoss(h, gamma=1.), emd=EMDLoss, sphere=lambda h: SquaredCosineLoss())

@holds(trees(), seeds)
def test_another_order_of_classes_changes_no_loss(h, seed):
    new, at = shuffled(h, seed)
    K, g = len(h), gen(seed)
    x, y = torch.randn(16, K, generator=g), torch.randint(K, (16,), generator=g)
    for name, make in losses.items(): close(make(new)(x[:,at[:K]], torch.argsort(at[:K])[y]), make(h)(x, y))
    old, yolo = YOLOHead(5, h), YOLOHead(5, new)
    with torch.no_grad():
        yolo.linear.weight.copy_(old.linear.weight[at[:-1]])
        yolo.linear.bias.copy_(old.linear.bias[at[:-1]])
    z = torch.randn(7, 5, generator=g)
    close(yolo.node_log_probs(z), old.node_log_probs(z)[:,at])
    p, q = x.softmax(1), x.flip(0).softmax(1)
    close(tree_emd(p[:,at[:K]], q[:,at[:K]], new), tree_emd(p, q, h))

@holds(trees(14), seeds)
def test_another_order_of_classes_changes_no_guide(h, seed):
    new, at = shuffled(h, seed)
    K, protos = len(h), torch.randn(h.n_nodes, 4, generator=gen(seed))
    for n in (K, h.n_nodes):
        D, E, P, Q = costs_for(h, n), costs_for(new, n), protos[:n], protos[at[:n]]
        for f in (disto_loss, distortion, scale_free_distortion, smooth_scale, optimal_scale,
                  lambda p, c: disto_loss(p, c, scale=1.)):
            close(f(Q, E), f(P, D), 1e-4)
        if n <= 40:
            for f in (rank_loss, functools.partial(rank_loss, ties='paper'), sphere_guide):
                close(f(Q, E, n=None), f(P, D, n=None), 1e-4)


@holds(trees(), seeds, st.booleans())
def test_any_split_into_batches_gives_the_same_metrics(h, seed, maps):
    g, rng, n = gen(seed), random.Random(seed), 60
    shape = (n, 2, 3) if maps else (n,)
    x, y = torch.randn(n, len(h), *shape[1:], generator=g), torch.randint(len(h), shape, generator=g)
    y[torch.rand(shape, generator=g) < .2] = 255
    cuts = sorted(rng.sample(range(1, n), rng.randint(1, 12)))
    metrics = hier_metrics(h, 'all', ignore_index=255)
    for m in metrics: m.reset()
    for a, b in zip([0, *cuts], [*cuts, n]):
        for m in metrics: m.add(Batch(x[a:b], y[a:b], 255))
    whole = hier_report(x, y, h, ignore_index=255)
    assert whole.keys() == {m.name for m in metrics}
    for m in metrics: assert m.value == pytest.approx(whole[m.name], rel=1e-9, abs=1e-9, nan_ok=True), m.name


@functools.lru_cache(None)
def built(method, size):
    h = tree(*[(1, 2, 1, 1, False, False), (2, 9, 4, 2, True, True), (3, 30, 6, 3, True, False)][size])
    torch.manual_seed(0)
    return h, *get_method(method)(h, 6)[:2]

@holds(st.sampled_from(sorted(METHODS)), st.integers(0, 2), st.sampled_from([0., 1e-12, 1e-3, 1., 1e3, 1e12]),
       st.booleans(), seeds, share=8.)
def test_probabilities_sum_to_one(method, size, spread, maps, seed):
    h, head, loss = built(method, size)
    z = spread*torch.randn(4, 6, *[3, 2]*maps, generator=gen(seed))
    if method == 'deep_ncm' and seed % 2:
        head.update(torch.randn(5, 6, generator=gen(seed)), torch.randint(len(h), (5,), generator=gen(seed)))
    with torch.no_grad(): p = loss.activation(head(z))
    assert p.shape == (4, len(h), *[3, 2]*maps) and (p >= 0).all()
    torch.testing.assert_close(p.sum(1), torch.ones_like(p[:,0]), rtol=1e-5, atol=0)


@holds(trees(), seeds, st.sampled_from([1e-3, 1., 10., 1e4]), st.sampled_from([1e-12, 1., 1e12]),
       st.booleans(), share=3.)
def test_crm_never_expects_to_cost_more_than_argmax(h, seed, spread, scale, odd):
    g = gen(seed)
    D = h.costs()*scale
    if odd: D = D*(.1 + torch.rand(D.shape, generator=g))  # neither symmetric nor a metric
    x = spread*torch.randn(32, len(h), generator=g)
    risk = x.double().softmax(1) @ D.double().T  # in full precision and by hand
    ours, theirs = (risk.gather(1, f[:,None])[:,0] for f in (crm(x, D), argmax_rule(x)))
    assert (ours <= theirs + 1e-6*D.max()).all() and (ours <= risk.amin(1) + 1e-6*D.max()).all()
    close(expected_cost(x, D)/D.max(), risk/D.max())
