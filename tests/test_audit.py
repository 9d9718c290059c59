"The audit: tables as people write them, statements that are true, two models, slices, suspected labels, limits."
import numpy as np, pandas as pd, pytest, torch

from hierproto.audit import audit, html_report, paired, read_predictions, write_text
from hierproto.cli import run_command
from hierproto.hierarchy import CostMatrix, Hierarchy, HierarchyError
from hierproto.predictions import Predictions

tree = Hierarchy.from_paths([(f'g{k//3}', f'c{k}') for k in range(12)])


def softmax_rows(n=400, seed=0):
    g = np.random.default_rng(seed)
    y = g.integers(12, size=n)
    scores = g.normal(size=(n, 12)) + 1.5*np.eye(12)[y] + .8*(np.arange(12)//3 == y[:, None]//3)
    P = np.exp(scores)
    return y, P/P.sum(1, keepdims=True)


def table(folder, P, y, name='p.csv', **columns):
    df = pd.DataFrame(P, columns=tree.leaves).assign(target=[tree.leaves[k] for k in y], **columns)
    df.to_csv(folder/name, index=False)
    return folder/name


@pytest.mark.parametrize('decimals', [2, 3])
def test_rounded_probabilities_are_not_softmaxed(tmp_path, decimals):
    y, P = softmax_rows()
    p = read_predictions(table(tmp_path, P.round(decimals), y), tree)
    assert torch.allclose(p.probs.sum(1), torch.ones(len(y), dtype=p.probs.dtype), atol=1e-6)
    assert np.abs(p.probs.numpy() - P).max() < 12*10.**-decimals and 'rounded' in p.notes[0]


def test_percentages_are_read_as_such(tmp_path):
    y, P = softmax_rows()
    p = read_predictions(table(tmp_path, (100*P).round(1), y), tree)
    assert np.abs(p.probs.numpy() - P).max() < .01 and 'divided by 100' in p.notes[0]
    text = pd.DataFrame((100*P).round(1)).map('{}%'.format).to_numpy()
    assert torch.allclose(read_predictions(table(tmp_path, text, y), tree).probs, p.probs)


def test_scores_are_refused_for_probabilities(tmp_path):
    y, P = softmax_rows()
    for decimals in (3, 15):
        f = table(tmp_path, P.round(decimals), y)
        with pytest.raises(HierarchyError, match='leave --scores out'): read_predictions(f, tree, scores=True)
    f = table(tmp_path, np.log(P), y)
    assert np.allclose(read_predictions(f, tree, scores=True).probs, P, atol=1e-5)


def test_numbers_that_are_no_probabilities_get_a_remedy_that_helps(tmp_path):
    y, P = softmax_rows()
    f = table(tmp_path, P*.8, y)
    with pytest.raises(HierarchyError, match='divide each row by its sum') as e: read_predictions(f, tree)
    assert '--scores' not in str(e.value)
    with pytest.raises(HierarchyError, match='say --scores'): read_predictions(table(tmp_path, np.log(P), y), tree)


def test_a_name_with_an_apostrophe_is_not_the_name_without(tmp_path):
    h = Hierarchy.from_paths(['=x', "'=x", 'y'])
    (tmp_path/'p.csv').write_text("target,prediction\n=x,'=x\n'=x,y\n")
    p = read_predictions(tmp_path/'p.csv', h)
    assert p.targets.tolist() == [0, 1] and p.preds.tolist() == [1, 2]
    write_text(tmp_path/'p.csv', iter([['target', 'prediction'], ['=x', "'=x"], ["'=x", 'y']]))
    p = read_predictions(tmp_path/'p.csv', h)
    assert p.targets.tolist() == [0, 1] and p.preds.tolist() == [1, 2]


@pytest.mark.parametrize('heads', ['y_true,y_pred', 'true,predicted', 'label,prediction', 'Y_TRUE,Predicted',
                                   'Label,PREDICTION', 'target,prediction'])
def test_names_of_columns_that_people_use(tmp_path, heads):
    (tmp_path/'p.csv').write_text(f'{heads}\nC1,c2\nc3,c3\n')
    p = read_predictions(tmp_path/'p.csv', tree)
    assert p.targets.tolist() == [1, 3] and p.preds.tolist() == [2, 3] and "'C1' is read as 'c1'" in p.notes[0]


def test_excel(tmp_path):
    pytest.importorskip('openpyxl')
    h = Hierarchy.from_paths([('a', '1'), ('a', '2'), ('b', '3')])
    pd.DataFrame({'label': [1, 3], 'prediction': [2, 3]}).to_excel(tmp_path/'p.xlsx', index=False)
    assert read_predictions(tmp_path/'p.xlsx', h).preds.tolist() == [1, 2]


def test_a_target_may_be_a_group(tmp_path):
    (tmp_path/'p.csv').write_text('target,prediction\nc0,c1\ng0,c2\ng1,c2\n/,c2\n')
    p = read_predictions(tmp_path/'p.csv', tree)
    m = p.measures()
    assert int(p.known.sum()) == 1 and m['error rate %'] == 100 and m['AHC'] == 2
    assert m['level 1 accuracy %'] == pytest.approx(200/3)


def test_page_and_command_say_how_many_targets_are_known_to_their_class(tmp_path, capsys):
    tree.to_csv(tmp_path/'c.csv')
    (tmp_path/'p.csv').write_text('target,prediction\nc0,c1\ng0,c2\ng1,c2\n/,c2\n')
    audit(tmp_path/'p.csv', tmp_path/'c.csv', tmp_path/'a', shuffles=0)
    says = '1 of them are known to their class, the others count for the levels they are known to'
    assert f'4 samples of 12 classes. {says}\n' in capsys.readouterr().out
    assert f'4 samples of 12 classes, 1 mistakes. {says}.' in (tmp_path/'a'/'report.html').read_text()


@pytest.mark.parametrize('wrong', [dict(fail_above='three'), dict(fail_above=True), dict(shuffles='1.5'), dict(seed='x'),
                                   dict(groups=['camera']), dict(fail_worse_than=3.), dict(against=3), dict(scores='no')])
def test_arguments_from_python_are_checked_before_anything_is_read(tmp_path, wrong):
    tree.to_csv(tmp_path/'c.csv')
    (tmp_path/'p.csv').write_text('target,prediction\nc0,c1\n')
    with pytest.raises(HierarchyError, match=f"--{next(iter(wrong)).replace('_', '-')} must be"):
        audit(tmp_path/'p.csv', tmp_path/'c.csv', tmp_path/'a', **wrong)
    assert not (tmp_path/'a').exists()


def test_numbers_may_be_text(tmp_path):
    tree.to_csv(tmp_path/'c.csv')
    (tmp_path/'p.csv').write_text('target,prediction\nc0,c1\n')
    audit(tmp_path/'p.csv', tmp_path/'c.csv', tmp_path/'a', shuffles='5', seed='1', fail_above='3')
    with pytest.raises(SystemExit, match='above 1.5'):
        audit(tmp_path/'p.csv', tmp_path/'c.csv', tmp_path/'b', shuffles='5', fail_above='1.5')


def test_none_of_the_shuffled_trees_is_not_a_tenth_of_a_percent():
    y = torch.arange(12).repeat(20)
    near = y//3*3 + (y+1) % 3
    fit = Predictions(y, tree, near).tree_fit(1000)
    assert fit.as_low == 0 and 'none of 1,000' in fit.says and '%' not in fit.says and 'p = 0.001' in fit.says


def test_the_sentence_counts_the_rows_of_the_table():
    "Answers that are groups cost something in the table, so they must in the sentence below it"
    y = torch.arange(12).repeat(20)
    preds = torch.where(torch.arange(240) % 2 == 0, torch.tensor(tree.n_nodes-1), y//3*3 + (y+1) % 3)
    p = Predictions(y, tree, preds)
    assert p.tree_fit(50).true == pytest.approx(p.measures()['AHC'])
    assert f"{p.measures()['AHC']:.2f}" in p.tree_fit(50).says


def test_costs_are_not_called_a_hierarchy():
    i = torch.arange(12.)
    y = torch.arange(12).repeat(20)
    p = Predictions(y, CostMatrix((i[:, None]-i).abs()*10, tree.leaves, warn=False), (y+1) % 12)
    page = html_report(p, fit=p.tree_fit(100))
    text = page.split('</style>')[1].split('<script')[0]
    assert 'hierarch' not in p.tree_fit(100).says.lower() and 'hierarch' not in text.replace('Made by hierproto', '')


def test_predictions_that_contradict_their_probabilities_are_noted(tmp_path):
    y, P = softmax_rows()
    wrong = [tree.leaves[k] for k in P.argmin(1)]
    p = read_predictions(table(tmp_path, P, y, prediction=wrong), tree)
    assert p.contradictions().startswith('400 of 400 predictions contradict') and 'contradict' in html_report(p, fit=False)
    right = [tree.leaves[k] for k in P.argmax(1)]
    assert not read_predictions(table(tmp_path, P, y, prediction=right), tree).contradictions()


def test_intervals_contain_the_value_and_shrink():
    y, P = softmax_rows(4000)
    few, many = (Predictions(y[:n], tree, probs=P[:n]).intervals().loc['AHC'] for n in (200, 3200))
    assert few.low < few.value < few.high and 3 < (few.high-few.low)/(many.high-many.low) < 5


def test_two_models_are_paired_by_file(tmp_path, capsys):
    y, P = softmax_rows()
    files = [f'{i}.png' for i in range(len(y))]
    order = np.random.default_rng(1).permutation(len(y))
    better = np.where(np.arange(len(y))[:, None] % 2, P, .5*P + .5*np.eye(12)[y])
    new = table(tmp_path, better, y, 'new.csv', file=files)
    old = table(tmp_path, P[order], y[order], 'old.csv', file=[files[i] for i in order])
    tree.to_csv(tmp_path/'classes.csv')
    options = ['--shuffles', 0, '--out', tmp_path/'a', '--force']
    run_command('audit', [new, tmp_path/'classes.csv', '--against', old, *options])
    D = tree.costs().numpy()
    want = (D[better.argmax(1), y] - D[P.argmax(1), y]).mean()
    d = pd.read_csv(tmp_path/'a'/'differences.csv', index_col=0)
    assert d.change.AHC == pytest.approx(want, abs=1e-5) and d.low.AHC < want < d.high.AHC < 0
    assert 'The average cost is lower' in capsys.readouterr().out
    for limits, status in ((['--fail-worse-than', old], None), (['--fail-above', 9], None), (['--fail-above', .01], 1)):
        if status is None: run_command('audit', [new, tmp_path/'classes.csv', *limits, *options])
        else:
            with pytest.raises(SystemExit, match='above 0.01'): run_command('audit', [new, tmp_path/'classes.csv', *limits, *options])
    with pytest.raises(SystemExit, match='is higher'):
        run_command('audit', [old, tmp_path/'classes.csv', '--fail-worse-than', new, *options])
    table(tmp_path, P[:-1], y[:-1], 'short.csv', file=files[:-1])
    with pytest.raises(HierarchyError, match="1 of 400 files are not in short.csv: '399.png'"):
        audit(str(new), str(tmp_path/'classes.csv'), tmp_path/'b', against=str(tmp_path/'short.csv'))


def test_groups_widen_intervals_and_columns_are_slices(tmp_path):
    y, P = softmax_rows(1000)
    g = np.random.default_rng(0)
    site, camera = g.integers(10, size=1000), g.choice(['a', 'b'], 1000)
    bad = (site < 3) | (camera == 'b') & (g.random(1000) < .5)
    P[bad] = P[bad][:, ::-1]
    f = table(tmp_path, P, y, site=site, camera=camera)
    p, over = read_predictions(f, tree), read_predictions(f, tree, groups='site')
    width = [o.intervals().loc['AHC', 'high']-o.intervals().loc['AHC', 'low'] for o in (p, over)]
    assert width[1] > 1.5*width[0] and list(over.columns) == ['camera']
    s = over.slices()
    assert s['slice'][s.worse].tolist() == ['b']


def test_wrong_labels_are_suspected_first():
    y, P = softmax_rows(1000)
    P = .05*P + .95*np.eye(12)[y]
    bad = np.arange(20)*50
    labels = y.copy()
    labels[bad] = (y[bad]+6) % 12
    found = Predictions(labels, tree, probs=P).suspects(20)
    assert {*(found.row-1)} == {*bad}


def test_every_new_confusion_is_shown_even_if_others_change_more():
    "Twenty pairs of classes change more than the one that is new"
    n = 21
    h = Hierarchy.from_paths([('g', f'c{k}') for k in range(n + 1)])
    targets = torch.arange(n).repeat_interleave(9)
    wrong = (targets + 1) % n
    first = torch.arange(n*9) % 9 == 0
    before = Predictions(targets, h, preds=torch.where(first, wrong, targets))
    now = torch.where(first, wrong, wrong)
    now[-1] = n
    page = html_report(Predictions(targets, h, preds=now), fit=False, against=(before, 'old.csv'))
    assert 'Confusions that only these predictions have' in page


def test_tables_of_an_earlier_audit_do_not_stay(tmp_path):
    y, P = softmax_rows()
    files = [f'{i}.png' for i in range(len(y))]
    f = table(tmp_path, P, y, file=files, camera=['a', 'b']*(len(y)//2))
    tree.to_csv(tmp_path/'tree.csv')
    out = tmp_path/'out'
    audit(f, tmp_path/'tree.csv', out, against=f, shuffles=0)
    assert (out/'by_class.csv').exists() and (out/'slices.csv').exists()
    plain = table(tmp_path, P, y, 'plain.csv')
    audit(plain, tmp_path/'tree.csv', out, shuffles=0, force=True)
    names = sorted(o.name for o in out.iterdir())
    assert names == ['intervals.csv', 'mistakes.csv', 'report.html', 'suspects.csv', 'table.csv']


def test_an_empty_cell_is_no_group(tmp_path):
    y, P = softmax_rows()
    f = table(tmp_path, P, y, patient=['p1', '']*(len(y)//2))
    with pytest.raises(HierarchyError, match="row 2: the cell is empty .column 'patient'"):
        read_predictions(f, tree, groups='patient')


def test_the_table_has_the_metrics_that_papers_report(tmp_path):
    "Cat taken for dog: half of the path is right. The answer 'animal' covers the cat"
    h = Hierarchy.from_paths([('animal', 'cat'), ('animal', 'dog'), ('plant', 'oak')])
    h.to_csv(tmp_path/'tree.csv')
    (tmp_path/'p.csv').write_text('target,prediction\ncat,dog\ncat,animal\noak,oak\n')
    run_command('audit', [tmp_path/'p.csv', tmp_path/'tree.csv', '--out', tmp_path/'out', '--shuffles', 0])
    row = pd.read_csv(tmp_path/'out'/'table.csv', index_col=0).loc['as given']
    assert row['hierarchical precision %'] == pytest.approx(100*4/5)
    assert row['hierarchical recall %'] == pytest.approx(100*4/6)
    assert row['hierarchical F1 %'] == pytest.approx(100*8/11)
    assert row['hierarchical recall % (macro)'] == pytest.approx(100*(2/4 + 1)/2)
    assert row['LCA height'] == pytest.approx((1 + 1 + 0)/3)
    assert row['coverage %'] == pytest.approx(100*2/3)
    assert row['specificity'] == pytest.approx((1 + 1 - np.log(2)/np.log(3) + 1)/3)
    assert 'HOPS' not in row
    page = (tmp_path/'out'/'report.html').read_text()
    assert 'Metrics that papers report' in page
    lines = 'target,cat,dog,oak\ncat,.6,.3,.1\noak,.4,.3,.3\n'
    (tmp_path/'q.csv').write_text(lines)
    run_command('audit', [tmp_path/'q.csv', tmp_path/'tree.csv', '--out', tmp_path/'soft', '--shuffles', 0])
    row = pd.read_csv(tmp_path/'soft'/'table.csv', index_col=0).loc['as given']
    assert row['full-path accuracy %'] == 50 and 0 < row['HOPS'] < 1 and row['HOPS@3'] == row['HOPS']
