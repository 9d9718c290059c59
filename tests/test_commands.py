"Saved models, and the commands for people who do not program: in process, and as a shell would start them"
import json, os, pickle, re, resource, shutil, signal, stat, subprocess, sys, time
from pathlib import Path
from types import SimpleNamespace
from urllib.error import URLError

import numpy as np, pandas as pd, pytest, torch
from PIL import Image
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits

from hierproto.body import _packaged
from hierproto.cli import run_command
from hierproto.hierarchy import CostMatrix, Hierarchy, HierarchyError, read_hierarchy
from hierproto.fit import _dls, _folder_data, _learner
from hierproto.images import ImageError, read_image
from hierproto.inference import BackOff, CRM
from hierproto.saving import ModelError, Predictor, export_onnx, load_classifier, save_classifier

FAST = ['--arch', 'convnet', '--epochs', '3', '--lr', '1e-2', '--m', '16', '--quiet']
torch.set_num_threads(1)  # as in the processes that tests start: sums in another order would differ in the last digit


def started(name, *argv, home=None, **kw):
    "The command `name` as its entry point starts it, in a process of its own"
    env = {**os.environ, 'OMP_NUM_THREADS': '1', **({'HOME': str(home)} if home else {})}
    # jobs in the background ignore Ctrl+C
    listen = 'import signal; signal.signal(signal.SIGINT, signal.default_int_handler); '
    code = f'{listen}from hierproto.cli import {name}_cli; {name}_cli()'
    return subprocess.Popen([sys.executable, '-c', code, *map(str, argv)], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, env=env, **kw)

def program(name, *argv, **kw):
    p = started(name, *argv, **kw)
    out, err = p.communicate(timeout=600)
    return subprocess.CompletedProcess(argv, p.returncode, out, err)


def failed(capsys, name, *argv, code=2):
    "What the command `name`, run in process, prints when it fails, without a traceback"
    with pytest.raises(SystemExit) as e: run_command(name, argv)
    assert e.value.code == code
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
    ("Digits as files, their tree, and the model that hierproto_fit makes of them from a cold start, "
     "as a process with an empty home")
    d = tmp_path_factory.mktemp('work')
    write_digits(d/'images')
    Hierarchy.named('mnist_visual').to_csv(d/'classes.csv')
    (d/'images'/'3'/'broken.png').write_bytes(b'\x89PNG\r\n\x1a\n not really')
    (d/'home').mkdir()
    d.joinpath('fit.txt').write_text((res := program('fit', d/'images', d/'classes.csv', '--out', d/'model', *FAST,
                                                     home=d/'home')).stdout)
    assert res.returncode == 0, res.stderr
    return d


def test_fit(work):
    said, table = (work/'fit.txt').read_text(), pd.read_csv(work/'model'/'table.csv', index_col=0)
    assert '160 images of 10 classes' in said and 'broken.png' in said and 'random weights' in said
    lines = ['gp_disto', 'gp_disto, least expected cost', 'gp_disto, a group if unsure'] # a group counts as a mistake
    assert list(table.index) == lines and (table['error rate %'][:2] < 75).all() and table['groups %'].iloc[2] > 0
    assert all(f"{table.loc[o, 'AHC']:.2f}" in said for o in table.index)
    assert {f.name for f in (work/'model').iterdir()} == {'model.safetensors', 'hierarchy.json', 'settings.json',
                                                          'report.html', 'table.csv', 'predictions.csv'}


def test_report_is_one_file(work):
    page = (work/'model'/'report.html').read_text()
    assert all(o in page for o in ('Costly mistakes', 'Which class is taken for which', 'Do the mistakes follow the hierarchy?',
                                   'The hierarchy', 'broken.png'))
    assert page.count('data:image/jpeg') >= 3 and not re.search(r'(src|href)="(?!data:)', page)
    assert page.count('<script') == 2 and "default-src 'none'" in page and "script-src 'sha256-" in page


def test_predict(work, tmp_path):
    "One process names pictures and reports those that it cannot read; the same in this process gives the same lines"
    rows = pd.read_csv(work/'model'/'predictions.csv', dtype={'prediction': str})
    (tmp_path/'no.png').write_text('no picture')
    res = program('predict', work/'model', tmp_path/'no.png', *rows.file[:3], tmp_path/'missing.png', '--top', 2)
    assert (res.returncode == 1 and 'no.png: not an image' in res.stderr
            and 'missing.png: there is no such file' in res.stderr and 'Traceback' not in res.stderr)
    lines = [o for o in res.stdout.splitlines() if not o.startswith(' ')]
    assert ([re.search(r'(\S+) \d+%$', o)[1] for o in lines] == rows.prediction[:3].tolist()
            and len(res.stdout.splitlines()) == 9)
    with pytest.raises(SystemExit):
        run_command('predict',
                    [work/'model', tmp_path/'no.png', rows.file[0], '--out', tmp_path/'x.jsonl', '--rule', 'crm'])
    found, = [json.loads(o) for o in (tmp_path/'x.jsonl').read_text().splitlines()]
    probs = [o['probability'] for o in found['path']]
    assert found['file'] == rows.file[0] and len(probs) == 3 and sorted(probs, reverse=True) == probs


@pytest.mark.parametrize('kind', ['csv', 'jsonl'])
@pytest.mark.parametrize('rule', [[], ['--rule', 'back_off', '--threshold', '.7']], ids=['class', 'group'])
def test_audit_reads_what_predict_writes(work, tmp_path, kind, rule, capsys):
    "A group costs its distance to the true class in the tree, computed here from the paths in the file"
    h, f = Hierarchy.from_csv(work/'classes.csv'), tmp_path/f'x.{kind}'
    pictures = [o for o in sorted((work/'images').rglob('*.png')) if o.name != 'broken.png']
    run_command('predict', [work/'model', *pictures, '--out', f, *rule])
    run_command('audit', [f, work/'classes.csv', '--out', tmp_path/'audit', '--shuffles', 9])
    rows = pd.read_csv(f, dtype=str) if kind == 'csv' else pd.read_json(f, lines=True, dtype=str)
    path = dict(zip(h.leaves, h.nodes))
    pairs = [(path.get(a, tuple(o for o in a.split('/') if o)), path[Path(t).parent.name])
             for a, t in zip(rows.prediction, rows.file)]
    costs = [len(a) + len(b) - 2*len(os.path.commonprefix([a, b])) for a, b in pairs]
    table, groups = (pd.read_csv(tmp_path/'audit'/'table.csv', index_col=0).loc['as given'],
                     [a not in h.leaves for a in rows.prediction])
    assert table.AHC == pytest.approx(np.mean(costs)) and any(groups) == bool(rule)
    assert table.get('groups %', 0) == pytest.approx(100*np.mean(groups))
    assert '--force' in failed(capsys, 'audit', f, work/'classes.csv', '--out', tmp_path/'audit')
    run_command('audit', [f, work/'classes.csv', '--out', tmp_path/'audit', '--shuffles', 0, '--force'])


def test_audit_agrees_with_fit(work, tmp_path):
    run_command('audit', [work/'model'/'predictions.csv', work/'classes.csv', '--out', tmp_path/'a'])
    ours, theirs = (pd.read_csv(f/'table.csv', index_col=0) for f in (tmp_path/'a', work/'model'))
    assert (np.allclose(ours.loc['as given'], theirs.loc['gp_disto'], equal_nan=True)
            and 'least expected cost' in (tmp_path/'a'/'report.html').read_text())


def test_audit_of_labels_and_costs(tmp_path, capsys):
    "A cost matrix that is not symmetric, and labels of another framework"
    names, rng = ['a', 'b', 'c'], np.random.default_rng(0)
    D = np.array([[0, 1, 5], [2, 0, 5], [9, 9, 0]], float)
    t, p = rng.integers(3, size=(2, 200))
    CostMatrix(D, names, warn=False).to_csv(tmp_path/'costs.csv')
    pd.DataFrame(dict(target=[names[i] for i in t],
                      prediction=[names[i] for i in p])).to_csv(tmp_path/'p.csv', index=False)
    run_command('audit', [tmp_path/'p.csv', tmp_path/'costs.csv', '--out', tmp_path/'a', '--shuffles', 99])
    said = capsys.readouterr().out
    assert pd.read_csv(tmp_path/'a'/'table.csv').AHC[0] == pytest.approx(D[p, t].mean(), abs=1e-5)
    assert 'Too few classes' in said # a sixth of all orders is as cheap as the cheapest


@pytest.mark.parametrize('name', ['fit', 'predict', 'audit', 'compare'])
def test_help_explains_each_option(name, capsys):
    with pytest.raises(SystemExit): run_command(name, ['--help'])
    text = ' '.join(capsys.readouterr().out.split())
    options = re.findall(r'--(\w+)(?: [A-Z]+| {[\w,]+})? (?=[a-z(])', text.split('options:')[1])
    assert {'fit': 18, 'predict': 6, 'audit': 5, 'compare': 9}[name] <= len(set(options)), options


def test_fit_complains(work, tmp_path, capsys):
    write_digits(tmp_path/'images', 60)
    classes = work/'classes.csv'
    def says(*argv): return failed(capsys, 'fit', *argv, '--out', tmp_path/'out', '--quiet')
    assert 'no such folder' in says(tmp_path/'none', classes)
    (tmp_path/'empty').mkdir()
    assert 'no images in this folder' in says(tmp_path/'empty', classes)
    assert 'no such file' in says(tmp_path/'images', tmp_path/'none.csv')
    assert ('directly in the folder: put each into a folder with the name of its class'
            in says(tmp_path/'images'/'3', classes))
    shutil.copytree(tmp_path/'images'/'3', tmp_path/'images'/'threee')
    assert "no class has the name of the folder 'threee'" in says(tmp_path/'images', classes)
    shutil.rmtree(tmp_path/'images'/'threee')
    shutil.rmtree(tmp_path/'images'/'3')
    assert "no images to learn from for '3': --subset" in says(tmp_path/'images', classes)
    assert '--method must be one of cross_entropy' in says(tmp_path/'images', classes, '--method', 'magic')
    assert "did you mean 'resnet18'" in says(tmp_path/'images', classes, '--subset', '--arch', 'resnet81')
    assert '--pretrained must be yes, no, a file' in says(tmp_path/'images', classes, '--pretrained', 'perhaps')
    assert 'has a model' in failed(capsys, 'fit', work/'images', classes, '--out', work/'model')
    assert not (tmp_path/'out'/'settings.json').exists()


def unreachable(*args, **kwargs): raise URLError('Name or service not known')

@pytest.fixture
def offline(tmp_path, monkeypatch):
    "No download succeeds, and none has before"
    monkeypatch.setenv('TORCH_HOME', str(tmp_path/'torch'))
    for where in ('torchvision.models._api.load_state_dict_from_url', 'torch.hub.load_state_dict_from_url'):
        monkeypatch.setattr(where, unreachable)

def test_weights_that_cannot_be_fetched(work, tmp_path, capsys, monkeypatch, offline):
    monkeypatch.setattr('hierproto.body.find_spec', lambda name: None) # without hierproto[weights]
    said = failed(capsys, 'fit', work/'images', work/'classes.csv', '--out', tmp_path/'out', '--pretrained',
                  'yes', '--quiet')
    assert '--pretrained no' in said and len(said.splitlines()) == 1


def test_packaged_weights_start_a_fit_on_grey_images_without_a_download(work, tmp_path, capsys, offline):
    file = _packaged('tf_efficientnet_lite0')
    if not file: pytest.skip("needs hierproto[weights]")
    run_command('fit', [work/'images', work/'classes.csv', '--out', tmp_path/'out', '--pretrained', 'yes', '--lr', '1e-8',
                        '--epochs', '1', '--quiet'])
    stem = load_classifier(tmp_path/'out').model[0][0].model.conv_stem.weight
    published = torch.load(file, weights_only=True)['_conv_stem.weight']
    assert 'tf_efficientnet_lite0' in capsys.readouterr().out and stem.shape[1] == 1
    assert torch.allclose(stem, published.sum(1, keepdim=True), atol=1e-5)


def test_errors_are_one_line_in_a_process_too(work, tmp_path):
    (tmp_path/'p.csv').write_text('target,prediction\n3,three\n')
    res = program('audit', tmp_path/'p.csv', work/'classes.csv', '--out', tmp_path/'a')
    assert (res.returncode == 2 and "no class or group is called 'three'" in res.stderr and 'Traceback' not in res.stderr
            and not (tmp_path/'a').exists())


def test_a_changed_hierarchy_is_noticed(work, tmp_path, capsys):
    shutil.copytree(work/'model', tmp_path/'model')
    text = (tmp_path/'model'/'hierarchy.json').read_text()
    (tmp_path/'model'/'hierarchy.json').write_text(text.replace('"closed loop"', '"open loop"'))
    said = failed(capsys, 'predict', tmp_path/'model', work/'images'/'0'/'0.png')
    assert "'0' was 'round/closed loop/0' and is 'round/open loop/0'" in said


def test_nothing_in_a_model_is_executed(work, tmp_path):
    class Evil:
        def __reduce__(self): return os.system, (f'touch {tmp_path/"executed"}',)
    for name in ('model.safetensors', 'settings.json', 'hierarchy.json'):
        shutil.copytree(work/'model', tmp_path/name)
        (tmp_path/name/name).write_bytes(pickle.dumps(Evil()))
        with pytest.raises((ModelError, HierarchyError)): load_classifier(tmp_path/name)
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
            with pytest.raises((ModelError, HierarchyError)): load_classifier(d)


@pytest.fixture(scope='module')
def learners():
    "A Learner of each method, untrained but for the means of Deep-NCM"
    from fastai.basics import set_seed
    from hierproto.backbones.convnet import convnet
    from hierproto.digits import digits
    from hierproto.learner import hier_learner
    from hierproto.methods import METHODS
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
        p = load_classifier(save_classifier(learn, tmp_path/method, 'convnet'))
        with torch.no_grad(): want = learn.model.cpu().eval()(x)
        assert torch.allclose(p.scores(x), want, atol=1e-5), method
        rule = 'crm' if method.endswith('_crm') else 'argmax'
        assert (p.settings['method'] == method and p.settings['rule'] == rule
                and [o.names[-1] for o in p.predict(x[:5])] == [p.h.leaves[k] for k in p.rule(rule)(want[:5])])


def test_odd_settings(learners, tmp_path):
    "Settings with entries replaced or lost load a model that predicts, or are refused with one of our errors"
    import random
    rng, values = (random.Random(0), [None, 0, -1, 10**12, 1.5, float('nan'), 'x', '', [], {}, True, [1, 2], {'a': 1},
                                      'resnet18', '../x', 'hf-hub:a/b', 'LinearHead', 'YOLOHead', 'FrameHead'])
    f = save_classifier(learners[0]('gp_disto'), tmp_path/'m', 'convnet')/'settings.json'
    whole, refused = json.loads(f.read_text()), 0
    for i in range(200):
        s = json.loads(json.dumps(whole))
        d = s
        k = rng.choice(list(d))
        while isinstance(d[k], dict) and d[k] and rng.random() < .8:
            d = d[k]
            k = rng.choice(list(d))
        if i == 0: d, k = s, 'embedder'
        if rng.random() < .15: del d[k]
        else: d[k] = 1.5 if i == 0 else rng.choice(values)
        f.write_text(json.dumps(s))
        try: assert len(load_classifier(f.parent).predict(learners[1][:2])) == 2
        except (ModelError, HierarchyError, ImageError): refused += 1
    assert refused > 100


@pytest.mark.parametrize('method,rule', [('gp_disto', 'argmax'), ('cross_entropy', 'back_off'), ('hxe', 'argmax'),
                                         ('yolo', 'crm'), ('hyperspherical_learnt', 'crm'), ('deep_ncm', 'back_off'),
                                         ('frame', 'argmax'), ('gp_disto_huber', 'crm'), ('haframe', 'crm'),
                                         ('hie', 'argmax'), ('hier_cos', 'argmax'), ('hace', 'crm')])
def test_onnx(learners, tmp_path, method, rule):
    for o in ('onnx', 'onnxscript', 'onnxruntime'):
        pytest.importorskip(o, reason="exporting needs the extra: pip install 'hierproto[onnx]'")
    import onnxruntime
    make, x, _ = learners
    learn = make(method)
    session = onnxruntime.InferenceSession(str(export_onnx(learn, tmp_path/'m.onnx', rule)))
    x8 = (255*x).round().byte()
    with torch.no_grad(): want = learn.model.cpu().eval()(x8/255)
    meta = session.get_modelmeta().custom_metadata_map
    assert (json.loads(meta['classes']) == learn.hierarchy.leaves and meta['fingerprint'] == learn.hierarchy.fingerprint
            and meta['rule'] == rule and json.loads(meta['input']) == dict(type='uint8', channels=1, size='any'))
    for n in (1, 5, len(x)):
        scores, probs, answer = session.run(None, dict(images=x8[:n].numpy()))
        assert np.abs(scores - want[:n].numpy()).max() < 1e-4*max(1, want.abs().max().item())
        assert (answer.tolist() == Predictor(learn.model, learn.hierarchy, {}).rule(rule)(want[:n]).tolist()
                and np.allclose(probs[:, :10], want[:n].softmax(1), atol=1e-4))
    for wrong in (x, 255*x): # numbers of another type than the graph takes
        with pytest.raises(Exception, match='Unexpected input data type'): session.run(None, dict(images=wrong.numpy()))


# --- preprocessing and weights ---
def colour_pictures(where, n=8, classes=('cat', 'dog', 'oak')):
    rng = np.random.default_rng(0)
    for k, name in enumerate(classes):
        (where/name).mkdir(parents=True)
        for i in range(n):
            Image.fromarray(rng.integers(50*k, 50*k + 99, (40, 32, 3), dtype=np.uint8)).save(where/name/f'{i}.png')
    return where

@pytest.fixture(scope='module')
def pets(tmp_path_factory):
    d = tmp_path_factory.mktemp('pets')
    colour_pictures(d/'images')
    (d/'classes.csv').write_text('group,class\npet,cat\npet,dog\nplant,oak\n')
    return d

def test_pictures_are_normalised_as_the_network_expects(pets, tmp_path, capsys):
    pytest.importorskip('timm')
    run_command('fit', [pets/'images', pets/'classes.csv', '--out', tmp_path/'m', '--arch', 'tf_efficientnet_lite0',
                        '--epochs', 1, '--size', 32, '--m', 8, '--quiet'])
    p = load_classifier(tmp_path/'m')
    im = p.settings['images']
    assert im['mean'] == im['std'] == [.5]*3 and im['interpolation'] == 'bicubic'
    f = next((pets/'images'/'cat').glob('*.png'))
    want = np.asarray(read_image(f).resize((32, 32), Image.BICUBIC))/127.5 - 1
    assert np.allclose(p.norm(p.batch(f))[0].permute(1, 2, 0).numpy(), want, atol=1e-5)

@pytest.mark.parametrize('wrap',
                         [lambda d: d, lambda d: {'state_dict': {f'module.{k}': v for k, v in d.items()}, 'epoch': 3}])
def test_published_files_of_weights_load_as_they_are(pets, tmp_path, wrap):
    import torchvision
    def options(arch):
        return SimpleNamespace(images=pets/'images', arch=arch, method='learnt', m=8,
                               pretrained=str(tmp_path/'resnet18.pth'), size=32, resize='squish', augment='mild', bs=4,
                               workers=0, valid=.2, seed=0, subset=False, quiet=True)
    data, theirs = _folder_data(read_hierarchy(pets/'classes.csv'), options('resnet18')), torchvision.models.resnet18()
    torch.save(wrap(theirs.state_dict()), tmp_path/'resnet18.pth')
    learn = _learner(_dls(data, options('resnet18')), data.h, options('resnet18'))
    assert torch.equal(learn.model[0][0][0].weight.cpu(), theirs.conv1.weight) and learn.opt.frozen_idx
    other = options('resnet34')
    with pytest.raises(ModelError, match='resnet34'): _learner(_dls(data, other), data.h, other)


# --- interrupted ---
def test_ctrl_c_and_resume(work, tmp_path, capsys):
    "One line, and a resumed fit ends with the same predictions"
    options = [work/'images', work/'classes.csv', '--arch', 'convnet', '--epochs', '8', '--lr', '1e-2', '--m', '16']
    p = started('fit', *options, '--out', tmp_path/'stopped')
    while not (tmp_path/'stopped'/'fit.ckpt').exists() and p.poll() is None: time.sleep(.02)
    p.send_signal(signal.SIGINT)
    out, err = p.communicate(timeout=300)
    assert p.returncode == 130 and re.fullmatch(r'hierproto_fit: interrupted: the same command with --resume continues '
                                                r'after epoch \d\n', err), (err)
    assert 'epoch train_loss valid_loss' in ' '.join(out.split())
    assert '--resume continues it' in failed(capsys, 'fit', *options, '--out', tmp_path/'stopped')
    run_command('fit', [*options, '--out', tmp_path/'stopped', '--resume', '--quiet'])
    run_command('fit', [*options, '--out', tmp_path/'whole', '--quiet'])
    a, b = (pd.read_csv(tmp_path/o/'predictions.csv') for o in ('stopped', 'whole'))
    assert a.equals(b) and not list((tmp_path/'stopped').glob('*.ckpt'))


def test_a_fit_that_was_killed_before_its_report_is_finished_by_resume(work, tmp_path, capsys, monkeypatch):
    "The message names --resume, and --resume writes the report of the model that was saved"
    from hierproto import fit as module
    options = [work/'images', work/'classes.csv', *FAST, '--out', tmp_path/'model']
    def killed(*args): raise KeyboardInterrupt
    with monkeypatch.context() as m:
        m.setattr(module, 'write_report', killed)
        failed(capsys, 'fit', *options, code=130)
    assert (tmp_path/'model'/'settings.json').exists() and not (tmp_path/'model'/'report.html').exists()
    before = (tmp_path/'model'/'model.safetensors').read_bytes()
    assert '--resume continues it' in failed(capsys, 'fit', *options)
    run_command('fit', [*options, '--resume'])
    assert (tmp_path/'model'/'report.html').exists() and not (tmp_path/'model'/'fit.ckpt').exists()
    a, b = (load_classifier(tmp_path/'model').scores(next((work/'images'/'3').glob('[0-9]*.png'))) for _ in range(2))
    assert torch.equal(a, b) and len(before) == len((tmp_path/'model'/'model.safetensors').read_bytes())


def test_one_fit_per_folder(work, tmp_path, capsys):
    from hierproto.fit import _output_folder
    options = [work/'images', work/'classes.csv', *FAST, '--out', tmp_path/'model']
    with _output_folder(tmp_path/'model'):
        assert 'another fit is running in this folder' in failed(capsys, 'fit', *options)
    assert not list((tmp_path/'model').iterdir())


def test_a_checkpoint_of_another_network_is_one_line(work, tmp_path, capsys):
    "Its key may fit by accident, or by hand"
    options = [work/'images', work/'classes.csv', *FAST, '--out', tmp_path/'model']
    torch.save(dict(epoch=1), tmp_path/'old')
    (tmp_path/'model').mkdir()
    shutil.copy(tmp_path/'old', tmp_path/'model'/'fit.ckpt')
    said = failed(capsys, 'fit', *options, '--resume')
    assert 'damaged, or from another version' in said and '--force' in said and len(said.splitlines()) == 1


def test_a_closed_output_does_not_end_training(work, tmp_path):
    "As in `hierproto_fit ... | head -1`: the reader goes after the first line"
    p = started('fit', work/'images', work/'classes.csv', *FAST[:-1], '--out', tmp_path/'model')
    assert 'images of 10 classes' in p.stdout.readline()
    p.stdout.close()
    assert p.wait(300) == 0, p.stderr.read()
    assert (tmp_path/'model'/'report.html').exists() and 'Broken pipe' not in p.stderr.read()


def test_each_epoch_is_a_line_without_a_terminal(work, tmp_path, capsys):
    run_command('fit', [work/'images', work/'classes.csv', *FAST[:-1], '--out', tmp_path/'model'])
    lines = [o.split() for o in capsys.readouterr().out.splitlines()]
    assert [o[0] for o in lines if o and o[0] in ('epoch', '0', '1', '2')][:4] == ['epoch', '0', '1', '2']


def test_folders_of_groups_are_labels(work, tmp_path, capsys):
    "A third of the digits is known to a group only: one line counts them, and the model answers with classes"
    write_digits(tmp_path/'images')
    h = Hierarchy.from_csv(work/'classes.csv')
    path = dict(zip(h.leaves, h.nodes))
    for f in sorted((tmp_path/'images').rglob('*.png'))[::3]:
        group = tmp_path/'images'/Path(*path[f.parent.name][:-1])
        group.mkdir(parents=True, exist_ok=True)
        f.rename(group/f.name)
    run_command('fit', [tmp_path/'images', work/'classes.csv', *FAST, '--out', tmp_path/'model'])
    said = capsys.readouterr().out
    assert re.search(r'133 images labelled with a class, \d+ images with a group', said), said
    assert load_classifier(tmp_path/'model').h.leaves == h.leaves


def test_accuracy_calibrates_on_images_that_are_not_in_the_report(work, tmp_path, capsys):
    run_command('fit', [work/'images', work/'classes.csv', *FAST, '--valid', '.5', '--accuracy', '.8', '--out',
                        tmp_path/'model'])
    said = capsys.readouterr().out
    assert 'right for 80% of images, on average over calibration samples' in said
    rows = pd.read_csv(tmp_path/'model'/'predictions.csv', dtype=str)
    assert len(rows) == 50
    assert load_classifier(tmp_path/'model').settings['rule'] == 'calibrated'


def test_fit_says_before_training_that_images_are_too_few_for_an_accuracy(work, tmp_path, capsys):
    err = failed(capsys, 'fit', work/'images', work/'classes.csv', *FAST, '--epochs', 10**5, '--accuracy', '.99',
                 '--out', tmp_path/'model')
    assert ('an accuracy of 0.99 needs 132 samples' in err and 'got 20' in err
            and 'Half of the 40 images held back calibrate: a larger --valid holds back more' in err)


def test_fit_saves_the_rule_that_was_asked_for(work, tmp_path, capsys):
    "Answers of the report and of the saved model are groups where no class reaches one half"
    run_command('fit', [work/'images', work/'classes.csv', *FAST, '--rule', 'back_off', '--out', tmp_path/'model'])
    h = Hierarchy.from_csv(work/'classes.csv')
    rows = pd.read_csv(tmp_path/'model'/'predictions.csv', dtype=str)
    assert not set(rows.prediction) <= set(h.leaves)
    p = load_classifier(tmp_path/'model')
    assert p.settings['rule'] == 'back_off'
    names = ['/'.join(o.names) or '/' for o in p.predict([Path(f) for f in rows.file])]
    paths = {k: '/'.join(o) for k, o in zip(h.leaves, h.nodes)}
    assert names == [paths.get(o, o) for o in rows.prediction]
    assert '--accuracy makes a rule of its own' in failed(capsys, 'fit', work/'images', work/'classes.csv', *FAST,
                                                          '--rule', 'crm', '--accuracy', '.8', '--out', tmp_path/'other')


@pytest.mark.parametrize('rule', [['--rule', 'crm'], ['--rule', 'back_off'], ['--method', 'cross_entropy_crm']],
                         ids=['crm', 'back_off', 'method'])
def test_fit_fits_a_temperature_for_rules_that_need_probabilities(work, tmp_path, capsys, rule):
    "On images that are not in the report; answers, tables, a reloaded model and ONNX follow it"
    run_command('fit', [work/'images', work/'classes.csv', *FAST, '--valid', '.4', *rule, '--out', tmp_path/'model'])
    said = capsys.readouterr().out
    found = re.search(r'temperature (\S+), fitted on (\d+) of the images held back, which choose nothing else', said)
    assert found and found[0] in (tmp_path/'model'/'report.html').read_text()
    p = load_classifier(tmp_path/'model')
    T = p.settings['temperature']
    assert T != 1 and f'{T:.3g}' == found[1] and 'temperature' not in load_classifier(work/'model').settings

    rows = pd.read_csv(tmp_path/'model'/'predictions.csv', dtype={'prediction': str, 'target': str})
    # 8 of 20 images of each class are held back, 2 of these for the temperature
    assert len(rows) + int(found[2]) == 80 and len(rows) == 60
    scores = p.scores([Path(f) for f in rows.file])
    own = CRM(p.h, temperature=T) if p.settings['rule'] == 'crm' else BackOff(p.h, temperature=T)
    names = p.h.node_names()
    assert [names[i] for i in own(scores, probs=False)] == rows.prediction.tolist()
    assert np.allclose(rows[p.h.leaves], (scores.double()/T).softmax(1), atol=1e-5)

    run_command('predict', [tmp_path/'model', *rows.file, '--out', tmp_path/'again.csv'])
    again = pd.read_csv(tmp_path/'again.csv', dtype={'prediction': str})
    assert again.prediction.tolist() == rows.prediction.tolist()
    assert np.allclose(again[p.h.leaves], rows[p.h.leaves], atol=1e-5)
    for o in ('onnx', 'onnxscript', 'onnxruntime'): pytest.importorskip(o)
    import onnxruntime
    session = onnxruntime.InferenceSession(str(export_onnx(p, tmp_path/'m.onnx')))
    x = torch.stack([p.pixels(Path(f)) for f in rows.file[:20]]).numpy()
    _, nodes, answers = session.run(None, {'images': x})
    assert [names[i] for i in answers] == rows.prediction[:20].tolist()
    assert np.allclose(nodes[:, :len(p.h)], rows[p.h.leaves][:20], atol=1e-3)


def test_files_have_the_usual_mode_and_force_overwrites(work, tmp_path, capsys):
    mask = os.umask(0)
    os.umask(mask)
    for f in (work/'model').iterdir(): assert stat.S_IMODE(f.stat().st_mode) == 0o666 & ~mask, f.name
    shutil.copytree(work/'model', tmp_path/'model')
    run_command('fit', [work/'images', work/'classes.csv', '--out', tmp_path/'model', '--force', *FAST[:2], '--epochs',
                        1, '--quiet'])
    assert load_classifier(tmp_path/'model').settings['head']['m'] == 64


# --- prediction at scale ---
def test_predict_reads_folders_patterns_and_lists_and_audit_reads_what_it_writes(work, tmp_path, capsys):
    rows = pd.read_csv(work/'model'/'predictions.csv', dtype=str)[['file', 'target', 'prediction']]
    rows[['file', 'target']].to_csv(tmp_path/'list.csv', index=False, sep=';')
    run_command('predict', [work/'model', tmp_path/'list.csv', '--out', tmp_path/'named.csv', '--bs', 7])
    named = pd.read_csv(tmp_path/'named.csv', dtype=str)
    assert (named.file.tolist() == rows.file.tolist() and named.prediction.tolist() == rows.prediction.tolist()
            and named.target.tolist() == rows.target.tolist())
    run_command('audit', [tmp_path/'named.csv', work/'classes.csv', '--out', tmp_path/'audit'])
    ours, theirs = (pd.read_csv(f/'table.csv', index_col=0) for f in (tmp_path/'audit', work/'model'))
    assert np.allclose(ours.loc['as given'], theirs.loc['gp_disto'], equal_nan=True)
    run_command('predict', [work/'model', work/'images'/'0', str(work/'images'/'[12]'/'*.png'), '--out',
                            tmp_path/'some.jsonl', '--rule', 'back_off', '--threshold', '.6'])
    found = [json.loads(o) for o in (tmp_path/'some.jsonl').read_text().splitlines()]
    assert len(found) == sum(len(list((work/'images'/o).iterdir())) for o in '012')
    groups = {'/'.join(n) or '/' for n in Hierarchy.named('mnist_visual').nodes} | set('0123456789')
    assert ({o['prediction'] for o in found} <= groups
            and all(abs(sum(o['probabilities'].values()) - 1) < 1e-4 for o in found))
    assert 'exists' in failed(capsys, 'predict', work/'model', work/'images'/'0', '--out', tmp_path/'some.jsonl')
    assert '.csv or .jsonl' in failed(capsys, 'predict', work/'model', work/'images'/'0', '--out', tmp_path/'some.txt')
    assert "needs rule='back_off'" in failed(capsys, 'predict', work/'model', work/'images'/'0', '--threshold', '.3')


# --- hostile files ---
def copy_of(model, where, settings=None, weights=None):
    "A copy of a saved model with other settings ('head.m' for one inside another) and weights"
    shutil.copytree(model, where, ignore=shutil.ignore_patterns('*.html', '*.csv'))
    s, w = json.loads((where/'settings.json').read_text()), load_file(where/'model.safetensors')
    for k, v in (settings or {}).items():
        *outer, k = k.split('.')
        (s[outer[0]] if outer else s)[k] = v
    (where/'settings.json').write_text(json.dumps(s))
    if weights: save_file({k: weights(v).contiguous() for k, v in w.items()}, where/'model.safetensors')
    return where

HOSTILE = [{'images.size': [6000, 6000]}, {'images.mean': [10**400]}, {'images.std': [float('nan')]},
           {'images.crop': 1}, {'embedder.pretrained': True}, {'embedder.weights': 'pipe'}, {'embedder.cut': 3},
           {'arch': 'hf-hub:a/b'}, {'arch': 'local-dir:/'}, {'arch': 'timm/vit_giant_patch14_dinov2'},
           {'arch': 'vit_h_14'}, {'arch_args': {'hidden': 10**9}}, {'arch_args': {'channels': [60000]*3}},
           {'head.m': 10**7}, {'head.n_protos': 10**7}, {'code': 'import os'}, {'rule': 'x'}, {'versions': 3}]

@pytest.mark.parametrize('settings', HOSTILE, ids=lambda o: '='.join(map(str, *o.items()))[:40])
def test_settings_are_data(work, tmp_path, settings):
    "Refused within a second and without memory; nothing is downloaded or opened"
    if 'embedder.weights' in settings:
        os.mkfifo(tmp_path/'pipe')
        settings = {'embedder.weights': str(tmp_path/'pipe')}
    m, before = copy_of(work/'model', tmp_path/'m', settings), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelError): load_classifier(m)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # kilobytes

def test_a_sparse_file_of_weights(work, tmp_path):
    m = copy_of(work/'model', tmp_path/'m')
    with open(m/'model.safetensors', 'r+b') as f: f.truncate(50*10**9)
    with pytest.raises(ModelError, match='larger than 20 GB'): load_classifier(m)
    with open(m/'model.safetensors', 'r+b') as f: f.truncate(10**9)
    with pytest.raises(ModelError, match='truncated or damaged'): load_classifier(m)

@pytest.mark.parametrize('weights', [lambda v: v > 0, lambda v: v*float('nan') if v.is_floating_point() else v])
def test_weights_that_are_not_numbers(work, tmp_path, weights, capsys):
    m = copy_of(work/'model', tmp_path/'m', weights=weights)
    assert 'model.safetensors' in failed(capsys, 'predict', m, work/'images'/'0'/'0.png')

@pytest.mark.parametrize('costs', [False, True])
def test_no_answer_without_a_probability(costs):
    h = Hierarchy.from_paths([('a', 'x'), ('a', 'y'), ('b', 'z')])
    p = Predictor(torch.nn.Flatten(), CostMatrix(h.costs(), h.leaves) if costs else h, {})
    for bad in (float('nan'), float('inf')):
        for rule in ('argmax', 'crm'):
            with pytest.raises(ModelError, match='not finite'): p.predict(torch.tensor([[0., bad, 1.]]), rule)
    images = dict(channels=1, size=[1, 3], mean=[0.], std=[1.])
    with pytest.raises(ImageError, match='between 0 and 1'):
        Predictor(torch.nn.Flatten(), h, dict(images=images)).predict(torch.full((1, 1, 1, 3), 1e18))

@pytest.mark.parametrize('threshold', ['x', None, float('nan'), 2])
def test_thresholds(threshold):
    h = Hierarchy.named('mnist_visual')
    p = Predictor(torch.nn.Flatten(), h, {})
    if threshold is None:
        assert p.rule('back_off').threshold == .5
        return
    with pytest.raises(ModelError, match='threshold must be a number between 0 and 1'): p.rule('back_off', threshold)

def test_pictures_that_are_something_else(work, tmp_path, capsys):
    "An EPS file starts no Ghostscript, a pipe does not hang, and the others are named"
    picture = work/'images'/'0'/'0.png'
    Image.open(picture).convert('RGB').save(tmp_path/'eps.png', format='EPS')
    os.mkfifo(tmp_path/'pipe.png')
    err = failed(capsys, 'predict', work/'model', tmp_path/'eps.png', tmp_path/'pipe.png', picture, code=1)
    assert ('eps.png: not an image' in err and 'pipe.png: this is not a regular file' in err
            and '2 of 3 images could not be read' in err)

def test_odd_names_of_files_and_classes(tmp_path, capsys):
    "Bytes that are not UTF-8, escapes, marks of direction and formulas: nothing is lost, and nothing odd is printed"
    pics = tmp_path/'images'
    write_digits(pics, 40)
    for old, new in (('0', '=1+1'), ('1', 'a\u202eb')): (pics/old).rename(pics/new)
    for o in '23456789': shutil.rmtree(pics/o)
    odd = os.fsencode(next((pics/'=1+1').iterdir()))
    os.rename(odd, os.path.join(os.path.dirname(odd), b'\xff\x1b[31m.png'))
    (tmp_path/'classes.csv').write_text('group,class\nx,=1+1\ny,a\u202eb\n', encoding='utf-8')
    run_command('fit', [pics, tmp_path/'classes.csv', '--out', tmp_path/'model', *FAST, '--valid', '.9'])
    out = capsys.readouterr().out
    rows = pd.read_csv(tmp_path/'model'/'predictions.csv')
    assert (tmp_path/'model'/'report.html').exists() and len(rows) == sum(1 for o in pics.rglob('*.png')) - 2
    run_command('predict', [tmp_path/'model', pics, '--top', 2])
    out += capsys.readouterr().out
    assert '\u202e' not in out and '\x1b' not in out and r'a\u202eb' in out and r'\udcff\x1b[31m.png' in out
    text = (tmp_path/'model'/'predictions.csv').read_text()
    assert not re.search('(^|,)"?=', text, re.M) and "'=1+1" in text

def test_export_onnx_takes_a_folder(work, tmp_path):
    for o in ('onnx', 'onnxscript', 'onnxruntime'):
        pytest.importorskip(o, reason="exporting needs the extra: pip install 'hierproto[onnx]'")
    assert export_onnx(work/'model', tmp_path/'m.onnx').is_file()
    with pytest.raises(ModelError, match='is a folder'): export_onnx(work/'model', work/'model')


def test_audit_calls_levels_by_their_names(tmp_path, capsys):
    (tmp_path/'classes.csv').write_text('kingdom;family;species\nanimal;cats;lion\nanimal;dogs;fox\n'
                                        'plant;beeches;oak\n')
    (tmp_path/'p.csv').write_text('target,prediction\nlion,fox\nfox,fox\noak,lion\n')
    run_command('audit', [tmp_path/'p.csv', tmp_path/'classes.csv', '--out', tmp_path/'a', '--shuffles', 0])
    table = pd.read_csv(tmp_path/'a'/'table.csv')
    assert ([c for c in table if 'accuracy' in c] == ['kingdom accuracy %', 'family accuracy %']
            and table['kingdom accuracy %'][0] == pytest.approx(200/3))
    assert ('kingdom accuracy %' in capsys.readouterr().out
            and '["kingdom", "family", "species"]' in (tmp_path/'a'/'report.html').read_text())


def test_audit_is_called_with_the_defaults_of_its_command():
    "`audit` is also a function of `hierproto.all`, so it is the one worker with defaults of its own"
    from inspect import signature
    from hierproto import cli
    from hierproto.audit import audit
    def defaults(f): return {k: o.default for k, o in signature(f).parameters.items()}
    assert defaults(audit) == defaults(cli.audit)

def test_other_workers_have_no_defaults():
    from inspect import signature
    from pkgutil import resolve_name
    from hierproto.cli import COMMANDS
    workers = {k: resolve_name(o) for k, o in COMMANDS.items() if k != 'audit'}
    twice = {k: [n for n, o in signature(f).parameters.items() if o.default is not o.empty] for k, f in workers.items()}
    assert not any(twice.values()), twice
