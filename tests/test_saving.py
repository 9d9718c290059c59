"Saved models: mixed and edited files, full disks, calibrated rules, restricted answers, the Hub, ONNX"
import errno, itertools, json, os, shutil
from functools import partial
import numpy as np, pandas as pd, pytest, torch
from fastai.vision.all import CrossEntropyLossFlat, ImageDataLoaders, Normalize, Resize, imagenet_stats, resnet18, vision_learner
from PIL import Image
from torch import nn
from hierproto.all import *
from hierproto.calibration import Restrict, calibrate
from hierproto.images import ImageError
from hierproto.hub import push_to_hub
from hierproto.predictions import Predictions
from hierproto.saving import ModelError, Predictor
import hierproto.saving as S

TREE = Hierarchy.from_paths([('x', 'a'), ('x', 'b'), ('y', 'c'), ('y', 'd')])

def image_dls(folder, size=32, item=None, **kw):
    rng = np.random.default_rng(0)
    for k in TREE.leaves:
        (folder/k).mkdir(parents=True, exist_ok=True)
        for i in range(6): Image.fromarray(rng.integers(0, 256, (40, 48, 3), dtype=np.uint8)).save(folder/k/f'{i}.png')
    return ImageDataLoaders.from_folder(folder, valid_pct=.5, seed=0, bs=4, num_workers=0,
                                        item_tfms=item or Resize(size), batch_tfms=Normalize.from_stats(*imagenet_stats), **kw)

def learner(folder, seed=0, **kw):
    dls = image_dls(folder/'images', **kw)
    torch.manual_seed(seed) # the splitter of the data sets its own
    return hier_learner(dls, 'convnet', TREE, 'gp_disto', m=8, pretrained=False)

@pytest.fixture(scope='module')
def work(tmp_path_factory):
    d = tmp_path_factory.mktemp('saving')
    for k in (0, 1): save_classifier(learner(d, k), d/f'm{k}')
    return d

@pytest.fixture
def copy(work, tmp_path):
    shutil.copytree(work/'m0', tmp_path/'m')
    return tmp_path/'m'

# --- files that do not belong together ---
@pytest.mark.parametrize('name', ['model.safetensors', 'settings.json'])
def test_files_of_two_models_of_the_same_tree(work, copy, name):
    "As after a kill between two renames, or a copy that was interrupted"
    shutil.copy(work/'m1'/name, copy/name)
    with pytest.raises(ModelError, match='belong to different models'): load_classifier(copy)

def test_a_flipped_bit_in_the_weights(copy):
    f = copy/'model.safetensors'
    data = bytearray(f.read_bytes())
    data[-3] ^= 1
    f.write_bytes(data)
    with pytest.raises(ModelError, match='damaged'): load_classifier(copy)

def test_weights_of_now_with_settings_of_02(work, copy):
    s = json.loads((copy/'settings.json').read_text())
    s['format'] = 'hierproto-model-1'
    del s['weights']
    (copy/'settings.json').write_text(json.dumps(s))
    with pytest.raises(ModelError, match='belong to different models'): load_classifier(copy)

@pytest.mark.skipif(not hasattr(os, 'fork'), reason='needs POSIX')
def test_a_save_killed_at_any_rename_leaves_the_old_or_the_new_model(work, copy, monkeypatch):
    "Every rename, and the removal of the empty folder: the process ends before it"
    old, new = (load_classifier(work/o) for o in ('m0', 'm1'))
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    found, names = [], {f.name for f in copy.iterdir()}
    for at in itertools.count():
        shutil.rmtree(copy)
        shutil.copytree(work/'m0', copy)
        pid = os.fork()
        if not pid:
            calls = itertools.count()
            def or_die(f): return lambda *a, **k: os._exit(9) if next(calls) == at else f(*a, **k)
            for o in ('replace', 'rename', 'rmdir', 'unlink'): monkeypatch.setattr(os, o, or_die(getattr(os, o)))
            save_classifier(new, copy)
            os._exit(0)
        killed = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        scores = load_classifier(copy).scores(x)
        found.append('old' if torch.equal(scores, old.scores(x)) else 'new')
        if found[-1] == 'new': assert torch.equal(scores, new.scores(x))
        save_classifier(old, copy) # goes on from there
        assert torch.equal(load_classifier(copy).scores(x), old.scores(x))
        assert {f.name for f in copy.iterdir() if not f.name.startswith('new.')} == names
        if not killed: break
    assert found == sorted(found, reverse=True) and found.count('new') >= 4 and found.count('old') >= 4, found

@pytest.mark.parametrize('at', range(3))
def test_a_full_disk_keeps_the_old_model(work, copy, monkeypatch, at):
    before, count, real = load_classifier(copy), itertools.count(), S.write_whole
    def full(path, write):
        if next(count) == at: raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, write)
    monkeypatch.setattr(S, 'write_whole', full)
    with pytest.raises(ModelError, match='could not be written: No space left on device') as e:
        save_classifier(load_classifier(work/'m1'), copy)
    assert '\n' not in str(e.value)
    x = torch.rand(2, 3, 32, 32)
    assert torch.equal(load_classifier(copy).scores(x), before.scores(x)) and not [*copy.glob('new.*')]

# --- settings ---
VALUES = [None, 0, -1, 1, 2, 3, 4, 10**12, 1.5, float('nan'), 'x', '', [], {}, True, [1, 2], [0, 0], [1, 1], [2, 2], [2048, 1],
          [.5], [.5]*3, {'a': 1}, 'resnet18', '../x', 'LinearHead', 'YOLOHead', 'crop', 'pad', 'calibrated']

def keys(d, *outer):
    for k, v in d.items():
        yield (*outer, k)
        if isinstance(v, dict): yield from keys(v, *outer, k)

def test_every_edit_of_the_settings_predicts_or_is_one_line(work, copy):
    "Each key with each of many values, and each key lost"
    f, whole = copy/'settings.json', json.loads((copy/'settings.json').read_text())
    image, worked, refused = Image.new('RGB', (9, 30)), 0, 0
    for key, value in itertools.product(keys(whole), [*VALUES, ...]):
        if key[0] == 'versions': continue
        s = json.loads(json.dumps(whole))
        d = s
        for k in key[:-1]: d = d[k]
        if value is ...: del d[key[-1]]
        else: d[key[-1]] = value
        f.write_text(json.dumps(s))
        try:
            assert len(load_classifier(copy).predict([image])) == 1
            worked += 1
        except (ModelError, HierarchyError, ImageError) as e:
            assert '\n' not in str(e), (key, value)
            refused += 1
    assert worked > 20 and refused > 500

@pytest.mark.parametrize('edit', [dict(channels=1), dict(channels=1, mean=[0.], std=[1.]), dict(size=[1, 1]), dict(size=[3, 2048])])
def test_channels_and_sizes_that_do_not_fit_are_refused_when_loading(copy, edit):
    s = json.loads((copy/'settings.json').read_text())
    s['images'].update(edit)
    (copy/'settings.json').write_text(json.dumps(s))
    with pytest.raises(ModelError): load_classifier(copy)

# --- a Learner of one's own ---
def test_the_error_for_the_second_example_of_the_readme_is_its_remedy(tmp_path):
    dls = image_dls(tmp_path/'images', 64)
    learn = vision_learner(dls, resnet18, pretrained=False, loss_func=CrossEntropyLossFlat())
    h = Hierarchy.from_paths([('x', 'a'), ('x', 'b'), ('y', 'c'), ('y', 'd')])
    learn.model[1][-1] = PrototypeHead(learn.model[1][-1].in_features, h)
    learn.model.eval()
    x = torch.rand(2, 3, 64, 64)
    with pytest.raises(ModelError) as e: save_classifier(learn, tmp_path/'m', h=h)
    lines, save = str(e.value).split('`')[3::2]
    with torch.no_grad(): want = learn.model.cpu()(x)
    exec(lines)
    exec(save, dict(globals(), learn=learn, folder=tmp_path/'m', h=h))
    p = load_classifier(tmp_path/'m', body=learn.model[0])
    with torch.no_grad(): assert torch.allclose(p.model(x), want, atol=1e-5)

# --- rules ---
def test_a_calibrated_rule_is_saved_with_its_promise(work, tmp_path):
    g = torch.Generator().manual_seed(0)
    y = torch.randint(4, (400,), generator=g)
    scores = torch.randn(400, 4, generator=g) + 2*torch.eye(4)[y]
    for per_group in (False, True):
        promise = calibrate(scores, y, TREE, accuracy=.9, per_group=per_group)
        save_classifier(learner(work), tmp_path/'m', rule=promise)
        p = load_classifier(tmp_path/'m')
        assert str(p.guarantee) == str(promise) and torch.equal(p.rule()(scores), promise(scores, probs=False))
        assert p.only('x').guarantee is None

def test_rules_and_sums_are_made_once(work, monkeypatch):
    p, made = load_classifier(work/'m0'), []
    real = S.SubtreeSum.__init__
    monkeypatch.setattr(S.SubtreeSum, '__init__', lambda self, h: (made.append(1), real(self, h))[1])
    for _ in range(3): p.predict(torch.rand(2, 3, 32, 32), 'back_off', .7)
    assert len(made) <= 1

# --- only ---
@pytest.mark.parametrize('rule', ['argmax', 'crm', 'back_off'])
def test_only_some_classes(work, rule, tmp_path):
    p, x = load_classifier(work/'m0'), torch.rand(50, 3, 32, 32)
    full = p.scores(x).softmax(1)
    (tmp_path/'known.txt').write_text('c\n\nx\n')
    for names, keep in (('y', [2, 3]), (['a', 'd'], [0, 3]), (tmp_path/'known.txt', [0, 1, 2]), ('y/c', [2])):
        q = p.only(names)
        probs = q.scores(x).softmax(1)
        assert torch.allclose(probs[:, keep], full[:, keep]/full[:, keep].sum(1, keepdim=True), atol=1e-6)
        assert probs.sum(1).allclose(torch.ones(50)) and (probs > 0).sum(1).max() <= len(keep)
        answers = q.rule(rule)(q.scores(x))
        inside = TREE.align(p.h.leaves).ancestry()[answers][:, keep]
        assert inside.any(1).all() and (rule == 'back_off' or (answers < 4).all())
    with pytest.raises(ModelError, match='cannot be saved'): save_classifier(q, tmp_path/'m')

def test_only_keeps_the_least_cost_among_what_is_left():
    D = torch.tensor([[0., 1, 1], [9, 0, 9], [9, 9, 0]]) # the first class is the cheap answer to everything
    h = CostMatrix(D, ['a', 'b', 'c'], warn=False)
    p = Predictor(nn.Flatten(), h, {})
    scores = torch.tensor([[0., 1., .9]])
    assert p.rule('crm')(scores).tolist() == [0]
    q = p.only(['b', 'c'])
    assert q.rule('crm')(q.model(scores)).tolist() == [1]

def test_no_rule_leaves_the_allowed_classes():
    "Costs that are not symmetric, squares of distances, rules of every form, and functions that look at nothing"
    K = 12
    h = Hierarchy.from_paths([(f'g{k//3}', f'c{k}') for k in range(K)])
    g = torch.Generator().manual_seed(0)
    i = torch.arange(float(K))
    squares = CostMatrix((i[:, None]-i)**2, h.leaves, warn=False)
    uneven = CostMatrix(squares.D*(.1 + torch.rand(K, K, generator=g)), h.leaves, warn=False)
    scores = 2*torch.randn(500, K, generator=g)
    for seed in range(20):
        some = torch.randperm(K, generator=g)[:2 + seed % 4].sort().values
        names = [h.leaves[k] for k in some]
        P = scores.softmax(1)[:, some]
        for costs in (squares, uneven):
            best = some[(P @ costs.D[some][:, some].T).argmin(1)]
            p = Predictor(nn.Flatten(), costs, {}).only(names)
            for rule in ('crm', CRM(costs), partial(crm, D=costs)):
                for answers in (Restrict(rule, costs, names)(scores), p.rule(rule)(p.model(scores))):
                    assert (answers != best).sum() == 0
        p = Predictor(nn.Flatten(), h, {}).only(names)
        inside = h.ancestry()[:, some].any(1)
        odd = lambda s: torch.arange(len(s)) % h.n_nodes
        to_node = partial(node_crm, h=h, costs=torch.rand(h.n_nodes, K, generator=g))
        for rule in ('argmax', 'back_off', BackOff(h, .9), CRM(uneven), to_node, odd):
            for answers in (Restrict(rule, h, names)(scores), p.rule(rule)(p.model(scores))): assert inside[answers].all()

# --- the Hub ---
@pytest.fixture
def hub(tmp_path, monkeypatch):
    "A folder that plays the Hub, and the list of what was asked of it"
    import huggingface_hub as H
    asked = []
    monkeypatch.setattr(H, 'create_repo', lambda repo, **kw: asked.append(('create', repo, kw)))
    monkeypatch.setattr(H, 'upload_folder', lambda repo_id, folder_path, **kw: (
        shutil.copytree(folder_path, tmp_path/'hub'/repo_id), asked.append(('upload', repo_id)), 'https://hub/commit')[-1])
    def download(repo, revision=None, allow_patterns=None):
        asked.append(('download', repo, revision, sorted(allow_patterns)))
        if not (tmp_path/'hub'/repo).is_dir(): raise H.errors.LocalEntryNotFoundError('no such repository\nmore')
        return str(tmp_path/'hub'/repo)
    monkeypatch.setattr(H, 'snapshot_download', download)
    return asked

def test_to_the_hub_and_back(work, tmp_path, hub):
    p, x = load_classifier(work/'m0'), torch.rand(2, 3, 32, 32)
    h = p.h
    every = Predictions(torch.arange(len(h)), h, torch.arange(len(h)).roll(1))
    assert push_to_hub(p, 'me/model', every) == 'https://hub/commit'
    assert {o.name for o in (tmp_path/'hub'/'me'/'model').iterdir()} == {*S._files, 'README.md'}
    assert torch.equal(load_classifier('hf://me/model@v1').scores(x), p.scores(x))
    assert hub[-1] == ('download', 'me/model', 'v1', sorted(S._files))
    card = (tmp_path/'hub'/'me'/'model'/'README.md').read_text()
    assert '| AHC | 3.00 (2.00 to 4.00) |' in card and TREE.align(h.leaves).tree() in card

def test_hostile_models_on_the_hub_are_refused_like_any(work, tmp_path, hub):
    push_to_hub(work/'m0', 'me/model')
    (tmp_path/'hub'/'me'/'model'/'model.safetensors').write_bytes(b'\x80\x04evil')
    with pytest.raises(ModelError, match='damaged'): load_classifier('hf://me/model')
    with pytest.raises(ModelError, match='hf://no/body could not be downloaded: no such repository$'): load_classifier('hf://no/body')

@pytest.mark.parametrize('name', ['modle', 'me/model', 'hf:/me/model', './hf://me/model'])
def test_a_mistyped_folder_never_reaches_the_network(hub, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match='not a saved model'): load_classifier(name)
    assert not hub

# --- ONNX ---
@pytest.mark.parametrize('how', ['squish', 'crop', 'pad'])
def test_onnx_resizes_as_the_predictor_does(tmp_path, how):
    for o in ('onnx', 'onnxscript', 'onnxruntime'):
        pytest.importorskip(o, reason="exporting needs the extra: pip install 'hierproto[onnx]'")
    import onnxruntime
    learn = learner(tmp_path, item=Resize((32, 24), how))
    p = load_classifier(save_classifier(learn, tmp_path/'m'))
    session = onnxruntime.InferenceSession(str(export_onnx(p, tmp_path/'m.onnx')))
    sizes = [(32, 24)] if how == 'pad' else [(40, 48), (32, 24), (200, 31), (10, 12)]
    assert json.loads(session.get_modelmeta().custom_metadata_map['input'])['size'] == ([32, 24] if how == 'pad' else 'any')
    for h, w in sizes:
        smooth = np.random.default_rng(0).integers(0, 256, (5, 5, 3), dtype=np.uint8)
        images = [np.array(Image.fromarray(o).resize((w, h), Image.BICUBIC)) for o in (smooth, 255-smooth)]
        got = session.run(None, dict(images=np.stack(images).transpose(0, 3, 1, 2)))
        assert np.abs(got[0]-p.scores(images).numpy()).max() < .05*p.scores(images).abs().max()
        assert got[2].tolist() == p.rule()(p.scores(images)).tolist()
