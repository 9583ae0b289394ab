"""Changes of a running planner by an operator: its pause, budgets, minima and targets.

They last as long as the deployment: ``planner-control.json`` in the run directory has them, so a
planner that is restarted goes on with them. A new deployment begins with the options of its graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from dynamo.config.planner import PlannerSettings
from dynamo.errors import ConfigError, DynamoError, InvalidArgument
from dynamo.operations.planner_client import MOST_GPUS, check_change
from dynamo.planner.connector import ScaledService
from dynamo.planner.live.loop import ScalingLoop
from dynamo.protocols.control import PlannerChange, PlannerState
from dynamo.runtime.discovery.layout import read_file
from dynamo.runtime.process.paths import write_atomic

_BUDGETS = ("max_gpu_budget", "min_gpu_budget")
_TARGETS = ("ttft_ms", "itl_ms")
log = logging.getLogger(__name__)


class _Saved(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The changes since the ``deployment`` began: the process of its arbiter, and its start."""

    deployment: str
    change: PlannerChange


class PlannerControl:
    """The settings as an operator has changed them.

    ``settings`` is what every part of the planner begins with. :meth:`attach` gives it the loop;
    ``listeners`` get the settings after each change.
    """

    def __init__(self, settings: PlannerSettings, path: Path, deployment: str) -> None:
        self._path = path
        self._deployment = deployment
        self._change = self._read()
        self.settings = settings
        self.listeners: list[Callable[[PlannerSettings], object]] = []
        self.on_pause: Callable[[bool], object] = lambda paused: None
        self._acts = not settings.no_operation
        self._loop: ScalingLoop | None = None
        try:
            self.settings = changed(settings, self._change)
        except DynamoError as error:  # the options of the graph have changed since
            log.warning("%s is not used: %s", path, error.message)
            self._change = PlannerChange()

    def attach(self, loop: ScalingLoop) -> None:
        """Take the loop; it gets the minima and the pause that were saved."""
        self._loop = loop
        loop.set_minima(_kept(self._change.minima))
        if self._change.paused:
            self._pause(loop, True)

    def change(self, wanted: PlannerChange) -> PlannerState:
        """Apply ``wanted``, all of it or nothing; return the state. Raises InvalidArgument."""
        loop = self._loop
        assert loop is not None
        if wanted == PlannerChange():
            return self.state(loop)
        settings = changed(self.settings, wanted)
        least = 0 if settings.environment == "local" else 1
        _check_minima(wanted.minima, loop.services, least)
        total = merged(self._change, wanted)
        # Before it is applied: a change that cannot be written would not outlive a restart.
        self._save(total)
        self._change = total
        if settings != self.settings:
            self.settings = settings
            for listener in self.listeners:
                listener(settings)
        loop.set_minima(_kept(self._change.minima))
        if wanted.paused is not None:
            self._pause(loop, wanted.paused)
        rest = msgspec.structs.replace(wanted, paused=None)
        if rest != PlannerChange():
            log.info("changed by an operator: %s", msgspec.json.encode(rest).decode())
            loop.wake()
        return self.state(loop)

    def state(self, loop: ScalingLoop) -> PlannerState:
        """Return what the planner does, and by which settings."""
        settings = self.settings
        has_targets = settings.mode != "load"
        return PlannerState(
            paused=loop.paused,
            acts=self._acts,
            models=loop.models(),
            on_demand=loop.on_demand(),
            mode=settings.mode,
            ttft_ms=settings.ttft_ms if has_targets else None,
            itl_ms=settings.itl_ms if has_targets else None,
            max_gpu_budget=settings.max_gpu_budget,
            min_gpu_budget=settings.min_gpu_budget,
            minima={
                service.name: settings.least_workers(service.gpus_per_worker, service.pool)
                if service.minimum is None
                else service.minimum
                for service in loop.services.values()
            },
        )

    def _pause(self, loop: ScalingLoop, paused: bool) -> None:
        (loop.pause if paused else loop.resume)()
        self.on_pause(paused)

    def _read(self) -> PlannerChange:
        try:
            # Without a file, {} lacks fields, and the error below means no changes.
            saved = msgspec.json.decode(read_file(self._path) or b"{}", type=_Saved)
        except msgspec.MsgspecError:
            return PlannerChange()
        except (DynamoError, OSError, ValueError) as error:
            log.warning("%s cannot be read: %s", self._path, error)
            return PlannerChange()
        return saved.change if saved.deployment == self._deployment else PlannerChange()

    def _save(self, change: PlannerChange) -> None:
        """Write the changes. Raises DynamoError if that fails: they would not last."""
        saved = _Saved(deployment=self._deployment, change=change)
        try:
            write_atomic(self._path, msgspec.json.encode(saved))
        except OSError as error:
            raise DynamoError(f"cannot write {self._path}: {error.strerror}") from error


def changed(settings: PlannerSettings, change: PlannerChange) -> PlannerSettings:
    """Return ``settings`` with the budgets and targets of ``change``. Raises InvalidArgument."""
    check_change(change)
    values: dict[str, Any] = {
        name: getattr(change, name)
        for name in (*_BUDGETS, *_TARGETS)
        if getattr(change, name) is not None
    }
    if "min_gpu_budget" in values:  # minima in workers would take precedence over it
        values |= dict.fromkeys(("min_endpoint", "prefill_min_endpoint", "decode_min_endpoint"))
    if settings.mode == "load" and values.keys() & set(_TARGETS):
        raise InvalidArgument(
            "mode load has thresholds and no targets (ttft_ms, itl_ms): start the planner with "
            "--mode auto or load+sla"
        )
    try:
        return replace(settings, **values)
    except ConfigError as error:
        raise InvalidArgument(error.message) from error


def merged(before: PlannerChange, wanted: PlannerChange) -> PlannerChange:
    """Return both changes as one; ``wanted`` counts where both say something."""
    values = {
        name: value
        for name in wanted.__struct_fields__
        if name != "minima" and (value := getattr(wanted, name)) is not None
    }
    minima = {**(before.minima or {}), **(wanted.minima or {})}
    return msgspec.structs.replace(before, **values, minima=_kept(minima) or None)


def _kept(minima: Mapping[str, int | None] | None) -> dict[str, int | None]:
    """Return the minima without those that are the graph's again."""
    return {name: count for name, count in (minima or {}).items() if count is not None}


def _check_minima(
    minima: Mapping[str, int | None] | None, services: Mapping[str, ScaledService], least: int
) -> None:
    for name, count in (minima or {}).items():
        service = services.get(name)
        if service is None:
            names = ", ".join(sorted(services)) or "none yet"
            raise InvalidArgument(f"minima: no service {name!r} is scaled; there are: {names}")
        most = MOST_GPUS if service.maximum is None else service.maximum
        if count is not None and not least <= count <= most:
            raise InvalidArgument(f"minima: {name} must be between {least} and {most}, got {count}")
