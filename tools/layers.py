"""Ways around the layers that import-linter cannot see.

They are imports by string, private names across modules and `#| exporti` to pass private names on.

Prints each violation and returns 1 if there is one: python tools/layers.py"""
import ast, json, re, sys
from pathlib import Path

root = Path(__file__).resolve().parent.parent
package = root/'hierproto'

# imports by string that are allowed: module, the argument as written, and why
BY_STRING = {
    ('hierproto.cli', 'target'): 'the table of commands',
    ('hierproto.moved', 'MOVED[old]'): 'old import paths',
    ('hierproto.moved', 'new'): 'old import paths',
    ('hierproto.hierarchy', "'hierproto.plots'"): 'the lazy plot_ methods',
    ('hierproto.body', "f'hierproto.{ARCHS[arch]}'"): 'the registry of architectures',
    ('hierproto.paper.data.common', 'module'): 'optional packages of others',
    ('hierproto.paper.site', "f'{module}:{name[1]}'"): 'documentation of any module',
    ('hierproto.paper.site', "f'{module}:{name}'"): 'documentation of any module',
}
IMPORTERS = 'import_module', '__import__', 'resolve_name', 'run_module'

def is_private(name): return name.startswith('_') and not name.endswith('__')

# --- the package ---
def module_name(file):
    parts = file.relative_to(root).with_suffix('').parts
    return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)

def target(node, file):
    "The full name of the module that `from ... import` names"
    if not node.level: return node.module or ''
    parts = file.relative_to(root).parts[:-node.level]
    return '.'.join([*parts, *([node.module] if node.module else [])])

def may_be_ours(arg):
    "May the expression `arg` name a module of hierproto? A text that names another package cannot"
    if isinstance(arg, ast.JoinedStr): arg = arg.values[0]
    text = arg.value if isinstance(arg, ast.Constant) else None
    return not isinstance(text, str) or text.startswith(('hierproto', '.'))

def strings(tree):
    "Calls that import a module of hierproto by string"
    for o in ast.walk(tree):
        if not isinstance(o, ast.Call) or not o.args: continue
        name = getattr(o.func, 'id', getattr(o.func, 'attr', ''))
        if name in IMPORTERS and may_be_ours(o.args[0]): yield o

def imports(tree, file):
    "`(line, module, name)` of everything that comes from modules of hierproto"
    for o in ast.walk(tree):
        if not isinstance(o, ast.ImportFrom): continue
        module = target(o, file)
        if module.split('.')[0] != 'hierproto': continue
        yield from ((o.lineno, module, a.name) for a in o.names)

def check_module(file):
    "The violations in one module of the package"
    tree = ast.parse(file.read_text())
    where, me = file.relative_to(root), module_name(file)
    for o in strings(tree):
        if (me, ast.unparse(o.args[0])) in BY_STRING: continue
        yield f'{where}:{o.lineno}: import by string: {ast.unparse(o)}'
    aliases = {}
    for line, module, name in imports(tree, file):
        if is_private(name): yield f'{where}:{line}: private name: {name} of {module}'
        aliases[name] = f'{module}.{name}'
    ours = {module_name(f) for f in package.rglob('*.py')}
    for o in ast.walk(tree):
        if not isinstance(o, ast.Attribute) or not is_private(o.attr): continue
        module = aliases.get(getattr(o.value, 'id', None))
        if module in ours: yield f'{where}:{o.lineno}: private name: {o.attr} of {module}'

# --- the notebooks ---
def code_cells(nb):
    for c in json.loads(nb.read_text())['cells']:
        if c['cell_type'] == 'code': yield ''.join(c['source'])

def parsed(source):
    "The tree of a cell; magics and shell commands do not import"
    lines = [o for o in source.splitlines() if not o.lstrip().startswith(('%', '!'))]
    try: return ast.parse('\n'.join(lines))
    except SyntaxError: return ast.parse('')

def defined(tree):
    "Names that a cell defines at its top level"
    for o in tree.body:
        if isinstance(o, (ast.FunctionDef, ast.ClassDef)): yield o.name
        if isinstance(o, ast.Assign):
            yield from (n.id for t in o.targets for n in ast.walk(t) if isinstance(n, ast.Name))

def exporti_names(nb):
    "The module of the notebook `nb`, and what its `#| exporti` cells define"
    cells = list(code_cells(nb))
    found = [m[1] for c in cells if (m := re.search(r'^#\|\s*default_exp\s+(\S+)', c, re.M))]
    internal = [c for c in cells if re.search(r'^#\|\s*exporti\b', c, re.M)]
    return found[0] if found else None, {n for c in internal for n in defined(parsed(c))}

def check_notebooks():
    "Imports, in exported cells, of names that are internal to another notebook"
    nbs = sorted((root/'nbs').glob('[!._]*.ipynb'))
    pairs = {nb: exporti_names(nb) for nb in nbs}
    internal = {f'hierproto.{module}': names for module, names in pairs.values() if module}
    for nb, (me, _) in pairs.items():
        if me is None: continue
        file = package/(me.replace('.', '/') + '.py')
        for cell in code_cells(nb):
            if not re.search(r'^#\|\s*export', cell, re.M): continue
            for _, module, name in imports(parsed(cell), file):
                if name not in internal.get(module, ()): continue
                yield f'nbs/{nb.name}: exporti: {name} of {module}'

def main():
    found = [v for f in sorted(package.rglob('*.py')) for v in check_module(f)]
    found += check_notebooks()
    for o in found: print(o)
    print(f'{len(found)} violations')
    return bool(found)

if __name__ == '__main__': sys.exit(main())
