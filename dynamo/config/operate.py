"""Options of the verbs that operate a running deployment: restart, drain, sleep, wake, load, logs,
top."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.config.option import option

__all__ = [
    "DeploymentSettings",
    "LoadModelSettings",
    "LogsSettings",
    "OperateSettings",
    "TopSettings",
]


@dataclass(frozen=True, kw_only=True)
class DeploymentSettings:
    """deployment: which one"""

    namespace: str | None = option(
        None,
        "--namespace",
        help="namespace of the deployment; default: DYN_NAMESPACE, else the only one",
    )


@dataclass(frozen=True, kw_only=True)
class OperateSettings:
    """operate: which processes"""

    name: str = option(
        "", "name", help="a worker, such as dynamo_Worker_1, or a service for all of its workers"
    )


@dataclass(frozen=True, kw_only=True)
class LoadModelSettings:
    """load: which model"""

    model: str = option("", "model", help="name of a model of the graph")


@dataclass(frozen=True, kw_only=True)
class LogsSettings:
    """logs: of which processes, and how many lines"""

    name: str = option("", "name", help="a worker or a service; default: all, with their names")
    follow: bool = option(
        False, "-f", "--follow", help="go on with new lines, beyond restarts and rotations"
    )
    number: int = option(
        50, "-n", "--number", minimum=0, help="last lines of each process to show first"
    )


@dataclass(frozen=True, kw_only=True)
class TopSettings:
    """top: how often"""

    once: bool = option(False, "--once", help="print one frame and exit")
    interval_s: float = option(
        1.0,
        "--interval",
        minimum=0.1,
        maximum=3600.0,
        metavar="SECONDS",
        help="time between frames",
    )
    api_key: str | None = option(
        None,
        "--api-key",
        env=("DYN_API_KEY", "OPENAI_API_KEY"),
        help="an operator's key, for the figures of a frontend that needs one",
    )
