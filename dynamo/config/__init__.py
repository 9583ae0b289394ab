"""Every option once (flag, variable, default, range, help); the only reader of os.environ.

Its names are imported on first use: ``dynamo ps`` mostly needs none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynamo.config.option import (
        deprecations,
        environ,
        from_env,
        load,
        load_known,
        preset,
        to_env,
    )
    from dynamo.config.parser import Option

__all__ = [
    "Option",
    "deprecations",
    "environ",
    "from_env",
    "load",
    "load_known",
    "preset",
    "to_env",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(f"{__name__}.option"), name)
    return found
