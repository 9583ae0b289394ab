"""Reads the events of a deployment, and chooses among them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import msgspec

from dynamo.errors import InvalidArgument
from dynamo.protocols.status import OPERATOR_EVENTS, BoxEvent
from dynamo.serve.state.events import EVENTS_FILE
from dynamo.status.logs import LogTail, matches

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_decode = msgspec.json.Decoder(BoxEvent).decode


@dataclass(frozen=True)
class EventFilter:
    """Which events: since a time (Unix), of a model, of a worker or service of ``namespace``."""

    namespace: str
    since_s: float = 0.0
    model: str = ""
    name: str = ""

    def takes(self, event: BoxEvent) -> bool:
        """Whether the event is one of them."""
        return (
            event.at_s >= self.since_s
            and (not self.model or self.model in (event.model, event.name))
            and (not self.name or self._names(event))
        )

    def _names(self, event: BoxEvent) -> bool:
        """Whether it is of ``name``, which may be without the namespace, or that of a service.

        What operators name may be a service, too, and is then of each of its workers.
        """
        prefix = f"{self.namespace}_"
        bare, wanted = event.name.removeprefix(prefix), self.name.removeprefix(prefix)
        return matches(prefix + bare, self.namespace, wanted) or (
            event.kind in OPERATOR_EVENTS and matches(prefix + wanted, self.namespace, bare)
        )


class EventReader:
    """Reads the events in a run directory. Each call goes on where the last one ended."""

    def __init__(self, run_directory: Path) -> None:
        self.directory = (run_directory / EVENTS_FILE).parent
        self._tail = LogTail(run_directory / EVENTS_FILE, "")

    def all(self) -> list[BoxEvent]:
        """Return all events that are kept, the oldest first."""
        return list(_decoded(self._tail.whole()))

    def read(self) -> Iterator[BoxEvent]:
        """Yield the events since the last call, also after a rotation."""
        return _decoded(self._tail.read())

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._tail.close()


def parse_since(text: str, now_s: float | None = None) -> float:
    """Return the Unix time of ``30m``, ``2h``, ``1d`` ago, or of a local time in ISO 8601.

    Raises InvalidArgument.
    """
    if found := _AGO.fullmatch(text):
        now_s = time.time() if now_s is None else now_s
        return now_s - float(found[1]) * _UNITS_S[found[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise InvalidArgument(
            f"--since {text!r}: give a time such as 30m, 2h, 1d, or 2026-05-04T13:00"
        ) from None


def _decoded(lines: Iterator[bytes]) -> Iterator[BoxEvent]:
    for line in lines:
        try:
            yield _decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue  # its writer crashed
