"""Build the docs site in _docs/, with Quarto if it is installed and with Sphinx otherwise.

nbdev processes the notebooks, `hierproto.paper.site.Polish` being its last step, and Quarto or Sphinx
renders them. Both read titles and the sidebar from _quarto.yml and use the same page names and anchors, so links work in both."""
import argparse, hashlib, html, io, os, re, shutil, subprocess, sys, tempfile
from fnmatch import fnmatch
from pathlib import Path

import nbformat, yaml
from execnb.nbio import read_nb, write_nb
from fastcore.parallel import parallel
from nbdev.config import get_config
from nbdev.processors import FilterDefaults

import readme
from hierproto.paper.site import add_names_to_search, has_image, site
from readme import relink, root, tag_options

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

quarto_alt = re.compile(r'(!\[[^\]\n]+\]\([^)\s]+\))\{fig-alt="[^"]*"\}')

def adapt(nb):
    "Change the processed notebook `nb` to what myst-nb reads; returns the name of its page"
    head, *cells = nb.cells
    fm = yaml.safe_load(head.source.strip().strip('-'))
    title = f"# {fm['title']}" + (f"\n\n> {fm['description']}" if 'description' in fm else '')
    nb.cells = [nbformat.v4.new_markdown_cell(title)]
    nb.metadata['language_info'] = {'name': 'python'}
    for c in cells:
        if c.cell_type == 'markdown': c.source = quarto_alt.sub(r'\1', c.source)
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
            to_page = lambda t: local_link(t, pages)
            if c.cell_type == 'markdown': c.source = relink(c.source, to_page)
            for o in c.get('outputs', []):
                if md := o.get('data', {}).get('text/markdown'): o.data['text/markdown'] = relink(md, to_page)
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
    "Do what `nbdev_docs` does, but leave README.md alone and stop at warnings"
    proc = root/'_proc'
    shutil.rmtree(proc, ignore_errors=True)  # may contain notebooks that were renamed
    shutil.copytree(root/'nbs', proc, ignore=shutil.ignore_patterns('*.ipynb', '.ipynb_checkpoints'))
    process(proc)
    run = subprocess.run(['quarto', 'render', '--no-cache'], cwd=proc, stderr=subprocess.PIPE, text=True)
    print(run.stderr, file=sys.stderr)
    if run.returncode: sys.exit('quarto render failed')
    shutil.move(proc/'_docs', out)
    add_names_to_search(out)
    return '\n'.join(re.findall(r'.*\bWARN.*', run.stderr))

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
