"""The docs site in _docs/: by `nbdev_docs` where Quarto is on the path, else the same processed notebooks rendered by Sphinx.

Titles, groups and order come from _quarto.yml for both; page names and anchors are those of Quarto, so that links hold in both."""
import argparse, hashlib, io, os, re, shutil, subprocess, sys, tempfile
from fnmatch import fnmatch
from pathlib import Path

import nbformat, yaml
from fastcore.parallel import parallel
from nbdev import serve_drv
from nbdev.config import get_config
from nbdev.processors import FilterDefaults

import readme
from readme import relink, root, tag_options

site = yaml.safe_load((root/'_quarto.yml').read_text(encoding='utf-8'))['website']

def notebooks(): return sorted(p.name for p in (root/'nbs').glob('[!._]*.ipynb'))

def sidebar(names=None):
    "The sidebar of _quarto.yml over notebook `names`: a dict from each section's title to its notebooks in order"
    names, item = names or notebooks(), lambda c: c if isinstance(c, str) else c.get('href') or c['auto']
    items = lambda cs: [item(c) for c in ([cs] if isinstance(cs, str) else cs)]
    return {s['section']: [n for c in items(s['contents']) for n in names if fnmatch(n, c)]
            for s in site['sidebar']['contents'] if 'section' in s}

def anchor(title):
    "The anchor that Quarto gives to a heading"
    return re.sub(r'^[^a-z]+', '', re.sub(r'[^\w\s.-]', '', title).strip().lower().replace(' ', '-')) or 'section'

def anchors(nb):
    "The anchors of a processed notebook's headings; an anchor met again gets a number, and the page's title is the first"
    res = []
    for c in nb.cells:
        if c.cell_type != 'markdown': continue
        for t in re.findall(r'^#+ +(.+?)\s*$', re.sub(r'^```.*?^```', '', c.source, flags=re.S | re.M), flags=re.M):
            a = anchor(re.sub(r'\[(.*?)\]\(.*?\)', r'\1', t))
            n = sum(o == a or re.fullmatch(re.escape(a) + r'-\d+', o) is not None for o in res)
            res.append(f'{a}-{n}' if n else a)
    return res

def show_doc_cell(cell):
    "The Markdown that nbdev made for an exported name, as a Markdown cell: its heading becomes one of the page's"
    md = cell.outputs[0].data['text/markdown']
    m = re.match(r'---\n\n(?:\[source\]\((.*?)\)\{.*?\}\n\n)?(.*)', md, flags=re.S)
    # nbdev links names in comments of the signature too, where a link is no link
    text = re.sub(r'^```.*?^```', lambda o: re.sub(r'\[(`[^`\n]+`)\]\([^)\n]*\)', r'\1', o[0]), m[2], flags=re.S | re.M)
    return nbformat.v4.new_markdown_cell(text + (f'\n\n[source]({m[1]})' if m[1] else ''))

def adapt(nb):
    "The processed notebook `nb` in the words of myst-nb; returns the name of its page"
    head, *cells = nb.cells
    fm = yaml.safe_load(head.source.strip().strip('-'))
    nb.cells = [nbformat.v4.new_markdown_cell(f"# {fm['title']}" + (f"\n\n> {fm['description']}" if 'description' in fm else ''))]
    nb.metadata['language_info'] = {'name': 'python'}
    for c in cells:
        if c.cell_type == 'code':
            asis = re.match(r'(#\|.*\n)*#\| *output: *asis', c.source)
            if asis and c.outputs: c = show_doc_cell(c)
            else: tag_options(c)
        for o in c.get('outputs', []):
            if html := o.get('data', {}).get('text/html'): o.data['text/html'] = html.replace('<table border="1" class="', '<table class="docutils ')
        if c.source.strip() or c.get('outputs'): nb.cells.append(c)
    return Path(fm['output-file']).stem

def local_link(target, pages):
    "A `target` as nbdev and the notebooks write it, pointing into the site: `pages` is a dict from notebook to (page, anchors)"
    path, _, a = target.removeprefix(site['site-url'] + '/').partition('#')
    known = {n: v for n, v in pages.items()} | {f'{p}.html': (p, ids) for p, ids in pages.values()}
    if path not in known: return target
    page, ids = known[path]
    a = a.lower()
    # nbdev's anchor of a class that is named like its page leads to the page's title; a method inside of a class has no heading
    found = [o for o in ((f'{a}-1', a) if ids[:1] == [a] else (a, a.rpartition('.')[0])) if o in ids]
    return f'{page}.html' + (f'#{found[0]}' if a and found else '')

def process(proc):
    "Write the notebooks to `proc` as `nbdev_docs` prepares them for Quarto; of their code only imports and exported cells are run"
    # nbdev warns of each cell that imports and does more, also of harmless set-up; tests/test_docs.py looks for the harmful ones
    os.environ['PYTHONWARNINGS'] = 'ignore'
    parallel(serve_drv.main, [(root/'nbs'/n, proc/n, FilterDefaults) for n in notebooks()], n_workers=os.cpu_count(), method='spawn')

def sphinx_source(proc, src):
    "Write what Sphinx reads to `src`, from the notebooks that nbdev processed in `proc`; returns a dict from page to notebook"
    nbs = {n: nbformat.read(proc/n, 4) for n in notebooks()}
    pages = {n: (adapt(nb), anchors(nb)) for n, nb in nbs.items()}
    toc = [f"```{{toctree}}\n:hidden:\n:caption: {title}\n\n" + '\n'.join(pages[n][0] for n in group) + '\n```'
           for title, group in sidebar().items() if group]
    nbs['index.ipynb'].cells.append(nbformat.v4.new_markdown_cell('\n\n'.join(toc)))
    for n, nb in nbs.items():
        for c in nb.cells:
            if c.cell_type == 'markdown': c.source = relink(c.source, lambda t: local_link(t, pages))
        nbformat.write(nb, src/f'{pages[n][0]}.ipynb')
    if (root/'nbs/images').exists(): shutil.copytree(root/'nbs/images', src/'images')
    return {page: n for n, (page, _) in pages.items()}

# No request for an icon that is not there; wide tables scroll in their own box; on wide screens, room for the longer lines of code
head = ('<link rel="icon" href="data:,"><style>.cell_output .text_html { overflow-x: auto } '
        '@media (min-width: 110em) { .main > .content { width: 60em } }</style>')

def on_doctree(app, doctree):
    r"Keep Sphinx from wrapping equations of several lines in an environment that forbids \tag; let headings be found by their anchors"
    for node in doctree.findall(lambda n: n.tagname == 'math_block'): node['classes'].append('amsmath')
    for node in doctree.findall(lambda n: n.tagname == 'section'):
        if (slug := node.get('slug')) and slug not in node['ids']: node['ids'].append(slug)

def sphinx_docs(out):
    "Render the processed notebooks to `out` with Sphinx, myst-nb and furo; returns its warnings"
    from sphinx.application import Sphinx
    cfg, repo, warnings = get_config(), site['repo-url'], io.StringIO()
    conf = dict(
        project=site['title'], author=cfg.author, copyright=cfg.copyright, version=cfg.version, release=cfg.version,
        html_title=site['title'], html_theme='furo', html_baseurl=site['site-url'] + '/', html_copy_source=False, html_show_sphinx=False,
        html_theme_options=dict(source_repository=repo, source_branch=site['repo-branch'], source_directory=site['repo-subdir']),
        extensions=['myst_nb', 'sphinx-mathjax-offline'], nb_execution_mode='off', nb_merge_streams=True, nb_render_markdown_format='myst',
        myst_enable_extensions=['dollarmath', 'amsmath', 'html_image'], myst_dmath_double_inline=True, myst_dmath_allow_space=False,
        myst_all_links_external=True, myst_heading_anchors=6, myst_heading_slug_func='docs.anchor',
        suppress_warnings=['myst.header', 'misc.highlighting_failure'])
    with tempfile.TemporaryDirectory() as tmp:
        proc, src = Path(tmp)/'proc', Path(tmp)/'src'
        for d in (proc, src): d.mkdir()
        process(proc)
        page2nb = sphinx_source(proc, src)
        app = Sphinx(src, None, out, Path(tmp)/'doctrees', 'html', conf, status=None, warning=warnings)
        app.connect('doctree-read', on_doctree)
        def page_context(app, page, template, context, doctree):
            context['metatags'] = context.get('metatags', '') + head
            for action in ('view', 'edit') if page in page2nb else ():
                context[f'theme_source_{action}_link'] = '/'.join([repo, {'view': 'blob'}.get(action, action), site['repo-branch'],
                                                                   site['repo-subdir'], page2nb[page]])
        app.connect('html-page-context', page_context)
        app.build()
    return warnings.getvalue()

def fingerprint():
    "What the site depends on, in short"
    files = [root/'_quarto.yml', root/'settings.ini', *(p for d in ('nbs', 'hierproto', 'tools') for p in sorted((root/d).rglob('*'))
                                                        if p.suffix in ('.ipynb', '.py', '.png', '.svg', '.jpg'))]
    return hashlib.sha256(b''.join(str(p.relative_to(root)).encode() + p.read_bytes() for p in files)).hexdigest()

def build(out, quarto):
    "The site in `out`, made anew: by Quarto, which writes to _docs only, or by Sphinx"
    if quarto:
        # nbdev keeps what it processed here, also of notebooks that were since renamed
        shutil.rmtree('_proc', ignore_errors=True)
        subprocess.run([Path(sys.executable).with_name('nbdev_docs')], check=True)
    elif warnings := sphinx_docs(out): sys.exit(f'{warnings}\nThe site in {out} was built with these warnings.')

def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--sphinx', action='store_true', help='render with Sphinx even where Quarto is on the path')
    parser.add_argument('--out', type=Path, help='a new folder for the site, with Sphinx; without it _docs, and README.md is made too')
    args = parser.parse_args()
    out = (args.out or root/'_docs').absolute()
    if args.out and out.exists(): sys.exit(f'{out} exists: give the name of a new folder')
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
