"Make README.md from nbs/index.ipynb without Quarto. With `--check`, only report whether it is up to date."
import argparse, re, sys
from itertools import takewhile
from pathlib import Path, PurePosixPath
from posixpath import normpath

import nbformat, yaml
from execnb.nbio import nb2str, read_nb
from nbconvert import MarkdownExporter
from nbdev.process import NBProcessor
from nbdev.processors import clean_magics, filter_stream_, hide_, hide_line, rm_export, strip_ansi
from traitlets.config import Config

root = Path(__file__).resolve().parents[1]
images = PurePosixPath('nbs/images')
notice = '<!-- Made from nbs/index.ipynb by tools/readme.py: edit the notebook, then run the tool. -->\n\n'

# Quarto's cell options and the tags that nbconvert and myst-nb use for them
tags = {('echo', 'false'): 'remove-input', ('output', 'false'): 'remove-output', ('include', 'false'): 'remove-cell',
        ('code-fold', 'true'): 'hide-input'}

def tag_options(cell):
    "Replace the options `#| name: value` at the top of a code `cell` by tags and metadata; returns its caption"
    lines = cell.source.splitlines()
    opts = [l[2:].partition(':') for l in takewhile(lambda l: l.startswith('#|'), lines)]
    opts = [(k.strip(), v.strip()) for k, _, v in opts]
    cell.source = '\n'.join(lines[len(opts):])
    cell.metadata['tags'] = [tags[o] for o in opts if o in tags]
    words = {k: yaml.safe_load(v) for k, v in opts if k in ('fig-alt', 'fig-cap', 'code-summary')}
    meta = {}
    if alt := words.get('fig-alt') or words.get('fig-cap'): meta['image'] = {'alt': alt}
    if summary := words.get('code-summary'): meta |= dict(code_prompt_show=summary, code_prompt_hide=summary)
    cell.metadata['mystnb'] = meta
    return words.get('fig-cap')

def relink(md, # Markdown
           f): # from the target of a link or image to its new target
    "Replace the target of each link and image in `md`, except in code, by `f(target)`"
    link = lambda s: re.sub(r'(\]\(\s*|\b(?:src|href)=")([^)"\s]+)', lambda m: m[1] + f(m[2]), s)
    parts = re.split(r'(^```.*?^```|`[^`\n]+`)', md, flags=re.S | re.M)
    return ''.join(s if i % 2 else link(s) for i, s in enumerate(parts))

def is_relative(target): return not re.match(r'[a-z+]+:|#|/', target)

def from_root(target):
    "A target relative to nbs/ as seen from README.md"
    if not is_relative(target): return target
    path, sep, anchor = target.partition('#')
    new = normpath(f'nbs/{path}')
    if not (root/new).exists(): raise FileNotFoundError(f'nbs/index.ipynb links to {target}, which does not exist')
    return new + sep + anchor

def convert(path=root/'nbs/index.ipynb'):
    "README.md and its images made from the notebook at `path`, as a dict from name to bytes"
    nb = read_nb(path)
    NBProcessor(nb=nb, procs=[strip_ansi, hide_line, filter_stream_, rm_export, clean_magics, hide_], process=True)
    nb = nbformat.reads(nb2str(nb), 4)
    nb.metadata['language_info'] = {'name': 'python'}
    nb.cells = [c for c in nb.cells if c.source.strip()]
    for c in nb.cells:
        if c.cell_type == 'markdown': c.source = relink(c.source, from_root)
        if c.cell_type == 'code': tag_options(c)
        for o in c.get('outputs', []):
            # GitHub shows style sheets as text
            if html := o.get('data', {}).get('text/html'):
                o.data['text/html'] = re.sub(r'<style.*?</style>\s*', '', html, flags=re.S)
            if md := o.get('data', {}).get('text/markdown'): o.data['text/markdown'] = relink(md, from_root)
    remove = dict(enabled=True, remove_input_tags={'remove-input'}, remove_cell_tags={'remove-cell'},
                  remove_all_outputs_tags={'remove-output'})
    kinds = ['text/html', 'text/markdown', 'image/svg+xml', 'image/png', 'image/jpeg', 'text/plain']
    cfg = Config({'TagRemovePreprocessor': remove, 'NbConvertBase': dict(display_data_priority=kinds)})
    resources = dict(unique_key='README', output_files_dir=str(images))
    body, res = MarkdownExporter(config=cfg).from_notebook_node(nb, resources)
    words = (c.metadata.get('mystnb', {}).get('image', {}).get('alt', 'Figure') for c in nb.cells
             for o in c.get('outputs', []) if any(k.startswith('image/') for k in o.get('data', {})))
    body = re.sub(r'!\[(png|svg|jpeg)\]', lambda m: f'![{next(words)}]', body)
    body = re.sub(r'\n{3,}', '\n\n', '\n'.join(l.rstrip() for l in body.splitlines())).strip()
    return {'README.md': f'{notice}{body}\n'.encode(), **res['outputs']}

def stale(files):
    "Names whose contents on disk differ from `files`, including images that are no longer used"
    old = {str(images/p.name) for p in (root/images).glob('README_*')} - files.keys()
    return sorted(old | {n for n, b in files.items() if not (root/n).exists() or (root/n).read_bytes() != b})

def write(files):
    "Write `files` and remove images that are no longer used"
    for n in stale(files): (root/n).unlink(missing_ok=True)
    for n, b in files.items():
        (root/n).parent.mkdir(parents=True, exist_ok=True)
        (root/n).write_bytes(b)

def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--check', action='store_true', help='write nothing; fail if a file is out of date')
    files = convert()
    if parser.parse_args().check:
        if bad := stale(files): sys.exit(f'out of date: {", ".join(bad)}; run python tools/readme.py')
    else: write(files)

if __name__ == '__main__': main()
