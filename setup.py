"Passes what `settings.ini` says about the distribution to setuptools."
from configparser import ConfigParser
from pathlib import Path
from setuptools import find_packages, setup

here = Path(__file__).parent
ini = ConfigParser(delimiters=['='])
ini.read(here/'settings.ini', encoding='utf-8')
cfg = ini['DEFAULT']
statuses = ['1 - Planning', '2 - Pre-Alpha', '3 - Alpha', '4 - Beta', '5 - Production/Stable', '6 - Mature', '7 - Inactive']
minor = {k: int(cfg[f'{k}_python'].split('.')[1]) for k in ('min', 'newest')}
extras = {k.removesuffix('_requirements'): v.split() for k, v in cfg.items() if k.endswith('_requirements')}

setup(
    name=cfg['lib_name'], version=cfg['version'], description=cfg['description'], keywords=cfg['keywords'],
    author=cfg['author'], author_email=cfg['author_email'], url=cfg['git_url'], license='Apache-2.0',
    long_description=(here/'README.md').read_text(encoding='utf-8'), long_description_content_type='text/markdown',
    classifiers=[f"Development Status :: {statuses[int(cfg['status']) - 1]}", f"Intended Audience :: {cfg['audience']}",
                 'Topic :: Scientific/Engineering :: Artificial Intelligence',
                 *(f'Programming Language :: Python :: 3.{v}' for v in range(minor['min'], minor['newest'] + 1))],
    packages=find_packages(include=['hierproto', 'hierproto.*']), zip_safe=False,
    package_data={'hierproto': ['trees/*', 'page/*'], 'hierproto.paper.data': ['*.json']},
    python_requires=f">={cfg['min_python']}", install_requires=cfg['requirements'].split(), extras_require=extras,
    entry_points={'console_scripts': cfg.get('console_scripts', '').split(),
                  'nbdev': [f"{cfg['lib_name']}={cfg['lib_name']}._modidx:d"]},
)
