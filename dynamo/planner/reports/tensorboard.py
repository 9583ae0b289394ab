"""What the planner sees and does, as scalars and texts for tensorboard.

A thread writes the files, so that a full or hung disk never holds up a decision. What cannot be
written is dropped.
"""

from __future__ import annotations

import logging
import re
import socket
import struct
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c
from tensorboardX.summary import Summary, scalar, text

from dynamo.planner.live.actions import WorkerAction
from dynamo.planner.live.loop import LoopObserver
from dynamo.planner.live.model_state import Pools
from dynamo.planner.policies.base import DECODE, PREFILL, Observation, Pull, ScalingDecision
from dynamo.planner.policies.load import kv_load
from dynamo.planner.reports.decisions import DecisionRecord
from dynamo.planner.reports.metrics import observed

_FLUSH_S = 5.0
_CLOSE_S = 2.0
_BUFFER_BYTES = 1 << 20
"""What a model may have unwritten, while the disk hangs."""
_FILE_BYTES = 8 << 20
_FILES = 8
_FILE_NAME = re.compile(r"events\.out\.tfevents\.(\d{1,10})\.")
_ORIGIN = re.compile(r"\.step0at(\d{1,10})$")
log = logging.getLogger(__name__)


def default_log_dir() -> Path:
    """Return ``logs/`` with the month, day and time of now."""
    return Path("logs") / time.strftime("%m%d_%H%M%S")


class TensorboardLog(LoopObserver):
    """A run of tensorboard for each model, in a directory of its name below ``directory``.

    The step is the number of seconds since the first planner started there: one that is started
    again continues the curves. A run has at most 8 files of 8 MiB: the oldest is deleted first.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._origin_s = _origin_s(directory)
        self._started_s = time.monotonic() - (time.time() - self._origin_s)
        self._unwritten: dict[str, bytearray] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tensorboard", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write everything and close the files; give up after two seconds."""
        self._closing.set()
        self._thread.join(_CLOSE_S)

    def pulled(self, model: str, pull: Pull, pools: Pools) -> None:
        """See :class:`LoopObserver`."""
        self._scalars(model, pull_scalars(pull, pools))

    def decided(self, record: DecisionRecord, seen: Observation, made: ScalingDecision) -> None:
        """See :class:`LoopObserver`."""
        self._scalars(record.model, {**observed(seen), **made.forecast})
        if record.changes:
            self._add(record.model, text("decisions", record.text()))

    def acted(self, action: WorkerAction) -> None:
        """See :class:`LoopObserver`."""
        self._add(action.model, text("actions", str(action)))

    def _scalars(self, model: str, scalars: Mapping[str, float]) -> None:
        values = [one for name, value in scalars.items() for one in scalar(name, value).value]
        if values:
            self._add(model, Summary(value=values))

    def _add(self, model: str, summary: Summary) -> None:
        step = round(time.monotonic() - self._started_s)
        record = _record(Event(wall_time=time.time(), step=step, summary=summary))
        with self._lock:
            unwritten = self._unwritten.setdefault(model, bytearray())
            if len(unwritten) + len(record) <= _BUFFER_BYTES:
                unwritten += record

    def _run(self) -> None:
        """Write what the loop has added, until it closes the log."""
        runs: dict[str, _Run] = {}
        failing: set[str] = set()
        closing = False
        while not closing:
            closing = self._closing.wait(_FLUSH_S)
            with self._lock:
                added, self._unwritten = self._unwritten, {}
            for model, records in added.items():
                if model not in runs:
                    name = model.replace("/", "_").lstrip(".") or "model"
                    runs[model] = _Run(self.directory / name, self._origin_s)
                problem = self._write(runs[model], model, records)
                if problem and model not in failing:  # once per outage
                    log.warning(
                        "no tensorboard log of model %s: %s; its figures are dropped. --log-dir "
                        "chooses another directory than %s",
                        *(model, problem, self.directory),
                    )
                (failing.add if problem else failing.discard)(model)

    def _write(self, run: _Run, model: str, records: bytearray) -> str:
        """Write ``records``; return "" or what went wrong."""
        is_new = run.is_new
        try:
            run.append(records)
        except (OSError, ValueError) as error:
            return str(error)
        if is_new:
            log.info("tensorboard --logdir=%s shows model %s", self.directory, model)
        return ""


class _Run:
    """The files of one model, each begun when the one before is full."""

    def __init__(self, directory: Path, origin_s: float) -> None:
        self._directory = directory
        self._origin_s = origin_s
        self._path: Path | None = None
        self._size_bytes = 0

    @property
    def is_new(self) -> bool:
        """Whether nothing was written yet."""
        return self._path is None

    def append(self, records: bytes | bytearray) -> None:
        """Write whole ``records``. Raises OSError; then the file is as it was before."""
        is_full = self._size_bytes + len(records) > _FILE_BYTES
        if self._path is None or is_full or not self._path.exists():  # a person may remove it
            self._begin()
        assert self._path is not None
        _append(self._path, records, self._size_bytes)
        self._size_bytes += len(records)

    def _begin(self) -> None:
        """Begin a file, and delete the oldest ones above the limit."""
        self._directory.mkdir(parents=True, exist_ok=True)
        seconds, nanoseconds = divmod(time.time_ns(), 10**9)
        path = self._directory / (  # in the order of time, by which they are read and deleted
            f"events.out.tfevents.{seconds:010d}.{socket.gethostname()}.{nanoseconds:09d}"
            f".step0at{self._origin_s:.0f}"
        )
        version = _record(Event(wall_time=time.time(), file_version="brain.Event:2"))
        _append(path, version, 0)
        self._path, self._size_bytes = path, len(version)
        files = sorted(one for one in self._directory.iterdir() if _FILE_NAME.match(one.name))
        for path in files[:-_FILES]:
            path.unlink(missing_ok=True)


def _append(path: Path, records: bytes | bytearray, size_bytes: int) -> None:
    """Add ``records`` to a file of ``size_bytes``, all or nothing. Raises OSError."""
    with path.open("ab", buffering=0) as file:
        try:
            rest = memoryview(records)
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            if size_bytes:
                file.truncate(size_bytes)  # a part of a record would end the curves
            else:
                path.unlink(missing_ok=True)
            raise


def _record(event: Event) -> bytes:
    """Return ``event`` as a record of an event file: length, data, and the checksums of both."""
    data = event.SerializeToString()
    length = struct.pack("<Q", len(data))
    return b"".join(
        (
            length,
            struct.pack("<I", masked_crc32c(length)),
            data,
            struct.pack("<I", masked_crc32c(data)),
        )
    )


def _origin_s(directory: Path) -> float:
    """Return the Unix time of step 0: that of the first planner here, by the names of its files."""
    times = [time.time()]
    for path in directory.glob("*/*"):
        if made := _FILE_NAME.match(path.name):
            times += [int(found[1]) for found in (made, _ORIGIN.search(path.name)) if found]
    return min(times)


def pull_scalars(pull: Pull, pools: Pools) -> dict[str, float]:
    """Return the scalars of one pull; those without a value are left out."""
    decode, prefill = pools[DECODE], pools.get(PREFILL)
    scalars: dict[str, float] = {
        "num_decode_workers": decode.ready,
        "num_prefill_workers": 0 if prefill is None else prefill.ready,
        "num_gpu": sum(pool.gpus for pool in pools.values()),
    }
    if pull.decode:
        scalars["average_kv_load"] = fmean(map(kv_load, pull.decode))
        scalars["total_queued_requests"] = sum(worker.waiting for worker in pull.decode)
    if pull.prefill_queue is not None and prefill is not None:
        scalars["prefill_queue_size"] = pull.prefill_queue * max(1, prefill.ready)
    return scalars
