"What a notebook cannot hold about hierarchies: files broken at random, odd names, another process"
import io, json, subprocess, sys
import pytest
from hypothesis import given, settings, strategies as st
from hierproto.hierarchy import CostMatrix, Hierarchy, HierarchyError

quick = settings(max_examples=60, derandomize=True, database=None, deadline=None)
h = Hierarchy.from_paths([('animal', 'mammal', 'cat'), ('animal', 'fish', 'trout'), ('plant', 'oak'), ('animal', 'mammal', 'dog'), ('stone',)],
                         weights={('plant',): 2.5}, titles=['a cat', 'a trout', 'an oak', 'a dog', 'a stone'], name='zoo')
readers = dict(csv=Hierarchy.from_csv, json=Hierarchy.from_json, parents=Hierarchy.from_parents, costs=lambda f: CostMatrix.from_csv(f, warn=False))
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
    piece = data.draw(st.sampled_from([b'', b'"', b',', b'\n', b'{', b'}', b'null', b'nan', b'-1', b'1e999', b'\xff', b'cat', text[a:b]*2]))
    read(kind, text[:a] + piece + text[b:])


values = st.recursive(st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | st.text(max_size=3),
                      lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(max_size=3), v, max_size=4), max_leaves=12)

@quick
@given(values, values, values)
def test_any_json(tree, titles, weights):
    read('json', json.dumps(tree).encode())
    read('json', json.dumps(dict(format='hierproto-tree-1', tree=tree, titles=titles, weights=weights, name=titles)).encode())


names = st.text(min_size=1, max_size=6).filter(lambda s: s.strip() and s.isprintable())

@quick
@given(st.lists(st.lists(names, min_size=1, max_size=4).map(tuple), min_size=1, max_size=8, unique=True))
def test_any_names(paths):
    try: t = Hierarchy.from_paths(paths)
    except HierarchyError: return  # a class that is also a group, or two names that are one once tidied
    for back in (Hierarchy.from_csv(io.StringIO(t.to_csv())), Hierarchy.from_json(io.StringIO(t.to_json())), Hierarchy.from_networkx(t.to_networkx())):
        assert back == t and back.leaves == t.leaves


@quick
@given(st.integers(0, 4), st.integers(0, 5))
def test_the_line_is_right(row, at):
    head, *rows = h.to_csv().splitlines()
    twice = rows[:at] + [rows[row]] + rows[at:]
    first, second = [i+2 for i, r in enumerate(twice) if r == rows[row]]
    with pytest.raises(HierarchyError, match=rf'line {second}: the class .* stands twice \(first: the file, line {first}\)'):
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
    assert {n: Hierarchy.named(n).fingerprint for n in ('mnist_visual', 'cifar100', 'nyudv2', 'inat19', 'french_crops')} == dict(
        mnist_visual='bf3b8bf2122d', cifar100='9d1be4e13668', nyudv2='80d28cab8f5f', inat19='42d7fbbc0aa6', french_crops='63a1cfe7df73')
