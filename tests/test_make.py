"The Makefile as a newcomer meets it."
import subprocess, sys
from pathlib import Path

import pandas as pd, pytest

root = Path(__file__).resolve().parent.parent

def test_make_alone_lists_the_targets():
    out = subprocess.run(['make'], cwd=root, capture_output=True, text=True).stdout
    assert all(f'make {t}' in out for t in 'help demo test docs bench'.split()), out

def test_nothing_is_installed_twice():
    "With the environment ready, `make demo` would run the demo and nothing else."
    if not (root/'.venv'/'.ready').exists(): pytest.skip('not set up by make')
    out = subprocess.run(['make', '-n', 'demo'], cwd=root, capture_output=True, text=True).stdout
    assert 'hierproto.paper.figure1' in out and 'pip install' not in out, out

def test_bench_takes_each_row_in_a_new_process(tmp_path):
    out = tmp_path/'bench.csv'
    cmd = [sys.executable, '-W', 'ignore', '-m', 'hierproto.paper.bench', '--only', 'inference', '--rounds',
           '1', '--out', out]
    subprocess.run(cmd, cwd=root, check=True, capture_output=True)
    df = pd.read_csv(out)
    assert len(df) == 2 and df.verdict.isin(['met', 'borderline', 'missed']).all(), df
