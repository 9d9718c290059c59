"""Properties, bad input, faults and a long run at full counts, into results/stress.csv.

    python tools/stress.py                          all suites, the long run for an hour
    python tools/stress.py fuzz --cases 500         some of them, smaller: properties fuzz processes numerics faults long_run
"""
import argparse, gc, os, random, subprocess, sys, tempfile, time, traceback, warnings, xml.etree.ElementTree as ET
from datetime import datetime, timezone
from pathlib import Path

root = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(root/'tests'))
SUITES = 'properties fuzz processes numerics faults long_run'.split()
COLUMNS = 'suite name cases failures seconds rss_mb handles commit date'.split()


def write(rows, path, at):
    "Put `rows` into the table at `path`, in place of older ones of the same suite and name; they were made at the commit `at`"
    import pandas as pd
    from hierproto.rows import write_whole
    new = pd.DataFrame(rows).assign(commit=at, date=datetime.now(timezone.utc).strftime('%Y-%m-%d %H:%M')).reindex(columns=COLUMNS)
    old = pd.read_csv(path, dtype=dict(commit=str)) if path.exists() else new[:0]  # a commit such as 67e8114 is no number
    keys = {*map(tuple, new[['suite', 'name']].values)}
    old = old[[tuple(k) not in keys for k in old[['suite', 'name']].values]]
    table = pd.concat([o for o in (old, new) if len(o)])
    table = table.sort_values('suite', key=lambda s: s.map(SUITES.index), kind='stable')
    write_whole(path, lambda f: table.to_csv(f, index=False))

def say(r): print(f"{r['suite']:<11} {r['name']:<58} {r['cases']:>7,} cases {r['failures']:>4} failures {r['seconds']:>7.1f} s", flush=True)


def properties(o):
    "Each property on `examples` random trees, vocabularies or batches"
    os.environ['HIERPROTO_EXAMPLES'] = str(o.examples)
    import test_properties as P
    for name, f in P.PROPERTIES.items():
        start, bad = time.time(), 0
        try: f()
        except Exception: bad = 1; traceback.print_exc(limit=-3)
        yield dict(name=name.removeprefix('test_'), cases=P.TRIED[name], failures=bad, seconds=time.time()-start)


def fuzz(o):
    "Each suite of bad input, `cases` times; every failure is counted, the first of each kind is shown"
    import test_fuzz as F
    for name in F.SUITES:
        if o.only not in name: continue
        start, bad, shown = time.time(), 0, set()
        for i in range(o.cases):
            try: F.case(name, i)
            except Exception as e:
                bad += 1
                kind = type(e).__name__, traceback.extract_tb(e.__traceback__)[-1].lineno
                if kind not in shown: shown.add(kind); print(f'  case {i} of {name}: {kind[0]}: {str(e)[:160]}', flush=True)
        yield dict(name=name, cases=o.cases, failures=bad, seconds=time.time()-start)


def as_process(program, args, fresh):
    "Exit code and all output of `program`, in a process of its own: started from nothing, or a copy of this one, which has loaded the libraries"
    scripts = dict(train='experiments:train_cli', sweep='experiments:sweep_cli', report='report:report_cli', figure1='experiments:figure1_cli')
    mod, f = scripts[program].split(':')
    with tempfile.TemporaryDirectory() as d:
        argv = [f'hierproto_{program}', *args, *([] if program == 'figure1' else [f'--out={d}'])]
        code = f'import sys; sys.argv = {argv!r}; from hierproto.{mod} import {f}; {f}()'
        if fresh:
            res = subprocess.run([sys.executable, '-W', 'ignore', '-c', code], capture_output=True, text=True, timeout=300, cwd=d)
            return res.returncode, res.stdout + res.stderr
        with open(Path(d)/'said', 'w+') as said:
            if not (pid := os.fork()):
                rc = 1
                try:
                    os.dup2(said.fileno(), 1); os.dup2(said.fileno(), 2); os.chdir(d)
                    sys.stdout, sys.stderr = (os.fdopen(os.dup(n), 'w') for n in (1, 2))
                    exec(code, {}); rc = 0
                except SystemExit as e:
                    rc = e.code if isinstance(e.code, int) else 1 if e.code else 0
                    if isinstance(e.code, str): print(e.code, file=sys.stderr)
                except BaseException: traceback.print_exc()
                finally: sys.stdout.flush(); sys.stderr.flush(); os._exit(rc)
            rc = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            said.seek(0)
            return rc, said.read()

def processes(o):
    "Command lines of the fuzzed suite as real processes, the first few from a new interpreter"
    import test_fuzz as F
    from hierproto import experiments, figure1, report  # loaded once, for the copies
    start, bad, i, n = time.time(), 0, 0, 0
    while n < o.processes:
        program, args, sound = F.command_line(random.Random(f'processes {i}')); i += 1
        # figure1 has no dry run, so only what its parser refuses is started
        if program == 'figure1' and '--nonsense' not in args: continue
        n += 1
        rc, said = as_process(program, args, fresh=n <= o.fresh)
        last = said.strip().splitlines()[-1] if said.strip() else ''
        fine = rc == 0 or (not sound and ('Traceback' not in said or last.split(':')[0].split('.')[-1] in ('ValueError', 'HierarchyError', 'FileNotFoundError')) and F.names_culprit(said, args))
        if rc < 0 or not fine: bad += 1; print(f'  {program} {args}: {rc}: {last[:160]}', flush=True)
    yield dict(name='command lines', cases=o.processes, failures=bad, seconds=time.time()-start)


def by_pytest(file):
    "Tests of `file`; a failure that is known and marked counts as one"
    start = time.time()
    with tempfile.TemporaryDirectory() as d:
        subprocess.run([sys.executable, '-W', 'ignore', '-m', 'pytest', '-q', '-p', 'no:cacheprovider', str(root/'tests'/file), f'--junitxml={d}/x.xml'], cwd=root)
        suite = ET.parse(f'{d}/x.xml').getroot().find('testsuite')
    known = sum('xfail' in (s.get('type') or '') for s in suite.iter('skipped'))
    skipped = int(suite.attrib['skipped']) - known
    yield dict(name=file.removesuffix('.py'), cases=int(suite.attrib['tests']) - skipped, failures=int(suite.attrib['failures']) + int(suite.attrib['errors']) + known, seconds=time.time()-start)

def numerics(o): yield from by_pytest('test_numerics.py')
def faults(o): yield from by_pytest('test_faults.py')


def rss(): "Memory of this process in MB"; return int(Path('/proc/self/statm').read_text().split()[1])*os.sysconf('SC_PAGE_SIZE')/2**20
def handles(): "Files that this process has open"; return len(os.listdir('/proc/self/fd'))

def one_training(i):
    "Data, model, training, metrics, decision and saved weights of a small run, all made anew"
    import torch
    from hierproto.backbones.convnet import convnet
    from hierproto.data.digits import digits
    from hierproto.inference import CRM
    from hierproto.methods import hier_learner
    method = ('gp_disto', 'cross_entropy', 'hxe', 'gp_rank', 'soft_labels', 'yolo', 'deep_ncm', 'emd')[i % 8]
    dls, h = digits(bs=128, protocol=None)
    with tempfile.TemporaryDirectory() as d:
        learn = hier_learner(dls, convnet(8), h, method, m=8, project=False, path=d, lr=1e-2)
        with learn.no_bar(), learn.no_logging():
            learn.fit(1)
            CRM(h)(learn.get_preds()[0])
            learn.save('model'); learn.load('model')

def long_run(o):
    "Small trainings in one process for `minutes`: one row for each sample of memory and open files"
    import torch
    torch.set_num_threads(1)
    start, n, due, samples = time.time(), 0, 0., 0
    while time.time()-start < 60*o.minutes or samples < 2:
        one_training(n); n += 1
        if time.time()-start >= due:
            gc.collect(); samples += 1
            yield dict(name='small trainings', cases=n, failures=0, seconds=time.time()-start, rss_mb=round(rss(), 1), handles=handles())
            due += 60*o.minutes/120


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('suites', nargs='*', default=SUITES, help='which suites; all unless given')
    p.add_argument('--cases', type=int, default=10_000, help='of each suite of bad input')
    p.add_argument('--only', default='', help='of the suites of bad input, those with this in their name')
    p.add_argument('--examples', type=int, default=300, help='of each property')
    p.add_argument('--processes', type=int, default=200, help='command lines that are real processes')
    p.add_argument('--fresh', type=int, default=10, help='of them, how many start a new interpreter')
    p.add_argument('--minutes', type=float, default=60, help='length of the long run')
    p.add_argument('--out', type=Path, default=root/'results'/'stress.csv', help='the table')
    o = p.parse_args()
    if unknown := set(o.suites) - set(SUITES): p.error(f"no suite is called {', '.join(sorted(unknown))}; there are {', '.join(SUITES)}")
    warnings.simplefilter('ignore')
    from hierproto.rows import commit
    failures, at = 0, commit()
    for s in sorted(o.suites, key=SUITES.index):
        rows = []
        for r in globals()[s](o):
            rows.append(dict(suite=s, **{**r, 'seconds': round(r['seconds'], 1)})); failures += r['failures']
            if s != 'long_run': say(rows[-1])
            write(rows if s == 'long_run' else rows[-1:], o.out, at)  # at once, so that a run that is stopped keeps what it has
        if s == 'long_run': say(rows[-1])
    sys.exit(f'{failures} failures: see above' if failures else 0)

if __name__ == '__main__': main()
