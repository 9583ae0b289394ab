"""Every metric that the package declares, found by importing all its modules."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import dynamo
from dynamo.observability.metrics import MetricSpec

__all__ = ["AnySpec", "absent_names", "declarations", "declared_in", "kind_of"]

AnySpec = MetricSpec[Any]


def declared_in(*modules: ModuleType) -> list[AnySpec]:
    """The metrics of these modules, imported ones included."""
    return [v for module in modules for v in vars(module).values() if isinstance(v, MetricSpec)]


@functools.cache
def declarations() -> tuple[AnySpec, ...]:
    """Each declaration of the package once, except in the modules that import an engine."""
    modules = []
    for one in pkgutil.walk_packages(dynamo.__path__, "dynamo."):
        if one.name.endswith("__main__"):
            continue
        try:
            modules.append(importlib.import_module(one.name))
        except ModuleNotFoundError as error:
            if error.name not in ("numpy", "vllm"):
                raise
    return tuple({id(spec): spec for spec in declared_in(*modules)}.values())


def kind_of(spec: AnySpec) -> str:
    """``counter``, ``gauge`` or ``histogram``."""
    return str(spec.kind.__name__).lower()


def absent_names() -> list[str]:
    """Dynamo's names that docs/observability.md calls absent; "…" at the end stands for any."""
    page = (Path(__file__).parents[1] / "docs/observability.md").read_text()
    table = page.split("\n### Names of Dynamo 1.6.1 that are not here")[1].split("\n## ")[0]
    rows = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall("`(.+?)`", row)]
