"""The figures of profiles and comparisons, which need matplotlib."""

from __future__ import annotations

from typing import Any

from dynamo.errors import ConfigError


def figure_class(what: str, otherwise: str = "") -> Any:
    """Return matplotlib's ``Figure``. Raises ConfigError with the remedy if it is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        install = "pip install 'dynamo-appliance[planner]'"
        raise ConfigError(f"{what} matplotlib ({error}): {install}{otherwise}") from None
    return Figure
