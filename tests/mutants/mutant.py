"""A small defect, and the checkers that must find it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from mutant_seeds import SEEDS

ROOT = Path(__file__).resolve().parent.parent.parent


class Mutant(NamedTuple):
    """``text`` occurs once in ``module``; ``replacement`` makes the defect ``name``.

    ``finders`` are test node ids relative to ``tests``. The text of a compiled module may be in a
    ``header`` of it.
    """

    name: str
    module: str
    text: str
    replacement: str
    finders: tuple[str, ...]
    header: str = ""

    @property
    def package(self) -> str:
        """The package: ``router`` of ``dynamo.router.modes.picker``."""
        return self.module.split(".")[1]

    @property
    def path(self) -> Path:
        """The source of the text."""
        path = ROOT / self.module.replace(".", "/")
        if self.header:
            return path.with_name(self.header)
        return path.with_suffix(".pyx" if path.with_suffix(".pyx").exists() else ".py")

    @property
    def seed(self) -> int:
        """A seed of the simulation that fails with the defect; 0: none is known."""
        return SEEDS.get(self.name, 0)

    @property
    def is_compiled(self) -> bool:
        """Whether the module is compiled, so that the defect needs a build."""
        return self.path.suffix != ".py"
