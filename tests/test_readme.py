"README.md is made from nbs/index.ipynb by tools/readme.py."
import sys
from pathlib import Path

import nbformat, pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

root = Path(__file__).parents[1]
sys.path.insert(0, str(root/'tools'))
import readme

def test_agrees_with_index(): assert readme.stale(readme.convert()) == []

@pytest.fixture
def project(tmp_path, monkeypatch):
    "A folder with a small index.ipynb instead of this repository"
    monkeypatch.setattr(readme, 'root', tmp_path)
    (tmp_path/'nbs/images').mkdir(parents=True)
    for f in ('LICENSE', 'nbs/01_a.ipynb', 'nbs/images/tree.svg'): (tmp_path/f).touch()
    png = new_output('display_data', {'image/png': 'iVBORw0KGgo=', 'text/plain': '<Figure>'})
    table = new_output('execute_result', {'text/html': '<div>\n<style scoped>\n td {}\n</style>\n<table></table></div>',
                                          'text/plain': 'x'})
    nbformat.write(new_notebook(cells=[
        new_markdown_cell('# Title\n\n> One line'), new_code_cell('#| hide\nimport secret'),
        new_markdown_cell('[a](01_a.ipynb#part), [b](../LICENSE), [c](https://example.org), `f[0](x)`\n\n'
                          '![](images/tree.svg)\n\n'
                          '```python\nf[0](x)\n```'),
        new_code_cell('#| echo: false\nplot()', outputs=[png]),
        new_code_cell('#| output: false\nnoisy()', outputs=[table]),
        new_code_cell('%matplotlib inline\nframe', outputs=[table])]), tmp_path/'nbs/index.ipynb')
    return tmp_path

def test_converts(project):
    files = readme.convert(project/'nbs/index.ipynb')
    md = files.pop('README.md').decode()
    assert md.startswith(readme.notice + '# Title\n\n> One line')
    assert '[a](nbs/01_a.ipynb#part), [b](LICENSE), [c](https://example.org), `f[0](x)`' in md
    assert '![](nbs/images/tree.svg)' in md and '```python\nf[0](x)\n```' in md
    assert not any(s in md for s in ('secret', 'plot()', '#|', '%matplotlib', '<style'))
    assert '```python\nnoisy()\n```' in md and md.count('<table>') == 1
    [(name, png)] = files.items()
    assert f'({name})' in md and name.startswith('nbs/images/README_') and png.startswith(b'\x89PNG')

def test_writes_and_notices(project):
    files = readme.convert(project/'nbs/index.ipynb')
    assert readme.stale(files) == sorted(files)
    (project/'nbs/images/README_99_0.png').touch()
    readme.write(files)
    assert readme.stale(files) == [] and not (project/'nbs/images/README_99_0.png').exists()
    assert (project/'nbs/images/tree.svg').exists()
    assert (project/'README.md').stat().st_mtime >= (project/'nbs/index.ipynb').stat().st_mtime
    (project/'README.md').write_text('edited by hand')
    assert readme.stale(files) == ['README.md']

def test_broken_link_is_an_error(project):
    (project/'nbs/01_a.ipynb').unlink()
    with pytest.raises(FileNotFoundError, match='01_a.ipynb#part'): readme.convert(project/'nbs/index.ipynb')
