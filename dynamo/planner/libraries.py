"""Libraries of the extra ``planner``: imported when they are needed, with an error that says how
to get them."""

from __future__ import annotations

import importlib
from typing import Any

from dynamo.errors import ConfigError

__all__ = ["load_library"]


def load_library(name: str, purpose: str, instead: str) -> Any:
    """Return the module ``name``.

    Raises ConfigError where it is not installed; ``purpose`` is the option that needs it, and
    ``instead`` what does without.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{purpose} needs {name.partition('.')[0]} ({error}): "
            f"pip install 'dynamo-appliance[planner]', or use {instead}"
        ) from error
