"""What a cost in seconds has learned of a model's workers, kept for the next start of a router."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from pathlib import Path

import msgspec

from dynamo.router.discovery.router import RoutedWorkers
from dynamo.router.prefill_model import MIN_SAMPLES, PrefillSpeed
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.process.paths import state_path, write_atomic

DIRECTORY = ".prefill-speed"
"""In the directory of the statefiles; no namespace begins with a dot."""
log = logging.getLogger(__name__)


class SavedSpeed(msgspec.Struct, kw_only=True):
    """One file: the speed of the workers of ``model`` at ``endpoint`` that do this ``phase``."""

    model: str
    endpoint: str
    phase: str
    speed: PrefillSpeed


class SpeedFile:
    """The file of one router. Routers of the same workers share it: the last one to save wins.

    A file that cannot be read or written costs a warning, and the next router begins with a guess.
    """

    def __init__(self, path: Path, workers: RoutedWorkers) -> None:
        self._path = path
        self._workers = workers
        self._saved: PrefillSpeed | None = None
        self._failed = False

    def load(self) -> PrefillSpeed | None:
        """Return the saved speed; None without one, or where it is of another model."""
        try:
            found = msgspec.json.decode(self._path.read_bytes(), type=SavedSpeed)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            log.warning("%s: %s; the prefill speed is learned again", self._path, error)
            return None
        described = found.model, found.endpoint, found.phase
        return found.speed if described == self._described else None

    async def save(self, speed: PrefillSpeed | None) -> None:
        """Write ``speed`` unless it is a guess or was written before. Not on the loop: disks may be
        slow."""
        if speed is None or speed.samples < MIN_SAMPLES or speed == self._saved:
            return
        model, endpoint, phase = self._described
        content = SavedSpeed(model=model, endpoint=endpoint, phase=phase, speed=speed)
        try:
            await asyncio.to_thread(self._write, msgspec.json.encode(content))
            self._saved = speed
        except OSError as error:
            if not self._failed:
                log.warning("%s: %s; what is learned of prefills is not kept", self._path, error)
            self._failed = True

    def _write(self, content: bytes) -> None:
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        write_atomic(self._path, content)

    @property
    def _described(self) -> tuple[str, str, str]:
        return self._workers.model, "/".join(self._workers.path), self._workers.phase


def speed_file(runtime: DistributedRuntime, workers: RoutedWorkers) -> SpeedFile | None:
    """Return the file for ``workers``; None where nothing is kept (discovery is not on disk)."""
    if runtime.settings.discovery_backend != "file":
        return None
    key = "\n".join((workers.model, *workers.path, workers.phase)).encode()
    name = f"{workers.namespace}-{hashlib.sha256(key).hexdigest()[:16]}.json"
    return SpeedFile(state_path(runtime.settings) / DIRECTORY / name, workers)
