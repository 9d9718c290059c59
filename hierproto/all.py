"Everything a notebook wants at hand: `from hierproto.all import *`. Programs import the modules by name."
from .hierarchy import *
from .readers import *
from .distortion import *
from .prototypes import *
from .plots import *
from .metrics import *
from .callbacks import *
from .learner import *
from .inference import *
from .methods import *
from .saving import *
from .audit import *
