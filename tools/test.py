"Everything that must pass: notebooks clean and in step with the package, every notebook executed, pytest. The last line counts the tests."
import ast, os, subprocess, sys, tempfile, time, xml.etree.ElementTree as ET
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

root = Path(__file__).resolve().parent.parent

def is_test(node):
    "Is the statement `node` an assertion: `assert`, `test_...(...)` or `with ExceptionExpected`?"
    if isinstance(node, ast.Assert): return True
    calls = [i.context_expr for i in node.items] if isinstance(node, ast.With) else [getattr(node, 'value', None)]
    names = [getattr(c.func, 'id', getattr(c.func, 'attr', '')) for c in calls if isinstance(c, ast.Call)]
    return any(n.startswith('test_') or n == 'ExceptionExpected' for n in names)

class CountTests(ast.NodeTransformer):
    "Notes which cells of a notebook have assertions, and in which at least one was reached"
    def __init__(self): self.cell, self.have, self.ran = 0, set(), set()
    def visit_Module(self, node):
        self.cell += 1
        return ast.fix_missing_locations(self.generic_visit(node))
    def generic_visit(self, node):
        node = super().generic_visit(node)
        if not isinstance(node, (ast.Assert, ast.Expr, ast.With)) or not is_test(node): return node
        self.have.add(self.cell)
        return [*ast.parse(f'__tests_ran__.add({self.cell})').body, node]

def run_notebook(path):
    "Execute one notebook: success, seconds, cells whose assertions ran, cells that have assertions"
    import multiprocessing, nbdev.test as nt
    multiprocessing.set_start_method('fork', force=True) # as in a notebook: loaders find the classes that it defines
    counter, shell, start = CountTests(), nt.CaptureShell, time.time()
    def counting_shell(*args, **kwargs):
        k = shell(*args, **kwargs)
        k.ast_transformers.append(counter)
        k.user_ns['__tests_ran__'] = counter.ran
        return k
    nt.CaptureShell = counting_shell
    print('Starting', path.name, flush=True)
    ok, _ = nt.test_nb(path, skip_flags=['slow'], basepath=root)
    return ok, time.time()-start, len(counter.ran), len(counter.have)

def test_notebooks():
    "Execute all notebooks, print how long each took, and return totals of cells that ran and that have assertions, and the failures"
    nbs = sorted(f for f in (root/'nbs').rglob('*.ipynb') if not any(p[0] in '._' for p in f.relative_to(root/'nbs').parts))
    with ProcessPoolExecutor(os.cpu_count(), max_tasks_per_child=1) as pool: results = dict(zip(nbs, pool.map(run_notebook, nbs)))
    for f, (ok, secs, ran, have) in sorted(results.items(), key=lambda o: -o[1][1]):
        print(f'{f.name}: {secs:.0f} s, {ran} of {have} test cells ran' + ('' if ok else ', FAILED'))
    failed = [f.name for f, r in results.items() if not r[0]]
    return len(nbs), sum(r[2] for r in results.values()), sum(r[3] for r in results.values()), failed

def pytest():
    "Run pytest: passed, failed, skipped"
    with tempfile.TemporaryDirectory() as tmp:
        subprocess.run([sys.executable, '-m', 'pytest', '-q', 'tests', f'--junitxml={tmp}/tests.xml'], cwd=root)
        suite = ET.parse(f'{tmp}/tests.xml').getroot().find('testsuite').attrib
    failed, skipped = int(suite['failures']) + int(suite['errors']), int(suite['skipped'])
    return int(suite['tests']) - failed - skipped, failed, skipped

def changes():
    "What git sees as changed in the work tree; nothing outside a checkout"
    try: return subprocess.run(['git', 'status', '--porcelain'], cwd=root, capture_output=True, text=True).stdout
    except OSError: return ''

def main():
    # one thread per process: the processes themselves fill the cores
    os.environ.update(OMP_NUM_THREADS='1', MPLBACKEND='agg')
    before = changes()
    if subprocess.run([sys.executable, 'tools/in_step.py'], cwd=root).returncode: sys.exit('0 passed, 1 failed')
    nbs, ran, have, bad = test_notebooks()
    if bad: sys.exit(f"failed: {', '.join(bad)}\n{ran} passed, {len(bad)} failed")
    passed, failed, skipped = pytest()
    print(f'{ran} of {have} test cells ran in {nbs} notebooks, {passed} tests in tests/')
    dirty = changes() != before
    if dirty: print(f'the tests changed the work tree:\n{changes()}')
    print(f'{ran + passed} passed, {failed + dirty} failed, {skipped + have - ran} skipped')
    sys.exit(bool(failed or dirty))

if __name__ == '__main__': main()
