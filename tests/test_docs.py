"The docs site: its settings, its sidebar, what nbdev can process, and what Quarto and Sphinx get to render."
import ast, os, re, subprocess, sys
from configparser import ConfigParser
from difflib import SequenceMatcher
from itertools import combinations
from pathlib import Path

import nbformat, pytest, yaml
from nbdev.config import get_config
from nbdev.doclinks import NbdevLookup
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

root = Path(__file__).parents[1]
sys.path.insert(0, str(root/'tools'))
import docs, readme
from hierproto.paper import site as web
from nbdev.doclinks import _nbpath2html

names = docs.notebooks()
nbs = {n: nbformat.read(root/'nbs'/n, 4) for n in names}
pages = {n: _nbpath2html(Path(n)).stem for n in names}

def markdown(name): return '\n'.join(c.source for c in nbs[name].cells if c.cell_type == 'markdown')

# Settings and sidebar

def test_settings_agree():
    ini = ConfigParser(delimiters=['='])
    ini.read(root/'settings.ini', encoding='utf-8')
    cfg, quarto = ini['DEFAULT'], yaml.safe_load((root/'nbs/_quarto.yml').read_text(encoding='utf-8'))
    site = quarto['website']
    assert site['title'] == cfg['title'] and site['description'] == cfg['description']
    assert (site['repo-url'] == cfg['git_url'] and site['repo-branch'] == cfg['branch']
            and site['repo-subdir'] == cfg['nbs_path'])
    assert site['navbar']['tools'][0]['href'] == cfg['git_url']
    assert site['site-url'] == cfg['doc_host'] + cfg['doc_baseurl']
    assert quarto['project']['output-dir'] == cfg['doc_path'] == '_docs'
    assert (root/'nbs'/quarto['format']['html']['css']).exists()

def test_sidebar_has_every_notebook_once():
    listed = [*docs.front(), *(n for group in docs.sidebar().values() for n in group)]
    assert sorted(listed) == names

def test_sidebar_has_no_empty_lines():
    for s in web.site['sidebar']['contents']:
        for c in s.get('contents', []):
            assert any(docs.fnmatch(n, c['auto']) for n in names), f"{c['auto']} matches no notebook"

def test_sidebar_starts_with_home_and_api(): assert docs.front() == ['index.ipynb', 'api.ipynb']

def test_no_section_is_called_like_one_of_its_pages():
    for section, group in docs.sidebar().items():
        titles = [re.match('# (.*)', nbs[n].cells[0].source)[1] for n in group]
        assert section not in titles

def test_titles_are_distinct():
    "Two pages whose titles are nearly the same are confused in the sidebar and in the search"
    titles = {n: re.match('# (.*)', nb.cells[0].source)[1].lower() for n, nb in nbs.items()}
    alike = [(a, b) for a, b in combinations(titles, 2)
             if SequenceMatcher(None, titles[a], titles[b]).ratio() > .75]
    assert not alike

def test_only_the_current_section_is_open(): assert web.site['sidebar']['collapse-level'] == 1

def test_one_search_field(): assert web.site['navbar']['search'] and not web.site['sidebar']['search']

def test_tables_follow_the_theme():
    "In a dark theme a fixed colour is unreadable"
    css = (root/'nbs/styles.css').read_text(encoding='utf-8')
    assert all(f'table{o}' in css.replace(':is(.dataframe, .fastprogress)', '.dataframe table.fastprogress')
               for o in ('.dataframe', '.fastprogress'))
    css = re.sub(r'body\.quarto-(light|dark) [^}]*}', '', css)
    assert set(re.findall(r'[^-]\bcolor: ([^;]+);', css)) == {'var(--bs-body-color) !important'}

def test_tables_do_not_break_words():
    assert ('td, th { overflow-wrap: normal; word-break: normal; }'
            in (root/'nbs/styles.css').read_text(encoding='utf-8'))

def test_theme_is_that_of_the_reader():
    html = yaml.safe_load((root/'_quarto.yml').read_text(encoding='utf-8'))['format']['html']
    assert (set(html['theme']) == {'light', 'dark'} and html['respect-user-color-scheme']
            and html['highlight-style'] == 'a11y')

def test_site_is_published_by_quarto_and_tested_in_a_browser():
    "`quarto --version` fails without Quarto; with it, `make docs` uses it and fails on warnings"
    steps = yaml.safe_load((root/'.github/workflows/docs.yml').read_text(encoding='utf-8'))['jobs']['publish']['steps']
    what = [s.get('uses', s.get('run')) for s in steps]
    setup, build, test, upload = (next(i for i, o in enumerate(what) if part in o) for part in (
        'quarto-actions/setup', 'quarto --version && make docs', 'tests/test_docs_browser.py', 'upload-pages-artifact'))
    assert setup < build < test < upload and 'DOCS_SITE=_docs' in what[test] and '-k' not in what[test].split()

def test_nbdev_leaves_the_readme_alone():
    "`nbdev_docs` writes README.md anew whenever its notebook is newer, as may happen in a fresh clone"
    from nbdev.quarto import _doc_mtime_not_older
    cfg = get_config(path=root)
    assert _doc_mtime_not_older(root/'README.md', root/'nbs'/cfg.readme_nb)

# Links and anchors

@pytest.mark.parametrize('title,anchor',
                         [('Hierarchy.from_paths', 'hierarchy.from_paths'), ('The proof, at last', 'the-proof-at-last'),
                          ('2 classes', 'classes'), ('`disto_loss`', 'disto_loss')])
def test_anchor_is_pandocs(title, anchor): assert docs.anchor(title) == anchor

def test_links_lead_into_the_site():
    url = web.site['site-url']
    pages = {'004_hierarchy.ipynb': ('hierarchy', ['hierarchy', 'hierarchy-1', 'hierarchy.costs', 'proof'])}
    for old, new in [('004_hierarchy.ipynb', 'hierarchy.html'), ('004_hierarchy.ipynb#Proof', 'hierarchy.html#proof'),
                     (f'{url}/hierarchy.html#hierarchy.costs', 'hierarchy.html#hierarchy.costs'),
                     # the class, not the title of the page
                     (f'{url}/hierarchy.html#hierarchy', 'hierarchy.html#hierarchy-1'),
                     (f'{url}/hierarchy.html#hierarchy.inner', 'hierarchy.html#hierarchy'),  # has no heading of its own
                     ('https://example.org/a.html', 'https://example.org/a.html'), ('images/a.png', 'images/a.png')]:
        assert docs.local_link(old, pages) == new

def test_links_between_notebooks_have_a_heading():
    "The Sphinx site drops an unknown anchor, so its own test of links would not notice"
    heads = {n: docs.anchors(nb) for n, nb in nbs.items()}
    links = [(n, o or n, a) for n in names for o, a in re.findall(r'\]\(([\w.]+\.ipynb)?#([\w.-]+)\)', markdown(n))]
    assert len(links) > 5 and [o for o in links if o[2] not in heads[o[1]]] == []

def test_api_names_have_a_page():
    "The API page links each name to its definition, which nbdev must know; constants are the exception"
    import hierproto.all as everything
    for n in web.public:
        o = getattr(everything, n)
        if not hasattr(o, '__module__'): continue
        assert re.search(rf"/{o.__module__.partition('.')[2]}\.html#{n.lower()}$", NbdevLookup().doc(n) or ''), n

# Notebooks

@pytest.mark.parametrize('name', names)
def test_opens_with_title_and_description(name): assert re.match(r'# \S.*\n\n> \S', nbs[name].cells[0].source)

@pytest.mark.parametrize('name', names)
def test_outputs_have_no_paths_or_warnings(name):
    for c in nbs[name].cells:
        for o in c.get('outputs', []):
            text = o.get('text', '') + ''.join(str(v) for k, v in o.get('data', {}).items() if k.startswith('text/'))
            assert (o.get('name') != 'stderr'
                    and not re.search(r'site-packages|/(work|home|root|tmp|Users)/', text)), (c.source, text)

@pytest.mark.parametrize('name', names)
def test_imports_have_their_own_cell(name):
    "If a notebook exports something, nbdev runs each cell that imports; other code in it would run too, out of context"
    cells = [c for c in nbs[name].cells if c.cell_type == 'code']
    if not any(re.search(r'^#\| *exports?\b', c.source, re.M) for c in cells): return
    for c in cells:
        if re.search(r'^#\| *(export|hide)|^\s*[%!]|nbdev_export\(\)', c.source, re.M): continue
        tree = ast.parse(c.source)
        imports = any(isinstance(n, (ast.Import, ast.ImportFrom)) for n in ast.walk(tree))
        alone = all(isinstance(n, (ast.Import, ast.ImportFrom)) for n in tree.body)
        assert alone or not imports, f'move the imports to their own cell:\n{c.source}'

@pytest.mark.parametrize('name', names)
def test_no_link_inside_a_link(name):
    "nbdev links each exported name in backticks; inside the text of a link that would be a link in a link"
    texts = re.findall(r'\[([^\[\]]*`[^\[\]]*)\]\(', markdown(name))
    nested = [t for t in texts if any(NbdevLookup().doc(n) for n in re.findall(r'`([^`\s]+?)(?:\(\))?`', t))]
    assert not nested, f'remove the link or the backticks: {nested}'

def test_page_names_are_unique():
    "A page has the name of its notebook without the number"
    assert len(set(pages.values())) == len(pages)

def test_front_page_fits():
    "Code that the front page shows has at most 100 characters per line"
    for c in nbs['index.ipynb'].cells:
        if c.cell_type == 'code' and not re.search(r'^#\| *(hide|echo: *false)', c.source, re.M):
            assert not [l for l in c.source.splitlines() if len(l) > 100]
    for block in re.findall('^```.*?^```', markdown('index.ipynb'), re.S | re.M):
        assert not [l for l in block.splitlines() if len(l) > 100]

def test_front_page_installs_before_it_makes():
    text = markdown('index.ipynb')
    assert text.index('pip install git+') < text.index('make demo') < text.index('make test') < text.index('## Train on your images')

has_caption = re.compile(r'^#\| *fig-cap: *"[A-Z].*[.)]"$', re.M)

@pytest.mark.parametrize('name', names)
def test_figures_have_captions(name):
    for c in nbs[name].cells: assert not web.has_image(c) or has_caption.search(c.source), c.source

@pytest.mark.parametrize('name', names)
def test_texts_of_figures_have_no_percent_sign(name):
    "Quarto decodes the alternative text of an image like an address, and warns"
    for c in nbs[name].cells:
        assert not re.search(r'^#\| *fig-alt:.*%', c.source, re.M), c.source

@pytest.mark.parametrize('name', names)
def test_notebook_is_below_half_a_megabyte(name): assert (root/'nbs'/name).stat().st_size < 5e5

# What Quarto and Sphinx get

url = web.site['site-url']
signature = f'''---

[source](https://github.com/hierproto/hierproto/blob/main/hierproto/paper/recipes.py#L68){{target="_blank" \
style="float:right; font-size:smaller"}}

### cosine

```python
def cosine(
    x, # a [`Hierarchy`]({url}/hierarchy.html#hierarchy)
    y:NoneType=None
):
```

*Distance, as in [`Hierarchy`]({url}/hierarchy.html#hierarchy), of [`x`]({url}/recipes.html#x)*

*Call self as a function.*'''
png = new_output('display_data', {'image/png': 'iVBORw0KGgo=', 'text/plain': '<Figure>'})

@pytest.fixture
def polished():
    "A page called 'distortion' after `polish`"
    text = (f'Call [`train`]({url}/experiments.html#train) and [`disto_loss`]({url}/distortion.html#disto_loss), '
            f'not [`show_batch`]({url}/data.nyudv2.html#show_batch). More.')
    cells = [new_markdown_cell(text),
             new_code_cell('#| output: asis', outputs=[new_output('display_data', {'text/markdown': signature})]),
             new_markdown_cell('## Title\n\nThe *loss* falls to $0$. Then it stays.'),
             new_code_cell('plot()', outputs=[png]), new_code_cell('#| fig-alt: "My words"\nplot()', outputs=[png]),
             new_code_cell('#| output: asis', outputs=[new_output('display_data', {'text/markdown': '### disto_loss'})])]
    nb = new_notebook(cells=cells)
    web.polish(nb, '101_distortion.ipynb')
    return nb

def test_signatures_are_plain(polished):
    md = polished.cells[1].outputs[0].data['text/markdown']
    assert 'def cosine(x, y=None):' in md
    assert '*Distance, as in [`Hierarchy`](hierarchy.html#hierarchy), of `x`*' in md

def test_arguments_have_a_table(polished):
    md = polished.cells[1].outputs[0].data['text/markdown']
    assert '| `x` |  | a `Hierarchy` |\n| `y` | `None` |  |' in md

@pytest.mark.parametrize('code,kept', [('def cosine(x): return x', False), ('@patch\ndef cosine(self:A): pass', False),
                                       ('cosine(1)', True)])
def test_no_signature_is_shown_twice(code, kept):
    nb = new_notebook(cells=[new_code_cell(
        '#| output: asis', outputs=[new_output('display_data', {'text/markdown': signature})]), new_code_cell(code)])
    web.polish(nb, '101_distortion.ipynb')
    md = nb.cells[0].outputs[0].data['text/markdown']
    assert ('def cosine' in md) == kept and '### cosine' in md and '*Distance' in md

def test_headings_keep_underscores():
    "Markdown shows `__call__` as a bold `call`"
    nb = new_notebook(cells=[new_code_cell('#| output: asis', outputs=[
        new_output('display_data', {'text/markdown': '---\n\n### Method.__call__\n\n*Text*'})])])
    web.polish(nb, '404_learner.ipynb')
    md = nb.cells[0].outputs[0].data['text/markdown']
    assert r'### Method.\_\_call\_\_' in md and docs.anchor(r'Method.\_\_call\_\_') == 'method.__call__'

def test_private_classes_have_no_heading_if_their_code_is_shown():
    docs_of = lambda n: new_code_cell(
        '#| output: asis', outputs=[new_output('display_data', {'text/markdown': f'---\n\n### {n}\n\n*Text*'})])
    nb = new_notebook(cells=[docs_of('_Saver.load'), new_code_cell('def load(self:_Saver): pass'),
                             docs_of('_Saver.save'), docs_of('__getattr__')])
    web.polish(nb, '404_learner.ipynb')
    assert len(nb.cells) == 3 and '_Saver.save' in nb.cells[1].outputs[0].data['text/markdown']

def test_tables_with_long_cells_become_blocks_on_a_phone():
    css = (root/'nbs/styles.css').read_text(encoding='utf-8')
    for o in (css, docs.head):
        assert re.search(r'@media \(max-width: 46em\) {[^@]*?table:is\(:has\(td br\), .*?\) :is\(tbody, tr, '
                         r'td\) { display: block', o)

def test_the_docstring_of_python_is_hidden(polished):
    assert 'Call self' not in polished.cells[1].outputs[0].data['text/markdown']

@pytest.mark.parametrize('obj', [type(docs).__repr__, __import__('torch').nn.Module.forward])
def test_other_inherited_docstrings_are_hidden(obj):
    first, _, rest = obj.__doc__.partition('\n')
    assert web.polish_markdown(f'### f\n\n*{first}*\n{rest}'.rstrip(), {}).strip() == '### f'

def test_names_with_other_meanings_are_not_links(polished):
    "fastai has a `show_batch` too, and two of our modules define one"
    assert (polished.cells[0].source
            == 'Call `train` and [`disto_loss`](distortion.html#disto_loss), not `show_batch`. More.')

def test_source_is_that_of_the_page(polished):
    "`cosine` is also the name of a schedule in `hierproto.paper.recipes`"
    assert re.search(r'blob/main/hierproto/distortion\.py#L\d+\)', polished.cells[1].outputs[0].data['text/markdown'])

def test_figures_have_alternative_texts(polished):
    assert polished.cells[3].source == '#| fig-alt: "The loss falls to 0."\nplot()'
    assert polished.cells[4].source == '#| fig-alt: "My words"\nplot()'
    readme.tag_options(polished.cells[4])
    assert (polished.cells[4].metadata['mystnb'] == {'image': {'alt': 'My words'}}
            and polished.cells[4].source == 'plot()')

def test_images_of_markdown_have_alternative_texts():
    "Quarto shows the text of an image as its caption, and leaves the alternative text empty"
    nb = new_notebook(cells=[new_markdown_cell('---\ntitle: T\noutput-file: t.html\n---'),
                             new_markdown_cell('![A *tree*](images/a.png)')])
    web.polish(nb, '101_distortion.ipynb')
    assert nb.cells[1].source == '![A *tree*](images/a.png){fig-alt="A tree"}'
    docs.adapt(nb)
    assert nb.cells[1].source == '![A *tree*](images/a.png)'

def test_names_without_a_heading_are_not_links():
    text = f'[`_tensors`]({url}/paper.data.nyudv2.html#_tensors)'
    nb = new_notebook(cells=[new_markdown_cell(text)])
    web.polish(nb, '703_paper.data.nyudv2.ipynb')
    assert nb.cells[0].source == '`_tensors`'

def test_caption_is_the_alternative_text_of_sphinx():
    text = new_output('display_data', {'text/markdown': 'words'})
    c = new_code_cell('#| fig-cap: "Two: <one>"\n#| code-fold: true\n#| code-summary: "Test"\nplot()',
                      outputs=[text, png, text])
    docs.add_captions(c, readme.tag_options(c))
    assert c.source == 'plot()' and c.metadata['tags'] == ['hide-input']
    assert c.metadata['mystnb'] == {'image': {'alt': 'Two: <one>'}, 'code_prompt_show': 'Test',
                                    'code_prompt_hide': 'Test'}
    assert [list(o.data)[0] for o in c.outputs] == ['text/markdown', 'image/png', 'text/html', 'text/markdown']
    assert c.outputs[2].data['text/html'] == '<p class="caption"><em>Two: &lt;one&gt;</em></p>'

test_cell = 'x = f(1)\nprint(x)\ntest_eq(x, 1)\ntest_fail(f)'
folded = '#| code-fold: true\n#| code-summary: "Test"\n'

@pytest.mark.parametrize('name,code,fold', [
    ('101_distortion.ipynb', test_cell, folded),
    ('101_distortion.ipynb', '#| code-fold: true\n1 + 1', ''),
    ('805_results.ipynb', 'table()', '#| code-fold: true\n'),
    ('101_distortion.ipynb', 'test_eq(f(1), 1)', ''),
    ('101_distortion.ipynb', 'def f(x):\n    assert x\n\n    return x', ''),
    ('101_distortion.ipynb', f'#| code-fold: false\n{test_cell}', ''), ('601_ten_minutes.ipynb', test_cell, ''),
    ('index.ipynb', test_cell, '')])
def test_code_of_results_and_long_tests_is_folded(name, code, fold):
    c = new_code_cell(code)
    web.fold(c, name)
    assert c.source == fold + code

def test_exported_source_is_folded():
    exported = '#| code-fold: show\n#| code-summary: "Exported source"\n'
    c = new_code_cell(f'{exported}def f(): pass')
    web.fold(c, '101_distortion.ipynb')
    assert c.source == '#| code-fold: true\n#| code-summary: "Source of f"\ndef f(): pass'

def test_output_of_a_test_is_folded_with_it():
    printed = new_output('stream', text='1')
    nb = new_notebook(cells=[new_code_cell(test_cell, outputs=[printed]), new_code_cell(test_cell, outputs=[png]),
                             new_code_cell('f(1)', outputs=[printed])])
    web.polish(nb, '101_distortion.ipynb')
    assert [c.source.partition('\n')[0] for c in nb.cells] == [
        '<details class="test"><summary>Test</summary>', 'x = f(1)', '</details>',
        '#| fig-alt: "Figure"', 'f(1)']

@pytest.fixture
def quarto(tmp_path, monkeypatch):
    ("A stand-in for Quarto that renders one file and prints what QUARTO_SAYS contains; "
     "one small notebook instead of ours")
    exe = tmp_path/'bin/quarto'
    exe.parent.mkdir()
    exe.write_text('#!/bin/sh\nmkdir _docs && cp *.ipynb *.css _docs/ && echo "$QUARTO_SAYS" >&2\n')
    exe.chmod(0o755)
    monkeypatch.setenv('PATH', f"{exe.parent}{os.pathsep}{os.environ['PATH']}")
    (tmp_path/'nbs').mkdir()
    (tmp_path/'nbs/styles.css').touch()
    nbformat.write(new_notebook(cells=[new_markdown_cell('# Title\n\n> A line'),
                                       new_code_cell('plot()', outputs=[png])]), tmp_path/'nbs/10_page.ipynb')
    monkeypatch.setattr(docs, 'root', tmp_path)
    monkeypatch.setattr(docs, 'parallel', lambda f, items, **kw: [f(o) for o in items])
    return tmp_path

def test_quarto_renders_the_polished_notebooks(quarto):
    (quarto/'README.md').write_text('untouched')
    docs.build(quarto/'_docs', quarto=True)
    assert '#| fig-alt: ' in nbformat.read(quarto/'_docs/10_page.ipynb', 4).cells[-1].source
    assert (quarto/'_docs/styles.css').exists() and (quarto/'README.md').read_text() == 'untouched'

def test_warnings_of_quarto_fail_the_build(quarto, monkeypatch):
    monkeypatch.setenv('QUARTO_SAYS', 'WARN: Unable to resolve link target')
    with pytest.raises(SystemExit, match='Unable to resolve link target'): docs.build(quarto/'_docs', quarto=True)
