"The docs site's configuration: one source for each fact, a place in the sidebar for each notebook, notebooks that nbdev can process."
import ast, re, sys
from configparser import ConfigParser
from pathlib import Path

import nbformat, pytest, yaml
from nbdev.doclinks import NbdevLookup

root = Path(__file__).parents[1]
sys.path.insert(0, str(root/'tools'))
import docs

names = docs.notebooks()

def test_settings_agree():
    ini = ConfigParser(delimiters=['='])
    ini.read(root/'settings.ini', encoding='utf-8')
    cfg, quarto = ini['DEFAULT'], yaml.safe_load((root/'nbs/_quarto.yml').read_text(encoding='utf-8'))
    site = quarto['website']
    assert site['title'] == cfg['title'] and site['description'] == cfg['description']
    assert site['repo-url'] == cfg['git_url'] and site['repo-branch'] == cfg['branch'] and site['repo-subdir'] == cfg['nbs_path']
    assert site['navbar']['tools'][0]['href'] == cfg['git_url']
    assert site['site-url'] == cfg['doc_host'] + cfg['doc_baseurl']
    assert quarto['project']['output-dir'] == cfg['doc_path'] == '_docs'

def test_sidebar_has_every_notebook_once():
    listed = ['index.ipynb', *(n for group in docs.sidebar().values() for n in group)]
    assert sorted(listed) == names

def test_sections_follow_the_numbers():
    for group in docs.sidebar().values(): assert group and group == sorted(group)

def test_patterns():
    bar = docs.sidebar(['00_hierarchy.ipynb', '10_baselines.hxe.ipynb', '19_methods.ipynb', '60_start.ipynb', 'index.ipynb'])
    assert {k: v for k, v in bar.items() if v} == {'Foundation': ['00_hierarchy.ipynb'], 'Baselines': ['10_baselines.hxe.ipynb'],
                                                   'Methods': ['19_methods.ipynb'], 'Tutorials': ['60_start.ipynb']}

@pytest.mark.parametrize('title,anchor', [('Hierarchy.from_paths', 'hierarchy.from_paths'), ('The proof, at last', 'the-proof-at-last'),
                                          ('2 classes', 'classes'), ('`disto_loss`', 'disto_loss')])
def test_anchor_is_pandocs(title, anchor): assert docs.anchor(title) == anchor

def test_links_lead_into_the_site():
    url = docs.site['site-url']
    pages = {'00_hierarchy.ipynb': ('hierarchy', ['hierarchy', 'hierarchy-1', 'hierarchy.costs', 'proof'])}
    for old, new in [('00_hierarchy.ipynb', 'hierarchy.html'), ('00_hierarchy.ipynb#Proof', 'hierarchy.html#proof'),
                     (f'{url}/hierarchy.html#hierarchy.costs', 'hierarchy.html#hierarchy.costs'),
                     (f'{url}/hierarchy.html#hierarchy', 'hierarchy.html#hierarchy-1'),      # the class, not the page's title
                     (f'{url}/hierarchy.html#hierarchy.inner', 'hierarchy.html#hierarchy'),  # has no heading of its own
                     ('https://example.org/a.html', 'https://example.org/a.html'), ('images/a.png', 'images/a.png')]:
        assert docs.local_link(old, pages) == new

@pytest.mark.parametrize('name', names)
def test_opens_with_title_and_description(name):
    assert re.match(r'# \S.*\n\n> \S', nbformat.read(root/'nbs'/name, 4).cells[0].source)

@pytest.mark.parametrize('name', names)
def test_outputs_speak_of_no_machine(name):
    "Warnings, and folders of whoever ran the notebook last, are nothing to read"
    for c in nbformat.read(root/'nbs'/name, 4).cells:
        for o in c.get('outputs', []):
            said = o.get('text', '') + ''.join(str(v) for k, v in o.get('data', {}).items() if k.startswith('text/'))
            assert o.get('name') != 'stderr' and not re.search(r'site-packages|/(work|home|root|tmp|Users)/', said), (c.source, said)

@pytest.mark.parametrize('name', names)
def test_imports_stand_alone(name):
    "Where there is something to document, nbdev runs each cell that imports: with other code in it, that code runs too, out of context"
    cells = [c for c in nbformat.read(root/'nbs'/name, 4).cells if c.cell_type == 'code']
    if not any(re.search(r'^#\| *exports?\b', c.source, re.M) for c in cells): return
    for c in cells:
        if re.search(r'^#\| *(export|hide)|^\s*[%!]|nbdev_export\(\)', c.source, re.M): continue
        tree = ast.parse(c.source)
        imports = any(isinstance(n, (ast.Import, ast.ImportFrom)) for n in ast.walk(tree))
        alone = all(isinstance(n, (ast.Import, ast.ImportFrom)) for n in tree.body)
        assert alone or not imports, f'give the imports a cell of their own:\n{c.source}'

@pytest.mark.parametrize('name', names)
def test_no_link_inside_a_link(name):
    "nbdev makes a link of each exported name in backticks: as the whole text of a link it would become a link in a link, which no renderer shows"
    md = '\n'.join(c.source for c in nbformat.read(root/'nbs'/name, 4).cells if c.cell_type == 'markdown')
    nested = [t for t in re.findall(r'\[([^\[\]]*`[^\[\]]*)\]\(', md) if any(NbdevLookup().doc(n) for n in re.findall(r'`([^`\s]+?)(?:\(\))?`', t))]
    assert not nested, f'name it without a link, or give the link other words: {nested}'

def test_pages_have_names_of_their_own():
    "A page is called as its notebook without the number, so two numbers must not share a name"
    pages = [f.stem.partition('_')[2] for f in Path(__file__).parent.parent.glob('nbs/[0-9]*.ipynb')]
    assert sorted({o for o in pages if pages.count(o) > 1}) == []
