"""The groups of options of each program that ``python -m`` runs."""

from __future__ import annotations

from typing import Any

from dynamo.config.runtime import RuntimeSettings
from dynamo.config.system import LogSettings, SystemSettings

_PASS_UNKNOWN = ("dynamo.vllm",)


def settings_groups(module: str) -> tuple[type[Any], ...] | None:
    """Return the groups of ``module``, in the order of its ``--help``; None for other programs.

    Imports only those: a group takes a millisecond.
    """
    if module == "dynamo.frontend":
        from dynamo.config.frontend import FrontendSettings
        from dynamo.config.router import RouterSettings

        return FrontendSettings, RouterSettings, RuntimeSettings, LogSettings
    if module == "dynamo.router":
        from dynamo.config.router import RouterProcessSettings, RouterSettings

        return RouterProcessSettings, RouterSettings, RuntimeSettings, LogSettings
    if module == "dynamo.planner":
        from dynamo.config.planner import PlannerSettings

        return PlannerSettings, RuntimeSettings, LogSettings
    if module == "dynamo.mocker":
        from dynamo.config.mocker import MockerSettings
        from dynamo.config.worker import WorkerSettings

        return RuntimeSettings, WorkerSettings, MockerSettings
    if module == "dynamo.vllm":
        from dynamo.config.worker import VllmSettings, WorkerSettings

        return RuntimeSettings, WorkerSettings, VllmSettings
    if module == "dynamo.attach":
        from dynamo.config.worker import AttachSettings

        return RuntimeSettings, AttachSettings
    return None


def variable_groups(module: str) -> tuple[type[Any], ...]:
    """Return the groups that ``module`` reads from variables only, besides those of its flags."""
    if module in ("dynamo.frontend", "dynamo.planner", "dynamo.router"):
        return (SystemSettings,)
    from dynamo.config.system import HealthCheckSettings

    return LogSettings, SystemSettings, HealthCheckSettings


def passes_unknown(module: str) -> bool:
    """Whether ``module`` passes flags that are not ours to its engine, which checks them."""
    return module in _PASS_UNKNOWN
