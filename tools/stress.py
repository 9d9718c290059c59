"""Run the stress tests with full counts and write results/stress.csv: random properties, bad input, faults, a long run.

    python tools/stress.py                          all suites; the long run takes an hour
    python tools/stress.py fuzz --cases 500         one suite with fewer cases

The suites are properties, fuzz, processes, numerics, faults and long_run.
"""
import argparse, gc, os, random, subprocess, sys, tempfile, time, traceback, warnings, xml.etree.ElementTree as ET
from datetime import datetime, timezone
from pathlib import Path

root = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(root/'tests'))
SUITES = 'properties fuzz processes numerics faults long_run'.split()
COLUMNS = 'suite name cases failures seconds rss_mb handles commit date'.split()


def write(rows, path, at):
    "Write `rows`, made at the commit `at`, to the table at `path`; they replace older rows of the same suite and name"
    import pandas as pd
    from hierproto.files import write_whole
    date = datetime.now(timezone.utc).strftime('%Y-%m-%d %H:%M')
    new = pd.DataFrame(rows).assign(commit=at, date=date).reindex(columns=COLUMNS)
    old = pd.read_csv(path, dtype=dict(commit=str)) if path.exists() else new[:0]  # 67e8114 is a commit, not a number
    keys = {*map(tuple, new[['suite', 'name']].values)}
    old = old[[tuple(k) not in keys for k in old[['suite', 'name']].values]]
    table = pd.concat([o for o in (old, new) if len(o)])
    table = table.sort_values('suite', key=lambda s: s.map(SUITES.index), kind='stable')
    write_whole(path, lambda f: table.to_csv(f, index=False))

def report(r):
    "Print one row of the table"
    counts = f"{r['cases']:>7,} cases {r['failures']:>4} failures {r['seconds']:>7.1f} s"
    print(f"{r['suite']:<11} {r['name']:<58} {counts}", flush=True)


def properties(o):
    "Each property, on `examples` random trees, vocabularies or batches"
    os.environ['HIERPROTO_EXAMPLES'] = str(o.examples)
    import test_properties as P
    for name, f in P.PROPERTIES.items():
        start, bad = time.time(), 0
        try: f()
        except Exception:
            bad = 1
            traceback.print_exc(limit=-3)
        yield dict(name=name.removeprefix('test_'), cases=P.TRIED[name], failures=bad, seconds=time.time()-start)


def fuzz(o):
    "Each suite of bad input, `cases` times; counts every failure and shows the first of each kind"
    import test_fuzz as F
    for name in F.SUITES:
        if o.only not in name: continue
        start, bad, shown = time.time(), 0, set()
        for i in range(o.cases):
            try: F.case(name, i)
            except Exception as e:
                bad += 1
                kind = type(e).__name__, traceback.extract_tb(e.__traceback__)[-1].lineno
                if kind not in shown: print(f'  case {i} of {name}: {kind[0]}: {str(e)[:160]}', flush=True)
                shown.add(kind)
        yield dict(name=name, cases=o.cases, failures=bad, seconds=time.time()-start)


def as_process(program, args, fresh):
    "Exit code and output of `program` in a new process: a `fresh` interpreter, or a fork that has the libraries loaded"
    with tempfile.TemporaryDirectory() as d:
        argv = [*args, *([] if program == 'figure1' else [f'--out={d}'])]
        code = f'from hierproto.cli import run_command; run_command({program!r}, {argv!r})'
        if fresh:
            command = [sys.executable, '-W', 'ignore', '-c', code]
            res = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=d)
            return res.returncode, res.stdout + res.stderr
        with open(Path(d)/'output', 'w+') as out:
            if not (pid := os.fork()):
                rc = 1
                try:
                    for n in (1, 2): os.dup2(out.fileno(), n)
                    os.chdir(d)
                    sys.stdout, sys.stderr = (os.fdopen(os.dup(n), 'w') for n in (1, 2))
                    exec(code, {})
                    rc = 0
                except SystemExit as e:
                    rc = e.code if isinstance(e.code, int) else 1 if e.code else 0
                    if isinstance(e.code, str): print(e.code, file=sys.stderr)
                except BaseException: traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(rc)
            rc = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            out.seek(0)
            return rc, out.read()

def clear_error(output, args):
    "Is `output` one message, or an error of ours with its traceback, that names what is wrong in `args`?"
    import test_fuzz as F
    lines = output.strip().splitlines() or ['']
    error = lines[-1].split(':')[0].split('.')[-1]
    ours = 'Traceback' not in output or error in ('ValueError', 'HierarchyError', 'FileNotFoundError')
    return ours and F.names_culprit(output, args)

def processes(o):
    "Command lines of the fuzz suite as real processes, the first few in a new interpreter"
    import test_fuzz as F
    from hierproto import experiments, figure1, report  # loaded once, for the forks
    start, bad, i, n = time.time(), 0, 0, 0
    while n < o.processes:
        program, args, sound = F.command_line(random.Random(f'processes {i}'))
        i += 1
        # figure1 has no dry run: only start what its parser rejects
        if program == 'figure1' and '--nonsense' not in args: continue
        n += 1
        rc, output = as_process(program, args, fresh=n <= o.fresh)
        if rc == 0 or (rc > 0 and not sound and clear_error(output, args)): continue
        bad += 1
        print(f'  {program} {args}: {rc}: {output.strip()[-160:]}', flush=True)
    yield dict(name='command lines', cases=o.processes, failures=bad, seconds=time.time()-start)


def by_pytest(file):
    "Tests of `file`; an expected failure (xfail) counts as a failure"
    start = time.time()
    with tempfile.TemporaryDirectory() as d:
        command = [sys.executable, '-W', 'ignore', '-m', 'pytest', '-q', '-p', 'no:cacheprovider']
        subprocess.run([*command, str(root/'tests'/file), f'--junitxml={d}/x.xml'], cwd=root)
        suite = ET.parse(f'{d}/x.xml').getroot().find('testsuite')
    known = sum('xfail' in (s.get('type') or '') for s in suite.iter('skipped'))
    tests, failures, errors, skipped = (int(suite.attrib[k]) for k in ('tests', 'failures', 'errors', 'skipped'))
    yield dict(name=file.removesuffix('.py'), cases=tests-skipped+known, failures=failures+errors+known,
               seconds=time.time()-start)

def numerics(o): yield from by_pytest('test_numerics.py')
def faults(o): yield from by_pytest('test_faults.py')


def rss():
    "Memory of this process in MB"
    return int(Path('/proc/self/statm').read_text().split()[1])*os.sysconf('SC_PAGE_SIZE')/2**20

def handles():
    "Number of files that this process has open"
    return len(os.listdir('/proc/self/fd'))

def one_training(i):
    "A small run with its own data, model, training, metrics, decision and saved weights"
    from hierproto.backbones.convnet import convnet
    from hierproto.digits import digits
    from hierproto.inference import CRM
    from hierproto.learner import hier_learner
    method = ('gp_disto', 'cross_entropy', 'hxe', 'gp_rank', 'soft_labels', 'yolo', 'deep_ncm', 'emd')[i % 8]
    dls, h = digits(bs=128, protocol=None)
    with tempfile.TemporaryDirectory() as d:
        learn = hier_learner(dls, convnet(8), h, method, m=8, project=False, path=d, lr=1e-2)
        with learn.no_bar(), learn.no_logging():
            learn.fit(1)
            CRM(h)(learn.get_preds()[0])
            learn.save('model')
            learn.load('model')

def long_run(o):
    "Small trainings in one process for `minutes`, with 120 samples of memory and open files"
    import torch
    torch.set_num_threads(1)
    start, n, due, samples = time.time(), 0, 0., 0
    while time.time()-start < 60*o.minutes or samples < 2:
        one_training(n)
        n += 1
        if time.time()-start >= due:
            gc.collect()
            samples += 1
            yield dict(name='small trainings', cases=n, failures=0, seconds=time.time()-start,
                       rss_mb=round(rss(), 1), handles=handles())
            due += 60*o.minutes/120


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('suites', nargs='*', default=SUITES, help='suites to run; all by default')
    p.add_argument('--cases', type=int, default=10_000, help='number of cases for each suite of bad input')
    p.add_argument('--only', default='', help='run only suites of bad input whose name contains this')
    p.add_argument('--examples', type=int, default=300, help='number of examples for each property')
    p.add_argument('--processes', type=int, default=200, help='number of command lines run as processes')
    p.add_argument('--fresh', type=int, default=10, help='how many of these start a new interpreter')
    p.add_argument('--minutes', type=float, default=60, help='length of the long run')
    p.add_argument('--out', type=Path, default=root/'results'/'stress.csv', help='the table to write')
    o = p.parse_args()
    if unknown := set(o.suites) - set(SUITES):
        p.error(f"unknown suites {', '.join(sorted(unknown))}; choose from {', '.join(SUITES)}")
    warnings.simplefilter('ignore')
    from hierproto.files import commit
    failures, at = 0, commit()
    for s in sorted(o.suites, key=SUITES.index):
        rows = []
        for r in globals()[s](o):
            rows.append(dict(suite=s, **{**r, 'seconds': round(r['seconds'], 1)}))
            failures += r['failures']
            if s != 'long_run': report(rows[-1])
            write(rows if s == 'long_run' else rows[-1:], o.out, at)  # now, so that an interrupted run keeps its rows
        if s == 'long_run': report(rows[-1])
    sys.exit(f'{failures} failures: see above' if failures else 0)

if __name__ == '__main__': main()
