"The pages whose runs are still being made are right with no rows, with the first rows and with all of them"
import json, re
from pathlib import Path
import matplotlib, numpy as np, pytest
from hierproto.files import add_row
from hierproto.paper.recipes import parse_methods, resolve
from hierproto.paper.runs import COLUMNS, results_file

root = Path(__file__).resolve().parent.parent
DECLARED = [(line, f, seed) for seed in range(10) for f in (.05, .1) for line in
            ('cross_entropy', 'learnt', 'gp_disto:lam=20', 'emd', 'soft_labels', 'hxe', 'shuffled')]
COST = {'cross_entropy': 5., 'gp_disto:lam=20': 4.7, 'learnt': 4.7, 'shuffled': 5.2}

def write_rows(out, lines):
    "Rows as `hierproto_sweep` writes them, with costs that differ by method, and by a little between seeds"
    noise = np.random.default_rng(0)
    for line, f, seed in lines:
        wrong = line == 'shuffled'
        (method, over), = parse_methods('gp_disto:lam=20' if wrong else line)
        tree = str(out.parent/'trees'/'cifar100_shuffled.csv') if wrong else None
        settings = dict(epochs=6, same_steps=True, crm=True, **over)
        r = resolve('cifar100', method, 'cpu', seed, fraction=f, hierarchy=tree, **settings)
        cost = COST.get(line, 4.9) + .1*seed + noise.normal(0, .01)
        row = dict({c: 0 for c in COLUMNS}, **{k: r[k] for k in ('run_id', 'data', 'tier', 'method', 'seed', 'fold')},
                   fraction=f, hierarchy=Path(r['hierarchy']).name, overrides=json.dumps(settings), epochs=6, er=.8,
                   ahc=9. if wrong else cost, ahc_expert=cost, er_crm=.8, ahc_crm=cost - .1, ahc_expert_crm=cost - .1,
                   levels='[]', n_train=round(50_000*f), n_test=10_000, seconds=1., commit='1234567',
                   versions='hierproto', device='cpu')
        add_row(results_file(r, out), row, [*row])

def show_page(page, tmp_path, monkeypatch, hidden):
    "What the code of `page` shows, read from copies of the results without the folder `hidden`"
    matplotlib.use('agg')
    results, nbs = tmp_path/'results', tmp_path/'nbs'
    for folder in (results, nbs): folder.mkdir(exist_ok=True)
    for f in (root/'results').iterdir():
        if f.name != hidden and not (results/f.name).exists(): (results/f.name).symlink_to(f)
    monkeypatch.chdir(nbs)
    monkeypatch.setenv('MPLBACKEND', 'agg')
    shown = []
    monkeypatch.setattr('IPython.display.display', lambda o: shown.append(getattr(o, 'data', o)))
    cells = json.loads((root/'nbs'/page).read_text())['cells']
    space = {}
    for c in cells:
        if c['cell_type'] == 'code': exec(''.join(c['source']), space)
    matplotlib.pyplot.close('all')
    return space, '\n'.join(map(str, shown))

@pytest.mark.parametrize('n', [0, 2, 140])
def test_little_data_from_scratch(n, tmp_path, monkeypatch):
    (tmp_path/'results').mkdir()
    (tmp_path/'results'/'trees').symlink_to(root/'results'/'trees')
    write_rows(tmp_path/'results'/'little', DECLARED[:n])
    space, text = show_page('807_little_data.ipynb', tmp_path, monkeypatch, 'little')
    verdict, = re.findall(r'\*\*Verdict from scratch\.\*\*.*', text)
    little, primary = space['little'], space['primary']
    assert space['made'].drop('least risk').to_numpy().sum() == n
    assert [o for o in little.index if little.primary[o]] == primary and len(primary) == 4
    if n < 140:
        assert f'{n} of 140 runs are finished, so there is no verdict yet' in verdict
        assert 'lower' not in verdict and 'undecided' not in verdict
        assert verdict.count('not run yet') == 4
    else:
        assert 'All runs are finished' in verdict and 'not run' not in verdict and (little.n == 10).all()
        assert little.verdict[primary].tolist() == ['lower']*2 + ['equal within 1%']*2
        assert verdict.count('**lower**') == verdict.count('**equal within 1%**') == 2
        plain, adjusted = [(little[high] - little[low])[primary] for low, high in (('low','high'), ('adj_low','adj_high'))]
        assert (adjusted > plain).all() # of the family of four, two are not rejected
        change = 100*(4.7 - 5)/5.45
        assert abs(little.change[primary[0]] - change) < .2
        # the cost of the shuffled tree is the one under the expert tree
        shuffled, = [o for o in little.index if o.startswith('GP-disto (lam=20) against') and 'shuffled' in o and '2,500' in o]
        assert abs(little.change[shuffled] - 100*(4.7 - 5.2)/5.65) < .2
        assert not little.primary[shuffled]
