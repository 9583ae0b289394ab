"""What the page shows and does: the deployment around this frontend, or this frontend alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dynamo.box.collect import BoxCollector
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import InvalidArgument, shorten
from dynamo.protocols.status import (
    BoxStatus,
    FrontendStatus,
    ModelFigures,
    ModelStatus,
    WorkerStatus,
)
from dynamo.runtime.paths import state_path

__all__ = ["BoxSource", "UiSource", "with_own_figures"]

_ALONE = (
    "this frontend was not started by dynamo serve: its own figures are shown, and the buttons "
    "have nothing to act on; start a deployment: dynamo serve GRAPH"
)


@dataclass(frozen=True, kw_only=True)
class UiSource:
    """What a page shows and does. ``collect`` and ``act`` block, ``own`` does not.

    ``own`` has the figures of this frontend, for ``collect``. ``act(action, name)`` returns a
    sentence about what happens now, or raises DynamoError. ``logs`` is a directory.
    """

    own: Callable[[], FrontendStatus]
    collect: Callable[[FrontendStatus], BoxStatus]
    act: Callable[[str, str], str]
    logs: Path


class BoxSource:
    """The deployment in the namespace of ``runtime``."""

    def __init__(self, runtime: RuntimeSettings) -> None:
        self._collector = BoxCollector(runtime)
        self.logs = state_path(runtime) / runtime.namespace / "logs"

    def act(self, action: str, name: str) -> str:
        """Do what a button says. Raises DynamoError. Blocks."""
        raise InvalidArgument(f"unknown action '{shorten(action, 64)}'")

    def collect(self, own: FrontendStatus) -> BoxStatus:
        """Return the state of the deployment; without one, what ``own`` has. Blocks."""
        found = self._collector.collect(own)
        requests = tuple(msgspec.structs.replace(one, route=None) for one in found.requests)
        found = msgspec.structs.replace(found, requests=requests)
        return found if found.state == "running" else with_own_figures(found, own)


def with_own_figures(found: BoxStatus, own: FrontendStatus) -> BoxStatus:
    """Return ``found``, which has no deployment, with the models and workers of a frontend."""
    return msgspec.structs.replace(
        found,
        frontend="draining" if own.draining else "ready",
        models=tuple(map(_model, own.models)),
        workers=tuple(worker for model in own.models for worker in _workers(model)),
        requests=tuple(msgspec.structs.replace(one, route=None) for one in own.requests),
        problems=(*found.problems, _ALONE),
    )


def _model(figures: ModelFigures) -> ModelStatus:
    count = len(figures.workers)
    return ModelStatus(
        model=figures.model,
        state="ready" if count else "zero",
        ready=count,
        wanted=count,
        figures=figures,
        workers=tuple(one.worker for one in figures.workers),
    )


def _workers(model: ModelFigures) -> list[WorkerStatus]:
    return [
        WorkerStatus(
            name=one.worker,
            service="",
            state="ready",
            worker=one.worker,
            model=model.model,
            in_flight=one.in_flight,
            kv_use=one.kv_use,
        )
        for one in model.workers
    ]
