"Comparison of methods on frozen features: the command, its errors, and from the best head to a whole network"
import os, re, shutil, signal, subprocess, sys, time, warnings
from functools import partial
from pathlib import Path

import numpy as np, pandas as pd, pytest, torch

from hierproto.body import embedder
from hierproto.cli import run_command
from hierproto.compare import Pool, compare, read_costs, read_groups
from hierproto.files import finished, read_rows
from hierproto.features import features, put_back
from hierproto.hierarchy import CostMatrix, Hierarchy, HierarchyError
from hierproto.methods import METHODS
from hierproto.saving import export_onnx, load_classifier, save_classifier
from test_commands import colour_pictures, failed

FAST = ['--arch', 'thin_resnet', '--size', 32, '--epochs', 1, '--jobs', 1]
CLASSES = 'cat', 'dog', 'oak', 'fir'
TREE = Hierarchy.from_paths([('animal', 'cat'), ('animal', 'dog'), ('plant', 'oak'), ('plant', 'fir')])
write_pictures = partial(colour_pictures, n=10, classes=CLASSES)


@pytest.fixture(scope='module')
def work(tmp_path_factory):
    "Pictures of four classes, two trees of them, and weights for a small network"
    d = tmp_path_factory.mktemp('work')
    write_pictures(d/'images')
    torch.manual_seed(0)
    torch.save(embedder('thin_resnet').state_dict(), d/'w.pth')
    (d/'classes.csv').write_text('kingdom,species\nanimal,cat\nanimal,dog\nplant,oak\nplant,fir\n')
    (d/'other.csv').write_text('side,species\nleft,cat\nleft,oak\nright,dog\nright,fir\n')
    CostMatrix(torch.ones(4, 4) - torch.eye(4), CLASSES).to_csv(d/'costs.csv')
    return d

@pytest.fixture
def cache(tmp_path, monkeypatch):
    "Features are stored in a folder of the test"
    monkeypatch.setattr('hierproto.features.cache_path', lambda name, key: tmp_path/'cache'/f'{name}_{key}')
    return tmp_path/'cache'

def options(work, out, *argv, images='images', classes='classes.csv'):
    return [work/images, work/classes, '--out', out, '--weights', work/'w.pth', *FAST, *argv]

def run(work, out, *argv, classes='classes.csv'):
    run_command('compare', options(work, out, *argv, classes=classes))
    return pd.read_csv(out/'comparison.csv'), (out/'comparison.html').read_text()


def test_command_and_a_warm_repeat_with_another_tree(work, tmp_path, cache, capsys):
    rows, page = run(work, tmp_path/'out', '--methods', 'learnt')
    assert set(rows.method) == {'cross_entropy', 'learnt'} and len(rows) == 2*2*3 and rows.run_id.is_unique
    assert not re.search(r'(src|href)="(?!#|data:)', page) and 'thin_resnet' in page
    assert page.index('<svg') < page.index('<table'), 'the page opens with the forest plot'
    assert '<th>kingdom</th>' in page and '<th>species</th>' in page, 'levels have the names of the columns'
    assert 'cross-entropy, least risk' in page and 'cross_entropy' not in page, 'methods are named in words'
    told = [o for o in capsys.readouterr().out.splitlines() if 'repetition' in o]
    assert len(told) == 4 and told[-1].startswith('4 of 4: learnt prototypes, repetition 2'), 'a line for each finished task'
    file = tmp_path/'out'/'features.safetensors'
    stamp = file.stat().st_mtime_ns
    run(work, tmp_path/'out', '--methods', 'learnt')
    again, _ = run(work, tmp_path/'out', '--methods', 'learnt', classes='other.csv')
    assert (len(again) == 24 and again.run_id.is_unique
            and again.iloc[:12].equals(rows)), 'finished runs are kept, another tree has other ids'
    assert file.stat().st_mtime_ns == stamp, 'features are computed once'
    with np.load(tmp_path/'out'/'comparison.npz') as costs:
        assert {*costs} == {*again.run_id} and all(o.shape == (40,) for o in costs.values())
    assert 'Page:' in capsys.readouterr().out


def test_divided_folders_have_an_official_test_set(work, tmp_path, cache):
    write_pictures(tmp_path/'images'/'train')
    write_pictures(tmp_path/'images'/'test', n=3)
    (tmp_path/'classes.csv').write_text((work/'classes.csv').read_text())
    shutil.copy(work/'w.pth', tmp_path)
    rows, page = run(tmp_path, tmp_path/'out', '--methods', 'fixed', '--seeds', 3)
    assert set(rows.n) == {12} and set(rows.seed) == {0, 1, 2}
    assert 'official test set' in page and '3 seeds' in page
    assert '<th>from images</th>' in page and '<th>from trainings</th>' in page


def test_your_own_predictions_are_a_row(work, tmp_path, cache, capsys):
    files = sorted((work/'images').rglob('*.png'))
    lines = [f'{f.relative_to(work/"images")},{f.parent.name},{f.parent.name}' for f in files]
    (tmp_path/'mine.csv').write_text('\n'.join(['file,target,prediction', *lines[::-1]]))
    (tmp_path/'few.csv').write_text('\n'.join(['file,target,prediction', *lines[1:]]))
    err = failed(capsys, 'compare', *options(work, tmp_path/'out', '--methods', 'learnt', '--predictions', tmp_path/'few.csv'))
    assert 'nothing for 1 of 40 images' in err and len(err.splitlines()) == 1, err
    _, page = run(work, tmp_path/'out', '--methods', 'learnt', '--predictions', tmp_path/'mine.csv')
    assert re.search(r'<th>mine</th>\s*<td>-100.0</td>', page), 'a model without mistakes costs 100% less'


def test_groups_of_images_stay_together(work, tmp_path, cache, capsys):
    files = sorted((work/'images').rglob('*.png'))
    (tmp_path/'sites.csv').write_text('\n'.join(['file,group', *(f'{f.relative_to(work/"images")},{i%7}' for i, f in enumerate(files))]))
    _, page = run(work, tmp_path/'out', '--methods', 'learnt', '--groups', tmp_path/'sites.csv')
    assert '7 groups that are never split' in page
    assert 'there is no such file' in failed(capsys, 'compare', *options(work, tmp_path/'out', '--groups', tmp_path/'none.csv'))


def some_known_to_a_group(work, tmp_path):
    "The images, and six of cats and dogs that are only known to be animals"
    shutil.copytree(work/'images', tmp_path/'images')
    (tmp_path/'images'/'animal').mkdir()
    for name in ('cat', 'dog'):
        for i in range(3):
            shutil.copy(work/'images'/name/f'{i}.png', tmp_path/'images'/'animal'/f'{name}{i}.png')
    for f in ('classes.csv', 'w.pth'): shutil.copy(work/f, tmp_path)
    return tmp_path

def test_images_known_to_a_group_train_and_are_not_tested(work, tmp_path, cache, capsys):
    some_known_to_a_group(work, tmp_path)
    rows, page = run(tmp_path, tmp_path/'out', '--seeds', 1)
    assert '40 images labelled with a class, 6 images with a group (kingdom)' in capsys.readouterr().out
    assert set(rows.n) == {40} and rows.ahc.notna().all()
    assert '6 more that are known to a group only' in page
    assert 'haframe' not in set(rows.method) and 'labels of some images are groups: HAFrame' in page
    err = failed(capsys, 'compare', *options(tmp_path, tmp_path/'out', '--methods', 'hie'))
    assert 'hie: labels of HiELoss must be classes' in err and len(err.splitlines()) == 1, err


def test_labels_of_groups_follow_the_groups_of_their_images(work, tmp_path, cache, capsys):
    some_known_to_a_group(work, tmp_path)
    files = sorted((tmp_path/'images').rglob('*.png'))
    lines = [f'{f.relative_to(tmp_path/"images")},{i%7}' for i, f in enumerate(files)]
    (tmp_path/'sites.csv').write_text('\n'.join(['file,group', *lines]))
    argv = '--methods', 'learnt', '--seeds', 1, '--groups', tmp_path/'sites.csv'
    _, page = run(tmp_path, tmp_path/'out', *argv)
    assert '7 groups that are never split' in page
    (tmp_path/'sites.csv').write_text('\n'.join(['file,group', *[o for o in lines if 'animal' not in o]]))
    assert 'nothing for 6 of 6 images' in failed(capsys, 'compare', *options(tmp_path, tmp_path/'other', *argv))


def test_two_processes_train_on_labels_of_groups_like_one():
    y = made_up_pool().y.clone()
    y[40:] = TREE.parent[y[40:]]
    data = made_up_pool().x, y
    one, two = (compare(data, TREE, 'learnt', seeds=1, epochs=1, m=4, progress=False, jobs=jobs) for jobs in (1, 2))
    assert all(np.allclose(one.costs[k], two.costs[k], atol=1e-4) for k in one.costs)
    assert len(one.pool.targets) == 40
    without = compare((data[0][:40], y[:40]), TREE, 'learnt', seeds=1, epochs=1, m=4, progress=False)
    assert {*without.rows.run_id}.isdisjoint(one.rows.run_id)


def test_foreign_files_end_in_one_line(work, tmp_path, cache, capsys):
    out = tmp_path/'out'
    out.mkdir()
    (out/'comparison.csv').write_text('name,value\na,1\n')
    err = failed(capsys, 'compare', *options(work, out))
    assert 'is not a file of this comparison' in err and len(err.splitlines()) == 1, err
    (out/'comparison.csv').unlink()
    (out/'comparison.npz').write_bytes(b'PK no')
    err = failed(capsys, 'compare', *options(work, out, '--methods', 'learnt'))
    assert 'comparison.npz is damaged' in err and len(err.splitlines()) == 1, err


BAD = {'arch': (['--arch', 'resnet81'], "did you mean 'resnet18'"), 'weights': (['--weights', 'none.pth'], 'none.pth'),
       'other weights': (['--arch', 'resnet18'], 'does not fit resnet18'),
       'no weights': (['--weights', ''], 'no published weights'),
       'methods': (['--methods', 'learnt,magic'], "--methods must be one of"),
       'seeds': (['--seeds', -1], '--seeds must be between 1'),
       'epochs': (['--epochs', -1], '--epochs must be between 1'),
       'size': (['--size', 3], '--size must be between 16'), 'jobs': (['--jobs', -2], '--jobs must be between 1'),
       'tree': (['--methods', 'hxe'], 'needs a tree')}

@pytest.mark.parametrize('case', BAD)
def test_bad_options_end_in_one_line(work, tmp_path, cache, capsys, case):
    argv, says = BAD[case]
    err = failed(capsys, 'compare', *options(work, tmp_path/'out', *argv,
                                             classes='costs.csv' if case == 'tree' else 'classes.csv'))
    assert says in err and len(err.splitlines()) == 1, err

def test_bad_files_end_in_one_line(work, tmp_path, cache, capsys):
    def says(images, classes='classes.csv', out=tmp_path/'out'):
        err = failed(capsys, 'compare', *options(work, out, images=images, classes=classes))
        assert len(err.splitlines()) == 1, err
        return err
    assert 'no such folder' in says(tmp_path/'none')
    (tmp_path/'empty').mkdir()
    assert 'no images in this folder' in says(tmp_path/'empty')
    assert 'directly in the folder' in says(work/'images'/'cat')
    assert 'no such file' in says(work/'images', 'none.csv')
    write_pictures(tmp_path/'few', n=3)
    assert "fewer than 5 images of 'cat', 'dog'" in says(tmp_path/'few')
    shutil.copytree(work/'images', tmp_path/'images')
    (tmp_path/'images'/'fir').rename(tmp_path/'images'/'firr')
    assert "did you mean 'fir'" in says(tmp_path/'images')
    shutil.rmtree(tmp_path/'images'/'firr')
    assert "no images to learn from for 'fir': --subset" in says(tmp_path/'images')
    for f in (tmp_path/'images').rglob('*.png'): f.write_text('no picture')
    (tmp_path/'animals.csv').write_text('kingdom,species\nanimal,cat\nanimal,dog\nplant,oak\n')
    assert 'none of the' in says(tmp_path/'images', tmp_path/'animals.csv')
    (tmp_path/'file').touch()
    says(work/'images', out=tmp_path/'file')


@pytest.mark.parametrize('hidden', [0, 8])
def test_from_features_to_a_saved_network(work, tmp_path, hidden):
    "The whole network answers like the head on features, is fine-tuned, saved, loaded and exported"
    from fastai.vision.all import ImageDataLoaders, Resize
    feats = features(work/'images', 'thin_resnet', weights=work/'w.pth', size=32, file=tmp_path/'f.safetensors',
                     progress=False)
    best = compare(feats, work/'classes.csv', 'gp_disto', seeds=1, epochs=2, hidden=hidden, m=8, progress=False).best()
    dls = ImageDataLoaders.from_folder(work/'images', valid_pct=.3, seed=0, item_tfms=Resize(32), num_workers=0, bs=8)
    whole = best.whole_network(dls)
    x = torch.rand(5, 3, 32, 32)
    with torch.no_grad(): assert torch.allclose(whole.model.eval()(x), put_back(best).eval()(x), atol=1e-5)
    with best.no_bar(): learn = best.fine_tune(dls, 1)
    first = lambda o: next(o.model[0][0].parameters()).detach().cpu()
    assert not torch.equal(first(learn), first(whole)), 'the network itself is trained'
    arch = None if not hidden else learn.model[0][0]
    p = load_classifier(save_classifier(learn, tmp_path/'model', arch), body=None if not hidden else arch)
    with torch.no_grad(): assert torch.allclose(p.scores(x), learn.model.cpu().eval()(p.norm(x)), atol=1e-4)
    if not hidden:
        for o in ('onnx', 'onnxscript', 'onnxruntime'):
            pytest.importorskip(o, reason="exporting needs the extra: pip install 'hierproto[onnx]'")
        assert export_onnx(learn, tmp_path/'m.onnx').is_file()

def test_pictures_of_other_classes_are_refused(work, tmp_path):
    from fastai.vision.all import ImageDataLoaders, Resize
    feats = features(work/'images', 'thin_resnet', weights=work/'w.pth', size=32, file=tmp_path/'f.safetensors',
                     progress=False)
    best = compare(feats, work/'classes.csv', 'learnt', seeds=1, epochs=1, progress=False).best()
    write_pictures(tmp_path/'images')
    (tmp_path/'images'/'fir').rename(tmp_path/'images'/'ash')
    dls = ImageDataLoaders.from_folder(tmp_path/'images', valid_pct=.3, item_tfms=Resize(32), num_workers=0, bs=8)
    with pytest.raises(HierarchyError, match='classes differ'): best.fine_tune(dls)


def made_up_pool(n=60, names=CLASSES):
    g = torch.Generator().manual_seed(0)
    y = torch.arange(n) % 4
    return Pool(torch.randn(n, 6, generator=g) + y[:, None], y, list(names))

def test_every_method_of_the_registry_takes_part():
    res = compare(made_up_pool(), TREE, 'all', seeds=1, epochs=1, m=4, progress=False)
    variants = {'gp_disto_leaf', 'gp_disto_fixed_scale', 'gp_disto_squared', 'gp_disto_huber', 'hyperspherical_learnt'}
    assert set(res.rows.method) == {k for k, m in METHODS.items() if m.rule is None} - variants
    assert len(res.rows) == 3*res.rows.method.nunique() and res.rows.er.notna().all()

def test_two_processes_give_the_rows_of_one(tmp_path):
    one, two = (compare(made_up_pool(), TREE, 'learnt', epochs=1, m=4, progress=False, jobs=jobs) for jobs in (1, 2))
    drop = ['seconds', 'train_seconds', 'test_ms']
    pd.testing.assert_frame_equal(one.rows.drop(columns=drop), two.rows.drop(columns=drop), rtol=1e-4)
    assert {*one.costs} == {*two.costs} and all(np.allclose(one.costs[k], two.costs[k], atol=1e-4) for k in one.costs)


def test_labels_without_a_class_are_refused():
    for y in ([-1, *[0, 1]*10], [2, *[0, 1]*10]):
        with pytest.raises(HierarchyError, match='labels must be class numbers from 0 to 1, got .* remove'):
            compare((torch.randn(21, 3), y), Hierarchy.from_paths([*'ab']))


def test_the_order_of_class_names_does_not_matter():
    "The same data under names of letters, and under digits in an order that is neither that of numbers nor of text"
    digits = Hierarchy.from_paths([('round', '0'), ('round', '3'), ('line', '1'), ('line', '2')])
    letters = Hierarchy.from_paths([('round', 'a'), ('round', 'd'), ('line', 'b'), ('line', 'c')])
    pool = made_up_pool()
    vocabs = {'d': ([*'2031'], digits), 'l': (['c', 'a', 'd', 'b'], letters)}
    runs = {k: compare(Pool(pool.x, pool.y, v), h, ['soft_labels', 'hxe'], seeds=1, epochs=1, m=4, progress=False)
            for k, (v, h) in vocabs.items()}
    for k, costs in runs['d'].costs.items(): assert np.allclose(costs, runs['l'].costs[k], atol=1e-4), k
    with pytest.raises(HierarchyError, match='a decision rule of another method'): compare(pool, TREE, 'cross_entropy_crm')


def answers_of(pool, folder, name, **columns):
    "A file of right answers for the images of `pool`, called `name`"
    table = pd.DataFrame(dict(file=pool.names, prediction=[pool.vocab[k] for k in pool.y])).assign(**columns)
    table.to_csv(folder/name, index=False)
    return folder/name


def test_a_file_that_is_called_like_a_method_does_not_replace_it(tmp_path):
    pool = made_up_pool()
    pool.names = [f'{i}.png' for i in range(60)]
    run = lambda f=None: compare(pool, TREE, 'learnt', seeds=1, epochs=1, m=4, progress=False, out=tmp_path, predictions=f)
    before = run().table().AHC
    for name in ('cross_entropy.csv', 'learnt prototypes.csv'):
        t = run(answers_of(pool, tmp_path, name)).table().AHC
        assert (t[before.index] == before).all()
        assert t[f'{name[:-4]} (yours)', 'argmax'] == 0


def test_your_own_answers_need_no_target_but_must_not_contradict_the_data(tmp_path):
    pool = made_up_pool()
    pool.names = [f'{i}.png' for i in range(60)]
    run = lambda f: compare(pool, TREE, 'learnt', seeds=1, epochs=1, m=4, progress=False, out=tmp_path, predictions=f)
    assert run(answers_of(pool, tmp_path, 'mine.csv')).table().AHC['mine', 'argmax'] == 0
    labels = [pool.vocab[k] for k in pool.y.roll(1)]
    with pytest.raises(HierarchyError, match="the target of '0.png' is .*, but the image is in"):
        run(answers_of(pool, tmp_path, 'mine.csv', target=labels))


def test_an_empty_group_is_an_error(tmp_path):
    (tmp_path/'g.csv').write_text('file,group\na.png,x\nb.png,\n')
    with pytest.raises(HierarchyError, match='row 2: the cell is empty'): read_groups(tmp_path/'g.csv', ['a.png', 'b.png'])


def test_no_image_is_tested_by_a_model_that_has_seen_it(monkeypatch):
    "Neither in training, nor in the choice of settings"
    from hierproto import compare as module
    pool, seen = made_up_pool(), []
    pool.x[:, 0, 0] = torch.arange(60) # a mark
    marks = lambda x: {*x[:, 0, 0].long().tolist()}
    train, scores, choose = module.train_head, module.head_scores, module._choose
    def traced(part, *args, **kwargs):
        learn = train(part, *args, **kwargs)
        learn.marks = marks(part[0])
        return learn
    def checked(learn, x):
        assert not learn.marks & marks(x), 'tested on images of the training'
        seen.append((len(learn.marks), marks(x)))
        return scores(learn, x)
    monkeypatch.setattr(module, 'train_head', traced)
    monkeypatch.setattr(module, 'head_scores', checked)
    compare(pool, TREE, 'learnt', seeds=1, rules='argmax', epochs=1, m=4, progress=False)
    final = [m for n, m in seen if n == 48]
    assert len(final) == 2*5 and sorted(sum(map(list, final[:5]), [])) == [*range(60)], 'each image is tested once'
    assert all(n == 36 for n, _ in seen if n != 48), 'choices leave out two folds'


def test_the_plain_loop_gives_the_results_of_a_learner(monkeypatch):
    from hierproto import compare as module
    run = partial(compare, made_up_pool(), TREE, 'hxe,gp_disto,deep_ncm', seeds=1, epochs=1, m=4, progress=False)
    quick, train = run(), module.train_head
    monkeypatch.setattr(module, 'train_head', partial(train, plain=False))
    usual = run()
    assert {*quick.costs} == {*usual.costs} and all(np.array_equal(quick.costs[k], usual.costs[k]) for k in quick.costs)
    assert quick.rows.run_id.equals(usual.rows.run_id) and quick.rows.nll.equals(usual.rows.nll)


def test_a_feature_that_is_not_a_number_is_named():
    pool = made_up_pool()
    pool.x[7] = float('nan')
    with pytest.raises(ValueError, match='the input: 1 of .* samples of the batch contain NaN'):
        compare(pool, TREE, 'learnt', seeds=1, epochs=1, m=4, progress=False)


@pytest.mark.skipif(not hasattr(os, 'killpg'), reason='needs POSIX')
@pytest.mark.parametrize('sig', [signal.SIGKILL, signal.SIGTERM], ids=['kill', 'terminate'])
def test_a_killed_comparison_leaves_nothing_behind(sig, tmp_path):
    "Workers end, the files that joblib shares with them disappear, every row is whole, and a repeat goes on"
    out, shared = tmp_path/'out', tmp_path/'shared'
    code = f"""
import torch
from hierproto.compare import Pool, compare
from hierproto.hierarchy import Hierarchy
y = torch.arange(4000)%4
x = torch.randn(4000, 256, generator=torch.Generator().manual_seed(0))
compare(Pool(x, y, [*'abcd']), Hierarchy.from_paths([*'abcd']), 'learnt,fixed', seeds=99, epochs=1, jobs=2,
        out={str(out)!r}, progress=False)"""
    shared.mkdir()
    env = os.environ | dict(JOBLIB_TEMP_FOLDER=str(shared), TMPDIR=str(shared))
    start = lambda: subprocess.Popen([sys.executable, '-W', 'ignore', '-c', code], env=env)
    ids = []
    for _ in range(2): # the second one continues what the first one left
        main = start()
        wait_for(lambda: len(finished(out/'comparison.csv')) > len(ids), 600)
        assert any(shared.rglob('*.pkl'))
        started = [o for o in processes() if str(shared) in environment(o)]
        assert sum('LokyProcess' in command(o) or 'loky' in command(o) for o in started) >= 2
        main.send_signal(sig)
        assert main.wait(60) == -sig
        wait_for(lambda: not any(str(shared) in environment(o) for o in processes()), 120)
        assert not [o for o in shared.rglob('*') if o.is_file()]
        with warnings.catch_warnings():
            warnings.simplefilter('error') # a torn row is a warning
            rows = read_rows(out/'comparison.csv')
        kept = read_costs(out/'comparison.npz')
        assert rows.run_id.is_unique and {*rows.run_id} <= {*kept} and rows.run_id[:len(ids)].tolist() == ids
        assert all(len(o) == 4000 and np.isfinite(o).all() for o in kept.values())
        ids = rows.run_id.tolist()

def processes(): return [o for o in Path('/proc').iterdir() if o.name.isdigit()]

def environment(o):
    try: return (o/'environ').read_text(errors='replace')
    except OSError: return ''

def command(o):
    try: return (o/'cmdline').read_text()
    except OSError: return ''

def wait_for(done, seconds):
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, 'waited too long'
        time.sleep(.2)
