"""Options of the verbs that operate a running deployment: restart, drain, sleep, wake, load, logs,
top."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.config.option import option

__all__ = ["DeploymentSettings", "LoadSettings", "OperateSettings"]


@dataclass(frozen=True, kw_only=True)
class DeploymentSettings:
    """deployment: which one"""

    namespace: str | None = option(
        None, "--namespace", help="namespace of the deployment; default: DYN_NAMESPACE"
    )


@dataclass(frozen=True, kw_only=True)
class OperateSettings:
    """operate: which processes"""

    name: str = option(
        "", "name", help="a worker, such as dynamo_Worker_1, or a service for all of its workers"
    )


@dataclass(frozen=True, kw_only=True)
class LoadSettings:
    """load: which model"""

    model: str = option("", "model", help="name of a model of the graph")
