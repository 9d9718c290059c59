"Every tutorial runs when its visible code is copied into a script outside the repository."
import json, os, subprocess, sys
from pathlib import Path

import pytest

root = Path(__file__).resolve().parent.parent
tutorials = sorted((root/'nbs').glob('6*.ipynb'))

def script(nb):
    "The code that a reader of the notebook `nb` sees"
    cells = [''.join(c['source']) for c in json.loads(nb.read_text(encoding='utf-8'))['cells']
             if c['cell_type'] == 'code']
    return '\n\n'.join(s for s in cells if not s.lstrip().startswith(('#| hide', '#|hide', '#| eval: false')))

@pytest.mark.parametrize('nb', tutorials, ids=lambda o: o.stem)
def test_runs_as_a_script(nb, tmp_path):
    (tmp_path/'tutorial.py').write_text(script(nb), encoding='utf-8')
    env = {**os.environ, 'MPLBACKEND': 'agg', 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(root)}
    res = subprocess.run([sys.executable, 'tutorial.py'], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert res.returncode == 0, res.stderr[-2000:]
