"""Open each page of the docs site in a headless Chromium, wide and narrow, light and dark.

DOCS_SITE=folder tests a site that is already built, by Quarto or Sphinx;
otherwise tools/docs.py builds one with Sphinx.
DOCS_SHOTS=folder saves small screenshots of each page, wide in light and narrow in dark."""
import ast, asyncio, functools, http.server, os, re, shutil, subprocess, sys, threading
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlparse

import nbformat, pytest
from nbdev.doclinks import _nbpath2html

pytest.importorskip('myst_nb', reason="the docs extra is not installed: pip install -e '.[docs]'")
root = Path(__file__).parents[1]
sys.path.insert(0, str(root/'tools'))
import docs
from hierproto.paper import site as web

names = docs.notebooks()
page_of = {n: _nbpath2html(Path(n)).name for n in names}
results = [n for n in names if n[0] in '89']
chromium = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None)
flags = ('--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking '
         '--disable-component-update --disable-sync')
widths, themes, screen, tabs = (1400, 390), ('light', 'dark'), 900, 3

def markdown(name):
    return '\n\n'.join(c.source for c in nbformat.read(root/'nbs'/name, 4).cells if c.cell_type == 'markdown')

@pytest.fixture(scope='module')
def site(tmp_path_factory):
    if built := os.environ.get('DOCS_SITE'): return Path(built).absolute()
    out = tmp_path_factory.mktemp('docs')/'site'
    run = subprocess.run([sys.executable, root/'tools/docs.py', '--out', out], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-5000:]
    return out

@pytest.fixture(scope='module')
def html(site): return {p.name: p.read_text(encoding='utf-8') for p in site.glob('*.html')}

@pytest.fixture(scope='module')
def quarto(html): return 'name="generator" content="quarto' in html['index.html']

@pytest.fixture
def sphinx(quarto):
    if quarto: pytest.skip('about the theme of the site that Sphinx builds')

class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args): pass

@pytest.fixture(scope='module')
def url(site):
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), functools.partial(Quiet, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f'http://127.0.0.1:{server.server_port}'
    server.shutdown()

@pytest.fixture(scope='module')
def in_tab(url):
    "Call an async function with a new tab of the one browser, and with more arguments"
    if not chromium: pytest.skip('Chromium is not installed')
    api = pytest.importorskip('playwright.async_api', reason="playwright is not installed: pip install -e '.[dev]'")
    loop = asyncio.new_event_loop()
    run = loop.run_until_complete
    p = run(api.async_playwright().start())
    browser = run(p.chromium.launch(executable_path=chromium, args=flags.split()))
    async def one(f, *args):
        scale = .4 if os.environ.get('DOCS_SHOTS') else 1
        tab = await browser.new_page(viewport=dict(width=widths[0], height=screen), base_url=url,
                                     device_scale_factor=scale)
        tab.set_default_timeout(300_000)  # milliseconds; the machine may be busy
        try: return await f(tab, *args)
        finally: await tab.close()
    async def many(f, items):
        free = asyncio.Semaphore(tabs)
        async def wait(o):
            async with free: return await one(f, o)
        return dict(zip(items, await asyncio.gather(*map(wait, items))))
    call = lambda f, *args: run(one(f, *args))
    call.many = lambda f, items: run(many(f, items))
    yield call
    run(browser.close())
    run(p.stop())
    loop.close()

script = """const main = document.querySelector('article, main'), texts = [], all = s => [...main.querySelectorAll(s)];
const walk = document.createTreeWalker(main, NodeFilter.SHOW_TEXT);
while (walk.nextNode()) if (walk.currentNode.data.trim()) texts.push(walk.currentNode);"""
# text outside code, where raw formulas and links would show
prose = (script + "return texts.filter(t => !t.parentElement.closest('pre, code, script, style, mjx-container'))"
         ".map(t => t.data).join(' ')")
maths = """const count = s => document.querySelectorAll(s).length;
    return {wanted: count('.math'), shown: count('.math > mjx-container'),
        errors: count('mjx-merror, [data-mjx-error]'), display: count('mjx-container[display]'),
            tags: [...document.querySelectorAll('[id^="mjx-eqn:"]')].filter(o => o.getBoundingClientRect().width)
        .map(o => decodeURIComponent(o.id.slice(8)))}"""
images = """return [...document.images].map(i => ({src: i.src.slice(-80), broken: !(i.complete && i.naturalWidth),
    large: i.clientWidth > 0 && i.naturalWidth > 2.5 * i.clientWidth}))"""
# elements wider than the screen that do not scroll in their own box
overflow = script + """const wide = o => o.getBoundingClientRect().right > innerWidth + 1,
        scrolls = o => getComputedStyle(o).overflowX != 'visible';
    const boxed = o => { for (let p = o.parentElement; p && p != main;
        p = p.parentElement) if (scrolls(p) && !wide(p)) return true };
    const out = all('*').filter(o => wide(o) && !(scrolls(o) && !wide(o)) && !boxed(o))
        .map(o => o.outerHTML.slice(0, 120));
    return document.documentElement.scrollWidth > innerWidth ? ['the page itself', ...out] : out"""
# texts whose contrast with what is behind them is below 4.5, the limit of the accessibility guidelines (WCAG AA)
contrast = script + """const cache = new Map(), rgba = s => { const c = s.match(/[\\d.]+/g).map(Number);
        return c.length < 4 ? [...c.slice(0, 3), 1] : c };
    const over = (a, b) => [0, 1, 2].map(i => a[i] * a[3] + b[i] * (1 - a[3]));
    const back = o => { if (!o) return [255, 255, 255]; if (!cache.has(o)) cache.set(o,
        over(rgba(getComputedStyle(o).backgroundColor), back(o.parentElement))); return cache.get(o) };
    const light = c => { const l = c.map(v => (v /= 255) <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
        return .2126 * l[0] + .7152 * l[1] + .0722 * l[2] };
    const ratio = o => { const b = back(o), [x, y] = [light(over(rgba(getComputedStyle(o).color), b)),
        light(b)].sort((p, q) => p - q); return (y + .05) / (x + .05) };
    const seen = texts.map(t => t.parentElement).filter(o => o.getClientRects().length
        && !o.closest('script, style, mjx-container, a.headerlink, .anchorjs-link'));
    return [...new Set(seen)].map(o => [ratio(o), o]).filter(o => o[0] < 4.5)
        .map(([r, o]) => r.toFixed(1) + ' ' + o.outerHTML.slice(0, 90))"""
anchors = script + """return all('a[href^="#"]').map(a => a.getAttribute('href').slice(1))
        .filter(a => a && !document.getElementById(decodeURIComponent(a)))"""
# the first table or figure, and code that is open above it
first = script + """const top = o => o.getBoundingClientRect().top + scrollY, found = all('table, img')[0];
    return {at: found ? top(found) : 1e6, code: all('pre').filter(o => o.getClientRects().length
        && !o.closest('details:not([open]), .cell_output, .cell-output') && (!found || top(o) < top(found))).length}"""

async def opened(tab, path):
    "Go to `path`; returns a list that collects errors"
    faults = []
    tab.on('console', lambda m: m.type in ('error', 'warning') and faults.append(m.text))
    tab.on('pageerror', lambda e: faults.append(str(e)))
    tab.on('response', lambda r: r.status >= 400 and faults.append(f'{r.status} {r.url}'))
    tab.on('requestfailed', lambda r: faults.append(f'{r.failure} {r.url}'))
    tab.outside = []
    tab.on('request', lambda r: urlparse(r.url).hostname in (None, '', '127.0.0.1') or tab.outside.append(r.url))
    await tab.goto(path)
    await tab.evaluate('async () => { if (window.MathJax) await MathJax.startup.promise }')
    return faults

# the background is that of the theme, and no colour is changing any more
switched = """theme => { const [r, g, b] = getComputedStyle(document.body).backgroundColor.match(/[\\d.]+/g).map(Number),
        changing = document.getAnimations().filter(o => o.effect.getComputedTiming().endTime < Infinity);
    return (r + g + b > 384) == (theme == 'light') && changing.length == 0 }"""

async def switch(tab, theme):
    "Ask for `theme` and wait until the page shows it"
    await tab.emulate_media(color_scheme=theme)
    await tab.wait_for_function(switched, arg=theme)

async def visit(tab, name):
    "Everything that the tests want to know about the page of the notebook `name`"
    faults = await opened(tab, page_of[name])
    ask = lambda js: tab.evaluate(f'() => {{ {js} }}')
    seen = dict(images=await ask(images), maths=await ask(maths), prose=await ask(prose), anchors=await ask(anchors),
                first=await ask(first))
    seen['height'] = await ask(script + 'return main.scrollHeight')
    if shots := os.environ.get('DOCS_SHOTS'):
        for w, theme in zip(widths, themes):
            await tab.set_viewport_size(dict(width=w, height=screen))
            await switch(tab, theme)
            await tab.screenshot(path=f'{shots}/{Path(page_of[name]).stem}_{w}_{theme}.jpg', full_page=True)
    await ask("document.querySelectorAll('details').forEach(o => o.open = true)")
    seen['wide'], seen['pale'] = [], []
    for w in widths:
        await tab.set_viewport_size(dict(width=w, height=screen))
        seen['wide'] += [f'{w} pixels: {o}' for o in await ask(overflow)]
    for theme in themes:
        await switch(tab, theme)
        seen['pale'] += [f'{theme}: {o}' for o in await ask(contrast)]
    return seen | dict(faults=faults, outside=tab.outside)

@pytest.fixture(scope='module')
def visits(in_tab): return in_tab.many(visit, names)

# Pages in the browser

@pytest.mark.parametrize('name', names)
def test_page(name, visits, quarto):
    seen, md = visits[name], re.sub(r'^```.*?^```|`[^`\n]+`', '', markdown(name), flags=re.S | re.M)
    assert seen['faults'] == []
    assert quarto or seen['outside'] == [], 'the site of Sphinx works offline'
    assert [i['src'] for i in seen['images'] if i['broken']] == []
    m = seen['maths']
    assert m['errors'] == 0 and m['shown'] == m['wanted']
    assert m['display'] >= len(re.findall(r'\$\$.+?\$\$', md, re.S))
    assert sorted(m['tags']) == sorted(re.findall(r'\\tag\{(.+?)\}', md))
    assert not (raw := re.findall(r'\\[a-zA-Z]{2,}.*|\]\(.*|\$\$.*|\$[^$\n]*[\\^_{][^$\n]*\$', seen['prose'])), raw
    assert seen['anchors'] == []

@pytest.mark.parametrize('name', names)
def test_nothing_is_wider_than_the_screen(name, visits): assert visits[name]['wide'] == []

@pytest.mark.parametrize('name', names)
def test_text_has_contrast_in_both_themes(name, visits): assert visits[name]['pale'] == []

@pytest.mark.parametrize('name', names)
def test_figures_are_embedded_at_the_size_shown(name, visits):
    assert [i['src'] for i in visits[name]['images'] if i['large']] == []

@pytest.mark.parametrize('name', results)
def test_result_comes_before_code(name, visits):
    assert visits[name]['first']['at'] < 2*screen and visits[name]['first']['code'] == 0

@pytest.mark.parametrize('name', names)
def test_page_is_shorter_than_20_screens(name, visits): assert visits[name]['height'] < 20*screen

def test_overflow_and_contrast_are_noticed(in_tab):
    async def spoil(tab):
        await opened(tab, 'index.html')
        html = '<div style="width: 3000px">wide</div><p style="color: #eee; background: #fff">pale</p>'
        await tab.evaluate("html => document.querySelector('article, main').insertAdjacentHTML('beforeend', html)",
                           html)
        return [await tab.evaluate(f'() => {{ {js} }}') for js in (overflow, contrast)]
    wide, pale = in_tab(spoil)
    assert len(wide) > 0 and any('pale' in o for o in pale)

def test_dark_and_light(in_tab):
    async def colours(tab):
        await opened(tab, 'index.html')
        seen = set()
        for theme in themes:
            await switch(tab, theme)
            seen.add(await tab.evaluate('getComputedStyle(document.body).backgroundColor'))
        return seen
    assert len(in_tab(colours)) == 2

def test_description_stands_apart_on_a_phone(in_tab, quarto):
    "Title, description and first paragraph would otherwise run together"
    if not quarto: pytest.skip('Sphinx shows the description as a quotation')
    async def gaps(tab):
        await tab.set_viewport_size(dict(width=widths[1], height=screen))
        await opened(tab, 'index.html')
        return await tab.evaluate("""() => { const at = s => document.querySelector(s).getBoundingClientRect();
            return [at('.description').top - at('h1.title').bottom,
                    at('main > p').top - at('.description').bottom] }""")
    below_title, below_description = in_tab(gaps)
    assert below_title >= 4 and below_description >= 10

@pytest.mark.parametrize('query,page', [('distortion', 'distortion.html'), ('MetricGuide', 'callbacks.html'),
                                        ('average cost', 'metrics.html'), ('distortion loss', 'distortion.html')])
def test_search_finds_the_definition_first(query, page, in_tab, sphinx):
    async def search(tab):
        faults = await opened(tab, f'search.html?q={query}')
        await tab.wait_for_selector('#search-results li a')
        await tab.wait_for_selector('#search-results .search-summary >> text=/found/i')
        return faults, [await a.get_attribute('href') for a in await tab.query_selector_all('#search-results li > a')]
    faults, found = in_tab(search)
    assert faults == [] and found[0].startswith(page), found[:5]

def test_only_the_current_section_is_open(in_tab, sphinx):
    async def sections(tab):
        await opened(tab, 'distortion.html')
        captions = await tab.query_selector_all('.sidebar-tree .caption')
        return {(await o.inner_text()).lower(): await o.get_attribute('aria-expanded') for o in captions}
    [section] = [k.lower() for k, names in docs.sidebar().items() if '101_distortion.ipynb' in names]
    assert [k for k, v in in_tab(sections).items() if v == 'true'] == ['reference', section]

# Files of the site

def test_links(site, html):
    "Each link and image of each page leads to a file of the site, and to an existing anchor; `//page.html` leads nowhere"
    assert {*page_of.values()} <= html.keys()
    ids = {n: {unquote(i) for i in re.findall(r'\bid="([^"]+)"', text)} for n, text in html.items()}
    broken = []
    for n, text in html.items():
        for target in re.findall(r'<(?:a|img|link|script)\b[^>]*?\b(?:href|src)="([^"]*)"', text):
            path, anchor = urldefrag(target.replace('&amp;', '&'))
            if urlparse(path).scheme: continue
            lost = path.startswith('//')
            path = unquote(urlparse(path).path) or n
            if lost or not (site/path).exists() or (anchor and path in ids and unquote(anchor) not in ids[path]):
                broken.append((n, target))
    assert broken == []

def test_links_between_pages_are_relative(html):
    "An absolute link leaves a copy of the site for the published one"
    pages = '|'.join(map(re.escape, page_of.values()))
    for n in page_of.values():
        assert not re.findall(rf'<a\b[^>]*href="{web.site["site-url"]}/(?:{pages})[^"]*"', html[n]), n

def test_pages_weigh_less_than_two_megabytes(site, html):
    "A page with its figures; what all pages share is loaded once"
    for n in page_of.values():
        figures = {src for src in re.findall(r'<img\b[^>]*\bsrc="([^":]+)"', html[n])}
        size = (site/n).stat().st_size + sum((site/unquote(f)).stat().st_size for f in figures)
        assert size < 2e6, f'{n}: {size/1e6:.1f} MB'

def test_sidebar(html, sphinx):
    text = html['index.html']
    tree = text[text.index('class="sidebar-tree"'):text.index('</aside>')]
    groups = {'Reference': docs.front()[1:], **{k: v for k, v in docs.sidebar().items() if v}}
    assert re.findall(r'class="caption"[^>]*><span class="caption-text">(.*?)</span>', tree) == list(groups)
    assert re.findall(r'class="reference internal" href="(.*?)"', tree) == [
        page_of[n] for g in groups.values() for n in g]

def test_api(html, sphinx):
    "Each exported function and class has a heading and a signature on its page"
    for mod, syms in web.modidx['syms'].items():
        body = ast.parse((root/f"{mod.replace('.', '/')}.py").read_text(encoding='utf-8')).body
        exported = next((ast.literal_eval(n.value) for n in body if isinstance(n, ast.Assign)
                         and n.targets[0].id == '__all__'), [])
        for name in exported:
            if f'{mod}.{name}' not in syms: continue
            page = syms[f'{mod}.{name}'][0].partition('#')[0]
            heading = rf'<h[1-6]>{name}<'
            signature = rf'<span class="k">(?:def|class)</span> *(<span class="w"> </span>)?<span class="n[fc]">{name}</span>'
            assert re.search(f'{heading}.*?{signature}', html[page], re.S), f'{name} is not on {page}'

@pytest.fixture(scope='module')
def rendered(html):
    "The contents of each page: everything inside <article> or, with Quarto, <main>"
    return {n: re.search(r'<(article|main)\b.*</\1>', html[page], re.S)[0] for n, page in page_of.items()}

def test_no_traces_of_the_tools(rendered):
    "Raw links in signatures, types of defaults, and the docstring that Python gives to functions without one"
    for name, text in rendered.items():
        # the page about these traces shows them in its tests
        if name.endswith('paper.site.ipynb'): text = re.sub(r'<pre.*?</pre>', '', text, flags=re.S)
        bad = re.findall(r'Call self as a function|Define the computation performed|:NoneType=|\[`[^`\n]+`\]\([^\n]*',
                         re.sub('<[^>]+>', '', text))
        assert not bad, f'{name}: {bad}'

def test_images_have_alternative_texts(rendered):
    for name, text in rendered.items():
        bad = [i[:200] for i in re.findall(r'<img\b[^>]*>', text) if not re.search(r'\balt="[^"]*\w{3}', i)
               or re.search(r'alt="[^"]*_files/|alt="_images', i)]
        assert not bad, f'{name}: {bad}'

def test_api_page_links_to_definitions(html):
    known = {k.rpartition('.')[2] for syms in web.modidx['syms'].values() for k in syms}
    for n in web.public & known:
        assert re.search(rf'href="[\w.]+\.html#[\w.-]*{n.lower()}[\w.-]*"[^>]*><code[^>]*>(<span[^>]*>)?{n}<',
                         html['api.html']), n
