"Saved models, and the programs for people who do not program: in process, and as a shell would start them"
import json, os, pickle, re, shutil, subprocess, sys
from pathlib import Path
from urllib.error import URLError

import numpy as np, pandas as pd, pytest, torch
from PIL import Image
from sklearn.datasets import load_digits

from hierproto.hierarchy import CostMatrix, Hierarchy, HierarchyError
from hierproto.audit import audit, run_program
from hierproto.fit import fit, predict
from hierproto.saving import ModelError, PictureError, export_onnx, get_rule, load_model, save_model

FAST = ['--arch', 'convnet', '--epochs', '3', '--lr', '1e-2', '--m', '16', '--quiet']


def program(name, *argv, home=None):
    "The installed program `name` as a process of its own"
    env = {**os.environ, 'OMP_NUM_THREADS': '1', **({'HOME': str(home)} if home else {})}
    return subprocess.run([Path(sys.executable).parent/f'hierproto_{name}', *map(str, argv)], capture_output=True, text=True, timeout=600, env=env)


def failed(capsys, f, *argv):
    "What the program `f`, called in process, says when it fails, without a traceback and with status 2"
    with pytest.raises(SystemExit) as e: run_program(f, f'hierproto_{f.__name__}', [str(o) for o in argv])
    assert e.value.code == 2
    return capsys.readouterr().err


def write_digits(where, n=200, noise=60):
    data, rng = load_digits(), np.random.default_rng(0)
    for i, (x, y) in enumerate(zip(data.images[:n], data.target)):
        f = where/str(y)/f'{i}.png'
        f.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((255 - x*15.9 + noise*rng.standard_normal(x.shape)).clip(0, 255).astype(np.uint8)).save(f)
    return where


@pytest.fixture(scope='module')
def work(tmp_path_factory):
    "Digits as files, their tree, and the model that hierproto_fit makes of them from a cold start, as a process with an empty home"
    d = tmp_path_factory.mktemp('work')
    write_digits(d/'images')
    Hierarchy.named('mnist_visual').to_csv(d/'classes.csv')
    (d/'images'/'3'/'broken.png').write_bytes(b'\x89PNG\r\n\x1a\n not really')
    (d/'home').mkdir()
    d.joinpath('fit.txt').write_text((res := program('fit', d/'images', d/'classes.csv', '--out', d/'model', '--compare', *FAST, home=d/'home')).stdout)
    assert res.returncode == 0, res.stderr
    return d


def test_fit(work):
    said, table = (work/'fit.txt').read_text(), pd.read_csv(work/'model'/'table.csv', index_col=0)
    assert '160 pictures of 10 classes' in said and 'broken.png' in said and 'random weights' in said
    assert list(table.index[:2]) == ['gp_disto', 'cross_entropy'] and (table['error rate %'] < 75).all()
    assert all(f"{table.loc[o, 'AHC']:.2f}" in said for o in table.index)
    assert {f.name for f in (work/'model').iterdir()} == {'model.safetensors', 'hierarchy.json', 'settings.json', 'report.html', 'table.csv', 'predictions.csv'}


def test_report_is_one_file(work):
    page = (work/'model'/'report.html').read_text()
    assert all(o in page for o in ('Costly mistakes', 'Who is taken for whom', 'Does the hierarchy fit?', 'The hierarchy', 'broken.png'))
    assert page.count('<img src="data:image/png;base64,') >= 4 and not re.search(r'(src|href)="(?!data:)', page) and '<script' not in page


def test_predict(work):
    rows = pd.read_csv(work/'model'/'predictions.csv', dtype={'prediction': str})
    res = program('predict', work/'model', *rows.file[:3], '--top', 2)
    assert res.returncode == 0, res.stderr
    lines = [o for o in res.stdout.splitlines() if not o.startswith(' ')]
    assert [re.search(r'(\S+) \d+%$', o)[1] for o in lines] == rows.prediction[:3].tolist() and len(res.stdout.splitlines()) == 9


def test_predict_json_and_a_bad_picture(work, tmp_path):
    rows = pd.read_csv(work/'model'/'predictions.csv', dtype={'prediction': str})
    (tmp_path/'no.png').write_text('no picture')
    res = program('predict', work/'model', tmp_path/'no.png', rows.file[0], tmp_path/'missing.png', '--json', '--rule', 'crm')
    found = json.loads(res.stdout)
    assert res.returncode == 1 and 'no.png: this is no picture' in res.stderr and 'missing.png: there is no such file' in res.stderr and 'Traceback' not in res.stderr
    probs = [o['probability'] for o in found[1]['path']]
    assert ['error' in o for o in found] == [True, False, True] and len(probs) == 3 and sorted(probs, reverse=True) == probs


def test_audit_agrees_with_fit(work, tmp_path):
    res = program('audit', work/'model'/'predictions.csv', work/'classes.csv', '--out', tmp_path/'a')
    assert res.returncode == 0, res.stderr
    ours, theirs = (pd.read_csv(f/'table.csv', index_col=0) for f in (tmp_path/'a', work/'model'))
    assert np.allclose(ours.loc['as given'], theirs.loc['gp_disto'], equal_nan=True) and 'least expected cost' in (tmp_path/'a'/'report.html').read_text()


def test_audit_of_labels_and_costs(tmp_path):
    "A cost matrix that is not symmetric, and labels of another framework"
    names, rng = ['a', 'b', 'c'], np.random.default_rng(0)
    D = np.array([[0, 1, 5], [2, 0, 5], [9, 9, 0]], float)
    t, p = rng.integers(3, size=(2, 200))
    CostMatrix(D, names, warn=False).to_csv(tmp_path/'costs.csv')
    pd.DataFrame(dict(target=[names[i] for i in t], prediction=[names[i] for i in p])).to_csv(tmp_path/'p.csv', index=False)
    res = program('audit', tmp_path/'p.csv', tmp_path/'costs.csv', '--out', tmp_path/'a', '--shuffles', 99)
    assert res.returncode == 0, res.stderr
    assert pd.read_csv(tmp_path/'a'/'table.csv').AHC[0] == pytest.approx(D[p, t].mean(), abs=1e-5)
    assert 'CAUTION' in res.stdout or 'follow' in res.stdout


@pytest.mark.parametrize('name', ['fit', 'predict', 'audit'])
def test_help_explains_each_option(name, capsys):
    f = dict(fit=fit, predict=predict, audit=audit)[name]
    with pytest.raises(SystemExit): run_program(f, name, ['--help'])
    text = ' '.join(capsys.readouterr().out.split())
    options = re.findall(r'--(\w+)(?: [A-Z]+)? (?=[a-z(])', text.split('options:')[1])
    assert {'fit': 18, 'predict': 5, 'audit': 4}[name] <= len(set(options)), options


def test_fit_complains(work, tmp_path, capsys):
    write_digits(tmp_path/'images', 60)
    classes = work/'classes.csv'
    def says(*argv): return failed(capsys, fit, *argv, '--out', tmp_path/'out', '--quiet')
    assert 'no such folder' in says(tmp_path/'none', classes)
    (tmp_path/'empty').mkdir()
    assert 'there are no pictures' in says(tmp_path/'empty', classes)
    assert 'cannot be read' in says(tmp_path/'images', tmp_path/'none.csv')
    shutil.copytree(tmp_path/'images'/'3', tmp_path/'images'/'threee')
    assert "no class is called like the folder 'threee'" in says(tmp_path/'images', classes)
    shutil.rmtree(tmp_path/'images'/'threee'); shutil.rmtree(tmp_path/'images'/'3')
    assert "no pictures to learn from for '3': --subset" in says(tmp_path/'images', classes)
    assert '--method is one of' in says(tmp_path/'images', classes, '--method', 'magic')
    assert 'No architecture is called' in says(tmp_path/'images', classes, '--subset', '--arch', 'resnet81')
    assert 'yes, no or a file' in says(tmp_path/'images', classes, '--pretrained', 'perhaps')
    assert 'holds a model already' in failed(capsys, fit, work/'images', classes, '--out', work/'model')
    assert not (tmp_path/'out'/'settings.json').exists()


def test_weights_that_cannot_be_fetched(work, tmp_path, capsys, monkeypatch):
    def unreachable(*args, **kwargs): raise URLError('Name or service not known')
    for where in ('torchvision.models._api.load_state_dict_from_url', 'torch.hub.load_state_dict_from_url'): monkeypatch.setattr(where, unreachable)
    said = failed(capsys, fit, work/'images', work/'classes.csv', '--out', tmp_path/'out', '--pretrained', 'yes', '--quiet')
    assert 'could not be had' in said and '--pretrained no' in said


def test_errors_are_one_line_in_a_process_too(work, tmp_path):
    (tmp_path/'p.csv').write_text('target,prediction\n3,three\n')
    res = program('audit', tmp_path/'p.csv', work/'classes.csv', '--out', tmp_path/'a')
    assert res.returncode == 2 and "no class is called 'three'" in res.stderr and 'Traceback' not in res.stderr and not (tmp_path/'a').exists()


def test_a_changed_hierarchy_is_noticed(work, tmp_path, capsys):
    shutil.copytree(work/'model', tmp_path/'model')
    text = (tmp_path/'model'/'hierarchy.json').read_text()
    (tmp_path/'model'/'hierarchy.json').write_text(text.replace('"closed loop"', '"open loop"'))
    said = failed(capsys, predict, tmp_path/'model', work/'images'/'0'/'0.png')
    assert "'0' was 'round/closed loop/0' and is 'round/open loop/0'" in said


def test_nothing_in_a_model_is_executed(work, tmp_path):
    class Evil:
        def __reduce__(self): return os.system, (f'touch {tmp_path/"executed"}',)
    for name in ('model.safetensors', 'settings.json', 'hierarchy.json'):
        shutil.copytree(work/'model', tmp_path/name)
        (tmp_path/name/name).write_bytes(pickle.dumps(Evil()))
        with pytest.raises((ModelError, HierarchyError)): load_model(tmp_path/name)
    assert not (tmp_path/'executed').exists()


def test_damaged_models(work, tmp_path):
    "Each file cut off anywhere is refused with one of our errors"
    rng = np.random.default_rng(0)
    for name in ('model.safetensors', 'settings.json', 'hierarchy.json'):
        whole = (work/'model'/name).read_bytes()
        for n in [0, 1, *rng.integers(2, len(whole.rstrip())-1, 5)]:
            d = tmp_path/f'{name}{n}'
            shutil.copytree(work/'model', d, ignore=shutil.ignore_patterns('*.html', '*.csv'))
            (d/name).write_bytes(whole[:n])
            with pytest.raises((ModelError, HierarchyError)): load_model(d)


@pytest.fixture(scope='module')
def learners():
    "A Learner of each method, untrained but for the means of Deep-NCM"
    from fastai.basics import set_seed
    from hierproto.backbones.convnet import convnet
    from hierproto.data.digits import digits
    from hierproto.methods import METHODS, hier_learner
    dls, h = digits(bs=32, protocol=None)
    def make(method):
        set_seed(0)
        learn = hier_learner(dls, convnet(64), h, method, m=12)
        if method == 'deep_ncm': learn.model[1].update(torch.randn(40, 12), torch.arange(40) % 10)
        return learn
    return make, dls.valid.one_batch()[0].cpu().as_subclass(torch.Tensor), list(METHODS)


def test_every_method_is_saved_and_loaded(learners, tmp_path):
    make, x, methods = learners
    for method in methods:
        learn = make(method)
        p = load_model(save_model(learn, tmp_path/method, 'convnet', method=method))
        with torch.no_grad(): want = learn.model.cpu().eval()(x)
        assert torch.allclose(p.scores(x), want, atol=1e-5), method
        rule = 'crm' if method.endswith('_crm') else 'argmax'
        assert p.settings['rule'] == rule and [o.names[-1] for o in p.predict(x[:5])] == [p.h.leaves[k] for k in get_rule(rule, p.h)(want[:5])]


def test_odd_settings(learners, tmp_path):
    "Settings with entries replaced or lost load a model that predicts, or are refused with one of our errors"
    import random
    rng, values = random.Random(0), [None, 0, -1, 10**12, 1.5, float('nan'), 'x', '', [], {}, True, [1, 2], {'a': 1}, 'resnet18', '../x', 'hf-hub:a/b', 'LinearHead', 'YOLOHead', 'FrameHead']
    f = save_model(learners[0]('gp_disto'), tmp_path/'m', 'convnet')/'settings.json'
    whole, refused = json.loads(f.read_text()), 0
    for i in range(200):
        s = json.loads(json.dumps(whole)); d = s; k = rng.choice(list(d))
        while isinstance(d[k], dict) and d[k] and rng.random() < .8: d = d[k]; k = rng.choice(list(d))
        if i == 0: d, k = s, 'embedder'
        if rng.random() < .15: del d[k]
        else: d[k] = 1.5 if i == 0 else rng.choice(values)
        f.write_text(json.dumps(s))
        try: assert len(load_model(f.parent).predict(learners[1][:2])) == 2
        except (ModelError, HierarchyError, PictureError): refused += 1
    assert refused > 100


@pytest.mark.parametrize('method,rule', [('gp_disto', 'argmax'), ('cross_entropy', 'back_off'), ('hxe', 'argmax'), ('yolo', 'crm'), ('hyperspherical_learnt', 'crm'), ('deep_ncm', 'back_off'), ('frame', 'argmax'), ('gp_disto_huber', 'crm')])
def test_onnx(learners, tmp_path, method, rule):
    for o in ('onnx', 'onnxscript', 'onnxruntime'): pytest.importorskip(o, reason="exporting needs the extra: pip install 'hierproto[onnx]'")
    import onnxruntime
    make, x, _ = learners
    learn = make(method)
    session = onnxruntime.InferenceSession(str(export_onnx(learn, tmp_path/'m.onnx', rule)))
    with torch.no_grad(): want = learn.model.cpu().eval()(x)
    meta = session.get_modelmeta().custom_metadata_map
    assert json.loads(meta['classes']) == learn.hierarchy.leaves and meta['fingerprint'] == learn.hierarchy.fingerprint and meta['rule'] == rule
    for n in (1, 5, len(x)):
        scores, probs, answer = session.run(None, dict(images=x[:n].numpy()))
        assert np.abs(scores - want[:n].numpy()).max() < 1e-4*max(1, want.abs().max().item())
        assert answer.tolist() == get_rule(rule, learn.hierarchy)(want[:n]).tolist() and np.allclose(probs[:, :10], want[:n].softmax(1), atol=1e-4)
