"""The verbs of the lab, a distribution of its own (``lab/``)."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from dynamo.errors import ConfigError


def lab_verb(name: str) -> Any:
    """Import the module ``name`` with verbs of the lab. Raises ConfigError without the lab."""
    try:
        return importlib.import_module(f"dynamo_lab.cli.{name}")
    except ModuleNotFoundError as error:
        if error.name != "dynamo_lab":
            raise
        raise ConfigError(
            "this is a part of the lab, which is not installed: "
            "pip install 'dynamo-appliance[lab]'; in a checkout: pip install ./lab"
        ) from None


def profile(argv: Sequence[str] | None = None) -> int:
    """Run ``dynamo profile``; return the exit status."""
    return int(lab_verb("profile").main(argv))
