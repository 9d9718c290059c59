"Probabilities enter through one door, whatever their rounding, and no form of a rule or a model answers differently"
import functools, warnings
import numpy as np, pandas as pd, pytest, torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import nn
from hierproto.answers import read_predictions
from hierproto.calibration import Climb, Restrict
from hierproto.hierarchy import CostMatrix, Hierarchy, HierarchyError
from hierproto.inference import (BackOff, CRM, Decide, argmax_rule, back_off, class_path, crm, expected_cost,
                                 get_rule, node_crm)
from hierproto.metrics import as_probs, calibration_error, hier_report
from hierproto.predictions import Predictions

h = Hierarchy.named('mnist_visual').align([str(i) for i in range(10)])
D = CostMatrix(h.costs()*torch.linspace(1, 3, 10)[:,None], h.leaves, warn=False) # not symmetric


@pytest.fixture(scope='module')
def real():
    "Scores, probabilities and classes of 1,700 digits, from a model that saw 60"
    d = load_digits()
    at = np.random.default_rng(0).permutation(len(d.target))
    model = LogisticRegression(C=1., max_iter=1000).fit(d.data[at[:60]]/16, d.target[at[:60]])
    scores = torch.tensor(model.decision_function(d.data[at[60:]]/16))
    return scores, scores.softmax(1), torch.tensor(d.target[at[60:]])


def same(a, b): return (a == b).double().mean() > .98 # rounded numbers have ties, which the last digit breaks

@pytest.mark.parametrize('change', [lambda p: p, lambda p: p.float(), lambda p: p.half(), lambda p: p.bfloat16().float(),
    *(functools.partial(torch.round, decimals=n) for n in (2,3,4,6)),
    lambda p: p.float().round(decimals=3)])
def test_rounded_probabilities_are_probabilities(real, change):
    scores, P, y = real
    P = change(P)
    clean = P.double()/P.double().sum(1, keepdim=True)
    with pytest.warns(UserWarning, match='rows sum to one'):
        assert torch.allclose(as_probs(P).double(), clean, atol=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        for rule, f in ((CRM(D), functools.partial(crm, D=D)), (BackOff(h, .7), functools.partial(back_off, h=h, threshold=.7)),
                        (Climb(h, .7), None), (BackOff(h, .5), functools.partial(node_crm, h=h))):
            answers = rule(P)
            assert same(answers, rule(clean, probs=True))
            if f: assert same(answers, f(P)) and same(answers, f(clean, probs=True))
        exact = hier_report(clean, y, h, rule=CRM(D), probs=True)
        assert hier_report(P, y, h, rule=CRM(D)) == pytest.approx(exact, abs=5e-3, nan_ok=True)
        assert calibration_error(P, y).item() == pytest.approx(calibration_error(clean, y, probs=True).item(), abs=2e-3)


def test_a_second_softmax_would_change_many_answers(real):
    "What the door prevents"
    scores, P, y = real
    assert (crm(P, D, probs=False) != crm(scores, D)).double().mean() > .1


spoilt = dict(one_row=(lambda p: p.index_fill(0, torch.tensor([3]), .05), 'one sums to 0.5,'),
              too_little=(lambda p: p*.97, 'most rows'), too_much=(lambda p: p*1.04, 'most rows'),
              percent=(lambda p: 100*p, 'percentages'), whole_percent=(lambda p: (100*p).round(), 'percentages'))

@pytest.mark.parametrize('how', spoilt)
def test_what_is_nearly_a_probability_is_refused(real, how):
    spoil, says = spoilt[how]
    for f in (as_probs, CRM(D), BackOff(h), Climb(h), functools.partial(crm, D=D), functools.partial(back_off, h=h)):
        with pytest.raises(HierarchyError, match=says): f(spoil(real[1]))


def test_scores_between_0_and_1_are_reported():
    with pytest.warns(UserWarning, match='taken for scores'): crm(torch.rand(50, 10), D)


def test_a_probability_just_below_zero_is_zero(real, tmp_path):
    "As one minus the sum of the others: no softmax, and no advice that leads nowhere"
    P = torch.tensor([[1 + 1e-16, -1e-16, *[0.]*8]]*3, dtype=torch.float64)
    for P in (P, real[1].index_fill(1, torch.tensor([3]), -1e-9)/real[1].index_fill(1, torch.tensor([3]), -1e-9).sum(1, keepdim=True)):
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            clean = P.clamp(min=0)
            for f in (CRM(D), BackOff(h, .7), functools.partial(crm, D=D)): assert torch.equal(f(P), f(clean, probs=True))
        table = pd.DataFrame(P.numpy(), columns=h.leaves).assign(target='3')
        table.to_csv(tmp_path/'p.csv', index=False)
        assert torch.allclose(read_predictions(tmp_path/'p.csv', h).probs, clean, atol=1e-8)


def test_predictions_take_rounded_probabilities():
    "Two decimals of a hundred classes: sums are off by up to a half, and a softmax would be wrong"
    many = Hierarchy.from_paths([(f'g{k//10}', f'c{k}') for k in range(100)])
    P = (2*torch.randn(300, 100, generator=torch.manual_seed(0))).softmax(1).round(decimals=2)
    assert (P.sum(1) - 1).abs().max() > .05
    p = Predictions(torch.arange(300) % 100, many, probs=P)
    assert torch.allclose(p.probs, P/P.sum(1, keepdim=True))
    for wrong in (P*.8, P*100, P.log().clamp(min=-9)):
        with pytest.raises(HierarchyError, match='divide each row by its sum, or take the softmax of scores'):
            Predictions(torch.arange(300) % 100, many, probs=wrong)


def test_double_precision_stays(real):
    scores, P, y = real
    risk = expected_cost(scores, D)
    assert risk.dtype == torch.float64
    assert torch.allclose(risk, P @ D.D.double().T, atol=1e-12)
    assert torch.equal(as_probs(P, True), P/P.sum(1, keepdim=True))


rules = dict(argmax=argmax_rule, crm=CRM(D), back_off=BackOff(h, .7), climb=Climb(h, .7, temperature=1.3),
             among=Restrict(CRM(D), h, ['1', '5', '8']), groups=Restrict('back_off', h, 'round'))

@pytest.mark.parametrize('name', rules)
def test_all_forms_of_a_model_give_the_same_answers(name, tmp_path):
    "Eager, compiled, exported and ONNX, for one sample whose scores look like probabilities as well"
    ort = pytest.importorskip('onnxruntime')
    pytest.importorskip('onnxscript')
    model = Decide(nn.Linear(10, 10), rules[name]).eval().requires_grad_(False)
    nn.init.eye_(model.model.weight)
    nn.init.zeros_(model.model.bias)
    x = torch.randn(32, 10, generator=torch.manual_seed(0))*2
    x[0] = x[0].softmax(0) # scores that sum to one
    want = model(x)
    assert torch.equal(want, get_rule(rules[name], h)(x)) and torch.equal(want[:1], model(x[:1]))
    assert torch.equal(torch.compile(model, backend='eager')(x), want)
    sizes = {'args': ({0: torch.export.Dim('B', min=1)},)}
    graph = torch.export.export(model, (x,), dynamic_shapes=sizes).module()
    assert torch.equal(graph(x), want) and torch.equal(graph(x[:1]), want[:1])
    program = torch.onnx.export(model, (x,), dynamo=True, verbose=False)
    program.save(tmp_path/'m.onnx')
    run = ort.InferenceSession(tmp_path/'m.onnx')
    assert run.run(None, {run.get_inputs()[0].name: x.numpy()})[0].tolist() == want.tolist()


def test_a_compiled_rule_looks_at_values_and_an_exported_one_must_know():
    P = (2*torch.randn(50, 10, generator=torch.manual_seed(1))).softmax(1).round(decimals=3)
    for rule in (CRM(D), BackOff(h, .7)):
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            want = rule(P)
            assert torch.equal(torch.compile(rule, backend='eager')(P), want)
            with pytest.raises(Exception, match='pass `probs=False` for scores'): torch.export.export(rule, (P,))
        known = type(rule)(D if isinstance(rule, CRM) else h, *([.7] if isinstance(rule, BackOff) else []), probs=True)
        assert torch.equal(torch.export.export(known, (P,)).module()(P), want)


def test_path_of_one_sample_in_double_precision(real):
    scores, P, _ = real
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        for rule in ('argmax', 'crm', 'back_off', functools.partial(back_off, h=h, threshold=.6), CRM(D)):
            assert class_path(P[5].round(decimals=4), h, rule).names == class_path(scores[5], h, rule).names


@pytest.mark.parametrize('as_given', [lambda P: P.numpy(), lambda P: P.tolist()], ids=['array', 'list'])
def test_rules_take_arrays_and_lists(as_given):
    "As scikit-learn's `predict_proba` returns them"
    from hierproto.inference import back_off, class_path, crm, expected_cost, node_crm, subtree_probs
    h = Hierarchy.from_paths([('animal', 'cat'), ('animal', 'dog'), ('plant', 'oak')])
    P = torch.tensor([[.5, .3, .2], [.4, .35, .25], [.1, .1, .8]], dtype=torch.float64)
    for f in (crm, back_off, node_crm, expected_cost, subtree_probs):
        assert torch.equal(f(as_given(P), h, probs=True), f(P, h, probs=True)), f.__name__
    assert [o.names for o in class_path(as_given(P), h, probs=True)] == [o.names for o in class_path(P, h, probs=True)]
