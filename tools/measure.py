"""Figures about the code: its size, its share of validation, its density, and how far a call walks.

Printed, not asserted. Run by `make test`, or alone: python tools/measure.py"""
import ast, os, sys, tempfile, warnings
from collections import defaultdict
from pathlib import Path

root = Path(__file__).resolve().parent.parent
package = root/'hierproto'

def modules(wing):
    "The files of the paper wing, or those of the library; indexes that nbdev writes do not count"
    files = [f for f in sorted(package.rglob('*.py')) if f.name != '_modidx.py']
    return [f for f in files if (f.relative_to(package).parts[0] == 'paper') == wing]

# --- validation ---
def is_failure(node):
    "Is the statement `node` a `raise`, or an expression that may call `fail(...)`?"
    if isinstance(node, ast.Raise): return True
    value = getattr(node, 'value', None) if isinstance(node, (ast.Expr, ast.Return)) else None
    parts = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
    calls = [o.func for o in parts if isinstance(o, ast.Call)]
    return any(getattr(o, 'id', getattr(o, 'attr', '')) == 'fail' for o in calls)

def only_fails(block): return bool(block) and all(map(is_validation, block))

def is_validation(node):
    "Does `node` do nothing but fail, under some condition, in a loop or in a function of its own?"
    blocks = ast.If, ast.For, ast.While, ast.With, ast.ExceptHandler, ast.FunctionDef
    if not isinstance(node, blocks): return is_failure(node)
    goes_on = isinstance(node, ast.If) and node.orelse and not only_fails(node.orelse)
    return only_fails(node.body) and not goes_on

def names(node, context):
    return [o.id for o in ast.walk(node) if isinstance(o, ast.Name) and isinstance(o.ctx, context)]

def names_read(node): return names(node, ast.Load)

def assigned(node): return [n for t in node.targets for n in names(t, ast.Store)]

def outermost(node, found):
    "The nodes at or below `node` for which `found` holds, without those inside another"
    if found(node): return [node]
    return [o for child in ast.iter_child_nodes(node) for o in outermost(child, found)]

def prepares(function):
    "Assignments of `function` to names that only its validation reads"
    checks = outermost(function, is_validation)
    inside, everywhere = [n for o in checks for n in names_read(o)], names_read(function)
    only = {n for n in inside if inside.count(n) == everywhere.count(n)}
    def found(o):
        if not isinstance(o, ast.Assign): return False
        return bool(assigned(o)) and set(assigned(o)) <= only
    return [o for o in outermost(function, found) if not any(o in ast.walk(c) for c in checks)]

def code_size(node):
    "Characters of the code of `node`, without comments and spaces to align it"
    return len(ast.unparse(node))

def validation(tree):
    "Characters of statements that fail, and of branches and assignments that only lead there"
    checks = outermost(tree, is_validation)
    functions = outermost(tree, lambda o: isinstance(o, ast.FunctionDef) and not is_validation(o))
    prepared = [o for f in functions for o in prepares(f)]
    # a branch that fails next to one that goes on
    ifs = [o for o in ast.walk(tree) if isinstance(o, ast.If)]
    half = [o for o in ifs if only_fails(o.body) and not is_validation(o)]
    return sum(map(code_size, checks + prepared)) + sum(code_size(o.test) for o in half)

def without_docstrings(tree):
    for o in ast.walk(tree):
        can = isinstance(o, (ast.FunctionDef, ast.ClassDef, ast.Module))
        if can and ast.get_docstring(o) is not None: o.body = o.body[1:] or [ast.Pass()]
    return tree

# --- density ---
def is_packing(node):
    "Is `node` an assignment of several values to several names, `a,b = x,y`?"
    if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Tuple): return False
    return isinstance(node.value, (ast.Tuple, ast.GeneratorExp))

def private_names(tree):
    "Private names that a module defines at its top level"
    for o in tree.body:
        if isinstance(o, (ast.FunctionDef, ast.ClassDef)): own = [o.name]
        else: own = assigned(o) if isinstance(o, ast.Assign) else []
        yield from (n for n in own if n.startswith('_') and not n.endswith('_'))

def own_lines(tree, text):
    "The lines of `text` without the list `__all__`, which nbdev writes"
    lines = text.splitlines()
    for o in tree.body:
        if isinstance(o, ast.Assign) and '__all__' in assigned(o):
            lines[o.lineno-1:o.end_lineno] = ['']*(o.end_lineno-o.lineno+1)
    return lines

def figures(files):
    "The figures of the modules `files`, and where each private name is defined"
    res, where = defaultdict(int), defaultdict(set)
    for f in files:
        text = f.read_text()
        tree = ast.parse(text)
        res['characters'] += len(text)
        code = without_docstrings(ast.parse(text))
        res['code'] += code_size(code)
        res['validation'] += validation(code)
        res['lines'] += sum(bool(o.strip()) for o in text.splitlines())
        res['long'] += sum(len(o) > 100 for o in own_lines(tree, text))
        res['packings'] += sum(map(is_packing, ast.walk(tree)))
        for n in private_names(tree): where[n].add(str(f.relative_to(package).with_suffix('')))
    return res, where

# --- the walk of a call ---
def rooms(call):
    "The modules of hierproto in the order in which `call()` enters them, neighbours once"
    walk = []
    def note(frame, event, _):
        name = frame.f_globals.get('__name__', '')
        enters = event == 'call' and frame.f_code.co_name != '<module>'
        if enters and name.startswith('hierproto.') and walk[-1:] != [name]: walk.append(name)
    sys.setprofile(note)
    try: call()
    finally: sys.setprofile(None)
    return [o.removeprefix('hierproto.') for o in walk]

def loops_once(walk):
    "`walk` with A > B > A > B > A as A > B > A: such loops grow with the number of classes"
    res = []
    for o in walk:
        there_again = len(res) > 2 and res[-3] == res[-1] and res[-2] == o
        if not there_again and (not res or res[-1] != o): res.append(o)
    return res

def example_walk():
    "The walk of `proto_learner(dls, resnet18, 'classes.csv')`, without downloading weights"
    from fastai.vision.all import Image, ImageDataLoaders, np, resnet18
    from hierproto.all import proto_learner
    tree = dict(oak='tree', fir='tree', owl='bird', wren='bird')
    image = Image.fromarray(np.zeros((64, 64, 3), np.uint8))
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as d:
        os.chdir(d)
        try:
            lines = ['group,class', *[f'{g},{c}' for c, g in tree.items()]]
            Path('classes.csv').write_text('\n'.join(lines))
            for c in tree:
                Path('images', c).mkdir(parents=True)
                for i in range(8): image.save(f'images/{c}/{i}.png')
            dls = ImageDataLoaders.from_folder('images', valid_pct=.5, seed=0, bs=4, num_workers=0)
            return rooms(lambda: proto_learner(dls, resnet18, 'classes.csv', pretrained=False))
        finally: os.chdir(here)

def print_sizes():
    "A line for each wing; returns where each private name is defined"
    print('         characters   lines  validation  packings/100 lines  lines > 100')
    everywhere = defaultdict(set)
    for name, wing in (('library', False), ('wing', True)):
        res, where = figures(modules(wing))
        for n, o in where.items(): everywhere[n] |= o
        share = res['validation']/max(1, res['code'])
        packed = 100*res['packings']/max(1, res['lines'])
        sizes = f"{res['characters']:11,}{res['lines']:8,}"
        print(f"{name:8}{sizes}{share:12.1%}{packed:20.1f}{res['long']:13,}")
    return everywhere

def main():
    warnings.simplefilter('ignore')
    sys.path.insert(0, str(root))
    twice = {n: o for n, o in sorted(print_sizes().items()) if len(o) > 1}
    print(f'private names in two or more modules: {len(twice)}')
    for n, o in twice.items(): print(f"  {n}: {', '.join(sorted(o))}")
    walk = example_walk()
    once = loops_once(walk)
    print("walk of proto_learner(dls, resnet18, 'classes.csv'): "
          f'{len(once) - 1} transitions, {len(walk) - 1} with loops')
    print(' ', ' > '.join(once))

if __name__ == '__main__': main()
