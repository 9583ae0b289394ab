"""The small defects that ``scripts/mutate`` puts in, by package."""

from __future__ import annotations

from mutant import ROOT, Mutant
from mutants_engines import ENGINES
from mutants_frontend import FRONTEND
from mutants_http import HTTP
from mutants_past import PAST
from mutants_planner import OPERATIONS, PLANNER, SERVE
from mutants_router import ROUTER
from mutants_runtime import RUNTIME
from mutants_tools import COMPILED, TOOLS

__all__ = ["MUTANTS", "ROOT", "Mutant"]

MUTANTS: tuple[Mutant, ...] = (
    *PAST,
    *ROUTER,
    *RUNTIME,
    *HTTP,
    *FRONTEND,
    *PLANNER,
    *SERVE,
    *OPERATIONS,
    *ENGINES,
    *TOOLS,
    *COMPILED,
)
