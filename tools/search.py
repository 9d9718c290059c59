"Add the names of functions and classes to the search of the site that Quarto has just built; Quarto runs this file."
import os, sys
from pathlib import Path

root = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(root))
from hierproto.paper.site import add_names_to_search

add_names_to_search(Path(os.environ['QUARTO_PROJECT_OUTPUT_DIR']))
