"""Everything that must pass: notebooks clean and in step with the package, all tests, every notebook executed.

The last line counts the tests."""
import ast, multiprocessing, os, resource, subprocess, sys, tempfile, time, xml.etree.ElementTree as ET
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
    "Execute one notebook: success, cells whose assertions ran, cells that have assertions"
    import nbdev.test as nt
    multiprocessing.set_start_method('fork', force=True) # as in a notebook: loaders find the classes that it defines
    counter, shell = CountTests(), nt.CaptureShell
    def counting_shell(*args, **kwargs):
        k = shell(*args, **kwargs)
        k.ast_transformers.append(counter)
        k.user_ns['__tests_ran__'] = counter.ran
        return k
    nt.CaptureShell = counting_shell
    ok, _ = nt.test_nb(path, skip_flags=['slow'], basepath=root)
    return ok, len(counter.ran), len(counter.have)

def run_pytest(path):
    "Run one file of tests and print its report: passed, failed, skipped"
    with tempfile.TemporaryDirectory() as tmp:
        cmd = [sys.executable, '-m', 'pytest', '-q', path, f'--junitxml={tmp}/tests.xml']
        res = subprocess.run(cmd, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        print(res.stdout, flush=True)
        if not Path(f'{tmp}/tests.xml').exists(): return 0, 1, 0
        suite = ET.parse(f'{tmp}/tests.xml').getroot().find('testsuite').attrib
    failed, skipped = int(suite['failures']) + int(suite['errors']), int(suite['skipped'])
    return int(suite['tests']) - failed - skipped, failed, skipped

def timed(f, path):
    "The result of `f(path)`, wall-clock seconds and processor seconds, those of child processes included"
    cpu = lambda: sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    start, used = time.time(), cpu()
    print('Starting', path.name, flush=True)
    return f(path), time.time() - start, cpu() - used

def tasks():
    "All files of tests, then all notebooks except tutorials, which tests/test_tutorials.py runs as a reader would"
    tests = sorted((root/'tests').glob('test_*.py'), key=lambda f: -f.stat().st_size)
    nbs = sorted(f for f in (root/'nbs').glob('[!._]*.ipynb') if f.name[0] != '6')
    return tests, nbs

def run_all():
    "Run tests and notebooks, one process per core; dicts from file to the result of `run_pytest` and of `run_notebook`"
    tests, nbs = tasks()
    # notebooks start as copies of a process that has imported what most of them need
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(['fastai.vision.all', 'nbdev.test', 'matplotlib.pyplot', 'sklearn.datasets',
                                    'scipy.stats', 'networkx'])
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context, max_tasks_per_child=1) as pool:
        jobs = {f: pool.submit(timed, run_notebook if f in nbs else run_pytest, f) for f in tests + nbs}
        done = {f: o.result() for f, o in jobs.items()}
    for f, (_, wall, cpu) in sorted(done.items(), key=lambda o: -o[1][2]):
        print(f'{cpu:6.0f} s of processor time, {wall:5.0f} s: {f.name}')
    return {f: done[f][0] for f in tests}, {f: done[f][0] for f in nbs}

def changes():
    "What git sees as changed in the work tree; nothing outside a checkout"
    try: return subprocess.run(['git', 'status', '--porcelain'], cwd=root, capture_output=True, text=True).stdout
    except OSError: return ''

def main():
    # one thread per process: the processes themselves fill the cores
    os.environ.update(OMP_NUM_THREADS='1', MPLBACKEND='agg')
    before = changes()
    if subprocess.run([sys.executable, 'tools/in_step.py'], cwd=root).returncode: sys.exit('0 passed, 1 failed')
    subprocess.run([sys.executable, 'tools/measure.py'], cwd=root) # figures to look at, nothing to pass
    tests, nbs = run_all()
    passed, failed, skipped = map(sum, zip(*tests.values()))
    ran, have = (sum(r[i] for r in nbs.values()) for i in (1, 2))
    bad = [f.name for f, r in nbs.items() if not r[0]] + [f.name for f, r in tests.items() if r[1]]
    failed += sum(not r[0] for r in nbs.values())
    if bad: print(f"failed: {', '.join(bad)}")
    print(f'{ran} of {have} test cells ran in {len(nbs)} notebooks, {passed} tests in tests/')
    dirty = changes() != before
    if dirty: print(f'the tests changed the work tree:\n{changes()}')
    print(f'{ran + passed} passed, {failed + dirty} failed, {skipped + have - ran} skipped')
    sys.exit(bool(failed or dirty))

if __name__ == '__main__': main()
