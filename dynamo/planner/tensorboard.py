"""What the planner sees and does, as scalars and texts for tensorboard. Spec 5.7."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from tensorboardX import SummaryWriter

from dynamo.planner.actions import WorkerAction
from dynamo.planner.decisions import DecisionRecord
from dynamo.planner.metrics import observed
from dynamo.planner.model_state import Pools
from dynamo.planner.observation import Observation, Pull
from dynamo.planner.policies.base import DECODE, PREFILL, ScalingDecision
from dynamo.planner.policies.load import kv_load

__all__ = ["TensorboardLog", "default_log_dir", "pull_scalars"]

_FLUSH_S = 5
_FILE_NAME = re.compile(r"events\.out\.tfevents\.(\d{1,10})\.")
log = logging.getLogger(__name__)


def default_log_dir() -> Path:
    """Return ``logs/`` with the month, day and time of now."""
    return Path("logs") / time.strftime("%m%d_%H%M%S")


class TensorboardLog:
    """A run of tensorboard for each model, in a directory of its name below ``directory``.

    The step is the number of seconds since the first planner started there: one that is started
    again continues the curves.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._started_s = time.monotonic() - _age_s(directory)
        self._writers: dict[str, SummaryWriter] = {}

    def close(self) -> None:
        """Write everything and close the files."""
        for writer in self._writers.values():
            writer.close()

    def counted(self, model: str, now_s: float, pools: Pools) -> None:
        """See :class:`LoopObserver`."""

    def pulled(self, model: str, pull: Pull, pools: Pools) -> None:
        """See :class:`LoopObserver`."""
        self._write(model, pull_scalars(pull, pools))

    def decided(self, record: DecisionRecord, seen: Observation, made: ScalingDecision) -> None:
        """See :class:`LoopObserver`."""
        self._write(record.model, {**observed(seen), **made.forecast})
        if record.changes:
            self._text(record.model, "decisions", record.text())

    def finished(self, record: DecisionRecord) -> None:
        """See :class:`LoopObserver`."""

    def acted(self, action: WorkerAction) -> None:
        """See :class:`LoopObserver`."""
        self._text(action.model, "actions", str(action))

    def _write(self, model: str, scalars: Mapping[str, float]) -> None:
        writer = self._writer(model)
        for name, value in scalars.items():
            writer.add_scalar(name, value, self._step())

    def _text(self, model: str, name: str, text: str) -> None:
        self._writer(model).add_text(name, text, self._step())

    def _step(self) -> int:
        return round(time.monotonic() - self._started_s)

    def _writer(self, model: str) -> SummaryWriter:
        writer = self._writers.get(model)
        if writer is None:
            name = model.replace("/", "_").lstrip(".") or "model"
            directory = self.directory / name
            log.info("tensorboard --logdir=%s shows model %s", self.directory, model)
            writer = self._writers[model] = SummaryWriter(str(directory), flush_secs=_FLUSH_S)
        return writer


def _age_s(directory: Path) -> float:
    """Return how long ago the first log file below ``directory`` was made, by its name."""
    found = (_FILE_NAME.match(path.name) for path in directory.glob("*/*"))
    made_at_s = min((int(one[1]) for one in found if one), default=None)
    return 0.0 if made_at_s is None else max(0.0, time.time() - made_at_s)


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
