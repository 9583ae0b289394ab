"""The timers of a connected router: drop stale load, expire predictions, name silent workers."""

from __future__ import annotations

import asyncio
import logging
import time

from dynamo.observability.metrics import Gauge
from dynamo.router.caches.indexer import Indexer
from dynamo.router.caches.predicted import STEP_BLOCKS, PredictedCache
from dynamo.router.kv_mode.kv import KvPicker

__all__ = ["Maintenance"]

SWEEP_S = 30.0
SILENCE_S = 2.0
"""From the first token of a worker's first prompt: by then it has published the stored blocks."""

log = logging.getLogger(__name__)


class Maintenance:
    """Timers of one router. ``indexer`` is None where no events are followed.

    ``useless`` counts the workers whose KV events are missing, or of another block size.
    """

    def __init__(
        self, picker: KvPicker, indexer: Indexer | None, expiry_s: float, useless: Gauge
    ) -> None:
        self._picker = picker
        self._indexer = indexer
        self._expiry_s = expiry_s
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._silent: set[int] = set()
        self._unusable: set[int] = set()
        self._exempt: set[int] = set()
        self._closed = False
        useless.function = lambda: len(self._silent | self._unusable)

    def start(self) -> None:
        """Arm the timers."""
        if self._indexer is not None:
            self._picker.on_first_served = self._on_first_served
        self._arm("sweep", SWEEP_S)
        self.age_predictions()

    def close(self) -> None:
        """Disarm them. Idempotent."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()

    def age_predictions(self) -> None:
        """Expire old predictions from now on, if caches are predicted. Idempotent."""
        if self._picker.predicted is not None and "age" not in self._timers and not self._closed:
            self._age(self._picker.predicted)

    def forget(self, worker_id: int) -> None:
        """Forget a removed worker."""
        self._silent.discard(worker_id)
        self._unusable.discard(worker_id)
        self._exempt.discard(worker_id)

    def exempt(self, worker_id: int) -> None:
        """Expect no KV events of a worker that decodes prompts which others have computed."""
        self._exempt.add(worker_id)

    def mark_unusable(self, worker_id: int) -> None:
        """Count a worker whose KV events cannot be used; the caller has logged the reason."""
        self._unusable.add(worker_id)

    def sweep(self) -> None:
        """Drop stale load, check for lost last events, name workers that publish nothing."""
        expired = self._picker.expire(self._expiry_s)
        if expired:
            log.warning("dropped the load of %d requests that never ended", len(expired))
        if self._indexer is not None:
            self._indexer.verify()
            self.check_silence(self._indexer)

    def check_silence(self, indexer: Indexer) -> None:
        """Log, once each, the workers that have served prompts and published nothing."""
        for worker_id in self._picker.worker_pool.members:
            if not self._picker.served.get(worker_id) or not indexer.silent(worker_id):
                self._silent.discard(worker_id)
            elif worker_id not in self._silent | self._unusable | self._exempt:
                self._silent.add(worker_id)
                log.warning(
                    "worker %x has served prompts but published no KV event: "
                    "its cache stays unknown (does its engine publish them?)",
                    worker_id,
                )

    def _arm(self, name: str, delay_s: float) -> None:
        timer = asyncio.get_running_loop().call_later(delay_s, self._fire, name)
        self._timers[name] = timer

    def _fire(self, name: str) -> None:
        if name == "sweep":
            self._arm("sweep", SWEEP_S)
            self.sweep()
        elif self._indexer is not None:
            del self._timers[name]
            self.check_silence(self._indexer)

    def _on_first_served(self, worker_id: int) -> None:
        if not self._closed:
            self._arm(f"silence of {worker_id}", SILENCE_S)

    def _age(self, predicted: PredictedCache) -> None:
        """Expire old predictions also without requests, a bounded step at a time."""
        more = predicted.expire(time.perf_counter()) >= STEP_BLOCKS
        pause_s = 0.01 if more else 1.0
        loop = asyncio.get_running_loop()
        self._timers["age"] = loop.call_later(pause_s, self._age, predicted)
