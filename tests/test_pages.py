"The audit page and the service of the tutorial, opened and used in a headless Chromium, wide and narrow."
import json, re, shutil, socket, threading, time
from pathlib import Path

import numpy as np, pytest, torch
from PIL import Image

from hierproto.audit import Predictions, html_report
from hierproto.hierarchy import CostMatrix, Hierarchy

root = Path(__file__).resolve().parent.parent
api = pytest.importorskip('playwright.sync_api', reason="playwright is not installed: pip install -e '.[dev]'")
chromium = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None)
pytestmark = pytest.mark.skipif(not chromium, reason='Chromium is not installed')
flags = ('--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking '
         '--disable-component-update --disable-sync')

@pytest.fixture(scope='module')
def browser():
    with api.sync_playwright() as p:
        b = p.chromium.launch(executable_path=chromium, args=flags.split())
        yield b
        b.close()

@pytest.fixture
def page(browser):
    "A new page that collects errors in `page.faults` and every request for another address in `page.asked`"
    page = browser.new_page(viewport=dict(width=1400, height=900))
    page.faults, page.asked = [], []
    page.on('console', lambda m: m.type in ('error', 'warning') and page.faults.append(m.text))
    page.on('pageerror', lambda e: page.faults.append(str(e)))
    page.on('request', lambda r: page.asked.append(r.url))
    yield page
    page.close()

EVIL = '<img src=x onerror=alert(1)>'

@pytest.fixture(scope='module')
def report(tmp_path_factory):
    "The page on 400 samples of six classes, two of them with hostile names, with a picture each"
    d, rng = tmp_path_factory.mktemp('audit'), np.random.default_rng(0)
    h = Hierarchy.from_paths([('animal', 'pet', 'cat'), ('animal', 'pet', 'dog'), ('animal', 'farm', 'cow'),
                              ('animal', 'farm', EVIL), ('plant', 'tree', 'oak'),
                              ('plant', 'tree', '</script><script>alert(2)</script>')],
                             level_names=['kingdom', EVIL, 'species'])
    y = rng.integers(6, size=400)
    scores = torch.tensor(rng.standard_normal((400, 6)) + 2*np.eye(6)[y])
    for k in range(6): Image.fromarray(np.full((8, 8, 3), 40*k, np.uint8)).save(d/f'{k}.png')
    p = Predictions(y, h, probs=scores.softmax(1), files=[d/f'{k}.png' for k in y])
    (d/'report.html').write_text(html_report(p, f'Audit {EVIL}', fit=p.tree_fit(50)), encoding='utf-8')
    return d/'report.html', p

def fits(page):
    "Does the page need no sideways scrolling?"
    return page.evaluate('document.documentElement.scrollWidth <= innerWidth')

def test_nothing_is_asked_for_and_nothing_hostile_runs(report, page):
    f, _ = report
    page.on('dialog', lambda o: page.faults.append(o.message))
    page.goto(f.as_uri())
    page.wait_for_timeout(100)
    assert page.faults == [] and [o for o in page.asked if not o.startswith('data:')] == [f.as_uri()]
    assert EVIL in page.locator('h1').inner_text() and page.locator('img[src=x]').count() == 0

def test_a_policy_stops_other_scripts(report, page, tmp_path):
    (tmp_path/'changed.html').write_text(report[0].read_text()
                                         .replace('</h1>', '</h1><script>document.title = "taken over"</script>'))
    page.goto((tmp_path/'changed.html').as_uri())
    assert page.title().startswith('Audit') and any('Content Security Policy' in o for o in page.faults)

def test_headers_sort_the_costly_mistakes(report, page):
    page.goto(report[0].as_uri())
    def column(i): return page.locator(f'#costly tbody tr td:nth-child({i})').all_inner_texts()
    head = page.locator('#costly th')
    head.nth(2).click()
    times = [float(o) for o in column(3)]
    assert times == sorted(times, reverse=True) and head.nth(2).get_attribute('aria-sort') == 'descending'
    head.nth(2).click()
    assert [float(o) for o in column(3)] == sorted(times)
    head.nth(0).press('Enter')
    assert (column(1) == sorted(column(1), key=str.lower, reverse=True) or len(set(column(1))) > 1
            and head.nth(0).get_attribute('aria-sort') == 'descending')

def test_a_cell_shows_its_pictures(report, page):
    f, p = report
    page.goto(f.as_uri())
    data = json.loads(page.locator('#data').text_content())
    names, cells = data['matrix']['names'], data['matrix']['cells']
    assert sum(c[2] for c in cells) == len(p) and sorted(names) == sorted(p.h.leaves)
    i = next(i for i, c in enumerate(cells) if c[0] != c[1])
    page.locator(f'#cells rect[data-i="{i}"]').click()
    row, column, times, *_ = cells[i]
    said = page.locator('#cell p').inner_text()
    assert f'{names[row]} taken for {names[column]}: {times} times' in said
    assert page.locator('#cell img').count() == min(3, times)
    assert f'{p.h.leaves.index(names[row])}.png' in page.locator('#cell img').first.get_attribute('alt')
    right = next(i for i, c in enumerate(cells) if c[0] == c[1])
    page.locator(f'#cells rect[data-i="{right}"]').click()
    assert 'times right' in page.locator('#cell p').inner_text() and page.locator('#cell img').count() == 0

def test_levels_filter(report, page):
    f, p = report
    page.goto(f.as_uri())
    top = {n: path[0] for n, path in zip(p.h.leaves, p.h.nodes)}
    assert (page.locator('#level option').all_inner_texts()
            == ['all mistakes', *(f'wrong from {n} on' for n in ('kingdom', EVIL, 'species'))])
    assert 'kingdom accuracy %' in page.locator('table').first.inner_text()
    page.select_option('#level', '1')
    rows = page.locator('#costly tbody tr:visible')
    pairs = [rows.nth(i).locator('td').all_inner_texts()[:2] for i in range(rows.count())]
    assert pairs and all(top[a] != top[b] for a, b in pairs)
    page.select_option('#level', '3')
    rows = page.locator('#costly tbody tr:visible')
    assert all(top[a] == top[b]
               for a, b in (rows.nth(i).locator('td').all_inner_texts()[:2] for i in range(rows.count())))
    page.select_option('#level', '0')
    assert page.locator('#costly tbody tr:visible').count() == page.locator('#costly tbody tr').count()

def test_the_slider_looks_up_the_curve(report, page):
    from hierproto.inference import trade_off
    f, p = report
    page.goto(f.as_uri())
    want = trade_off(p.probs, p.targets, p.h, [.8], probs=True).iloc[0]
    page.locator('#certainty').fill('16')
    said = page.locator('#certain').inner_text()
    assert said.startswith(f'Certainty 80%: {100*want.accuracy:.0f}% of the answers are right, '
                           f'{100*want.classes:.0f}% name a class')
    assert float(re.search(r'cost ([\d.]+)\.$', said)[1]) == pytest.approx(want.cost, abs=1e-3)

def test_the_tree_folds(report, page):
    page.goto(report[0].as_uri())
    cat = page.locator('#tree li', has_text='cat').last
    assert cat.is_visible()
    page.locator('#tree summary', has_text='animal').click()
    assert not cat.is_visible()
    page.locator('#fold').click()
    page.locator('#fold').click()
    assert cat.is_visible()

def test_the_cost_stands_among_those_of_shuffled_trees(report, page):
    page.goto(report[0].as_uri())
    data = json.loads(page.locator('#data').text_content())['fit']
    assert sum(data['bars']) == 50 and page.locator('#shuffled rect').count() == 40
    assert f"as given: {data['true']:.2f}" in page.locator('#shuffled').inner_text()

def test_dark_and_light(report, page):
    page.goto(report[0].as_uri())
    seen = set()
    for theme in ('dark', 'light'):
        page.emulate_media(color_scheme=theme)
        seen.add(page.evaluate("(o => o.backgroundColor + o.color + getComputedStyle(document.querySelector('#cells "
                               "text')).fill)(getComputedStyle(document.body))"))
    assert len(seen) == 2

@pytest.mark.parametrize('width', [390, 1400])
def test_pages_fit_phones_and_desks(report, page, width, tmp_path):
    page.set_viewport_size(dict(width=width, height=900))
    page.goto(report[0].as_uri())
    assert fits(page) and page.locator('#cells svg').bounding_box()['width'] <= width

def test_a_page_of_costs_without_a_tree(page, tmp_path):
    h = CostMatrix([[0., 1, 5], [2, 0, 5], [9, 9, 0]], ['a', 'b', 'c'], warn=False)
    (tmp_path/'r.html').write_text(html_report(Predictions([0, 1, 2, 0], h, [1, 1, 0, 0]), fit=False), encoding='utf-8')
    page.goto((tmp_path/'r.html').as_uri())
    assert (page.faults == [] and page.locator('#cells rect[data-i]').count() == 4
            and page.locator('#tree, #certainty, #level:visible').count() == 0)


# --- the service of the tutorial ---
@pytest.fixture(scope='module')
def service():
    "Address and names of the tutorial's app, served by uvicorn"
    for o in ('fastapi', 'uvicorn', 'multipart', 'httpx'):
        pytest.importorskip(o, reason="pip install 'hierproto[serve]'")
    import uvicorn
    cells = [''.join(c['source'])
             for c in json.loads((root/'nbs'/'611_service.ipynb').read_text(encoding='utf-8'))['cells']
             if c['cell_type'] == 'code']
    names = {}
    for o in cells:
        if not o.startswith('#|'): exec(o, names)
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(names['app'], port=port, log_level='error'))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started and thread.is_alive(): time.sleep(.05)
    yield f'http://127.0.0.1:{port}', names
    server.should_exit = True
    thread.join(10)

@pytest.mark.parametrize('width', [390, 1400])
def test_a_dropped_picture_gets_its_path(service, page, width):
    url, names = service
    page.set_viewport_size(dict(width=width, height=900))
    page.goto(url)
    page.set_input_files('#file', dict(name='digit.png', mimeType='image/png', buffer=names['images'][0]))
    page.wait_for_selector('#path li')
    want = names['model'].predict(names['images'][0])[0]
    said = [re.sub(r' \d+%.*', '', o, flags=re.S).strip() for o in page.locator('#path li').all_inner_texts()]
    assert said == want.names and fits(page)
    page.set_input_files('#file', dict(name='notes.txt', mimeType='text/plain', buffer=b'not an image'))
    page.wait_for_function("document.getElementById('error').textContent")
    assert 'notes.txt' in page.locator('#error').inner_text() and page.locator('#path li').count() == 0

def test_a_gradio_demo(service, page):
    gr = pytest.importorskip('gradio', reason='pip install gradio')
    cells = [''.join(c['source'])
             for c in json.loads((root/'nbs'/'611_service.ipynb').read_text(encoding='utf-8'))['cells']]
    code = next(re.search('```python\n(.*?)```', o, re.S)[1] for o in cells if '```python\nimport gradio' in o)
    names = dict(service[1])
    exec(code.replace('demo.launch()', ''), names)
    _, url, _ = names['demo'].launch(prevent_thread_lock=True, quiet=True)
    page.goto(url)
    page.set_input_files('input[type=file]', dict(name='digit.png', mimeType='image/png', buffer=names['images'][0]))
    page.get_by_role('button', name='Submit').click()
    page.wait_for_selector(f"text={' > '.join(names['model'].predict(names['images'][0])[0].names)}")
    names['demo'].close()
