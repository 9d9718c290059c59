"Comparison of methods on frozen features: the command, its errors, and from the best head to a whole network"
import re, shutil
from functools import partial

import pandas as pd, pytest, torch

from hierproto.body import embedder
from hierproto.cli import run_command
from hierproto.compare import Pool, compare
from hierproto.features import features, put_back
from hierproto.hierarchy import CostMatrix, Hierarchy, HierarchyError
from hierproto.methods import METHODS
from hierproto.saving import export_onnx, load_classifier, save_classifier
from test_commands import colour_pictures, failed

FAST = ['--arch', 'thin_resnet', '--size', 32, '--seeds', 2, '--epochs', 1, '--jobs', 1]
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
    assert set(rows.method) == {'cross_entropy', 'learnt'} and len(rows) == 2*2*2 and rows.run_id.is_unique
    assert not re.search(r'(src|href)="(?!#|data:)', page) and '<script' not in page and 'thin_resnet' in page
    assert '<th>kingdom</th>' in page and '<th>species</th>' in page, 'levels have the names of the columns'
    file, = cache.glob('*.safetensors')
    stamp = file.stat().st_mtime_ns
    run(work, tmp_path/'out', '--methods', 'learnt')
    again, _ = run(work, tmp_path/'out', '--methods', 'learnt', classes='other.csv')
    assert (len(again) == 16 and again.run_id.is_unique
            and again.iloc[:8].equals(rows)), 'finished runs are kept, another tree has other ids'
    assert [file] == [*cache.iterdir()] and file.stat().st_mtime_ns == stamp, 'features are computed once'
    assert 'Page:' in capsys.readouterr().out


def test_divided_folders_have_an_official_test_set(work, tmp_path, cache):
    write_pictures(tmp_path/'images'/'train')
    write_pictures(tmp_path/'images'/'test', n=3)
    (tmp_path/'classes.csv').write_text((work/'classes.csv').read_text())
    shutil.copy(work/'w.pth', tmp_path)
    rows, page = run(tmp_path, tmp_path/'out', '--methods', 'fixed', '--tune', 'once')
    assert (set(rows.n_train) == {40} and set(rows.n_test) == {12}
            and (rows.groupby('method').settings.nunique() == 1).all())
    assert 'official test set' in page and '2 seeds' in page


BAD = {'arch': (['--arch', 'resnet81'], "did you mean 'resnet18'"), 'weights': (['--weights', 'none.pth'], 'none.pth'),
       'other weights': (['--arch', 'resnet18'], 'does not fit resnet18'),
       'no weights': (['--weights', ''], 'no published weights'),
       'methods': (['--methods', 'learnt,magic'], "unknown method 'magic' in --methods; choose from"),
       'seeds': (['--seeds', 0], '--seeds must be between 1'),
       'epochs': (['--epochs', -1], '--epochs must be between 1'),
       'size': (['--size', 3], '--size must be between 16'), 'jobs': (['--jobs', -2], '--jobs must be between 1'),
       'tune': (['--tune', 'once'], 'needs an official test set'), 'tree': (['--methods', 'hxe'], 'needs a tree')}

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
    assert 'cannot be read' in says(work/'images', 'none.csv')
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
    best = compare(feats, work/'classes.csv', 'gp_disto', seeds=2, epochs=2, hidden=hidden, m=8, progress=False).best()
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
    best = compare(feats, work/'classes.csv', 'learnt', seeds=2, epochs=1, progress=False).best()
    write_pictures(tmp_path/'images')
    (tmp_path/'images'/'fir').rename(tmp_path/'images'/'ash')
    dls = ImageDataLoaders.from_folder(tmp_path/'images', valid_pct=.3, item_tfms=Resize(32), num_workers=0, bs=8)
    with pytest.raises(HierarchyError, match='classes differ'): best.fine_tune(dls)


def test_every_method_of_the_registry_takes_part():
    g = torch.Generator().manual_seed(0)
    y = torch.arange(60) % 4
    pool = Pool(torch.randn(60, 6, generator=g) + y[:, None], y, list(CLASSES))
    res = compare(pool, TREE, seeds=2, epochs=1, m=4, progress=False)
    assert set(res.rows.method) == {k for k, m in METHODS.items() if m.rule is None}
    assert len(res.rows) == 4*res.rows.method.nunique() and res.rows.er.notna().all()

def test_two_processes_give_the_rows_of_one(tmp_path):
    y = torch.arange(60) % 4
    pool = Pool(torch.randn(60, 6) + y[:, None], y, list(CLASSES))
    one, two = (compare(pool, TREE, 'learnt', seeds=2, epochs=1, m=4, progress=False,
                        jobs=jobs).rows.drop(columns='seconds') for jobs in (1, 2))
    pd.testing.assert_frame_equal(one, two, rtol=1e-4)
