"""Finds lost wake-ups: requests that wait although nothing is in their way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from presence import decoders, model_of

if TYPE_CHECKING:
    from box import Box
    from machine import Process

__all__ = ["Waiting"]

LIMIT_S = 5.0
"""So long a request waits at most while a worker of its model has nothing to do."""
_SETTLED_S = 6.0
"""A frontend may wait so long for a worker that was stopped, or for an answer of one that died."""


class Waiting:
    """Since when each request has received nothing while an idle worker could serve it."""

    def __init__(self) -> None:
        self._since_s: dict[str, tuple[int, float]] = {}
        self._told: set[str] = set()
        self._disturbed_s = 0.0
        self._done = self._lived = 0

    def look(self, box: Box) -> Iterator[str]:
        """Yield the requests that have waited too long; call it several times a second."""
        now_s = box.clock()
        idle = {model for model in box.profile.models if self._is_idle(box, model)}
        if self.is_disturbed(box):
            self._since_s.clear()
            return
        for name, client in box.open.items():
            model, count = box.models[name], len(client.record.events)
            before = self._since_s.get(name)
            away = client.is_paused or model not in idle
            if away or before is None or before[0] != count:
                self._since_s[name] = count, now_s
            elif now_s - before[1] > LIMIT_S and name not in self._told:
                self._told.add(name)
                yield (
                    f"{name}: for {now_s - before[1]:.1f} s nothing was in its way: a worker of "
                    f"{model} is live and idle"
                )
        for name in self._since_s.keys() - box.open.keys():
            del self._since_s[name]

    def is_disturbed(self, box: Box) -> bool:
        """Whether a process is stopped, or a fault happened some seconds ago."""
        stopped = any(one.state == "T" for one in box.machine.processes.values())
        begun = any(step.kind == "fault" for step in box.done[self._done :])
        self._done = len(box.done)
        if stopped or begun or len(box.machine.lived) != self._lived:
            self._lived, self._disturbed_s = len(box.machine.lived), box.clock()
        return box.clock() - self._disturbed_s < _SETTLED_S

    def _is_idle(self, box: Box, model: str) -> bool:
        workers = [one for service in decoders(model) for one in box.presence.live(service)]
        workers += [one for one in box.processes("mocker") if model_of(one) == model]
        return bool(box.presence.serves(model)) and not any(map(_works, workers))


def _works(process: Process) -> bool:
    """Whether the engine of a worker has requests."""
    return any(rank.load for part in process.parts if hasattr(part, "ranks") for rank in part.ranks)
