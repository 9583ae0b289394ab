"""dynamo: an LLM-serving appliance for one GPU box.

Other directories ``dynamo`` on ``sys.path`` add to this package, in the order of ``sys.path``: put
Dynamo's own worker packages (``dynamo/vllm``, ``dynamo/common``, …) before this one to run them.
"""

import gc
import os
import sys

__all__ = ["__version__"]

__version__ = "0.1.0"

# As pkgutil.extend_path, whose import would double the time until the command handles Ctrl-C.
_directories = (f"{entry}/{__name__}" for entry in sys.path if entry.startswith("/"))
_found = [path for path in _directories if os.path.isdir(path)]  # noqa: PTH112 - as above
__path__ = _found if __path__[0] in _found else [*__path__, *_found]

# A process of this package: the command, or ``python -m`` while it locates the module. What imports
# create is kept, so the collector would visit it again and again in vain. Others keep their own.
if sys.argv and sys.argv[0].rpartition("/")[2] in ("-m", "dynamo"):
    gc.set_threshold(50_000, 10, 10)
