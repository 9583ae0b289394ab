"""One sample: counted requests to one system, its CPU time and what it delivered."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from load import Load, Served, run_wrk
from results import Figure
from systems import System

_SETTLE_S = 0.2  # metrics and KV events of the last request
_LIMIT_S = 240
_TOKEN_TOLERANCE = 0.01
_WARM_UP_S = 1.0


class Sampler:
    """Takes samples; in one round all systems get the same prompts, which no other round has."""

    def __init__(self, wrk: str) -> None:
        self._wrk = wrk
        self._first = 0

    def calibrate(self, systems: Sequence[System], load: Load, seconds: float) -> int:
        """Return the requests that the slowest system answers in ``seconds``. Warms all up."""
        rates = []
        for system in systems:
            trial = max(8, 2 * load.connections)
            served = self.send(system, load, trial)
            trial = max(trial, int(trial / served.wall_s * _WARM_UP_S))
            self._first += 2 * load.connections + 8
            served = self.send(system, load, trial)
            rates.append(trial / served.wall_s)
            self.advance(trial)
        return max(2 * load.connections, int(min(rates) * seconds), 32)

    def round(self, systems: Sequence[System], load: Load, total: int) -> list[dict[str, Any]]:
        """Return one sample of each system."""
        found = [self._sample(system, load, total) for system in systems]
        self.advance(total)
        return found

    def send(self, system: System, load: Load, total: int) -> Served:
        """Send ``total`` requests, the first with the next prompt."""
        return run_wrk(self._wrk, system.port, load, self._first, total, _LIMIT_S)

    def advance(self, count: int) -> None:
        """Skip prompts that were sent."""
        self._first += count

    def _sample(self, system: System, load: Load, total: int) -> dict[str, Any]:
        machine_s, load_average = _machine_busy_s(), os.getloadavg()[0]
        counted, parts = system.metrics(), system.parts_cpu_s()
        cpu_s, mocker_s = system.cpu_s()
        served = self.send(system, load, total)
        time.sleep(_SETTLE_S)
        cpu_s, mocker_s = (
            now - then for now, then in zip(system.cpu_s(), (cpu_s, mocker_s), strict=True)
        )
        machine_s = _machine_busy_s() - machine_s
        others_s = machine_s - cpu_s - mocker_s - served.client_cpu_s
        counted = {name: now - counted[name] for name, now in system.metrics().items()}
        parts = {name: now - parts[name] for name, now in system.parts_cpu_s().items()}
        wall_s = served.wall_s + _SETTLE_S
        return {
            "system": system.name,
            "cpu_us_per_request": cpu_s / total * 1e6,
            "cpu_us_per_token": cpu_s / max(counted["tokens"], 1) * 1e6,
            "mocker_us_per_request": mocker_s / total * 1e6,
            "parts_share": {name: seconds / cpu_s for name, seconds in parts.items()},
            "tokens_per_request": counted["tokens"] / total,
            "counted_requests": counted["requests"],
            "rss_bytes": system.rss_bytes(),
            "load_average": load_average,
            "others_cpu_share": max(0.0, others_s) / wall_s / (os.cpu_count() or 1),
            **asdict(served),
        }


def check_delivery(figure: Figure, load: Load) -> None:
    """Check that all tokens of all requests were delivered; otherwise a ratio is meaningless."""
    for sample in figure.samples:
        delivered = sample["tokens_per_request"]
        if sample["failed"] or abs(delivered / load.max_tokens - 1) > _TOKEN_TOLERANCE:
            figure.valid = False
            figure.notes.append(
                f"{sample['system']} round {sample['round'] + 1}: {delivered:.2f} of "
                f"{load.max_tokens} tokens per request, {sample['failed']} failed"
            )


def _machine_busy_s() -> float:
    """CPU seconds of the whole machine that were not idle."""
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")
