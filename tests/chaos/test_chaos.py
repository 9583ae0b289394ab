"""The promise of docs/guarantees.md, under load and faults. `scripts/chaos` runs it for longer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chaos_run import ChaosOptions, run_chaos

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


async def storm(directory: Path, seed: int, profile: str, seconds: float) -> None:
    options = ChaosOptions(
        seed=seed, profile=profile, seconds=seconds, clients=40, faults_per_second=1.25
    )
    report = await run_chaos(options, directory)
    found = report.as_json()
    print(json.dumps(found))
    assert report.violations == [], found["violations"][:5]
    assert sum(report.verdict.faults.values()) >= 0.8 * seconds
    assert report.verdict.requests >= 10 * seconds


async def test_agg(tmp_path: Path) -> None:
    """Four workers. The short name keeps the paths of sockets short."""
    await storm(tmp_path, 1, "agg", 40)


async def test_disagg(tmp_path: Path) -> None:
    """Three decode workers behind two prefill workers."""
    await storm(tmp_path, 2, "disagg", 25)
