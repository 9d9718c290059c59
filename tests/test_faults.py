("What breaks around a program: disks that are full, folders that cannot be written, files that are cut off, "
 "downloads that stop, files that would like to run code")
import errno, http.server, io, os, pickle, re, subprocess, sys, tempfile, threading, warnings
from pathlib import Path
import numpy as np, pandas as pd, pytest, torch
from hierproto.paper.data.common import cached
from hierproto.cli import sweep
from hierproto.paper.sweeps import run_claimed
from hierproto.hierarchy import CostMatrix, Hierarchy, HierarchyError
from hierproto.paper.recipes import resolve
from hierproto.files import add_row, finished, read_rows, write_whole
from hierproto.paper.runs import results_file, run_file, train_run

COLUMNS = ['run_id', 'er', 'note']
def row(i): return dict(run_id=f'{i:012x}', er=i/7, note=f'a, "{i}"')


# --- rows ---
@pytest.mark.parametrize('cut', range(0, 80, 3))
def test_a_file_cut_off_anywhere(cut, tmp_path):
    "Whole rows stay, a torn one is made again, and none is doubled"
    f = tmp_path/'rows.csv'
    for i in range(3): add_row(f, row(i), COLUMNS)
    data = f.read_bytes()
    f.write_bytes(data[:max(0, len(data)-cut)])
    kept = data[:max(0, len(data)-cut)].count(b'\n') - 1
    assert len(finished(f)) == max(0, kept)
    for i in range(3): add_row(f, row(i), COLUMNS)
    assert f.read_bytes() == data


@pytest.mark.parametrize('torn',
                         ['000000000001', '000000000001,0.1', '000000000001,0.14,"a, ', '000000000001,0.14,"a, ""1'])
def test_a_line_torn_in_the_middle(torn, tmp_path):
    "It is named, does not count as finished, and its run is done again; its neighbours stay"
    f = tmp_path/'rows.csv'
    for i in range(3): add_row(f, row(i), COLUMNS)
    lines = f.read_text().splitlines()
    f.write_text('\n'.join([*lines[:2], torn, *lines[3:], '']))
    assert finished(f) == {row(0)['run_id'], row(2)['run_id']}
    with pytest.warns(UserWarning, match="line 3: the row of run '000000000001' is torn"): assert len(read_rows(f)) == 2
    assert add_row(f, row(1), COLUMNS) and not add_row(f, row(1), COLUMNS)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        df = read_rows(f)
    assert sorted(df.run_id) == [row(i)['run_id'] for i in range(3)] and df.er.notna().all()


@pytest.mark.parametrize('char', ['\n', '\r', '\r\n', '\u2028', '\u0085', '\f', '\v', '\x1c'])
def test_a_folder_whose_name_has_a_line_break(char, tmp_path):
    "Its row is one row: finished, not written again, and read as it was written"
    f, name = tmp_path/'rows.csv', f'my{char}folder, "{char}"'
    rows = [dict(run_id=f'{i:012x}', er=i/7, note=name if i != 1 else '') for i in range(3)]
    for _ in range(2): added = [add_row(f, r, COLUMNS) for r in rows]
    assert not any(added) and finished(f) == {r['run_id'] for r in rows}
    df = read_rows(f)
    assert df.note[0] == df.note[2] == name and len(df) == 3
    with open(f, 'a') as o: o.write('000000000009,0.1,"torn')
    assert finished(f) == {r['run_id'] for r in rows} and add_row(f, row(9), COLUMNS) and len(read_rows(f)) == 4


def test_a_table_of_somebody_else_is_left_alone(tmp_path):
    f = tmp_path/'comparison.csv'
    f.write_text('group,class\npet,cat\n')
    for use in (lambda: add_row(f, row(1), COLUMNS), lambda: finished(f), lambda: read_rows(f)):
        with pytest.raises(ValueError, match="comparison.csv is not a results file of hierproto: its first column is 'group'"): use()
    assert f.read_text() == 'group,class\npet,cat\n'


SAVE = '''
import resource, sys, torch
from hierproto.files import write_whole
path, kind, n, limit = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
tensor = torch.zeros(n)
if kind == 'torch': write = lambda f: torch.save(dict(model=tensor), f)
else:
    from safetensors.torch import save
    write = lambda f: f.write(save(dict(model=tensor)))
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try: write_whole(path, write)
except OSError as e: print(e)
'''

@pytest.mark.parametrize('kind', ['torch', 'safetensors'])
@pytest.mark.parametrize('n', [100, 10_000, 1_000_000])
@pytest.mark.parametrize('limit', [0, 400])
def test_models_on_a_full_disk_end_in_one_line(kind, n, limit, tmp_path):
    res = subprocess.run([sys.executable, '-W', 'ignore', '-c', SAVE, str(tmp_path/'m'), kind, str(n), str(limit)],
                         capture_output=True, text=True, timeout=300)
    assert 'the disk is full' in res.stdout and len(res.stdout.splitlines()) == 1, res.stdout + res.stderr[-500:]
    assert not [*tmp_path.iterdir()]


FULL = '''
import resource, signal, sys
from hierproto.files import add_row, finished
path, limit = sys.argv[1], int(sys.argv[2])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
add_row(path, dict(run_id='a'*12, er=.5), ['run_id', 'er'])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try: done = add_row(path, dict(run_id='b'*12, er=.25), ['run_id', 'er'])
except OSError as e: print('refused', e.errno); sys.exit()
print('added' if 'b'*12 in finished(path) else 'lost')
'''

def test_a_disk_that_is_full_in_the_middle_of_a_row(tmp_path):
    "A row of which only a part could be written counts as an error, not as a row"
    f = tmp_path/'rows.csv'
    # the header, one row of seventeen bytes, and five bytes of the next
    res = subprocess.run([sys.executable, '-W', 'ignore', '-c', FULL, str(f), str(len('run_id,er\n') + 17 + 5)],
                         capture_output=True, text=True, timeout=300)
    assert res.stdout.startswith('refused'), res.stdout + res.stderr[-500:]
    assert finished(f) == {'a'*12}
    assert (add_row(f, dict(run_id='b'*12, er=.25), ['run_id', 'er'])
            and read_rows(f).run_id.tolist() == ['a'*12, 'b'*12])


def no_space(*_): raise OSError(errno.ENOSPC, 'No space left on device')

def test_a_disk_that_is_full_leaves_the_old_file(tmp_path):
    f = tmp_path/'state.ckpt'
    write_whole(f, lambda o: o.write(b'old'))
    with pytest.raises(OSError, match='No space left'): write_whole(f, lambda o: (o.write(b'ne'), no_space()))
    assert f.read_bytes() == b'old' and list(tmp_path.iterdir()) == [f]


def test_many_writers(tmp_path):
    "Eight processes that add the same fifty rows, each in its own order"
    f, pids = tmp_path/'rows.csv', []
    for k in range(8):
        if not (pid := os.fork()):
            order = np.random.default_rng(k).permutation(50)
            n = sum(add_row(f, row(int(i)), COLUMNS) for i in order)
            (tmp_path/f'{k}.n').write_text(str(n))
            os._exit(0)
        pids.append(pid)
    assert all(os.waitpid(p, 0)[1] == 0 for p in pids)
    df = read_rows(f)
    assert (sorted(df.run_id) == [row(i)['run_id'] for i in range(50)]
            and sum(int(o.read_text()) for o in tmp_path.glob('*.n')) == 50)
    assert all(df.set_index('run_id').note[row(i)['run_id']] == row(i)['note'] for i in range(50))


# --- runs ---
def small(**kw): return resolve('digits', 'gp_disto', 'smoke', **{**dict(epochs=2, n_train=96, n_test=64), **kw})

@pytest.fixture(scope='module')
def straight(tmp_path_factory):
    torch.set_num_threads(1)
    return train_run(small(), tmp_path_factory.mktemp('straight'))

def stop_after(epochs):
    from fastai.callback.core import Callback
    class Stop(Callback):
        order = 70
        def after_epoch(self):
            if self.epoch == epochs-1: raise KeyboardInterrupt
    return Stop()

def interrupted(out):
    with pytest.raises(KeyboardInterrupt): train_run(small(), out, cbs=[stop_after(1)])
    return run_file(small(), out, 'ckpt')

def test_an_interrupted_run_goes_on(straight, tmp_path):
    assert interrupted(tmp_path).exists()
    got = train_run(small(), tmp_path)
    assert (got['er'], got['ahc'], got['loss']) == (straight['er'], straight['ahc'], straight['loss'])

@pytest.mark.parametrize('damage', ['cut', 'empty', 'nonsense'])
def test_a_damaged_checkpoint(damage, straight, tmp_path):
    "The run begins again, or says which file is damaged and what to do"
    f = interrupted(tmp_path)
    data = f.read_bytes()
    f.write_bytes(dict(cut=data[:len(data)//2], empty=b'', nonsense=b'nonsense'*100)[damage])
    try: got = train_run(small(), tmp_path)
    except Exception as e:
        assert f.name in str(e), f'{type(e).__name__} does not name the file: {str(e)[:200]}'
        return
    assert ((got['er'], got['ahc']) == (straight['er'], straight['ahc'])
            and len(read_rows(results_file(small(), tmp_path))) == 1)

def said_by_another(f):
    "What `f` raises in a process of its own, which is not root's: nothing is read-only for root"
    r, w = os.pipe()
    if not (pid := os.fork()):
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            f()
            said = 'nothing'
        except BaseException as e: said = f'{type(e).__name__}: {e}'
        os.write(w, said.encode())
        os._exit(0)
    os.close(w)
    with os.fdopen(r) as o: said = o.read()
    os.waitpid(pid, 0)
    return said

@pytest.mark.parametrize('where', ['a file', 'read-only', 'read-only rows'])
def test_a_folder_that_cannot_be_written(where, monkeypatch):
    "Said before the training, not after it"
    import hierproto.paper.sweeps as E
    monkeypatch.setattr(E, 'train_run', lambda *a, **k: pytest.fail('it trains'))
    with tempfile.TemporaryDirectory() as d:  # tmp_path is closed to others
        os.chmod(d, 0o755)
        out = Path(d)/'out'
        if where == 'a file': out.write_text('')
        else:
            out.mkdir()
            if where == 'read-only rows':
                add_row(results_file(small(), out), {'run_id': 'f'*12, 'er': .5}, ['run_id', 'er'])
            out.chmod(0o555)
        said = said_by_another(lambda: run_claimed(small(), out))
        if where != 'a file': out.chmod(0o755)
        if where == 'read-only rows': assert finished(results_file(small(), out)) == {'f'*12}
    assert (re.match(f"({'NotADirectory|FileExists' if where == 'a file' else 'Permission'})Error", said)
            and str(out) in said), said

def test_a_disk_that_is_full_during_a_run(straight, tmp_path, monkeypatch):
    "The run fails, is reported, and finishes once there is room; rows that were there stay"
    import hierproto.paper.runs as R
    add_row(results_file(small(), tmp_path), {'run_id': 'f'*12, 'er': .5}, R.COLUMNS)
    with monkeypatch.context() as m:
        m.setattr(R, 'write_whole', no_space)
        assert run_claimed(small(), tmp_path) == 'failed'
        assert 'No space left' in run_file(small(), tmp_path, 'log').read_text()
    assert finished(results_file(small(), tmp_path)) == {'f'*12}
    assert run_claimed(small(), tmp_path) == 'finished'
    assert len(finished(results_file(small(), tmp_path))) == 2 and not list(tmp_path.rglob('*.claim'))


@pytest.mark.parametrize('claim', ['', '{', 'null', '[]', '{"here": 1}', '\udcff'])
def test_a_malformed_claim_is_dead(claim, tmp_path, monkeypatch):
    import hierproto.paper.sweeps as E
    monkeypatch.setattr(E, 'train_run', lambda *a, **k: None)
    f = run_file(small(), tmp_path, 'claim')
    f.parent.mkdir(parents=True)
    f.write_bytes(claim.encode(errors='surrogateescape'))
    assert run_claimed(small(), tmp_path) == 'finished' and not f.exists()

def test_a_disk_without_room_for_the_log(tmp_path, monkeypatch, capsys):
    "The run fails with its reason on the error stream, not with another traceback"
    import hierproto.paper.sweeps as E
    monkeypatch.setattr(E, 'train_run', lambda *a, **k: no_space())
    real = E.write_whole
    monkeypatch.setattr(E, 'write_whole',
                        lambda path, write: no_space() if path.suffix == '.log' else real(path, write))
    with pytest.raises(SystemExit, match='no log could be written'):
        sweep('digits', 'gp_disto', 'smoke', 1, out=str(tmp_path))
    assert 'No space left' in capsys.readouterr().err


# --- data ---
@pytest.mark.parametrize('damage', ['cut', 'empty', 'nonsense'])
def test_a_damaged_cache_is_made_again(damage, tmp_path):
    f, value = tmp_path/'x.pt', torch.arange(1000.)
    cached(f, lambda: value)
    data = f.read_bytes()
    f.write_bytes(dict(cut=data[:len(data)//2], empty=b'', nonsense=b'nonsense'*100)[damage])
    assert torch.equal(cached(f, lambda: value), value) and f.read_bytes() == data

def test_a_cache_on_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, 'save', no_space)
    assert torch.equal(cached(tmp_path/'x.pt', lambda: torch.ones(3)), torch.ones(3)) and not list(tmp_path.iterdir())

def test_a_damaged_picture_is_named(tmp_path, monkeypatch):
    from hierproto.paper.data.mnist import mnist
    from hierproto.paper.toys import toy_data
    path = toy_data('mnist', tmp_path)
    f = sorted(path.rglob('*.png'))[7]
    f.write_bytes(f.read_bytes()[:60])
    monkeypatch.setattr('hierproto.images.fastai_cfg',
                        lambda: type('Cfg', (), dict(path=lambda self, o: tmp_path/'cache'))())
    with pytest.raises(Exception, match=f.name): mnist(source=path)


class Half(http.server.BaseHTTPRequestHandler):
    "Announces an archive and sends the first half of it, until `whole` is set"
    archive, whole = b'', False
    def do_GET(self):
        self.send_response(200)
        self.send_header('Content-Length', str(len(self.archive)))
        self.end_headers()
        self.wfile.write(self.archive if type(self).whole else self.archive[:len(self.archive)//2])
    def log_message(self, *_): pass

def test_a_download_that_stops_half_way(tmp_path, monkeypatch):
    "An error, nothing that looks like data, and the next attempt succeeds"
    import tarfile
    from fastai.data.external import untar_data
    monkeypatch.setattr('fastai.data.external.fastai_cfg', lambda: type('Cfg', (dict,), dict(
        path=lambda self, o: tmp_path/o, config_path=tmp_path, __missing__=lambda self, k: str(tmp_path/k)))())
    buf, noise = io.BytesIO(), np.random.default_rng(0).bytes(200_000)
    with tarfile.open(fileobj=buf, mode='w:gz') as t:
        for i in range(4):
            info = tarfile.TarInfo(f'toyset/train/{i}.bin')
            info.size = len(noise)
            t.addfile(info, io.BytesIO(noise))
    Half.archive, Half.whole = buf.getvalue(), False
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Half)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f'http://127.0.0.1:{server.server_port}/toyset.tgz'
    get = lambda: untar_data(url, base=tmp_path)
    try:
        with pytest.raises(Exception): get()
        Half.whole = True
        path = get()
        assert len(list(Path(path).rglob('*.bin'))) == 4
    finally: server.shutdown()


# --- trust ---
class Bomb:
    def __init__(self, flag): self.flag = flag
    def __reduce__(self): return open, (str(self.flag), 'w')

def test_checkpoints_and_caches_run_no_code(straight, tmp_path):
    flag = tmp_path/'flag'
    f = interrupted(tmp_path)
    for bomb in (lambda: torch.save(Bomb(flag), f), lambda: f.write_bytes(pickle.dumps(Bomb(flag)))):
        bomb()
        try: train_run(small(), tmp_path)
        except Exception: pass
        assert not flag.exists()
    torch.save(Bomb(flag), tmp_path/'x.pt')
    assert torch.equal(cached(tmp_path/'x.pt', lambda: torch.ones(2)), torch.ones(2)) and not flag.exists()

def test_predictions_run_no_code(tmp_path):
    "The report reads arrays of numbers and names, never objects"
    from hierproto.paper.report import confusions
    flag = tmp_path/'flag'
    (tmp_path/'digits_smoke').mkdir()
    np.savez(tmp_path/'digits_smoke'/'r.npz', vocab=np.array([Bomb(flag)], dtype=object), pred=np.array([0]),
             targ=np.array([0]))
    with pytest.raises(ValueError): confusions(pd.DataFrame([dict(data='digits', tier='smoke', run_id='r')]), tmp_path)
    assert not flag.exists()

def test_names_in_a_report_are_text():
    "A class name does not end a table's cell, nor does it become HTML"
    from hierproto.pages import markdown_table
    names = ['a|b', '<script>alert(1)</script>']
    text = markdown_table(pd.DataFrame({'pair': names, 'change %': [-50., 20.]}, index=pd.Index(names, name='class')))
    lines = text.splitlines()
    assert '<script>' not in text and len({len(l.replace(r'\|', '').split('|')) for l in lines}) == 1, text

def test_names_in_a_picture_are_text(tmp_path):
    "Neither formulas nor HTML"
    import matplotlib
    matplotlib.use('agg')
    import matplotlib.pyplot as plt
    from hierproto.interpret import HierInterpretation
    h = Hierarchy.from_paths([('a $x', r'$\frac$'), ('a $x', 'b_{'), ('<b>', '$$'),
                              ('<b>', '\u05d7\u05ea\u05d5\u05dc')])
    for draw in (h.plot_sunburst, h.plot_costs, CostMatrix(h.costs(), h.leaves).plot_costs):
        draw().figure.savefig(tmp_path/'x.png')
        plt.close('all')
    y = torch.tensor([0, 1, 2, 3, 1])
    interp = HierInterpretation.__new__(HierInterpretation)
    interp.__dict__.update(D=h, costs=h.costs(), vocab=h.leaves, targs=y, decoded=y.flip(0),
                           counts=torch.ones(5, dtype=torch.bool))
    interp.plot_confusion_matrix().figure.savefig(tmp_path/'x.png')
    plt.close('all')
    assert ('<b>' not in interp.most_costly().to_html()
            and r'$\frac$' in interp.most_costly().true.tolist() + interp.most_costly().predicted.tolist())

def test_no_archive_is_unpacked_by_the_library():
    "fastai unpacks what it downloads; no module of ours opens an archive"
    import hierproto
    words = ('extractall', 'unpack_archive', 'import tarfile', 'import zipfile')
    for f in Path(hierproto.__file__).parent.rglob('*.py'): assert not any(w in f.read_text() for w in words), f.name


# --- what does not fit ---
def test_a_label_that_is_no_class_stops_a_learner(tmp_path):
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from torch import nn
    from torch.utils.data import TensorDataset
    from hierproto.learner import proto_learner
    h = Hierarchy.from_paths(['a', 'b', 'c'])
    x, y = torch.randn(12, 2), torch.arange(12) % 3
    y[7] = 3
    dls = DataLoaders(*[DataLoader(TensorDataset(x, y), bs=4) for _ in range(2)])
    learn = proto_learner(dls, nn.Linear(2, 4), h, m=4, project=False, pool=False, path=tmp_path)
    with (learn.no_bar(), learn.no_logging(),
          pytest.raises(HierarchyError, match='1 of 4 labels in this batch are not one of the 3 classes')):
        learn.fit(1)

@pytest.mark.parametrize('vocab,said', [(['a', 'b', 'd'], "'d'"), (['a', 'b'], "'c'"), (['a', 'b', 'c', 'c'], "'c'")])
def test_a_vocabulary_of_other_classes_stops_a_learner(vocab, said, tmp_path):
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from torch import nn
    from torch.utils.data import TensorDataset
    from hierproto.learner import proto_learner
    from hierproto.learner import hier_learner
    h = Hierarchy.from_paths(['a', 'b', 'c'])
    dls = DataLoaders(*[DataLoader(TensorDataset(torch.randn(12, 2), torch.arange(12) % 2), bs=4) for _ in range(2)])
    dls.vocab = vocab
    for make in (proto_learner, hier_learner):
        with pytest.raises(HierarchyError, match=said):
            make(dls, nn.Linear(2, 4), h, m=4, project=False, pool=False, path=tmp_path)

def test_an_embedding_of_another_size_stops_a_learner(tmp_path):
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from torch import nn
    from torch.utils.data import TensorDataset
    from hierproto.learner import proto_learner
    h = Hierarchy.from_paths(['a', 'b', 'c'])
    dls = DataLoaders(*[DataLoader(TensorDataset(torch.randn(12, 2), torch.arange(12) % 3), bs=4) for _ in range(2)])
    for wrong in (1, 8):
        learn = proto_learner(dls, nn.Linear(2, wrong), h, m=4, project=False, pool=False, path=tmp_path)
        with learn.no_bar(), learn.no_logging(), pytest.raises(ValueError, match=rf'\(4, {wrong}\) and \(3, 4\)'):
            learn.fit(1)
