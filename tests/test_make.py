"The Makefile as a newcomer meets it."
import shutil, subprocess, sys
from pathlib import Path

import pandas as pd, pytest

root = Path(__file__).resolve().parent.parent

def test_make_alone_lists_the_targets():
    out = subprocess.run(['make'], cwd=root, capture_output=True, text=True).stdout
    assert all(f'make {t}' in out for t in 'help demo test docs bench'.split()), out

def test_nothing_is_installed_twice(tmp_path):
    "With the environment ready, `make demo` runs the demo and nothing else, until the requirements change"
    for f in ('Makefile', 'settings.ini', 'setup.py'): shutil.copyfile(root/f, tmp_path/f)
    python = tmp_path/'.venv'/'bin'/'python'
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$@" >> calls.txt\n')
    python.chmod(0o755)

    def calls():
        (tmp_path/'calls.txt').write_text('')
        subprocess.run(['make', 'demo'], cwd=tmp_path, check=True, capture_output=True)
        return (tmp_path/'calls.txt').read_text()
    assert "install --quiet -e .[dev]" in calls()
    (tmp_path/'settings.ini').touch() # a checkout gives files a new time
    again = calls()
    assert 'hierproto.paper.figure1' in again and 'pip install' not in again
    with open(tmp_path/'settings.ini', 'a') as f: f.write('more_requirements = pytest\n')
    assert 'pip install' in calls() and 'pip install' not in calls()

def test_bench_takes_each_row_in_a_new_process(tmp_path):
    out = tmp_path/'bench.csv'
    cmd = [sys.executable, '-W', 'ignore', '-m', 'hierproto.paper.bench', '--only', 'inference', '--rounds',
           '1', '--out', out]
    subprocess.run(cmd, cwd=root, check=True, capture_output=True)
    df = pd.read_csv(out)
    assert len(df) == 2 and df.verdict.isin(['met', 'borderline', 'missed']).all(), df
