__version__ = "0.3.0"
from . import moved # import paths of 0.2
