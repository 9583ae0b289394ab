"""The small defects that ``scripts/mutate`` puts in, by package."""

from __future__ import annotations

from mutant import ROOT, Mutant
from mutants_past import PAST

__all__ = ["MUTANTS", "ROOT", "Mutant"]

MUTANTS: tuple[Mutant, ...] = (*PAST,)
