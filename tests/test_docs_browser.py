"""Open each page of the docs site in a headless Chromium, wide and narrow, light and dark.

DOCS_SITE=folder tests a site that is already built, for example by Quarto; otherwise tools/docs.py builds one with Sphinx.
DOCS_SHOTS=folder saves a screenshot of each page."""
import ast, functools, http.server, os, re, shutil, subprocess, sys, threading
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlparse

import nbformat, pytest
from nbdev.doclinks import _nbpath2html

pytest.importorskip('myst_nb', reason="the docs extra is not installed: pip install -e '.[docs]'")
root = Path(__file__).parents[1]
sys.path.insert(0, str(root/'tools'))
import docs

names = docs.notebooks()
page_of = {n: _nbpath2html(Path(n)).name for n in names}
chromium = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None)
in_browser = pytest.mark.skipif(not chromium, reason='Chromium is not installed')
flags = ('--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking '
         '--disable-component-update --disable-sync')
widths = 1280, 390

def markdown(name): return '\n\n'.join(c.source for c in nbformat.read(root/'nbs'/name, 4).cells if c.cell_type == 'markdown')

@pytest.fixture(scope='module')
def site(tmp_path_factory):
    if built := os.environ.get('DOCS_SITE'): return Path(built).absolute()
    out = tmp_path_factory.mktemp('docs')/'site'
    run = subprocess.run([sys.executable, root/'tools/docs.py', '--out', out], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-5000:]
    return out

class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args): pass

@pytest.fixture(scope='module')
def url(site):
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), functools.partial(Quiet, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f'http://127.0.0.1:{server.server_port}'
    server.shutdown()

@pytest.fixture(scope='module')
def browser():
    api = pytest.importorskip('playwright.sync_api', reason="playwright is not installed: pip install -e '.[dev]'")
    with api.sync_playwright() as p:
        b = p.chromium.launch(executable_path=chromium, args=flags.split())
        yield b
        b.close()

@pytest.fixture
def page(browser):
    "A new page that collects errors in `page.faults`"
    page = browser.new_page(viewport=dict(width=widths[0], height=900))
    page.faults = []
    page.on('console', lambda m: m.type in ('error', 'warning') and page.faults.append(m.text))
    page.on('pageerror', lambda e: page.faults.append(str(e)))
    page.on('response', lambda r: r.status >= 400 and page.faults.append(f'{r.status} {r.url}'))
    page.on('requestfailed', lambda r: page.faults.append(f'{r.failure} {r.url}'))
    page.on('request', lambda r: urlparse(r.url).hostname in (None, '', '127.0.0.1') or page.faults.append(f'not offline: {r.url}'))
    yield page
    page.close()

# text outside code, where raw formulas and links would show
prose = """() => { const walk = document.createTreeWalker(document.querySelector('article'), NodeFilter.SHOW_TEXT), text = [];
    while (walk.nextNode()) if (!walk.currentNode.parentElement.closest('pre, code, script, style, mjx-container')) text.push(walk.currentNode.data);
    return text.join(' ') }"""
maths = """async () => { if (window.MathJax) await MathJax.startup.promise;
    const count = s => document.querySelectorAll(s).length;
    return {wanted: count('.math'), shown: count('.math > mjx-container'), errors: count('mjx-merror, [data-mjx-error]'), display: count('mjx-container[display]'),
            tags: [...document.querySelectorAll('[id^="mjx-eqn:"]')].filter(o => o.getBoundingClientRect().width).map(o => decodeURIComponent(o.id.slice(8)))} }"""
images = "() => [...document.images].filter(i => !(i.complete && i.naturalWidth)).map(i => i.src)"
# elements wider than the screen that do not scroll in their own box
overflow = """() => { const wide = o => o.getBoundingClientRect().right > innerWidth + 1, scrolls = o => getComputedStyle(o).overflowX != 'visible';
    const boxed = o => { for (let p = o.parentElement; p && p.tagName != 'ARTICLE'; p = p.parentElement) if (scrolls(p) && !wide(p)) return true };
    const out = [...document.querySelectorAll('article *')].filter(o => wide(o) && !(scrolls(o) && !wide(o)) && !boxed(o)).map(o => o.outerHTML.slice(0, 120));
    return document.documentElement.scrollWidth > innerWidth ? ['the page itself', ...out] : out }"""

@in_browser
@pytest.mark.parametrize('name', names)
def test_page(name, page, url):
    page.goto(f'{url}/{page_of[name]}')
    seen, md = page.evaluate(maths), re.sub(r'^```.*?^```|`[^`\n]+`', '', markdown(name), flags=re.S | re.M)
    assert page.faults == []
    assert page.evaluate(images) == []
    assert seen['errors'] == 0 and seen['shown'] == seen['wanted']
    assert seen['display'] >= len(re.findall(r'\$\$.+?\$\$', md, re.S))
    assert sorted(seen['tags']) == sorted(re.findall(r'\\tag\{(.+?)\}', md))
    assert not (raw := re.findall(r'\\[a-zA-Z]{2,}.*|\]\(.*|\$\$.*|\$[^$\n]*[\\^_{][^$\n]*\$', page.evaluate(prose))), raw
    for w in widths:
        page.set_viewport_size(dict(width=w, height=900))
        assert page.evaluate(overflow) == [], f'wider than a screen of {w} pixels'
        if shots := os.environ.get('DOCS_SHOTS'): page.screenshot(path=f'{shots}/{Path(page_of[name]).stem}_{w}.png', full_page=True)

@in_browser
def test_overflow_is_noticed(page, url):
    page.goto(f'{url}/index.html')
    page.evaluate("document.querySelector('article').insertAdjacentHTML('beforeend', '<div style=\"width: 3000px\">wide</div>')")
    assert len(page.evaluate(overflow)) > 0

@in_browser
def test_search(page, url):
    page.goto(f'{url}/search.html?q=distortion')
    page.wait_for_selector('#search-results li a')
    assert any('distortion.html' in a.get_attribute('href') for a in page.query_selector_all('#search-results li a'))
    assert page.faults == []

@in_browser
def test_dark_and_light(page, url):
    page.goto(f'{url}/index.html')
    seen = set()
    for scheme in ('light', 'dark'):
        page.emulate_media(color_scheme=scheme)
        seen.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(seen) == 2

def test_links(site):
    "Each link and image of each page leads to a file of the site, and to an existing anchor"
    pages = {p.name: p.read_text(encoding='utf-8') for p in site.glob('*.html')}
    assert {*page_of.values()} <= pages.keys()
    ids = {n: {unquote(i) for i in re.findall(r'\bid="([^"]+)"', html)} for n, html in pages.items()}
    broken = []
    for n, html in pages.items():
        for target in re.findall(r'<(?:a|img|link|script)\b[^>]*?\b(?:href|src)="([^"]*)"', html):
            path, anchor = urldefrag(target.replace('&amp;', '&'))
            if urlparse(path).scheme or path.startswith('//'): continue
            path = unquote(urlparse(path).path) or n
            if not (site/path).exists() or (anchor and path in ids and unquote(anchor) not in ids[path]): broken.append((n, target))
    assert broken == []

def test_sidebar(site):
    html = (site/'index.html').read_text(encoding='utf-8')
    tree = html[html.index('class="sidebar-tree"'):html.index('</aside>')]
    groups = {'Reference': docs.front()[1:], **{k: v for k, v in docs.sidebar().items() if v}}
    assert re.findall(r'class="caption"[^>]*><span class="caption-text">(.*?)</span>', tree) == list(groups)
    assert re.findall(r'class="reference internal" href="(.*?)"', tree) == [page_of[n] for g in groups.values() for n in g]

def test_api(site):
    "Each exported function and class has a heading and a signature on its page"
    from hierproto._modidx import d
    for mod, syms in d['syms'].items():
        body = ast.parse((root/f"{mod.replace('.', '/')}.py").read_text(encoding='utf-8')).body
        exported = next((ast.literal_eval(n.value) for n in body if isinstance(n, ast.Assign) and n.targets[0].id == '__all__'), [])
        for name in exported:
            if f'{mod}.{name}' not in syms: continue
            page = syms[f'{mod}.{name}'][0].partition('#')[0]
            html = (site/page).read_text(encoding='utf-8')
            assert re.search(rf'<h[1-6]>{name}<.*?<span class="k">def</span> *(<span class="w"> </span>)?<span class="nf">{name}</span>', html, re.S), f'{name} is not on {page}'

def rendered(site):
    "The contents of each page: everything inside <article> or, with Quarto, <main>"
    html = {n: (site/page).read_text(encoding='utf-8') for n, page in page_of.items()}
    return {n: re.search(r'<(article|main)\b.*</\1>', text, re.S)[0] for n, text in html.items()}

def test_no_traces_of_the_tools(site):
    "Raw links in signatures, types of defaults, and the docstring that Python gives to functions without one"
    for name, html in rendered(site).items():
        bad = re.findall(r'Call self as a function|:NoneType=|\[`[^`\n]+`\]\([^\n]*', re.sub('<[^>]+>', '', html))
        assert not bad, f'{name}: {bad}'

def test_images_have_alternative_texts(site):
    for name, html in rendered(site).items():
        bad = [i[:200] for i in re.findall(r'<img\b[^>]*>', html) if not re.search(r'\balt="[^"]*\w{3}', i) or re.search(r'alt="[^"]*_files/|alt="_images', i)]
        assert not bad, f'{name}: {bad}'

def test_api_page_links_to_definitions(site):
    html = (site/'api.html').read_text(encoding='utf-8')
    known = {k.rpartition('.')[2] for syms in docs.modidx['syms'].values() for k in syms}
    for n in docs.public & known:
        assert re.search(rf'href="[\w.]+\.html#[\w.-]*{n.lower()}[\w.-]*"[^>]*><code[^>]*>(<span[^>]*>)?{n}<', html), n

@in_browser
def test_only_the_current_section_is_open(page, url):
    page.goto(f'{url}/distortion.html')
    sections = {o.inner_text().lower(): o.get_attribute('aria-expanded') for o in page.query_selector_all('.sidebar-tree .caption')}
    assert [k for k, v in sections.items() if v == 'true'] == ['reference', 'the idea']
