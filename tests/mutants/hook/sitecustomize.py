"""Puts one defect into a module of ``dynamo`` while it is imported; no file is changed.

Python imports this module at the start of every process that has the directory in PYTHONPATH, so
that processes which a test starts have the defect, too. TEST_MUTANT names a file with the
module, its text and the replacement, or with the compiled module to load in its place.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import NamedTuple


class Replacement(NamedTuple):
    """``mark`` is a file that is made when the module was imported with the defect."""

    module: str
    text: str
    replacement: str
    extension: str
    mark: str


def replaced(source: str, text: str, replacement: str) -> str:
    """Return the source with the defect. ValueError: it does not have the text exactly once."""
    count = source.count(text)
    if count != 1:
        raise ValueError(f"the text to replace occurs {count} times, not once: {text!r}")
    return source.replace(text, replacement)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, defect: Replacement) -> None:
        self._defect = defect

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module of the defect."""
        if fullname != self._defect.module:
            return None
        Path(self._defect.mark).touch()
        if self._defect.extension:
            extension = ExtensionFileLoader(fullname, self._defect.extension)
            return importlib.util.spec_from_loader(fullname, extension)
        spec = PathFinder.find_spec(fullname, path)
        assert spec is not None and spec.origin is not None
        loader = _Loader(fullname, spec.origin, self._defect)
        return importlib.util.spec_from_file_location(fullname, spec.origin, loader=loader)


class _Loader(SourceFileLoader):
    def __init__(self, fullname: str, path: str, defect: Replacement) -> None:
        super().__init__(fullname, path)
        self._defect = defect

    def get_code(self, fullname: str) -> object:  # type: ignore[override]
        """Compile the source with the defect; no cached code is used."""
        source = self.get_data(self.path).decode()
        broken = replaced(source, self._defect.text, self._defect.replacement)
        return compile(broken, self.path, "exec", dont_inherit=True)


if "TEST_MUTANT" in os.environ:
    _defect = Replacement(**json.loads(Path(os.environ["TEST_MUTANT"]).read_text()))
    sys.meta_path.insert(0, _Finder(_defect))
