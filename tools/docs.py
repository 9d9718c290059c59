"""Build the docs site in _docs/, with Quarto if it is installed and with Sphinx otherwise.

nbdev processes the notebooks, `polish` improves the result, and Quarto or Sphinx renders it. Both read titles and the
sidebar from _quarto.yml and use the same page names and anchors, so links work in both."""
import argparse, ast, hashlib, html, io, json, os, pkgutil, re, runpy, shutil, subprocess, sys, tempfile
from fnmatch import fnmatch
from pathlib import Path

import nbformat, yaml
from execnb.nbio import read_nb, write_nb
from fastcore.parallel import parallel
from nbdev.config import get_config
from nbdev.doclinks import _nbpath2html
from nbdev.processors import FilterDefaults

import readme
from readme import relink, root, tag_options

site = yaml.safe_load((root/'_quarto.yml').read_text(encoding='utf-8'))['website']
modidx = runpy.run_path(root/'hierproto/_modidx.py')['d']

def api_table():
    "The table `API` of nbs/api.ipynb: a dict from task to names"
    body = ast.parse((root/'hierproto/all.py').read_text(encoding='utf-8')).body
    value = next(o.value for o in body if isinstance(o, ast.Assign) and o.targets[0].id == 'API')
    return {task: names.split() for task, names in ast.literal_eval(value).items()}

public = {n for names in api_table().values() for n in names}

def notebooks(): return sorted(p.name for p in (root/'nbs').glob('[!._]*.ipynb'))

def sidebar(names=None):
    "The sidebar of _quarto.yml: a dict from each section to its notebooks, taken from `names`, in order"
    names = names or notebooks()
    return {s['section']: [n for c in s['contents'] for n in names if fnmatch(n, c['auto'])]
            for s in site['sidebar']['contents'] if 'section' in s}

def front():
    "The notebooks above the sections of the sidebar"
    return [s['href'] for s in site['sidebar']['contents'] if 'href' in s]

def anchor(title):
    "The anchor that Quarto gives to a heading"
    return re.sub(r'^[^a-z]+', '', re.sub(r'[^\w\s.-]', '', title).strip().lower().replace(' ', '-')) or 'section'

def anchors(nb):
    "The anchors of the headings of a processed notebook, the title first; repeated anchors get a number"
    res = []
    for c in nb.cells:
        if c.cell_type != 'markdown': continue
        for t in re.findall(r'^#+ +(.+?)\s*$', re.sub(r'^```.*?^```', '', c.source, flags=re.S | re.M), flags=re.M):
            a = anchor(re.sub(r'\[(.*?)\]\(.*?\)', r'\1', t))
            n = sum(o == a or re.fullmatch(re.escape(a) + r'-\d+', o) is not None for o in res)
            res.append(f'{a}-{n}' if n else a)
    return res

auto_link = re.compile(r'\[`([^`\n]+)`\]\(([^)\n]*)\)')  # as nbdev writes it

def plain_signature(code):
    "A signature as nbdev shows it, without links in comments and without `NoneType`"
    return auto_link.sub(r'`\1`', code).replace(':NoneType=None', '=None')

def own_names(page):
    "The names defined on `page`: a dict from name to (link, Python file)"
    return {k.removeprefix(f'{mod}.'): v for mod, syms in modidx['syms'].items()
            for k, v in syms.items() if v[0].startswith(f'{page}.html#')}

def defined_twice(name):
    "Do two modules define `name`, as a function, a class or a method?"
    return sum(k.rpartition('.')[2] == name for syms in modidx['syms'].values() for k in syms) > 1

def better_link(name, url, own):
    "The link of nbdev for `name`: to this page if it defines the name, none if it may be something else (`train`)"
    name, call = name.removesuffix('()'), name.endswith('()')
    if name in own: url = own[name][0]
    elif name not in public and (re.fullmatch('[a-z]+', name) and not call or defined_twice(name)): return f'`{name}`'
    return f"[`{name}{'()' * call}`]({url.removeprefix(site['site-url'] + '/')})"

def better_source(name, url, own):
    "The source link that nbdev made for `name`, corrected if another module defines the same name"
    if name not in own or own[name][1] in url: return url
    file = own[name][1]
    lines = (root/file).read_text(encoding='utf-8').splitlines()
    n = next((i for i, l in enumerate(lines, 1) if re.match(rf'(def|class) {name}\b', l)), 1)
    return f"{site['repo-url']}/blob/{site['repo-branch']}/{file}#L{n}"

# docstrings of Python and PyTorch, which functions without their own inherit
borrowed = re.compile(r'\*(Call self as a function|Return (repr|len)\(self\))\.\*|'
                      r'\*Define the computation performed at every call\..*silently ignores them\.', re.S)

def polish_markdown(md, own):
    "Markdown that nbdev processed, with plain signatures, better links and no empty phrases"
    parts = re.split(r'(^```.*?^```)', md, flags=re.S | re.M)
    # in the documentation of a function, the name of one of its arguments means that argument
    signatures = [re.sub('#.*', '', s) for s in parts[1::2]]
    args = {a for s in signatures for a in re.findall(r'(?:^|[,(])\s*\**([a-z_]\w*)', s, flags=re.M)}
    link = lambda s: auto_link.sub(lambda m: f'`{m[1]}`' if m[1] in args else better_link(m[1], m[2], own), s)
    md = ''.join(plain_signature(s) if i % 2 else link(s) for i, s in enumerate(parts))
    return borrowed.sub('', md)

def first_sentence(md):
    "The first sentence of the last paragraph of `md` as plain text; the heading if there is no paragraph"
    md = re.sub(r'^```.*?^```|\$\$.*?\$\$', '', md, flags=re.S | re.M)
    paragraphs = [' '.join(p.split()) for p in re.split(r'\n\s*\n', md) if p.strip()]
    text = next((p for p in reversed(paragraphs) if p[0] not in '#|!-<'), paragraphs[-1] if paragraphs else 'Figure')
    text = re.sub(r'!?\[(.*?)\]\(.*?\)', r'\1', text).translate({ord(c): None for c in '`*$\\'})
    return re.split(r'(?<=[.:?])\s', text.lstrip('# '))[0].rstrip(':')[:250]

def is_test(code):
    "Does `code` assert anything, outside the functions that it defines?"
    try: body = ast.parse(code).body
    except SyntaxError: return False
    nodes = [o for s in body if not isinstance(s, (ast.FunctionDef, ast.ClassDef)) for o in ast.walk(s)]
    called = [getattr(o.func, 'id', '') for o in nodes if isinstance(o, ast.Call)]
    return any(isinstance(o, ast.Assert) for o in nodes) or any(re.match('test_|ExceptionExpected', o) for o in called)

long_source = 20 # lines of a public definition; longer ones are folded

def hidden_definitions(code):
    "The names that `code` defines, if a reader of the reference can do without it: private ones, or a long definition"
    try: body = ast.parse(code).body
    except SyntaxError: return []
    found = [o.name for o in body if isinstance(o, (ast.FunctionDef, ast.ClassDef))]
    private = all(o.startswith('_') for o in found)
    return found if private or code.count('\n') >= long_source else []

def fold(cell, name):
    """Fold the code, not the output, unless `#| code-fold: false`: of results, and in the reference of tests of more
    than three lines, of private definitions and of long ones"""
    code = cell.source
    if re.search(r'^#\| *(echo|include|output|code-fold):', code, re.M): return
    if name[0] in '89': cell.source = f'#| code-fold: true\n{code}'
    elif name[0] not in '0123457': return
    elif code.count('\n') > 2 and is_test(code): cell.source = f'#| code-fold: true\n#| code-summary: "Test"\n{code}'
    elif names := hidden_definitions(code):
        cell.source = f'#| code-fold: true\n#| code-summary: "Code of {", ".join(names)}"\n{code}'

def defined(nb):
    "The names of functions whose code the page of `nb` shows, each alone in its cell, right below its heading"
    open_cell = lambda c: c.cell_type == 'code' and (c.source.count('\n') < long_source or 'def _' in c.source)
    found = [re.findall(r'^(def|class) (\w+)', c.source, re.M) for c in nb.cells if open_cell(c)]
    return {o[0][1] for o in found if len(o) == 1 and o[0][0] == 'def'}

def without_signature(md, shown):
    "The documentation of a name, without its signature if the code in `shown` has it"
    name = re.search(r'^#+ (?:\w+\.)?(\w+)$', md, re.M)
    return re.sub(r'^```python\n.*?^```\n+', '', md, count=1, flags=re.S | re.M) if name and name[1] in shown else md

def escape_heading(md):
    "The documentation of a name, whose heading shows the underscores of `__call__` instead of bold text"
    return re.sub(r'^#+ \S*__\S*$', lambda m: m[0].replace('_', r'\_'), md, count=1, flags=re.M)

def has_image(cell): return any(k.startswith('image/') for o in cell.get('outputs', []) for k in o.get('data', {}))

def documents_private(cell, shown):
    "Is `cell` the documentation that nbdev made for a method of a private class whose code is in `shown`?"
    md = ''.join(str(o.get('data', {}).get('text/markdown', '')) for o in cell.get('outputs', []))
    return any(n in shown for n in re.findall(r'^#+ _[a-zA-Z]\w*\.(\w+)$', md, re.M))

def polish(nb, name):
    "Improve the processed notebook `name`: links, folded code, an alternative text per figure, no signature twice"
    own, shown, before = own_names(_nbpath2html(Path(name)).stem), defined(nb), ''
    nb.cells = [c for c in nb.cells if not documents_private(c, shown)]
    for c in nb.cells:
        if c.cell_type == 'markdown':
            c.source = before = polish_markdown(c.source, own)
        elif c.cell_type == 'code': fold(c, name)
        for o in c.get('outputs', []):
            if md := o.get('data', {}).get('text/markdown'):
                source = lambda m: f'[source]({better_source(m[3], m[1], own)}){m[2]}{m[3]}'
                md = re.sub(r'\[source\]\((.*?)\)(\{.*?\}\n\n#+ )(\S+)', source, md)
                o.data['text/markdown'] = escape_heading(without_signature(polish_markdown(md, own), shown))
        if c.cell_type == 'code' and has_image(c) and not re.search(r'^#\| *fig-(alt|cap):', c.source, re.M):
            c.source = f'#| fig-alt: {json.dumps(first_sentence(before), ensure_ascii=False)}\n{c.source}'

def show_doc_cell(cell):
    "The documentation of an exported name, made by nbdev, as a Markdown cell: its heading becomes one of the page's"
    md = cell.outputs[0].data['text/markdown']
    m = re.match(r'---\n\n(?:\[source\]\((.*?)\)\{.*?\}\n\n)?(.*)', md, flags=re.S)
    heading, _, rest = m[2].partition('\n\n')
    return nbformat.v4.new_markdown_cell('\n\n'.join([heading, *[f'[source]({m[1]})']*bool(m[1]), rest]))

def add_captions(cell, caption):
    "Put the `caption` below each figure of `cell`; the captions of myst-nb would be below its tables and texts too"
    text = f'<p class="caption"><em>{html.escape(caption or "")}</em></p>'
    below = nbformat.v4.new_output('display_data', {'text/html': text})
    cell.outputs = [p for o in cell.outputs for p in ((o, below) if caption and has_image(dict(outputs=[o])) else (o,))]

def adapt(nb):
    "Change the processed notebook `nb` to what myst-nb reads; returns the name of its page"
    head, *cells = nb.cells
    fm = yaml.safe_load(head.source.strip().strip('-'))
    title = f"# {fm['title']}" + (f"\n\n> {fm['description']}" if 'description' in fm else '')
    nb.cells = [nbformat.v4.new_markdown_cell(title)]
    nb.metadata['language_info'] = {'name': 'python'}
    for c in cells:
        if c.cell_type == 'code':
            asis = re.match(r'(#\|.*\n)*#\| *output: *asis', c.source)
            if asis and c.outputs: c = show_doc_cell(c)
            else: add_captions(c, tag_options(c))
        for o in c.get('outputs', []):
            if text := o.get('data', {}).get('text/html'):
                o.data['text/html'] = text.replace('<table border="1" class="', '<table class="docutils ')
        if c.source.strip() or c.get('outputs'): nb.cells.append(c)
    return Path(fm['output-file']).stem

def local_link(target, pages):
    "The page and anchor for a link `target` of a notebook; `pages` is a dict from notebook to (page, anchors)"
    path, _, a = target.removeprefix(site['site-url'] + '/').partition('#')
    known = pages | {f'{p}.html': (p, ids) for p, ids in pages.values()}
    if path not in known: return target
    page, ids = known[path]
    a = a.lower()
    # the anchor of a class with the name of its page would lead to the page's title;
    # a method inside a class has no heading
    found = [o for o in ((f'{a}-1', a) if ids[:1] == [a] else (a, a.rpartition('.')[0])) if o in ids]
    return f'{page}.html' + (f'#{found[0]}' if a and found else '')

def process_one(paths):
    "Let nbdev process one notebook, given as (source, target)"
    os.environ['IN_TEST'] = '1'
    nb = read_nb(paths[0])
    FilterDefaults()(nb)
    write_nb(nb, paths[1])

def process(proc):
    "Let nbdev process the notebooks into `proc`; it runs imports and exported cells only"
    # nbdev warns about every cell that imports and does more, even harmless ones;
    # tests/test_docs.py finds the harmful ones
    os.environ['PYTHONWARNINGS'] = 'ignore'
    # found by its module, since a notebook that runs in a worker takes the place of `__main__`
    sys.path.insert(0, str(root/'tools'))
    import docs
    parallel(docs.process_one, [(root/'nbs'/n, proc/n) for n in notebooks()], n_workers=os.cpu_count(), method='spawn')

def polish_all(proc):
    "Polish the processed notebooks in `proc`"
    for n in notebooks():
        nb = nbformat.read(proc/n, 4)
        polish(nb, n)
        nbformat.write(nb, proc/n)

def sphinx_source(proc, src):
    "Write what Sphinx reads to `src`, from the processed notebooks in `proc`; returns a dict from page to notebook"
    nbs = {n: nbformat.read(proc/n, 4) for n in notebooks()}
    pages = {n: (adapt(nb), anchors(nb)) for n, nb in nbs.items()}
    groups = {'Reference': front()[1:], **sidebar()}
    toc = [f"```{{toctree}}\n:hidden:\n:caption: {title}\n\n" + '\n'.join(pages[n][0] for n in group) + '\n```'
           for title, group in groups.items() if group]
    nbs['index.ipynb'].cells.append(nbformat.v4.new_markdown_cell('\n\n'.join(toc)))
    for n, nb in nbs.items():
        for c in nb.cells:
            if c.cell_type == 'markdown': c.source = relink(c.source, lambda t: local_link(t, pages))
        nbformat.write(nb, src/f'{pages[n][0]}.ipynb')
    if (root/'nbs/images').exists(): shutil.copytree(root/'nbs/images', src/'images')
    return {page: n for n, (page, _) in pages.items()}

# an empty icon, and the style
head = f"""<link rel="icon" href="data:,"><style>{(root/'tools/docs.css').read_text(encoding='utf-8')}</style>"""
# only the section of the current page is open; a click on a section opens or closes it
head += """<script>addEventListener('DOMContentLoaded', () =>
document.querySelectorAll('.sidebar-tree .caption').forEach(c => {
  const list = c.nextElementSibling,
        open = o => { list.style.display = o ? '' : 'none'; c.setAttribute('aria-expanded', o) },
        toggle = () => open(list.style.display == 'none')
  c.tabIndex = 0; c.setAttribute('role', 'button'); c.onclick = toggle
  c.onkeydown = e => { if (e.key == 'Enter') toggle() }
  open(list.children.length == 1 || list.classList.contains('current')) }))</script>"""

# in the search, a heading that contains the query comes before pages whose headings contain one of its words
scorer = ("var Scorer = {score: o => o[4] + (o[6] === 'title' ? 20 : 0), "
          "title: 15, partialTitle: 7, term: 5, partialTerm: 2};")

def on_doctree(app, doctree):
    r"Keep Sphinx from wrapping long equations in an environment that forbids \tag, and give headings their anchors"
    for node in doctree.findall(lambda n: n.tagname == 'math_block'): node['classes'].append('amsmath')
    for node in doctree.findall(lambda n: n.tagname == 'section'):
        if (slug := node.get('slug')) and slug not in node['ids']: node['ids'].append(slug)

def sphinx_docs(out):
    "Render the processed notebooks to `out` with Sphinx, myst-nb and furo; returns its warnings"
    from sphinx.application import Sphinx
    cfg, repo, warnings = get_config(), site['repo-url'], io.StringIO()
    conf = dict(
        project=site['title'], author=cfg.author, copyright=cfg.copyright, version=cfg.version, release=cfg.version,
        html_title=site['title'], html_theme='furo', html_baseurl=site['site-url'] + '/',
        html_copy_source=False, html_show_sphinx=False,
        html_theme_options=dict(source_repository=repo, source_branch=site['repo-branch'],
                                source_directory=site['repo-subdir']),
        extensions=['myst_nb', 'sphinx-mathjax-offline'],
        nb_execution_mode='off', nb_merge_streams=True, nb_render_markdown_format='myst',
        nb_code_prompt_show='Code', nb_code_prompt_hide='Code',
        myst_enable_extensions=['dollarmath', 'amsmath', 'html_image'],
        myst_dmath_double_inline=True, myst_dmath_allow_space=False,
        myst_all_links_external=True, myst_heading_anchors=6, myst_heading_slug_func='docs.anchor',
        suppress_warnings=['myst.header', 'misc.highlighting_failure'])
    with tempfile.TemporaryDirectory() as tmp:
        proc, src = Path(tmp)/'proc', Path(tmp)/'src'
        for d in (proc, src): d.mkdir()
        conf['html_search_scorer'] = str(Path(tmp)/'scorer.js')
        Path(conf['html_search_scorer']).write_text(scorer)
        process(proc)
        polish_all(proc)
        page2nb = sphinx_source(proc, src)
        app = Sphinx(src, None, out, Path(tmp)/'doctrees', 'html', conf, status=None, warning=warnings)
        app.connect('doctree-read', on_doctree)
        def page_context(app, page, template, context, doctree):
            context['metatags'] = context.get('metatags', '') + head
            for action in ('view', 'edit') if page in page2nb else ():
                place = {'view': 'blob'}.get(action, action)
                parts = [repo, place, site['repo-branch'], site['repo-subdir'], page2nb[page]]
                context[f'theme_source_{action}_link'] = '/'.join(parts)
        app.connect('html-page-context', page_context)
        app.build()
    return warnings.getvalue()

def fingerprint():
    "A hash of everything that the site depends on"
    found = (p for d in ('nbs', 'hierproto', 'tools') for p in sorted((root/d).rglob('*')))
    kinds = ('.ipynb', '.py', '.png', '.svg', '.jpg', '.gif', '.css')
    files = [root/'_quarto.yml', root/'settings.ini', *(p for p in found if p.suffix in kinds)]
    return hashlib.sha256(b''.join(str(p.relative_to(root)).encode() + p.read_bytes() for p in files)).hexdigest()

def quarto_docs(out):
    "Do what `nbdev_docs` does, but polish the processed notebooks, leave README.md alone and stop at warnings"
    proc = root/'_proc'
    shutil.rmtree(proc, ignore_errors=True)  # may contain notebooks that were renamed
    shutil.copytree(root/'nbs', proc, ignore=shutil.ignore_patterns('*.ipynb', '.ipynb_checkpoints'))
    process(proc)
    polish_all(proc)
    run = subprocess.run(['quarto', 'render', '--no-cache'], cwd=proc, stderr=subprocess.PIPE, text=True)
    print(run.stderr, file=sys.stderr)
    if run.returncode: sys.exit('quarto render failed')
    shutil.move(proc/'_docs', out)
    add_names_to_search(out)
    return '\n'.join(re.findall(r'.*\bWARN.*', run.stderr))

def names_for_search():
    "(name, page#anchor, docstring) of each function and class that a module exports, methods and private names left out"
    for module, names in modidx['syms'].items():
        for full, (link, _) in names.items():
            name = full.removeprefix(f'{module}.')
            if '.' in name or name.startswith('_'): continue
            doc = getattr(pkgutil.resolve_name(f'{module}:{name}'), '__doc__', None) or ''
            yield name, link, doc.strip().split('\n')[0]

def add_names_to_search(out):
    "Let the search of the Quarto site in `out` find definitions: Quarto itself lists second-level headings only"
    file = out/'search.json'
    if not file.exists(): return
    index = json.loads(file.read_text(encoding='utf-8'))
    index += [dict(objectID=link, href=link, title=name, section=name, text=text)
              for name, link, text in names_for_search() if (out/link.partition('#')[0]).exists()]
    file.write_text(json.dumps(index, ensure_ascii=False), encoding='utf-8')

def build(out, quarto):
    "Build the site in `out` with Quarto or Sphinx; fails if there are warnings"
    if warnings := (quarto_docs if quarto else sphinx_docs)(out):
        sys.exit(f'{warnings}\nThe site in {out} was built with these warnings.')

def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--sphinx', action='store_true', help='use Sphinx even if Quarto is installed')
    parser.add_argument('--out', type=Path,
                        help='a new folder for the site, built with Sphinx; '
                             'by default _docs, and README.md is updated too')
    args = parser.parse_args()
    out = (args.out or root/'_docs').absolute()
    if args.out and out.exists(): sys.exit(f'{out} already exists: choose a new folder')
    os.chdir(root)
    stamp, now = out/'.made-from', fingerprint()
    if not args.out:
        readme.write(readme.convert())
        if stamp.exists() and stamp.read_text() == now: return print(f'{out}/index.html is up to date')
        shutil.rmtree(out, ignore_errors=True)
    build(out, quarto=shutil.which('quarto') and not (args.sphinx or args.out))
    if not args.out: stamp.write_text(now)
    print(f'{out}/index.html: {len(notebooks())} pages')

if __name__ == '__main__': main()
