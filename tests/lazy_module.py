"""Modules that a test file imports when a test first uses them.

Each worker of pytest-xdist collects all tests and runs some: the clients of OpenAI's and
Anthropic's API take longer to import than all other modules together.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


class LazyModule:
    """The module ``name``, imported by the first use of an attribute."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # asked by pytest of each name in a test file
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


if TYPE_CHECKING:
    import anthropic as anthropic
    import openai as openai
else:
    anthropic = LazyModule("anthropic")
    openai = LazyModule("openai")
