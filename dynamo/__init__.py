"""dynamo: an LLM-serving appliance for one GPU box.

Other directories ``dynamo`` on ``sys.path`` add to this package, in the order of ``sys.path``: put
Dynamo's own worker packages (``dynamo/vllm``, ``dynamo/common``, …) before this one to run them.
"""

from pkgutil import extend_path

__all__ = ["__version__"]

__version__ = "0.1.0"

_found: list[str] = extend_path([], __name__)
__path__ = _found if __path__[0] in _found else [*__path__, *_found]
