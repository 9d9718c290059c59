"One way to find, open and recognise images, for every reader of the library"
import os, shutil, struct, zlib
from pathlib import Path
import numpy as np, pytest, torch
from PIL import Image
from fastai.vision.all import ImageDataLoaders, Resize
from hierproto.all import *
from hierproto.features import read_features
from hierproto.cli import fit
from hierproto.images import ImageError, file_digests, image_table, image_tensor, label_counts, read_image
from hierproto.saving import ModelError
from hierproto.hierarchy import HierarchyError


def write(folder, n=6, size=32, seed=0):
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(n): Image.fromarray(rng.integers(0, 256, (size, size, 3), dtype=np.uint8)).save(folder/f'{i}.bmp')
    return folder

@pytest.fixture
def images(tmp_path):
    for k, o in enumerate('abc'): write(tmp_path/'images'/o, seed=k)
    return tmp_path/'images'

def same_stats(a, b):
    "Swap the contents of the files `a` and `b`, which keep their times"
    for f in (a, b): assert a.stat().st_size == b.stat().st_size
    was, (x, y) = [f.stat() for f in (a, b)], (a.read_bytes(), b.read_bytes())
    a.write_bytes(y), b.write_bytes(x)
    for f, s in zip((a, b), was): os.utime(f, ns=(s.st_atime_ns, s.st_mtime_ns))

def feats(source, tmp_path, **kw):
    kw = dict(dict(file=tmp_path/'f.safetensors'), **kw)
    torch.manual_seed(0) # of the network
    return features(source, 'convnet', pretrained=False, size=32, progress=False, **kw)

# --- stale files ---
def test_features_of_two_folders_with_equal_names_sizes_and_times(images, tmp_path):
    "Archives that can be reproduced give every file the same time: the features must still be those of the folder"
    shutil.copytree(images, tmp_path/'other')
    for k, o in enumerate('abc'): write(tmp_path/'other'/o, seed=k+10)
    for f in [*images.rglob('*.bmp'), *(tmp_path/'other').rglob('*.bmp')]: os.utime(f, (1, 1))
    a = feats(images, tmp_path).train_ds
    b = feats(tmp_path/'other', tmp_path).train_ds
    assert a.items == b.items and not torch.equal(a.x, b.x)

@pytest.mark.parametrize('loaders', [False, True])
def test_features_notice_swapped_images(images, tmp_path, loaders):
    "Two files of equal size change places and keep their times"
    def get():
        kw = dict(valid_pct=.5, seed=0, bs=4, num_workers=0, item_tfms=Resize(32))
        return feats(ImageDataLoaders.from_folder(images, **kw) if loaders else images, tmp_path)
    before = {Path(n).parts[-2:]: x for ds in [o.dataset for o in get().loaders] for n, x in zip(ds.items, ds.x)}
    same_stats(images/'a'/'2.bmp', images/'b'/'2.bmp')
    after = {Path(n).parts[-2:]: x for ds in [o.dataset for o in get().loaders] for n, x in zip(ds.items, ds.x)}
    assert not torch.equal(before['a', '2.bmp'], after['a', '2.bmp'])
    assert torch.equal(before['c', '2.bmp'], after['c', '2.bmp'])

def test_resume_notices_swapped_images(images, tmp_path, monkeypatch):
    (tmp_path/'classes.csv').write_text('class\na\nb\nc\n')
    import hierproto.fit as F
    args = dict(images=str(images), classes=str(tmp_path/'classes.csv'), out=str(tmp_path/'m'), epochs=2, arch='convnet',
                size=32, quiet=True)
    with monkeypatch.context() as m:
        m.setattr(F, '_held_back', lambda *_, **__: 1/0)
        with pytest.raises(ZeroDivisionError): fit(**args)
    same_stats(images/'a'/'2.bmp', images/'b'/'2.bmp')
    with pytest.raises(ModelError, match='images'): fit(**args, resume=True)

def test_a_flipped_byte_in_stored_features(images, tmp_path):
    want = feats(images, tmp_path).train_ds.x.clone()
    f = tmp_path/'f.safetensors'
    data = bytearray(f.read_bytes())
    data[-100] ^= 1
    f.write_bytes(data)
    with pytest.raises(ValueError, match='damaged'): read_features(f)
    assert torch.equal(feats(images, tmp_path).train_ds.x, want)
    assert torch.equal(read_features(f).train_ds.x, want)

def test_features_of_another_program_in_the_same_file(images, tmp_path, monkeypatch):
    "Between the check of the key and the reading, another program writes its own features"
    import hierproto.features as F
    write(tmp_path/'other'/'x'), write(tmp_path/'other'/'y')
    mine, f = feats(images, tmp_path).train_ds.x, tmp_path/'f.safetensors'
    feats(tmp_path/'other', tmp_path, file=tmp_path/'g.safetensors')
    header = F._header
    def too_late(file):
        res = header(file)
        shutil.copy(tmp_path/'g.safetensors', f)
        return res
    monkeypatch.setattr(F, '_header', too_late)
    dls = feats(images, tmp_path)
    assert list(dls.vocab) == ['a', 'b', 'c'] and torch.equal(dls.train_ds.x, mine)

def test_digests_are_remembered_only_while_files_stay(tmp_path, monkeypatch):
    import hierproto.images as I
    monkeypatch.setattr(I, 'fastai_cfg', lambda: type('', (), dict(path=staticmethod(lambda _: tmp_path/'data'))))
    f = tmp_path/'f'
    f.write_bytes(b'1'*1000)
    first = file_digests([f])
    later = I.time.time()+5
    monkeypatch.setattr(I.time, 'time', lambda: later)
    assert file_digests([f, f]) == first*2
    with monkeypatch.context() as m:
        m.setattr(I, 'file_digest', lambda f: 1/0)
        assert file_digests([f]) == first
    f.write_bytes(b'2'*1000)
    os.utime(f, (1, 1))
    assert file_digests([f]) != first
    (tmp_path/'data'/'hierproto'/'digests.sqlite').write_bytes(b'damaged')
    assert file_digests([f]) != first

# --- one opener ---
def png16(a):
    "The array `a` (H, W[, C]) of 16 bits as the bytes of a PNG file"
    def chunk(t, d): return struct.pack('>I', len(d)) + t + d + struct.pack('>I', zlib.crc32(t+d))
    kind = {2: 0, 3: {3: 2, 4: 6}.get(a.shape[-1])}[a.ndim]
    rows = b''.join(b'\0' + o.astype('>u2').tobytes() for o in a)
    head = struct.pack('>IIBBBBB', a.shape[1], a.shape[0], 16, kind, 0, 0, 0)
    return b'\x89PNG\r\n\x1a\n' + chunk(b'IHDR', head) + chunk(b'IDAT', zlib.compress(rows)) + chunk(b'IEND', b'')

@pytest.mark.parametrize('shape,readable', [((32, 32), False), ((32, 32, 3), True), ((32, 32, 4), True)])
def test_every_reader_takes_or_refuses_the_same_files(images, tmp_path, shape, readable):
    "16 bits per channel: colours are reduced to 8 bits, greys have no known range"
    f = images/'a'/'deep.png'
    f.write_bytes(png16(np.full(shape, 40000, np.uint16)))
    def reads(get):
        try: get()
        except ImageError: return False
        return True
    assert [reads(lambda: read_image(f)), reads(lambda: image_tensor(f)), reads(lambda: read_image(f.read_bytes()))] == [readable]*3
    with pytest.warns(UserWarning) if not readable else __import__('contextlib').nullcontext():
        bad = feats(images, tmp_path).features['unreadable']
    assert bad == ([] if readable else ['a/deep.png'])
    if readable: assert np.array(read_image(f))[0, 0].tolist() == [156]*3

def test_arrays_of_other_types_are_refused():
    for dtype in (np.uint16, np.float32, bool):
        with pytest.raises(ImageError, match='must contain bytes'): read_image(np.zeros((4, 4, 3), dtype))

# --- labels at any level ---
TREE = Hierarchy.from_paths([('x', 'a'), ('x', 'b'), ('y', 'c'), ('y', 'd')])

def test_images_in_the_folder_of_a_group_have_its_label(tmp_path, capsys):
    for o in ('x/a', 'x/b', 'y/c', 'y/d', 'x', 'y'): write(tmp_path/'images'/o, 5)
    t = image_table(tmp_path/'images', TREE)
    assert t.label.value_counts().to_dict() == dict.fromkeys('abcdxy', 5)
    assert label_counts(t.label, TREE) == '20 images labelled with a class, 10 images with a group (level 1)'
    dls = feats(tmp_path/'images', tmp_path, h=TREE)
    assert '10 images with a group' in capsys.readouterr().out
    h = TREE.align(dls.vocab)
    for ds in [o.dataset for o in dls.loaders]:
        for name, y in zip(ds.items, ds.y.tolist()): assert Path(name).parent.name == h.nodes[y][-1]

def test_a_misspelt_class_in_the_folder_of_its_group_stays_an_error(tmp_path):
    for o in ('x/a', 'x/bb', 'y/c', 'y/d', 'x'): write(tmp_path/'images'/o, 5)
    with pytest.raises(HierarchyError, match="no class has the name of the folder 'x/bb'"): image_table(tmp_path/'images', TREE)

def test_group_labels_need_every_class(tmp_path):
    for o in ('x/a', 'x/b', 'y/c', 'y'): write(tmp_path/'images'/o, 5)
    with pytest.raises(HierarchyError, match="no images to learn from for 'd'"): feats(tmp_path/'images', tmp_path, h=TREE)

def test_the_key_of_features_covers_all_labels():
    "Labels in the middle of a long list, which `repr` of a tensor leaves out"
    import hierproto.features as F
    body = torch.nn.Flatten()
    body.arch = None
    a, b = torch.zeros(5000).long(), torch.zeros(5000).long()
    b[2500] = 1
    keys = {F._record(body, dict(train=F._Split(None, y, [], [])), ['x', 'y'], 32, False)['key'] for y in (a, b)}
    assert len(keys) == 2

def test_threads_write_one_file(tmp_path):
    "Every thread has its own temporary file; the last whole one stays"
    from concurrent.futures import ThreadPoolExecutor
    from hierproto.files import write_whole
    def write(k): write_whole(tmp_path/'f', lambda f: f.write(bytes([k])*100_000))
    with ThreadPoolExecutor(8) as pool: list(pool.map(write, range(64)))
    data = (tmp_path/'f').read_bytes()
    assert len(data) == 100_000 and len({*data}) == 1 and [o.name for o in tmp_path.iterdir()] == ['f']
