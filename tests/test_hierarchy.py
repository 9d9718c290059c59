"What a notebook cannot hold about hierarchies: files broken at random, odd names, another process"
import io, json, os, subprocess, sys, time, tracemalloc, warnings
from pathlib import Path
import pandas as pd, pytest, torch
from hypothesis import given, settings, strategies as st
from hierproto.hierarchy import CostMatrix, Hierarchy, HierarchyError, align_costs, as_costs, named_costs
from hierproto.hierarchy import read_hierarchy
from hierproto.readers import wordnet_senses

quick = settings(max_examples=60, derandomize=True, database=None, deadline=None)
h = Hierarchy.from_paths([('animal', 'mammal', 'cat'), ('animal', 'fish', 'trout'),
                          ('plant', 'oak'), ('animal', 'mammal', 'dog'), ('stone',)], weights={('plant',): 2.5},
                         titles=['a cat', 'a trout', 'an oak', 'a dog', 'a stone'], name='zoo')
readers = dict(csv=Hierarchy.from_csv, json=Hierarchy.from_json, parents=Hierarchy.from_parents,
               costs=lambda f: CostMatrix.from_csv(f, warn=False))
parents = 'node,parent,weight\ncat,mammal,1\ndog,mammal,2\nmammal,animal,1\ntrout,animal,1\nanimal,,\n'
sound = dict(csv=h.to_csv(), json=h.to_json(), parents=parents, costs=CostMatrix(h.costs(), h.leaves).to_csv())


def read(kind, data):
    "Read `data`, which either is a tree or is refused in our own words"
    try: return readers[kind](io.BytesIO(data))
    except HierarchyError as e: assert str(e)


@pytest.mark.parametrize('kind', readers)
def test_sound_files(kind): assert read(kind, sound[kind].encode()) is not None


@pytest.mark.parametrize('kind', readers)
@quick
@given(data=st.binary(max_size=80) | st.text(alphabet='a,"\n\r{}[]:01 \t\ufeff\x00é', max_size=80).map(str.encode))
def test_any_bytes(kind, data): read(kind, data)


@pytest.mark.parametrize('kind', readers)
@quick
@given(data=st.data())
def test_damaged_files(kind, data):
    text = sound[kind].encode()
    a, b = sorted(data.draw(st.tuples(*[st.integers(0, len(text))]*2)))
    piece = data.draw(st.sampled_from([b'', b'"', b',', b'\n', b'{', b'}', b'null', b'nan', b'-1', b'1e999', b'\xff',
                                       b'cat', text[a:b]*2]))
    read(kind, text[:a] + piece + text[b:])


values = st.recursive(st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | st.text(max_size=3),
                      lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(max_size=3), v, max_size=4),
                      max_leaves=12)

@quick
@given(values, values, values)
def test_any_json(tree, titles, weights):
    read('json', json.dumps(tree).encode())
    read('json', json.dumps(dict(format='hierproto-tree-1', tree=tree, titles=titles, weights=weights,
                                 name=titles)).encode())


names = st.text(min_size=1, max_size=6).filter(lambda s: s.strip() and s.isprintable())

@quick
@given(st.lists(st.lists(names, min_size=1, max_size=4).map(tuple), min_size=1, max_size=8, unique=True))
def test_any_names(paths):
    try: t = Hierarchy.from_paths(paths)
    except HierarchyError: return  # a class that is also a group, or two names that are one once tidied
    for back in (Hierarchy.from_csv(io.StringIO(t.to_csv())), Hierarchy.from_json(io.StringIO(t.to_json())),
                 Hierarchy.from_networkx(t.to_networkx())):
        assert back == t and back.leaves == t.leaves


@quick
@given(st.integers(0, 4), st.integers(0, 5))
def test_the_line_is_right(row, at):
    head, *rows = h.to_csv().splitlines()
    twice = rows[:at] + [rows[row]] + rows[at:]
    first, second = [i+2 for i, r in enumerate(twice) if r == rows[row]]
    with pytest.raises(HierarchyError,
                       match=rf'line {second}: the class .* is listed twice \(first: the file, line {first}\)'):
        Hierarchy.from_csv(io.StringIO('\n'.join([head, *twice])))


def test_files_that_are_not_there():
    for read in readers.values():
        with pytest.raises(FileNotFoundError): read('no/such/file')


def test_deep_trees():
    "A chain far deeper than Python's stack"
    t = Hierarchy.from_paths([('a',)*k + ('b',) for k in range(1200)])
    D = t.costs()
    assert D[0, 1199] == 1 + 1200 and D[1199, 0] == t.pair_costs(0, 1199) and D[5, 7] == 4
    assert Hierarchy.from_nested(t.nested()) == t


def test_another_process(tmp_path):
    "A pickled tree is the same tree where hashes are salted otherwise"
    import pickle
    (tmp_path/'h.pkl').write_bytes(pickle.dumps(h))
    code = "import pickle, sys; h = pickle.load(open(sys.argv[1], 'rb')); print(h.fingerprint, h.titles[2], h.name)"
    out = subprocess.run([sys.executable, '-c', code, tmp_path/'h.pkl'], capture_output=True, text=True, check=True)
    assert out.stdout.split(maxsplit=1) == [h.fingerprint, 'an oak zoo\n']


def test_trees_travel_with_the_package():
    assert {n: Hierarchy.named(n).fingerprint
            for n in ('mnist_visual', 'cifar100', 'nyudv2', 'inat19', 'french_crops')} == dict(
        mnist_visual='bf3b8bf2122d', cifar100='9d1be4e13668', nyudv2='80d28cab8f5f', inat19='42d7fbbc0aa6',
        french_crops='63a1cfe7df73')


# --- what is meant, or a remedy ---
frame = pd.DataFrame([['animal', 'dog'], ['animal', 'cat'], ['stone', None]], columns=['group', 'class'])
meant = [('animal', 'dog'), ('animal', 'cat'), ('stone',)]

def test_arrays_and_frames_become_the_tree_that_is_meant():
    for t in (Hierarchy.from_paths(frame.values), Hierarchy(frame.values), Hierarchy.from_frame(frame),
              Hierarchy.from_paths(['animal/dog', 'animal/cat', 'stone'], sep='/')):
        assert t.nodes[:3] == meant
    assert Hierarchy(['dog', 'cat']).nodes[:2] == [('dog',), ('cat',)]


@pytest.mark.parametrize('wrong, remedy', [
    (frame, 'from_frame'), ({'animal': ['dog']}, 'from_nested'), (['animal/dog', 'animal/cat'], "sep='/'"),
    ({'dog', 'cat'}, 'a list of paths'), ('dog', 'a list of paths'), ([[['animal', 'dog']]], 'text or a number'),
    (7, 'a list of paths')])
def test_garbage_is_refused_with_the_remedy(wrong, remedy):
    for make in (Hierarchy, Hierarchy.from_paths):
        with pytest.raises(HierarchyError) as e: make(wrong)
        assert remedy in str(e.value)


def test_named_trees_cannot_be_changed_for_everyone():
    t = Hierarchy.named('mnist_visual')
    t.leaves[0] = 'zero'
    t.nodes[0] = ('zero',)
    t.parent[0] = 0
    again = Hierarchy.named('mnist_visual')
    assert again.leaves[0] == '0' and again.nodes[0][-1] == '0' and again.parent[0] != 0


def test_a_class_in_two_groups_names_both_lines():
    t = Hierarchy.from_csv(io.StringIO('group,class\npet,cat\npet,cow\nwild,cat\n'))
    with pytest.raises(HierarchyError) as e: t.align(['cat', 'cow'])
    assert "'pet/cat' (the file, line 2)" in str(e.value) and "'wild/cat' (the file, line 4)" in str(e.value)


INVISIBLE = ['\u200b', '\u200c', '\u200d', '\u2060', '\ufeff', '\u00ad', '\u200e', '\u202e']

@pytest.mark.parametrize('c', INVISIBLE)
def test_invisible_characters_make_no_twins(c):
    t = Hierarchy.from_csv(io.StringIO(f'group,class\npet,cat\np{c}et,dog\nplant,oak\n'))
    assert t.widths == [2, 3] and t.nodes[1] == ('pet', 'dog')
    assert t.align([f'o{c}ak', f'{c}cat', 'dog']).leaves == ['oak', 'cat', 'dog']
    with pytest.raises(HierarchyError, match='twice'): Hierarchy.from_paths(['cat', f'c{c}at'])


@pytest.mark.parametrize('tiny', [1e-44, 1e-38, 1e-31])
def test_costs_too_small_for_single_precision(tiny):
    D = torch.full((3, 3), tiny, dtype=torch.float64).fill_diagonal_(0)
    for make in (CostMatrix, as_costs):
        with pytest.raises(HierarchyError, match='1e-30'): make(D)
    assert CostMatrix(D/tiny).D.max() == 1


# --- scale ---
def seconds(f):
    "Seconds of the processor that `f` takes, whatever else the machine does"
    start = time.process_time()
    f()
    return time.process_time() - start


def peak(f):
    "Megabytes that `f` allocates"
    tracemalloc.start()
    f()
    mb = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    return mb


deep = {f'n{i}': f'n{i-1}' for i in range(1, 10_000)} | {'other': 'n0'}

def test_a_chain_of_depth_10_000():
    t = Hierarchy.from_parents(deep)
    assert t.depth == 9999 and t.pair_costs(0, 1) == 10_000 == t.costs()[0, 1]
    assert seconds(lambda: Hierarchy.from_parents(deep).costs()) < 10
    assert seconds(lambda: Hierarchy.from_paths([tuple(f'n{i}' for i in range(10_000))]).fingerprint) < 10
    assert peak(lambda: Hierarchy.from_parents(deep).costs()) < 100


def test_a_deep_comb():
    "A class at every level of a chain"
    up = {f'n{i}': f'n{i-1}' for i in range(1, 5000)} | {f'leaf {i}': f'n{i}' for i in range(5000)}
    t = Hierarchy.from_parents(up)
    assert t.depth == 5000 and t.pair_costs(0, 4999) == 1 + 5000
    assert seconds(lambda: Hierarchy.from_parents(up)) < 5
    assert seconds(lambda: Hierarchy.from_paths([('a',)*k + ('b',) for k in range(5000)])) < 5


def test_a_matrix_too_large_names_what_to_use():
    t = Hierarchy.from_paths([(f'{k%100}', f'{k}') for k in range(100_000)])
    def refused():
        with pytest.raises(HierarchyError, match='40 GB.*pair_costs.*sampled'): t.costs()
    assert seconds(refused) < 1
    assert t.pair_costs([0, 0], [100, 1]).tolist() == [2, 4]


def test_ten_thousand_classes():
    t = Hierarchy.from_paths([(f'{k%7}', f'{k%91}', f'{k%1001}', f'{k}') for k in range(10_000)])
    assert seconds(t.costs) < 20


# --- WordNet ---
class Synset:
    "Answers as nltk does, in any order"
    def __init__(self, name, *above): self._name, self.above = name, {*above}
    def name(self): return self._name
    def definition(self): return f'what {self._name} means'
    def hypernyms(self): return [*self.above]
    def instance_hypernyms(self): return []

class WordNet:
    def __init__(self):
        self.all = {}
        for line in ('entity', 'animal entity', 'pet animal', 'canine animal', 'wolfish canine', 'dog pet wolfish',
                     'wolf wolfish', 'goldfish pet', 'machine entity', 'crane.n.04 machine', 'crane.n.05 animal'):
            n, *up = line.split()
            self.all[n] = Synset(n, *(self.all[u] for u in up))
    def synsets(self, name, pos): return [s for n, s in self.all.items() if n.split('.')[0] == name]
    def synset(self, name): return self.all[name]


def test_wordnet_does_not_depend_on_the_order_of_hypernyms():
    code = ("import sys; sys.path.insert(0, 'tests'); from test_hierarchy import *; "
            "print(Hierarchy.from_wordnet(['dog', 'wolf', 'goldfish'], wn=WordNet()).nodes[:3])")
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    runs = [subprocess.Popen([sys.executable, '-c', code], env={**os.environ, 'PYTHONHASHSEED': str(s)}, **pipes)
            for s in range(4)]
    outs, errs = zip(*(r.communicate() for r in runs))
    assert {*outs} == {"[('wolfish', 'dog'), ('wolfish', 'wolf'), ('goldfish',)]\n"}, errs[0][-300:]


def test_ambiguous_words_are_reported():
    with pytest.warns(UserWarning, match="first of several senses is used for 'crane'.*senses="):
        t = Hierarchy.from_wordnet(['dog', 'crane'], wn=WordNet(), collapse=False)
    assert t.nodes[1] == ('entity', 'machine', 'crane')
    found = wordnet_senses(['crane'], wn=WordNet())
    assert found.sense.tolist() == ['crane.n.04', 'crane.n.05'] and found.definition[1] == 'what crane.n.05 means'
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        t = Hierarchy.from_wordnet(['dog', 'crane'], senses={'crane': 'crane.n.05'}, wn=WordNet(), collapse=False)
    assert t.nodes[1] == ('entity', 'animal', 'crane')


@pytest.fixture(scope='module')
def real_wordnet():
    corpus = pytest.importorskip('nltk.corpus', reason='nltk is not installed').wordnet
    try: corpus.ensure_loaded()
    except LookupError: pytest.skip('the corpus of WordNet is not installed')
    return corpus


def test_the_real_wordnet(real_wordnet):
    senses = dict(tiger='tiger.n.02', oak='oak.n.02', maple='maple.n.02', crane='crane.n.05', couch='sofa.n.01',
                  lion='lion.n.01', fox='fox.n.01')
    names = [*senses, 'golden retriever', 'Einstein']
    with pytest.warns(UserWarning,
                      match="first of several senses is used for 'Einstein': .*senses={'Einstein': 'genius.n.01'}"):
        t = Hierarchy.from_wordnet(names, senses)
    assert (t.leaves == names and t.nodes[0][-2:] == ('big_cat.n.01', 'tiger')
            and t.nodes[1] == ('organism.n.01', 'tree.n.01', 'oak'))
    cost = lambda a, b: t.pair_costs(names.index(a), names.index(b)).item()
    assert cost('tiger', 'lion') == 2 < cost('tiger', 'fox') <= cost('tiger', 'crane') < cost('tiger', 'oak')
    found = wordnet_senses(['crane', 'xyzzy'])
    assert (found.sense.tolist() == ['crane.n.01', 'crane.n.02', 'grus.n.01', 'crane.n.04', 'crane.n.05']
            and 'bird' in found.definition[4])


@pytest.mark.parametrize('names, senses, why', [
    (['cat', 'maple tree'], {}, "no noun for 'maple tree': choose a synset for each"),
    (['cat'], {'cat': 'cat.n.99'}, "no synset 'cat.n.99', chosen for 'cat'"),
    (['cat'], {'cat': 'feline'}, "no synset 'feline'"),
    (['cat'], {'Cat': 'cat.n.01'}, "`senses` has 'Cat', which is not one of the names")])
def test_the_real_wordnet_says_what_is_missing(real_wordnet, names, senses, why):
    with pytest.raises(HierarchyError) as e: Hierarchy.from_wordnet(names, senses)
    assert why in str(e.value)


# --- one reader ---
def test_read_hierarchy(tmp_path):
    c = CostMatrix([[0, 2], [1, 0]], ['healthy', 'ill'], warn=False)
    for o, want in [(h.to_csv(tmp_path/'tree.csv'), h), (h.to_json(tmp_path/'tree.json'), h),
                    (c.to_csv(tmp_path/'c.csv'), c), (c.to_json(tmp_path/'c.json'), c),
                    ('mnist_visual', Hierarchy.named('mnist_visual')), (h, h), (c, c),
                    ('digits_chain', named_costs('digits_chain'))]:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            assert read_hierarchy(o).fingerprint == want.fingerprint
            if isinstance(o, (str, Path)): assert read_hierarchy(str(o)).fingerprint == want.fingerprint
    (tmp_path/'parents.csv').write_text(parents)
    assert read_hierarchy(tmp_path/'parents.csv') == Hierarchy.from_parents(tmp_path/'parents.csv')
    for wrong, why in [(tmp_path/'no.csv', 'no.csv'), ('oak', "no hierarchy is called 'oak'"),
                       (tmp_path, '.csv or .json'), ('a\0b.csv', 'null'), (3, 'int')]:
        with pytest.raises(HierarchyError) as e: read_hierarchy(wrong)
        assert why in str(e.value)


def test_align_costs_reads_files_and_vocabularies(tmp_path):
    vocab = ['cat', 'dog', 'oak', 'stone', 'trout']
    f = h.to_csv(tmp_path/'classes.csv')
    class Loaders: pass
    dls = Loaders()
    dls.vocab = vocab
    for v in (vocab, dls, [['the', 'a'], vocab]): assert align_costs(str(f), v).leaves == vocab
    assert align_costs(h, None) is h and align_costs(h, ['dog', 'oak'], subset=True).leaves == ['dog', 'oak']
    with pytest.raises(HierarchyError, match='costs of 3 classes for data with 5'): align_costs(torch.ones(3, 3), vocab)


# --- names of levels ---
def test_level_names_travel(tmp_path):
    "The header of a table names the levels; what keeps the levels keeps the names"
    import copy, pickle
    t = Hierarchy.from_csv(io.StringIO('kingdom,family,species,title,weight:family\nanimal,cats,lion,a lion,2\n'
                                       'animal,dogs,fox,a fox,\nplant,beeches,oak,an oak,\n'))
    names = ['kingdom', 'family', 'species']
    same = [t, t.align(['fox', 'oak', 'lion']), t.subset(['fox']), pickle.loads(pickle.dumps(t)),
            copy.deepcopy(t), read_hierarchy(t.to_csv(tmp_path/'t.csv')), read_hierarchy(t.to_json(tmp_path/'t.json')),
            Hierarchy.from_frame(pd.read_csv(tmp_path/'t.csv'))]
    assert [o.level_names for o in same] == [names]*len(same)
    assert t == Hierarchy(t.nodes[:3], t.weights) and t.fingerprint == Hierarchy(t.nodes[:3], t.weights).fingerprint
    assert (t.collapse().level_names == ['level 1', 'class']
            and Hierarchy.from_csv(io.StringIO(t.to_csv()), levels=['family', 'species']).level_names == names[1:])
    assert (Hierarchy.from_csv(io.StringIO('a,b\nx,1\nx,2\ny,3\ny,4\n')).collapse().level_names
            == ['a', 'b']), 'nothing was collapsed'
    assert CostMatrix([[0, 1], [1, 0]]).level_names == ['class']


@pytest.mark.parametrize('head', ['level1,level2', 'Level 1,Level 2', '0,1', 'group,', 'title,class', 'node,parent',
                                  'predicted,class'])
def test_headers_that_are_no_names(head):
    t = Hierarchy.from_csv(io.StringIO(f'{head}\npet,cat\npet,dog\n'), levels=head.split(','))
    assert t.level_names == ['level 1', 'class'] and Hierarchy.from_csv(io.StringIO(t.to_csv())) == t


@quick
@given(st.lists(st.text(max_size=6), min_size=3, max_size=3))
def test_any_level_names(heads):
    try: t = Hierarchy([('a', 'b', 'c'), ('a', 'd', 'e'), ('f', 'g', 'h')], level_names=heads)
    except HierarchyError: return  # two names that are one once tidied, or a control character
    for back in (Hierarchy.from_csv(io.StringIO(t.to_csv())), Hierarchy.from_json(io.StringIO(t.to_json()))):
        assert back == t and back.level_names == t.level_names


# --- tables that mean something else than they say ---
def table(text, **kw): return Hierarchy.from_csv(io.StringIO(text), **kw)

def quietly(f):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return f()


def test_a_table_without_header_does_not_lose_its_first_class():
    for text in ('pet,cat\npet,dog\nplant,oak\n', 'round,0\nline,1\nround,3\n'):
        with pytest.raises(HierarchyError, match='line 1: .* is the header of the first column and a group in it.*level1,level2'):
            table(text)
    t = table('stone,flint\npet,cat\npet,dog\n')  # nobody can tell until the data come
    with pytest.raises(HierarchyError, match="'flint' is the header of the last column: is the first line a class"):
        t.align(['flint', 'cat', 'dog'])
    assert table('0,1\nround,0\nround,1\n').leaves == ['0', '1']  # columns that pandas numbered


def test_a_count_column_is_no_level():
    for text in ('group,class,count\npet,cat,20\npet,dog,20\n', 'count,group,class\n20,pet,cat\n7,pet,dog\n',
                 'group,class,Images\npet,cat,20\npet,dog,\n'):
        with pytest.warns(UserWarning, match='counts something and is no level'): t = table(text)
        assert t.nodes[:2] == [('pet', 'cat'), ('pet', 'dog')]
    assert table('shape,n\nround,0\nround,3\nline,1\n').leaves == ['0', '3', '1']  # the numbers are the classes
    assert quietly(lambda: table('class,count\ncat,1\ndog,1\n', levels=['class', 'count'])).leaves == ['cat/1', 'dog/1']


def test_semicolons_with_a_comma_in_the_header():
    t = table('group;class, in English\npet;cat\npet;dog\n')
    assert t.nodes[:2] == [('pet', 'cat'), ('pet', 'dog')] and t.level_names == ['group', 'class, in English']
    c = CostMatrix.from_csv(io.StringIO('predicted;a;b\na;0;1,5\nb;2,5;0\n'), warn=False)
    assert c.D.tolist() == [[0, 1.5], [2.5, 0]]  # decimal commas


MERGED = [['animal', 'mammal', 'cat'], [None, None, 'dog'], [None, 'fish', 'trout'], ['stone', None, None]]
UNMERGED = [('animal', 'mammal', 'cat'), ('animal', 'mammal', 'dog'), ('animal', 'fish', 'trout'), ('stone',)]

def test_merged_cells_of_a_spreadsheet(tmp_path):
    pytest.importorskip('openpyxl')
    df = pd.DataFrame(MERGED, columns=['kingdom', 'group', 'kind'])
    df.to_csv(tmp_path/'t.csv', index=False)
    df.to_excel(tmp_path/'t.xlsx', index=False)
    for t in (df, tmp_path/'t.csv', tmp_path/'t.xlsx'):
        with pytest.warns(UserWarning, match='empty cells take the group above'): assert Hierarchy.from_csv(t).nodes[:4] == UNMERGED
        assert quietly(lambda: read_hierarchy(t)).nodes[:4] == UNMERGED
    with pytest.raises(HierarchyError, match='line 3: a name is empty'): table('a,b,c\nx,y,z\nv,,w\n')


def test_excel_files(tmp_path):
    pytest.importorskip('openpyxl')
    pd.DataFrame([[1, 'x'], [2, 'y']], columns=['b', 'c']).to_excel(tmp_path/'t.xlsx', index=False)
    assert quietly(lambda: read_hierarchy(tmp_path/'t.xlsx')).nodes[:2] == [('1', 'x'), ('2', 'y')]
    D = pd.DataFrame(h.costs().numpy(), h.leaves, h.leaves)
    D.to_excel(tmp_path/'D.xlsx')
    assert (read_hierarchy(tmp_path/'D.xlsx').costs() == h.costs()).all()
    (tmp_path/'no.xlsx').write_text('group,class\n')
    with pytest.raises(HierarchyError, match='not an Excel file'): read_hierarchy(tmp_path/'no.xlsx')


def test_float_labels_are_whole_numbers():
    df = pd.DataFrame(dict(group=['round', 'round', 'line'], digit=[0., 3., 1.]))
    t = Hierarchy.from_frame(df)
    assert t.leaves == ['0', '3', '1'] and Hierarchy.from_paths(df.values).leaves == ['0', '3', '1']
    assert t.align(pd.Series([1., 0., 3.])).leaves == t.align(['1.0', '0.0', '3.0']).leaves == ['1', '0', '3']
    assert CostMatrix([[0, 1], [1, 0]], [1., 2.]).leaves == ['1', '2']


def test_frames_with_several_levels_of_names():
    files = pd.DataFrame(dict(group=['pet', 'pet', 'stone'], kind=['cat', 'dog', 'flint'], file=['a', 'b', 'c']))
    sizes = files.groupby(['group', 'kind']).size()
    for t in (sizes, sizes.to_frame('files')):
        assert read_hierarchy(t).nodes[:3] == [('pet', 'cat'), ('pet', 'dog'), ('stone', 'flint')]
    with pytest.raises(HierarchyError, match='get_level_values'): Hierarchy.from_frame(sizes.to_frame('files').T)
    D = pd.DataFrame([[0, 1], [1, 0]], sizes.index[:2], sizes.index[:2])
    with pytest.raises(HierarchyError, match='droplevel'): CostMatrix(D)


def test_a_dict_a_frame_or_paths_as_the_tree():
    vocab, tree = ['oak', 'dog', 'cat'], {'animal': ['cat', 'dog'], 'oak': None}
    paths = [('animal', 'cat'), ('animal', 'dog'), ('oak',)]
    for o in (tree, paths, pd.DataFrame(dict(group=['animal', 'animal', 'oak'], kind=['cat', 'dog', None]))):
        assert align_costs(o, vocab).nodes[:3] == [('oak',), ('animal', 'dog'), ('animal', 'cat')]
        assert read_hierarchy(o).leaves == ['cat', 'dog', 'oak']
    groups = dict(cat='animal', dog='animal', oak='plant')
    with pytest.raises(HierarchyError, match="turn it round, as in {'animal': \\['cat', ...]}"): read_hierarchy(groups)
    with pytest.raises(HierarchyError, match='a column per level'): read_hierarchy(pd.Series(groups))


D = pd.DataFrame([[0, 5, 2], [1, 0, 3], [4, 6, 0]], [*'abc'], [*'abc'], dtype=float)  # D[predicted, true]

def test_costs_whose_columns_are_in_another_order():
    for t in (D[[*'cab']], D.loc[[*'bca']], D.loc[[*'cba'], [*'bac']]):
        c = quietly(lambda: CostMatrix(t))
        assert c.leaves == [*t.columns] and c.align([*'abc']).D.tolist() == D.values.tolist()
        back = quietly(lambda: CostMatrix.from_csv(io.StringIO(t.to_csv())))
        assert back.align([*'abc']).D.tolist() == D.values.tolist() == quietly(lambda: read_hierarchy(t)).align([*'abc']).D.tolist()


@pytest.mark.parametrize('word', ['true', 'Truth', 'actual class', 'observed', 'y_true'])
def test_rows_that_are_the_truth(word):
    for t in (D.T.rename_axis(word), D.T.rename_axis('predicted', axis=1)):
        assert CostMatrix(t, warn=False).D.tolist() == D.values.tolist()
    assert CostMatrix.from_csv(io.StringIO(D.T.to_csv(index_label=word)), warn=False).D.tolist() == D.values.tolist()
    with pytest.raises(HierarchyError, match='both axes'): CostMatrix(D.rename_axis(word).rename_axis(word, axis=1))


@pytest.mark.parametrize('a, b', [('Cat', 'cat'), ('cat', '\u0441at'), ('cat', '\uff43\uff41\uff54'), ('fir', '\ufb01r'),
                                  ('star', 'star\ufe0f')])
def test_lookalikes_give_a_warning_that_shows_both(a, b):
    for make in (lambda: Hierarchy([a, b]), lambda: Hierarchy([(a, 'x'), (b, 'y'), (b, 'z')]),
                 lambda: CostMatrix([[0, 1], [1, 0]], [a, b]), lambda: table(f'group,class\np,{a}\np,{b}\n')):
        with pytest.warns(UserWarning, match='look alike') as said: t = make()
        assert all(repr(n) in str(said[0].message) and (n.isascii() or ascii(n) in str(said[0].message)) for n in (a, b))
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert t.align([b, a]).leaves == [b, a]  # said once
    with pytest.raises(HierarchyError, match=f"did you mean {a!r}. It only looks the same"): Hierarchy([a, 'x']).align([b, 'x'])


# --- the order of classes ---
@quick
@given(st.permutations(range(11)), st.sampled_from(['{}', '{:02}', 'k{}', 'é{}']), st.booleans())
def test_the_number_rule_is_for_data_without_names(order, form, named):
    "Class numbers meet the names 0 to K-1 by value, others by position; an aligned tree is never arranged again"
    names = [form.format(k) for k in order]
    t = Hierarchy([(f'g{k%3}', n) for k, n in zip(order, names)])
    class Loaders: loaders = ()
    dls = Loaders()
    if named: dls.vocab = sorted(names)
    got = align_costs(t, dls)
    assert got.leaves == (sorted(names) if named else [str(k) for k in range(11)] if form == '{}' else names)
    for o in (got, t): assert align_costs(o, None) is o and torch.equal(as_costs(o), o.costs())


# --- names of nodes ---
def test_any_node_by_name():
    t = Hierarchy([('animal', 'pet', 'cat'), ('animal', 'dog'), ('plant', 'pet', 'cactus'), ('plant', 'animal')])
    assert [t.find_node(n) for n in t.node_names()] == [*range(t.n_nodes)]
    assert t.find_node(('animal', 'pet')) == t.find_node('animal/pet') == t.nodes.index(('animal', 'pet'))
    with pytest.raises(HierarchyError, match="'pet' is the name of 2 nodes: use a path, 'animal/pet', 'plant/pet'"): t.find_node('pet')
    with pytest.raises(HierarchyError, match="did you mean 'cactus'"): t.find_node('catus')
    with pytest.raises(HierarchyError, match="no class or group is called 'sofa'$"): t.find_node('sofa')


# --- taxonomies ---
GBIF = ('taxonID datasetID parentNameUsageID acceptedNameUsageID originalNameUsageID scientificName scientificNameAuthorship '
        'canonicalName genericName specificEpithet infraspecificEpithet taxonRank nameAccordingTo namePublishedIn taxonomicStatus '
        'nomenclaturalStatus taxonRemarks kingdom phylum class order family genus').split()
INAT = ('id taxonID identifier parentNameUsageID kingdom phylum class order family genus specificEpithet infraspecificEpithet '
        'modified scientificName taxonRank references').split()

def taxon(i, name, family, rank='species', **kw):
    ranks = dict(zip(('kingdom', 'phylum', 'class', 'order'), ('Animalia', 'Chordata', 'Mammalia', 'Carnivora')))
    return dict(ranks, taxonID=f'{i}', scientificName=name, taxonRank=rank, family=family, genus=name.split()[0], **kw)

ROWS = [taxon(1, 'Felidae', 'Felidae', 'family'), taxon(2, 'Panthera leo', 'Felidae'), taxon(5, 'Lynx lynx', 'Felidae'),
        taxon(6, 'Vulpes vulpes', 'Canidae'), taxon(3, 'Felis leo', 'Felidae', acceptedNameUsageID='4'),
        taxon(4, 'Leo leo', 'Felidae', acceptedNameUsageID='2')]

def test_taxonomies_of_gbif_and_inaturalist(tmp_path):
    gbif = pd.DataFrame([dict(r, canonicalName=r['scientificName'], scientificName=r['scientificName'] + ' "L.", 1758', namePublishedIn='"Systema" naturae') for r in ROWS], columns=GBIF)
    inat = pd.DataFrame([dict(r, id=r['taxonID'], taxonID=f"https://www.inaturalist.org/taxa/{r['taxonID']}")
                         for r in ROWS[:4]], columns=INAT)
    gbif.to_csv(tmp_path/'Taxon.tsv', sep='\t', index=False)
    import csv
    gbif.to_csv(tmp_path/'plain.tsv', sep='\t', index=False, quoting=csv.QUOTE_NONE)  # as GBIF writes it
    inat.to_csv(tmp_path/'taxa.csv', index=False)
    for f in (gbif, inat, tmp_path/'Taxon.tsv', tmp_path/'plain.tsv', tmp_path/'taxa.csv'):
        t = Hierarchy.from_taxonomy(f)
        assert t.leaves == ['Panthera leo', 'Lynx lynx', 'Vulpes vulpes'] and t.depth == 7
        assert t.level_names[-2:] == ['genus', 'species'] and t.pair_costs(0, 1) == 4
    t = Hierarchy.from_taxonomy(gbif, ['Vulpes_vulpes', 'Felis leo', 'Lynx lynx'], collapse=True)  # a synonym of a synonym
    assert t.nodes[:3] == [('Vulpes_vulpes',), ('Felidae', 'Felis leo'), ('Felidae', 'Lynx lynx')]
    assert t.titles == ['Vulpes vulpes', 'Panthera leo', 'Lynx lynx']


@pytest.mark.parametrize('rows, names, why', [
    (ROWS, ['Felis leo', 'Leo leo'], "are the same species, 'Panthera leo'"), (ROWS, ['Lynx linx'], "did you mean 'Lynx lynx'"),
    (ROWS[2:], ['Leo leo'], 'is a synonym of a taxon that the table does not have'),
    ([dict(ROWS[5], acceptedNameUsageID='3'), ROWS[4]], None, 'a cycle of synonyms'),
    ([dict(a='x')], None, 'not a Darwin Core table')])
def test_taxonomies_that_cannot_be_used(rows, names, why):
    with pytest.raises(HierarchyError) as e: Hierarchy.from_taxonomy(pd.DataFrame(rows), names)
    assert why in str(e.value)


def test_a_file_is_parsed_once(tmp_path, monkeypatch):
    import hierproto.readers as R
    seen, real = [], R._file_rows
    monkeypatch.setattr(R, '_file_rows', lambda f: seen.append(f) or real(f))
    for text in (h.to_csv(), parents, CostMatrix(h.costs(), h.leaves).to_csv()):
        (tmp_path/'t.csv').write_text(text)
        seen.clear()
        quietly(lambda: read_hierarchy(tmp_path/'t.csv'))
        assert len(seen) == 1


def test_trees_and_readers_do_not_import_each_other():
    import ast, hierproto.names, hierproto.readers
    for m in (hierproto.names, hierproto.readers):
        tree = ast.parse(Path(m.__file__).read_text())
        used = {o.module for o in ast.walk(tree) if isinstance(o, ast.ImportFrom) and o.level}
        assert used <= {'moved','names'}
    with pytest.raises(ImportError, match='read_hierarchy is in hierproto.hierarchy since version 0.3'):
        from hierproto.readers import read_hierarchy
