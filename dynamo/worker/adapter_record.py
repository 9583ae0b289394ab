"""The record of the LoRA adapters that operators have loaded, and the directories of adapters."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import InvalidArgument, Unavailable, name_problem
from dynamo.runtime.discovery.layout import BadRecord, read_file
from dynamo.runtime.process.paths import run_dir, state_path, write_atomic

CONFIG = "adapter_config.json"
"""A directory with this file has an adapter."""
_RECORD = "adapters.json"
_LOCK = "adapters.lock"
_MAX_BYTES = 1 << 20  # what read_file() reads
_MAX_DIRECTORIES = 4096
log = logging.getLogger(__name__)


class AdapterFiles(NamedTuple):
    """The directory of an adapter, and a digest of the names, sizes and times of its files."""

    path: str
    version: str


class AdapterRecord:
    """``adapters.json`` in the run directory: the adapters of ``model`` that operators have loaded.

    Each worker of the namespace reads it at its start and follows its changes. It outlives workers
    and deployments. All calls are blocking.
    """

    def __init__(self, settings: RuntimeSettings, model: str) -> None:
        directory = state_path(settings) / settings.namespace
        self.path = directory / _RECORD
        self._lock = directory / _LOCK
        self._settings = settings
        self._model = model

    def stamp(self) -> tuple[int, ...]:
        """Return what differs after each change; () without a record."""
        try:
            status = self.path.stat()
        except OSError:
            return ()
        return status.st_ino, status.st_mtime_ns, status.st_size

    def read(self) -> dict[str, str]:
        """Return the directory of each adapter by its name; log what cannot be read."""
        return self._read().get(self._model, {})

    def change(self, name: str, path: str | None) -> None:
        """Record an adapter in ``path``, or None: remove it.

        Raises InvalidArgument if the record becomes too large, Unavailable if it cannot be written.
        """
        run_dir(self._settings)
        try:
            with self._locked():
                models = self._read()
                adapters = models.setdefault(self._model, {})
                if adapters.get(name) == path:
                    return
                if path is None:
                    del adapters[name]
                else:
                    adapters[name] = path
                models = {model: names for model, names in models.items() if names}
                data = json.dumps({"version": 1, "models": models}, indent=1).encode()
                if len(data) > _MAX_BYTES:
                    raise InvalidArgument(
                        f"{self.path} would be larger than {_MAX_BYTES >> 20} MiB: unload adapters "
                        "first"
                    )
                write_atomic(self.path, data)
        except OSError as error:
            raise Unavailable(
                f"the adapters cannot be recorded in {self.path}: {error.strerror}"
            ) from None

    def _read(self) -> dict[str, dict[str, str]]:
        try:
            data = read_file(self.path)
            written = {} if data is None else json.loads(data)
        except (BadRecord, OSError, ValueError, RecursionError) as error:
            log.error("%s is ignored, it is not JSON: %s", self.path, error)
            return {}
        models = written.get("models", {}) if isinstance(written, dict) else None
        if not isinstance(models, dict):
            log.error("%s is ignored: it has no object 'models'", self.path)
            return {}
        return {model: self._adapters(model, adapters) for model, adapters in models.items()}

    def _adapters(self, model: str, written: Any) -> dict[str, str]:
        if not isinstance(written, dict):
            log.error("%s: the adapters of %r are ignored: they are no object", self.path, model)
            return {}
        adapters = {}
        for name, path in written.items():
            if not name or name_problem(name) or not isinstance(path, str) or not path:
                log.error("%s: the adapter %r of %r is ignored", self.path, name, model)
            else:
                adapters[name] = path
        return adapters

    @contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # for the time of a small write
            yield
        finally:
            os.close(descriptor)


def adapter_files(path: str) -> AdapterFiles:
    """Return the files of the adapter in ``path``. Raises InvalidArgument if it has none."""
    try:
        with os.scandir(path) as entries:
            files = sorted((entry.name, entry.stat()) for entry in entries if entry.is_file())
    except OSError as error:
        raise InvalidArgument(f"the adapter's directory {path}: {error.strerror}") from None
    if CONFIG not in (name for name, _ in files):
        raise InvalidArgument(
            f"the directory {path} has no {CONFIG}; give the local directory of the adapter"
        )
    facts = [(name, status.st_size, status.st_mtime_ns) for name, status in files]
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=6).hexdigest()
    return AdapterFiles(path, digest)


def adapters_in(directory: Path) -> dict[str, AdapterFiles]:
    """Return the adapters in the subdirectories of ``directory``, by their names."""
    adapters: dict[str, AdapterFiles] = {}
    try:
        with os.scandir(directory) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir())
    except OSError:
        return {}
    for name in names[:_MAX_DIRECTORIES]:
        if name.startswith(".") or name_problem(name):
            continue
        try:
            adapters[name] = adapter_files(str(directory / name))
        except InvalidArgument:  # no adapter, or not yet whole
            continue
    return adapters
