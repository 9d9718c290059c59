"Names that moved to `hierproto.testing`"
from .testing import *
