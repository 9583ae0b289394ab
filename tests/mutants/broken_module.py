"""Puts a defect into a module while it is imported; no file is changed.

Uses the standard library alone: a mutant's processes import it before their packages.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType


def replaced(source: str, text: str, replacement: str) -> str:
    """Return the source with the defect. ValueError: it does not have the text exactly once."""
    count = source.count(text)
    if count != 1:
        raise ValueError(f"the text to replace occurs {count} times, not once: {text!r}")
    return source.replace(text, replacement)


class BrokenModule(importlib.abc.MetaPathFinder):
    """Finds ``module`` with ``replacement`` in place of ``text``: insert it in sys.meta_path."""

    def __init__(self, module: str, text: str, replacement: str) -> None:
        self._module = module
        self._text = text
        self._replacement = replacement

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module of the defect."""
        if fullname != self._module:
            return None
        spec = PathFinder.find_spec(fullname, path)
        assert spec is not None and spec.origin is not None
        loader = _Loader(fullname, spec.origin, self._text, self._replacement)
        return importlib.util.spec_from_loader(fullname, loader)


class _Loader(SourceFileLoader):
    def __init__(self, fullname: str, path: str, text: str, replacement: str) -> None:
        super().__init__(fullname, path)
        self._text = text
        self._replacement = replacement

    def get_code(self, fullname: str) -> object:  # type: ignore[override]
        """Compile the source with the defect; no cached code is used."""
        source = self.get_data(self.path).decode()
        broken = replaced(source, self._text, self._replacement)
        return compile(broken, self.path, "exec", dont_inherit=True)
