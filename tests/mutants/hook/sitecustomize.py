"""Puts the defect of ``TEST_MUTANT`` into every process of its tests.

Python imports this module at the start of every process that has the directory in PYTHONPATH, so
that processes which a test starts have the defect, too. TEST_MUTANT names a file with the
module, its text and the replacement, or with the compiled module to load in its place.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from pathlib import Path
from types import ModuleType

from broken_module import BrokenModule


class _Mutant(BrokenModule):
    """``mark`` is a file that is made when the module is imported with the defect."""

    def __init__(self, module: str, text: str, replacement: str, extension: str, mark: str) -> None:
        super().__init__(module, text, replacement)
        self._extension = extension
        self._mark = mark

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module of the defect, or the compiled one that has it already."""
        spec = super().find_spec(fullname, path)
        if spec is None:
            return None
        Path(self._mark).touch()
        if self._extension:
            extension = ExtensionFileLoader(fullname, self._extension)
            return importlib.util.spec_from_loader(fullname, extension)
        return spec


if "TEST_MUTANT" in os.environ:
    sys.meta_path.insert(0, _Mutant(**json.loads(Path(os.environ["TEST_MUTANT"]).read_text())))
