"Each public name has a one-line docstring and documented arguments, and some notebook uses it."
import builtins, dis, importlib, inspect, json, pkgutil, re, types
from pathlib import Path

import pytest
from fastcore.docments import docments

import hierproto

root = Path(__file__).resolve().parent.parent
mods = {m.name.removeprefix('hierproto.'): importlib.import_module(m.name)
        for m in pkgutil.walk_packages(hierproto.__path__, 'hierproto.')}

def public(mod):
    "Names that the module `mod` exports, and their values"
    return {n: getattr(mod, n) for n in getattr(mod, '__all__', []) if hasattr(mod, n)}

names = {f'{m}.{n}': o for m, mod in mods.items() for n, o in public(mod).items()}
defined = {k: o for k, o in names.items() if (inspect.isfunction(o) or inspect.isclass(o))
           and o.__module__ == f"hierproto.{k.rpartition('.')[0]}"}

def used():
    "Words in tests and examples: the code cells of the notebooks that are not exported"
    cells = (c for f in sorted((root/'nbs').glob('[!._]*.ipynb'))
             for c in json.loads(f.read_text(encoding='utf-8'))['cells'])
    code = (''.join(c['source']) for c in cells if c['cell_type'] == 'code')
    return {w for s in code if not re.search(r'^#\| *exports?\b', s, re.M) for w in re.findall(r'\w+', s)}

# tests/test_install.py runs the commands
shown = (used() | set(re.findall(r'\w+', re.search(r'^console_scripts *=(.*)$',
                                                   (root/'settings.ini').read_text(encoding='utf-8'), re.M)[1])))

def bare(o):
    "Arguments of `o` without a comment that its docstring does not mention"
    if inspect.isclass(o) and '__init__' not in vars(o): return []
    doc, args = o.__doc__ or '', inspect.signature(o.__init__ if inspect.isclass(o) else o).parameters
    # fastcore does not read comments after `*args` and `**kwargs`
    named = [k for k, p in args.items() if k != 'self' and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    comments = docments(o)
    return [k for k in named if not comments.get(k) and f'`{k}`' not in doc]

# Known exceptions by module. The last test fails for a name that is no longer an exception.
UNDOCUMENTED = {}
UNUSED = {}
NOT_IMPORTED = {}

def excused(name, places):
    m, _, n = name.rpartition('.')
    return n in places.get(m, '').split()

@pytest.mark.parametrize('name', defined)
def test_says_what_it_does(name):
    if excused(name, UNDOCUMENTED): pytest.skip('known exception')
    doc = vars(defined[name]).get('__doc__') if inspect.isclass(defined[name]) else defined[name].__doc__
    assert (doc or '').strip() and '\n' not in doc.strip(), 'needs a docstring of one line'
    assert not bare(defined[name]), f"arguments without documentation: {', '.join(bare(defined[name]))}"

@pytest.mark.parametrize('name', names)
def test_used_in_a_notebook(name):
    if excused(name, UNUSED): pytest.skip('known exception')
    assert name.rpartition('.')[2] in shown, 'no notebook tests or shows it'

def codes(code):
    "`code` and the code objects inside it"
    yield code
    for c in code.co_consts:
        if isinstance(c, types.CodeType): yield from codes(c)

@pytest.mark.parametrize('mod', mods)
def test_knows_its_names(mod):
    "A name that a notebook imports in a cell that is not exported is missing in the module"
    top = compile(Path(mods[mod].__file__).read_text(encoding='utf-8'), mod, 'exec')
    inner = [c for c in codes(top) if c is not top]
    loads = {i.argval: c.co_name for c in inner for i in dis.get_instructions(c) if i.opname == 'LOAD_GLOBAL'}
    excused = NOT_IMPORTED.get(mod, '').split()
    unknown = {k: v for k, v in loads.items() if not hasattr(mods[mod], k) and not hasattr(builtins, k)
               and k not in excused}
    assert not unknown, f"used but not imported: {', '.join(f'{k} in {v}' for k, v in unknown.items())}"

def test_exceptions_are_needed():
    over = [k for k, o in defined.items() if excused(k, UNDOCUMENTED) and (o.__doc__ or '').strip() and not bare(o)]
    over += [k for k in names if excused(k, UNUSED) and k.rpartition('.')[2] in shown]
    over += [f'{m}.{n}' for m, ns in NOT_IMPORTED.items() for n in ns.split() if hasattr(mods[m], n)]
    known = {tuple(k.rpartition('.')[::2]) for k in names}
    over += [f'{m}.{n}' for places in (UNDOCUMENTED, UNUSED) for m, ns in places.items()
             for n in ns.split() if (m, n) not in known]
    assert not over, f"no longer exceptions: {', '.join(over)}"


# --- names of version 0.2 ---
def names_02():
    "Public names of version 0.2 by module"
    lines = (root/'tests/fixtures/names_02.txt').read_text(encoding='utf-8').splitlines()
    return {m: n.split() for m, _, n in (o.partition(': ') for o in lines)}

def moved_rows():
    "Cells of the table of moved names in CHANGELOG.md"
    text = (root/'CHANGELOG.md').read_text(encoding='utf-8').split('### Names that moved')[1].split('###')[0]
    rows = [o.strip('| ').split(' | ') for o in text.splitlines() if o.startswith('| `') or o.startswith('| the')]
    assert len(rows) > 20 and all(len(o) == 2 for o in rows)
    return rows

def words(text): return set(re.findall(r'\w+', text))

def test_every_name_of_02_is_there_or_in_the_table_of_moved_names():
    from hierproto.moved import MOVED
    rows = moved_rows()
    named = {w for old, _ in rows for w in words(old)}
    of_core = words(dict(rows)['`hierproto.data.core`']) # functions that did not go where its classes went
    assert {m.rpartition('.')[2] for m in MOVED} <= named
    lost = []
    for m, names in names_02().items():
        there = vars(importlib.import_module(MOVED.get(m, m)))
        listed = {w for old, _ in rows if m in old for w in words(old)} | (of_core if m == 'hierproto.data.core' else set())
        lost += [f'{m}.{n}' for n in names if n not in there and n not in listed]
    assert not lost, lost

def test_every_new_name_in_the_table_exists():
    "In `hierproto.images.image_files`, `image_table` the second name stands next to the first; after a module, inside it"
    for _, new in moved_rows():
        for part in re.sub(r'\(.*?\)', '', new).split(';'):
            first, *others = re.findall(r'`([\w.]+)`', part) or ['']
            if not first.startswith('hierproto.'): continue
            place = pkgutil.resolve_name(first)
            if not inspect.ismodule(place): place = pkgutil.resolve_name(first.rpartition('.')[0])
            missing = [o for o in others if not hasattr(place, o)]
            assert not missing, (new, missing)
