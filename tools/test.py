"All that must pass: notebooks clean and in step with the package, every notebook executed, pytest; the last line counts the tests."
import json, os, re, subprocess, sys, tempfile, xml.etree.ElementTree as ET
from pathlib import Path

root, bins = Path(__file__).resolve().parent.parent, Path(sys.executable).parent
test_cell = re.compile(r'^\s*(test_\w+\(|assert\b|with ExceptionExpected)', re.M)

def run(*cmd, **env):
    print('+', *(Path(c).name if os.sep in c else c for c in cmd), flush=True)
    # one thread a process: the processes themselves fill the cores
    return subprocess.run(cmd, cwd=root, env={**os.environ, 'OMP_NUM_THREADS': '1', 'MPLBACKEND': 'agg', **env}).returncode

def notebook_tests():
    "Code cells that assert something, in the notebooks that `nbdev_test` runs."
    nbs = [f for f in sorted((root/'nbs').rglob('*.ipynb')) if not any(p[0] in '._' for p in f.relative_to(root/'nbs').parts)]
    cells = [c for f in nbs for c in json.loads(f.read_text(encoding='utf-8'))['cells'] if c['cell_type'] == 'code']
    return len(nbs), sum(bool(test_cell.search(''.join(c['source']))) for c in cells)

def main():
    if run(sys.executable, 'tools/in_step.py'): sys.exit('0 passed, 1 failed')
    if run(str(bins/'nbdev_test'), '--n_workers', str(os.cpu_count() or 1), '--do_print', '--timing'): sys.exit('0 passed, 1 failed')
    nbs, cells = notebook_tests()
    with tempfile.TemporaryDirectory() as tmp:
        rc = run(sys.executable, '-m', 'pytest', '-q', 'tests', f'--junitxml={tmp}/tests.xml')
        suite = ET.parse(f'{tmp}/tests.xml').getroot().find('testsuite').attrib
    failed, skipped = int(suite['failures']) + int(suite['errors']), int(suite['skipped'])
    passed = int(suite['tests']) - failed - skipped
    print(f'{cells} test cells in {nbs} notebooks, {passed} tests in tests/')
    print(f'{cells + passed} passed, {failed} failed, {skipped} skipped')
    sys.exit(rc)

if __name__ == '__main__': main()
