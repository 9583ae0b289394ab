"""The usual traffic of each model, kept in a file over restarts of planner and deployment."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import msgspec

from dynamo.planner.capacity.season import USUAL_S, Season, SeasonRecord, Usual, is_sound
from dynamo.planner.policies.base import Traffic
from dynamo.runtime.discovery.layout import BadRecord, read_file
from dynamo.runtime.process.paths import private_dir, write_atomic

SEASONS_FILE = "logs/planner-traffic.json"
"""Name of the file in the run directory of a deployment; it stays when the deployment stops."""
_MODELS = 32
"""Models in the file, 40 KB each; the one that was seen the longest ago is dropped first."""
_DIGITS = 4
log = logging.getLogger(__name__)


class SeasonStore:
    """Counts the traffic of models by local time; writes ``path`` whenever a slot has ended.

    Without ``writes`` it only reads: another planner may scale the deployment.
    """

    def __init__(self, path: Path, writes: bool = True) -> None:
        self._path = path
        self._writes = writes
        self._failed = False
        self._seasons = {name: Season(record) for name, record in self._read().items()}

    def add(self, model: str, traffic: Traffic, at_s: float | None = None) -> None:
        """Count the traffic of an interval that ends at ``at_s`` (Unix time), by default now."""
        if not traffic.known or traffic.duration_s <= 0:
            return
        season = self._seasons.setdefault(model, Season())
        if season.add(_local_s(at_s), traffic.arrived, traffic.duration_s):
            self._seasons[model] = self._seasons.pop(model)  # the newest is last
            while len(self._seasons) > _MODELS:
                del self._seasons[next(iter(self._seasons))]
            self._write()

    def usual(self, model: str, at_s: float | None = None) -> Usual | None:
        """Return what is usual for ``model`` in the time from ``at_s`` on, None if unknown."""
        season = self._seasons.get(model)
        return None if season is None else season.usual(_local_s(at_s), USUAL_S)

    def _read(self) -> dict[str, SeasonRecord]:
        try:
            data = read_file(self._path)
            found = msgspec.json.decode(data or b"{}", type=dict[str, SeasonRecord])
        except (BadRecord, OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.warning("%s is not used: %s; the usual traffic is learned again", self._path, error)
            return {}
        return {name: record for name, record in found.items() if is_sound(record)}

    def _write(self) -> None:
        if not self._writes:
            return
        records = {name: _rounded(season.record) for name, season in self._seasons.items()}
        try:
            private_dir(self._path.parent)
            write_atomic(self._path, msgspec.json.encode(records))
            self._failed = False
        except OSError as error:
            if not self._failed:
                log.error("cannot write %s: %s", self._path, error.strerror)
            self._failed = True


def _local_s(at_s: float | None) -> float:
    """Return the seconds of the local clock since 1970: a day begins at local midnight."""
    at_s = time.time() if at_s is None else at_s
    return at_s + time.localtime(at_s).tm_gmtoff


def _rounded(record: SeasonRecord) -> SeasonRecord:
    columns = {
        name: [round(value, _DIGITS) for value in getattr(record, name)]
        for name in record.__struct_fields__
    }
    return SeasonRecord(**columns)
