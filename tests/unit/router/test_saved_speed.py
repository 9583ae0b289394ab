"""What a router has learned of prefills, kept for the next one."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest
from live_kit import WORKERS, Box
from until import until

from dynamo.config.runtime import RuntimeSettings
from dynamo.protocols.control import RuntimeConfig
from dynamo.router.connect import kv_router
from dynamo.router.connect.router import DIRECTORY, SavedSpeed, speed_file
from dynamo.router.load.prefill_model import BusyInterval, PrefillFit, PrefillSpeed

SPEED = PrefillSpeed(fixed_s=0.5, token_s=1e-3, attention_s=1e-9, samples=64)


def settings(path: Path) -> RuntimeSettings:
    return RuntimeSettings(namespace="ns", state_dir=str(path), lease_ttl_s=30)


def files(path: Path) -> list[Path]:
    return list((path / DIRECTORY).iterdir())


async def test_the_next_router_begins_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_router, "_SAVE_S", 0.01)
    box = Box(settings(tmp_path))
    live = await box.route(cost="seconds")
    first = live.picker.active.prefill_speed()
    assert first is not None and first.samples == 0
    live.picker.add_worker(1, RuntimeConfig())
    (slot,) = live.picker.worker_pool.slots_of(1)
    fit = live.picker.active._prefills
    assert fit is not None
    for number in range(16):
        fit.begin(slot, str(number), 1000, 0, 10.0 * number)
        fit.first_token(slot, str(number), 10.0 * number + 3.0)
    learned = live.picker.active.prefill_speed()
    assert learned is not None and learned.token_s == pytest.approx(3e-3, rel=0.1)
    # A router that is killed has saved it before, too.
    await until(lambda: (tmp_path / DIRECTORY).exists() and len(files(tmp_path)) == 1)
    await box.close()
    assert len(files(tmp_path)) == 1

    again = Box(settings(tmp_path))
    found = (await again.route(cost="seconds")).picker.active.prefill_speed()
    await again.close()
    assert found is not None
    assert found.token_s == pytest.approx(learned.token_s) and found.samples == 0


async def test_a_cost_in_blocks_keeps_nothing(tmp_path: Path) -> None:
    box = Box(settings(tmp_path))
    await box.route(prefill_load_model="fitted")
    await box.close()
    assert not (tmp_path / DIRECTORY).exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"model": "tiny", "endpoint": "ns/backend/generate", "phase": "aggregated", '
        b'"speed": {"fixed_s": -1, "token_s": 1, "attention_s": 0, "samples": 9}}',
    ],
)
async def test_a_bad_file_is_named_and_replaced(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    box = Box(settings(tmp_path))
    file = speed_file(box.runtime, WORKERS)
    assert file is not None and file.load() is None
    await file.save(SPEED)
    (path,) = files(tmp_path)
    assert file.load() == SPEED
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert file.load() is None
    assert str(path) in caplog.text
    await file.save(msgspec.structs.replace(SPEED, samples=65))
    assert file.load() is not None
    await box.close()


async def test_a_guess_is_not_saved_and_another_model_not_taken(tmp_path: Path) -> None:
    box = Box(settings(tmp_path))
    file = speed_file(box.runtime, WORKERS)
    assert file is not None
    await file.save(None)
    await file.save(msgspec.structs.replace(SPEED, samples=7))
    assert not (tmp_path / DIRECTORY).exists()
    await file.save(SPEED)
    (path,) = files(tmp_path)
    found = msgspec.json.decode(path.read_bytes(), type=SavedSpeed)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(found, model="other")))
    assert file.load() is None
    await box.close()


async def test_a_directory_that_cannot_be_written_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    box = Box(settings(tmp_path))
    file = speed_file(box.runtime, WORKERS)
    assert file is not None
    (tmp_path / DIRECTORY).touch()
    with caplog.at_level(logging.WARNING):
        await file.save(SPEED)
        await file.save(SPEED)
    assert len(caplog.records) == 1 and "not kept" in caplog.text
    await box.close()


def test_a_restored_speed_is_scaled_by_the_first_prompt() -> None:
    fit = PrefillFit((0.02, 1e-4, 0.0))
    fit.restore(SPEED)
    assert fit.predict(1000, 0) == pytest.approx(1.5005)
    fit.observe(BusyInterval(1, 1000, 500_000.0, 3.0), 0.0)
    assert fit.predict(1000, 0) == pytest.approx(3.0)
    fit.restore(PrefillSpeed(fixed_s=0, token_s=0, attention_s=0, samples=64))
    assert fit.predict(1000, 0) == pytest.approx(3.0), "prompts that take no time are no guess"
