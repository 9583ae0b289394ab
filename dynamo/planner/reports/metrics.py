"""The planner's Prometheus metrics, under Dynamo's names."""

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

from dynamo.config.planner import PlannerSettings
from dynamo.observability.metrics import Gauge, MetricSpec, Registry, gauge
from dynamo.planner.capacity.observation import Observation, Pull
from dynamo.planner.live.actions import WorkerAction
from dynamo.planner.live.decisions import DecisionRecord
from dynamo.planner.live.loop import LoopObserver
from dynamo.planner.live.model_state import Pools
from dynamo.planner.policies.base import ScalingDecision
from dynamo.planner.policies.load import kv_load
from dynamo.serve.graph.facts import DECODE, PREFILL

_PREFIX = "dynamo_planner_"
_LABELS = "dynamo_namespace model"
_FLUSH_S = 5.0
_CLOSE_S = 2.0
_BUFFER_BYTES = 1 << 20
"""What a model may have unwritten, while the disk hangs."""
_FILE_BYTES = 8 << 20
_FILES = 8
_FILE_NAME = re.compile(r"events\.out\.tfevents\.(\d{1,10})\.")
_ORIGIN = re.compile(r"\.step0at(\d{1,10})$")
log = logging.getLogger(__name__)


def _gauge(name: str, help: str) -> MetricSpec[Gauge]:
    return gauge(_PREFIX + name, help, _LABELS)


def _states(name: str, help: str) -> MetricSpec[Gauge]:
    """Declare an enumeration: a gauge per state, 1 for the current one. The label has its name."""
    return gauge(_PREFIX + name, help, f"{_LABELS} {_PREFIX}{name}")


_GAUGES = (
    _gauge("num_prefill_replicas", "Prefill workers that serve"),
    _gauge("num_decode_replicas", "Decode or aggregated workers that serve"),
    _gauge("predicted_num_prefill_replicas", "Prefill workers that the last decision wants"),
    _gauge("predicted_num_decode_replicas", "Decode workers that the last decision wants"),
    _gauge("predicted_requests_per_second", "Forecast of the request rate"),
    _gauge("predicted_input_sequence_tokens", "Forecast of the mean prompt length"),
    _gauge("predicted_output_sequence_tokens", "Forecast of the mean output length"),
    _gauge("gpu_hours", "GPU hours that the workers have held since the planner started"),
    _gauge("estimated_ttft_ms", "Time to first token that the policy estimates"),
    _gauge("estimated_itl_ms", "Time between tokens that the policy estimates"),
    _gauge("sla_target_ttft_ms", "Target of the time to first token (--ttft)"),
    _gauge("sla_target_itl_ms", "Target of the time between tokens (--itl)"),
    _gauge("observed_ttft_ms", "Mean time to first token of the last interval"),
    _gauge("observed_itl_ms", "Mean time between tokens of the last interval"),
    _gauge("observed_requests_per_second", "Requests per second of the last interval"),
    _gauge("observed_request_duration_seconds", "Mean duration of the last interval's requests"),
    _gauge("observed_input_sequence_tokens", "Mean prompt length of the last interval"),
    _gauge("observed_output_sequence_tokens", "Mean output length of the last interval"),
)
_BY_NAME = {spec.name.removeprefix(_PREFIX): spec for spec in _GAUGES}
_LOAD_DECISION = _states("load_scaling_decision", "What the load decided last")
_THROUGHPUT_DECISION = _states("throughput_scaling_decision", "What the forecast decided last")
_LOAD_STATES = (
    *("unset", "disabled", "no_fpm_data", "scaling_in_progress", "worker_count_mismatch"),
    *("insufficient_data", "no_change", "scale_up", "scale_down"),
    "scale_down_capped_by_throughput",
)
_THROUGHPUT_STATES = (
    *("unset", "disabled", "no_traffic_data", "predict_failed", "model_not_ready"),
    *("set_lower_bound", "scale"),
)


class PlannerMetrics(LoopObserver):
    """Shows the loop's figures on ``registry``; a figure without a value keeps its last one."""

    def __init__(self, registry: Registry, namespace: str, settings: PlannerSettings) -> None:
        self._registry = registry
        self._namespace = namespace
        self._settings = settings
        self._counted_s: dict[str, float] = {}

    def configure(self, settings: PlannerSettings) -> None:
        """Show the targets of ``settings`` from now on."""
        self._settings = settings

    def counted(self, model: str, now_s: float, pools: Pools) -> None:
        """See :class:`LoopObserver`."""
        for name in (DECODE, PREFILL):
            pool = pools.get(name)
            self._set(model, f"num_{name}_replicas", 0 if pool is None else pool.ready)
        hours = (now_s - self._counted_s.get(model, now_s)) / 3600
        self._counted_s[model] = now_s
        gpus = sum(pool.gpus for pool in pools.values())
        self._gauge(model, "gpu_hours").value += hours * gpus

    def decided(self, record: DecisionRecord, seen: Observation, decision: ScalingDecision) -> None:
        """See :class:`LoopObserver`."""
        model, settings = record.model, self._settings
        targets = {"sla_target_ttft_ms": settings.ttft_ms, "sla_target_itl_ms": settings.itl_ms}
        for name, value in {**targets, **observed(seen), **decision.forecast}.items():
            if name in _BY_NAME:
                self._set(model, name, value)
        for pool in record.pools:  # after the forecast, which ignores the budget and the load
            self._set(model, f"predicted_num_{pool.pool}_replicas", pool.wanted)
        load, throughput = (
            load_state(settings.mode, record, seen),
            throughput_state(settings.mode, seen),
        )
        self._state(model, _LOAD_DECISION, _LOAD_STATES, load)
        self._state(model, _THROUGHPUT_DECISION, _THROUGHPUT_STATES, throughput)

    def forgotten(self, model: str) -> None:
        """See :class:`LoopObserver`."""
        self._registry.forget("model", model)
        self._counted_s.pop(model, None)

    def _gauge(self, model: str, name: str) -> Gauge:
        return self._registry.child(_BY_NAME[name], self._namespace, model)

    def _set(self, model: str, name: str, value: float) -> None:
        self._gauge(model, name).value = value

    def _state(
        self, model: str, spec: MetricSpec[Gauge], states: tuple[str, ...], current: str
    ) -> None:
        for state in states:
            child = self._registry.child(spec, self._namespace, model, state)
            child.value = float(state == current)


def observed(seen: Observation) -> Mapping[str, float]:
    """Return the known figures of the interval's traffic, by the names of their metrics."""
    traffic = seen.traffic
    if not traffic.known or traffic.duration_s <= 0:
        return {}
    figures = {
        "observed_ttft_ms": traffic.ttft_ms,
        "observed_itl_ms": traffic.itl_ms,
        "observed_requests_per_second": traffic.arrived / traffic.duration_s,
        "observed_request_duration_seconds": traffic.request_s,
        "observed_input_sequence_tokens": traffic.isl,
        "observed_output_sequence_tokens": traffic.osl,
    }
    return {name: value for name, value in figures.items() if value is not None}


def load_state(mode: str, record: DecisionRecord, seen: Observation) -> str:
    """Return Dynamo's word for what the load decided."""
    if "load" not in mode.split("+"):
        return "disabled"
    if any(pool.wanted > pool.before for pool in record.pools):
        return "scale_up"
    if record.changes:
        return "scale_down"
    if seen.changed:
        return "worker_count_mismatch"
    return "no_change" if any(pull.decode for pull in seen.pulls) else "no_fpm_data"


def throughput_state(mode: str, seen: Observation) -> str:
    """Return Dynamo's word for what the forecast decided."""
    if "sla" not in mode.split("+"):
        return "disabled"
    if not seen.traffic.known:
        return "no_traffic_data"
    return "set_lower_bound" if "load" in mode.split("+") else "scale"


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
        # Step 0 on the monotonic clock: later steps do not depend on changes of the time of day.
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

    def decided(self, record: DecisionRecord, seen: Observation, decision: ScalingDecision) -> None:
        """See :class:`LoopObserver`."""
        self._scalars(record.model, {**observed(seen), **decision.forecast})
        if record.changes:
            self._add(record.model, text("decisions", record.text()))

    def acted(self, action: WorkerAction) -> None:
        """See :class:`LoopObserver`."""
        self._add(action.model, text("actions", str(action)))

    def _scalars(self, model: str, scalars: Mapping[str, float]) -> None:
        values = [point for name, value in scalars.items() for point in scalar(name, value).value]
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
            # Read before the records are taken: the round after the closing writes the rest.
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
        # tensorboard reads only files that begin with this record.
        version = _record(Event(wall_time=time.time(), file_version="brain.Event:2"))
        _append(path, version, 0)
        self._path, self._size_bytes = path, len(version)
        files = sorted(file for file in self._directory.iterdir() if _FILE_NAME.match(file.name))
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
        if match := _FILE_NAME.match(path.name):
            times += [int(stamp[1]) for stamp in (match, _ORIGIN.search(path.name)) if stamp]
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
