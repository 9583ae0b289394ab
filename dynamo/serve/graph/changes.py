"""What a changed graph means for a running deployment: watchers to add, replace and remove. Pure.

A watcher is replaced if its command, directory, environment or number of GPUs changed. The GPUs
themselves do not count: a running process keeps its own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from dynamo.config.programs import PLANNER
from dynamo.serve.graph.watchers import WatcherSpec, added_env, with_gpus
from dynamo.serve.state.document import ASLEEP, DRAINING

_NOT_COMPARED = ("CUDA_VISIBLE_DEVICES", "DYNAMO_SERVICE_CONFIG")
"""The GPUs that were assigned, and the whole graph, which changes with every service."""


@dataclass(frozen=True, kw_only=True)
class GraphChanges:
    """The difference of a graph to what runs. Specs are those of the new graph.

    ``changed`` and ``kept`` have the GPUs of the running watcher if the number is the same. ``why``
    has what changed, by watcher.
    """

    added: Sequence[WatcherSpec]
    changed: Sequence[WatcherSpec]
    kept: Sequence[WatcherSpec]
    removed: Sequence[str]
    why: Mapping[str, str]

    def lines(self) -> list[str]:
        """Return one line per watcher that changes."""
        return [
            *(f"add      {spec.name}" for spec in self.added),
            *(f"restart  {spec.name}   changed: {self.why[spec.name]}" for spec in self.changed),
            *(f"remove   {name}" for name in self.removed),
        ]

    def summary(self) -> str:
        """``1 added, 2 restarted, 0 removed, 3 unchanged``."""
        return (
            f"{len(self.added)} added, {len(self.changed)} restarted, "
            f"{len(self.removed)} removed, {len(self.kept)} unchanged"
        )


def compare(
    running: Mapping[str, WatcherSpec], wanted: Sequence[WatcherSpec], planned: Collection[str]
) -> GraphChanges:
    """Compare the ``running`` watchers with the ``wanted`` ones.

    Only the watchers ``planned`` are removed, those of the last graph and workers added to them:
    others were added by command.
    """
    added, changed, kept = [], [], []
    why: dict[str, str] = {}
    for spec in wanted:
        before = running.get(spec.name)
        if before is None:
            added.append(spec)
            continue
        if before.gpus and before.gpu == spec.gpu:
            spec = with_gpus(spec, before.gpus)
        difference = _difference(before, spec)
        if difference:
            why[spec.name] = difference
            changed.append(spec)
        else:
            kept.append(spec)
    names = {spec.name for spec in wanted}
    removed = [name for name in running if name in planned and name not in names]
    return GraphChanges(added=added, changed=changed, kept=kept, removed=removed, why=why)


def added_workers(
    running: Mapping[str, WatcherSpec], planned: Collection[WatcherSpec]
) -> dict[str, str]:
    """Return the workers that were added by command to a ``planned`` service, as the planner does.

    The result has the first watcher of the service by the worker's name. A watcher with another
    command than its service is not one of its workers.
    """
    names = {spec.name for spec in planned}
    found: dict[str, str] = {}
    for base in planned:
        pattern = re.compile(re.escape(base.name) + r"_\d+")
        for name, spec in running.items():
            is_own = pattern.fullmatch(name) is not None and spec.argv == base.argv
            if is_own and not base.index and name not in names:
                found[name] = base.name
    return found


def follow(added: Mapping[str, str], wanted: Collection[WatcherSpec]) -> list[WatcherSpec]:
    """Return the specs of ``added`` workers (see :func:`added_workers`) in the new graph.

    A worker whose service left the graph has none.
    """
    specs = {spec.name: spec for spec in wanted}
    return [
        replace(
            specs[base],
            name=name,
            index=int(name.rpartition("_")[2]),
            env=added_env(specs[base], name),
        )
        for name, base in added.items()
        if base in specs and name not in specs
    ]


def without_removed(
    wanted: Sequence[WatcherSpec],
    started: Collection[WatcherSpec],
    running: Mapping[str, WatcherSpec],
) -> list[WatcherSpec]:
    """Leave out workers that were ``started`` from the last graph and are not ``running`` now.

    A service whose workers were all removed stays at zero. With a planner, which decides how many
    workers there are, every removed worker stays removed.
    """
    left = {spec.name for spec in started} - running.keys()
    zero = {spec.service for spec in started} - {spec.service for spec in running.values()}
    planned = any(spec.program == PLANNER for spec in wanted)
    return [
        spec
        for spec in wanted
        if not spec.serves_model or not (spec.service in zero or (planned and spec.name in left))
    ]


def without_awakening(changes: GraphChanges, states: Mapping[str, str]) -> GraphChanges:
    """Start no process in place of a worker that sleeps or drains, by its state in the statefile.

    One that sleeps is removed: woken, its process would serve the old definition.
    """
    changed = {spec.name: spec for spec in changes.changed}
    asleep = [name for name in changed if states.get(name) == ASLEEP]
    draining = [changed[name] for name in changed if states.get(name) == DRAINING]
    return replace(
        changes,
        changed=[s for s in changes.changed if s.name not in asleep and s not in draining],
        kept=[*changes.kept, *draining],
        removed=[*changes.removed, *asleep],
    )


def _difference(before: WatcherSpec, after: WatcherSpec) -> str:
    """Name what differs, without values: they may be secrets."""
    parts = {
        "command": before.argv != after.argv,
        "directory": before.working_dir != after.working_dir,
        "GPUs": before.gpu != after.gpu or bool(before.gpus) != bool(after.gpus),
        "environment": _compared_env(before) != _compared_env(after),
    }
    return ", ".join(part for part, differs in parts.items() if differs)


def _compared_env(spec: WatcherSpec) -> Mapping[str, str]:
    # Without assigned GPUs, the graph itself sets CUDA_VISIBLE_DEVICES.
    ignored = _NOT_COMPARED if spec.gpus else _NOT_COMPARED[1:]
    return {key: value for key, value in spec.env.items() if key not in ignored}
