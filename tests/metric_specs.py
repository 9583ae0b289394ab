"""Every metric that the package declares, found by importing all its modules."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType
from typing import Any

import dynamo
from dynamo.observability.metrics import MetricSpec

__all__ = ["AnySpec", "declarations", "declared_in", "kind_of"]

AnySpec = MetricSpec[Any]


def declared_in(*modules: ModuleType) -> list[AnySpec]:
    """The metrics of these modules, imported ones included."""
    return [v for module in modules for v in vars(module).values() if isinstance(v, MetricSpec)]


def declarations() -> list[AnySpec]:
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
    return list({id(spec): spec for spec in declared_in(*modules)}.values())


def kind_of(spec: AnySpec) -> str:
    """``counter``, ``gauge`` or ``histogram``."""
    return str(spec.kind.__name__).lower()
