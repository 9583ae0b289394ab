"""Busy detection: each threshold, all ranks, both sources of load."""

from __future__ import annotations

from array import array

import pytest

from dynamo.config.option import load
from dynamo.config.router import RouterSettings
from dynamo.errors import Overloaded
from dynamo.protocols.control import RuntimeConfig
from dynamo.protocols.engine import Routing
from dynamo.protocols.kv import KvMetrics
from dynamo.router.eligibility.eligibility_filter import (
    BusyWatch,
    EligibilityFilter,
    Thresholds,
    is_busy,
)
from dynamo.router.modes.factory import make_index, make_picker
from dynamo.router.worker_pool import DenseSlots, Saturation, WorkerPool

BLOCKS = Thresholds(decode_blocks_share=0.8)
TOKENS = Thresholds(prefill_tokens=100)
BATCH = Thresholds(prefill_batch_share=0.5)


def one_worker() -> WorkerPool:
    """Worker 1 with one rank."""
    worker_pool = WorkerPool(DenseSlots())
    worker_pool.add(1, RuntimeConfig())
    return worker_pool


@pytest.mark.parametrize(
    ("thresholds", "report", "prefill", "busy"),
    [
        (Thresholds(), KvMetrics(1, active_decode_blocks=100, kv_total_blocks=100), 10**9, False),
        (BLOCKS, KvMetrics(1, active_decode_blocks=80, kv_total_blocks=100), 0, False),
        (BLOCKS, KvMetrics(1, active_decode_blocks=81, kv_total_blocks=100), 0, True),
        (BLOCKS, KvMetrics(1, kv_used_blocks=81, kv_total_blocks=100), 0, True),
        (BLOCKS, KvMetrics(1, active_decode_blocks=41), 0, True),
        (BLOCKS, KvMetrics(1), 0, False),
        (BLOCKS, None, 10**9, False),
        (TOKENS, None, 100, False),
        (TOKENS, None, 101, True),
        (TOKENS, KvMetrics(1, active_prefill_tokens=101), 0, True),
        (BATCH, None, 1000, False),
        (BATCH, None, 1001, True),
        (Thresholds(0.8, 100, 0.5), None, 101, True),
    ],
)
def test_one_rank(
    thresholds: Thresholds, report: KvMetrics | None, prefill: int, busy: bool
) -> None:
    config = RuntimeConfig(total_kv_blocks=50, max_num_batched_tokens=2000)
    assert is_busy(thresholds, config, report, prefill) is busy


def test_unknown_capacities() -> None:
    nothing = RuntimeConfig()
    assert not is_busy(BLOCKS, nothing, KvMetrics(1, active_decode_blocks=10**6), 0)
    assert not is_busy(BATCH, nothing, None, 5_000_000)
    assert is_busy(BATCH, nothing, None, 5_000_001)


def test_a_worker_is_busy_when_all_its_ranks_are() -> None:
    worker_pool = WorkerPool(DenseSlots())
    worker_pool.add(1, RuntimeConfig(data_parallel_size=2, total_kv_blocks=10))
    watch = BusyWatch(worker_pool, BLOCKS)
    watch.report(KvMetrics(1, 0, active_decode_blocks=9))
    assert not worker_pool.busy
    watch.report(KvMetrics(1, 1, active_decode_blocks=9))
    assert worker_pool.busy == {1}
    watch.report(KvMetrics(1, 0, active_decode_blocks=3))
    assert not worker_pool.busy
    watch.report(KvMetrics(99, 0, active_decode_blocks=9))
    assert not worker_pool.busy


def test_thresholds_change_while_running() -> None:
    worker_pool = WorkerPool(DenseSlots())
    worker_pool.add(1, RuntimeConfig(total_kv_blocks=10))
    watch = BusyWatch(worker_pool, Thresholds())
    watch.report(KvMetrics(1, active_decode_blocks=9))
    assert not worker_pool.busy
    watch.thresholds = BLOCKS
    assert worker_pool.busy == {1}
    watch.thresholds = Thresholds(0.95)
    assert not worker_pool.busy
    watch.thresholds = BLOCKS
    watch.thresholds = Thresholds()
    assert not worker_pool.busy
    watch.thresholds = BLOCKS
    watch.forget(1)
    assert not worker_pool.busy


def test_thresholds_count_only_with_admission_control() -> None:
    given = ["--active-decode-blocks-threshold", "0.5", "--active-prefill-tokens-threshold", "7"]
    (settings,) = load("router", "", [RouterSettings], given, {})
    assert not EligibilityFilter(one_worker(), settings).thresholds.any
    given += ["--admission-control", "token-capacity"]
    (settings,) = load("router", "", [RouterSettings], given, {})
    eligibility = EligibilityFilter(one_worker(), settings)
    assert eligibility.thresholds == eligibility.busy.thresholds == Thresholds(0.5, 7, None)


def test_without_admission_control_thresholds_are_kept_only() -> None:
    eligibility = EligibilityFilter(one_worker(), RouterSettings(mode="kv"), lambda slot: 100)
    eligibility.thresholds = Thresholds(prefill_tokens=5)
    assert eligibility.thresholds.any and not eligibility.busy.thresholds.any
    eligibility.load_changed(1)
    assert not eligibility.worker_pool.busy


def test_thresholds_are_in_force_at_once() -> None:
    settings = RouterSettings(mode="kv", admission_control="token-capacity")
    eligibility = EligibilityFilter(one_worker(), settings, lambda slot: 100)
    eligibility.thresholds = Thresholds(prefill_tokens=99)
    assert eligibility.worker_pool.busy == {1}
    eligibility.thresholds = Thresholds(prefill_tokens=100)
    assert not eligibility.worker_pool.busy


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["--active-decode-blocks-threshold", "1.5"],
            "--active-decode-blocks-threshold must be between 0.0 and 1.0",
        ),
        (
            ["--active-prefill-tokens-threshold", "-1"],
            "--active-prefill-tokens-threshold must be >= 0",
        ),
        (
            ["--active-prefill-tokens-threshold-frac", "inf"],
            "--active-prefill-tokens-threshold-frac must be a finite value >= 0",
        ),
        (["--router-session-affinity-ttl-secs", "0"], "must be between 1 and 31536000"),
        (["--router-ttl-secs", "0"], "must be a finite value > 0"),
        (["--router-prune-target-ratio", "1.5"], "must be between 0.0 and 1.0"),
    ],
)
def test_bad_values_end_the_start(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load("router", "", [RouterSettings], given, {})
    assert message in capsys.readouterr().err


def test_own_bookings_make_a_worker_busy_until_the_first_token() -> None:
    settings = RouterSettings(
        mode="kv", admission_control="token-capacity", active_prefill_tokens_threshold=10
    )
    picker = make_picker(settings, 4, index=make_index(settings))
    for worker_id in (1, 2):
        picker.add_worker(worker_id, RuntimeConfig())
    prompt = array("I", range(12))
    first = picker.pick("a", prompt).worker_id
    assert picker.worker_pool.busy == {first}
    assert picker.pick("b", prompt).worker_id != first
    with pytest.raises(Overloaded, match="all eligible workers are overloaded"):
        picker.pick("c", prompt)
    with pytest.raises(Overloaded, match=f"pinned worker {first} is overloaded"):
        picker.pick("c", prompt, routing=Routing(backend_instance_id=first))
    picker.mark_prefill_complete("a")
    assert picker.pick("c", prompt).worker_id == first
    picker.free("b")
    assert len(picker.worker_pool.busy) == 1
    picker.remove_worker(first)
    assert not picker.worker_pool.busy


MODES = ["random", "round-robin", "power-of-two", "least-loaded", "device-aware-weighted"]


@pytest.mark.parametrize("mode", MODES)
def test_prompts_make_a_worker_busy_in_every_mode(mode: str) -> None:
    settings = RouterSettings(
        mode=mode, admission_control="token-capacity", active_prefill_tokens_threshold=10
    )
    picker = make_picker(settings, 4)
    for worker_id in (1, 2):
        picker.add_worker(worker_id, RuntimeConfig())
    prompt = array("I", range(12))
    first = picker.pick("a", prompt).worker_id
    assert picker.worker_pool.busy == {first}
    second = picker.pick("b", prompt).worker_id
    assert second != first
    with pytest.raises(Overloaded, match="all eligible workers are overloaded"):
        picker.pick("c", prompt)
    picker.mark_prefill_complete("a")
    picker.mark_prefill_complete("a")
    assert picker.worker_pool.busy == {second}
    assert picker.pick("c", prompt).worker_id == first
    picker.free("b")
    picker.free("b")
    assert picker.worker_pool.busy == {first}
    picker.remove_worker(first)
    assert not picker.worker_pool.busy
    picker.free("a")
    picker.add_worker(first, RuntimeConfig())
    assert not picker.worker_pool.busy


@pytest.mark.parametrize("mode", ["kv", *MODES])
def test_a_worker_at_capacity_is_busy_without_thresholds(mode: str) -> None:
    settings = RouterSettings(mode=mode)
    picker = make_picker(settings, 4, index=make_index(settings))
    for worker_id in (1, 2):
        picker.add_worker(worker_id, RuntimeConfig(total_kv_blocks=10))
    prompt = array("I", range(12))
    eligibility = picker.eligibility
    assert eligibility.rejected(1) and not eligibility.rejected(1) and not eligibility.rejected(9)
    assert {picker.pick(f"a{number}", prompt).worker_id for number in range(8)} == {2}
    with pytest.raises(Overloaded):
        picker.pick("b", prompt, routing=Routing(backend_instance_id=1))
    eligibility.busy.report(KvMetrics(2, active_decode_blocks=9))
    assert picker.worker_pool.busy == {1}
    eligibility.busy.report(KvMetrics(1, active_decode_blocks=9))
    assert not picker.worker_pool.busy
    eligibility.rejected(2)
    picker.free("a0")  # there is room again
    assert not picker.worker_pool.busy
    eligibility.rejected(2)
    eligibility.recovered(2)
    eligibility.recovered(2)
    assert not picker.worker_pool.busy
    eligibility.rejected(2)
    picker.remove_worker(2)
    assert not picker.worker_pool.busy and not eligibility.follows_load
    for number in range(8):
        picker.free(f"a{number}")


def test_room_at_a_full_worker_is_a_change_for_the_queue() -> None:
    eligibility = EligibilityFilter(one_worker(), RouterSettings())
    changes: list[bool] = []
    eligibility.on_change = lambda: changes.append(bool(eligibility.worker_pool.busy))
    eligibility.rejected(1)
    eligibility.recovered(1)
    assert changes == [False]


def test_a_worker_that_returns_under_its_id_is_judged_by_new_reports() -> None:
    worker_pool = one_worker()
    watch = BusyWatch(worker_pool, BLOCKS)
    watch.report(KvMetrics(1, active_decode_blocks=9, kv_total_blocks=10))
    watch.forget(1)
    worker_pool.remove(1)
    worker_pool.add(1, RuntimeConfig())
    watch.update(1)
    assert not worker_pool.busy and not watch.reports(1)


def test_a_removed_worker_is_not_busy() -> None:
    worker_pool = one_worker()
    worker_pool.add(2, RuntimeConfig())
    worker_pool.set_busy(2, True)
    worker_pool.remove(2)
    assert not worker_pool.busy and worker_pool.all_eligible is not None


def test_a_saturated_pool_is_counted_once() -> None:
    saturation = Saturation()
    worker_pool = one_worker()
    worker_pool.set_busy(1, True)
    worker_pool.report_to(saturation)
    assert worker_pool.all_busy and saturation.count == 1
    worker_pool.set_busy(1, True)
    assert saturation.count == 1
    worker_pool.add(2, RuntimeConfig())
    assert not worker_pool.all_busy and saturation.count == 0
    worker_pool.remove(2)
    assert saturation.count == 1
    worker_pool.remove(1)
    assert saturation.count == 0
