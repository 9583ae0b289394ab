"""Rooms over client libraries that not everybody installs; opened when a setting asks for them."""

from __future__ import annotations

import importlib
from typing import Any

from dynamo.errors import ConfigError

__all__ = ["extra"]


def extra(name: str, module: str) -> Any:
    """Import ``module``, which needs the extra ``name``. ConfigError says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == "dynamo":
            raise
        raise ConfigError(
            f"{name} needs a package that is not installed ({missing or error}): "
            f"pip install 'dynamo-appliance[{name}]'"
        ) from error
