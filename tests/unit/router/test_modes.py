"""Round-robin, random, power-of-two, least-loaded and direct."""

from __future__ import annotations

from array import array
from collections import Counter
from random import Random

import pytest
from msgspec.structs import astuple

from dynamo.config.router import RouterSettings
from dynamo.errors import InvalidArgument, NoInstances
from dynamo.protocols.control import RuntimeConfig
from dynamo.protocols.engine import Routing
from dynamo.router.decision.receipt import InflightInputs
from dynamo.router.modes.picker import MODES, InflightPicker

TOKENS = array("I", [1, 2, 3])


def picker(mode: str, workers: int = 3) -> InflightPicker:
    """A picker over workers 1..workers."""
    made = InflightPicker(mode, Random(3))
    for worker_id in range(1, workers + 1):
        made.add_worker(worker_id, RuntimeConfig())
    return made


def inflight(made: InflightPicker, routing: Routing | None = None) -> list[int]:
    """The requests on each slot, as a decision weighed them."""
    inputs = made.pick("next", TOKENS, routing=routing).inputs
    made.free("next")
    assert isinstance(inputs, InflightInputs)
    return list(inputs.inflight)


def test_round_robin_takes_turns_over_ranks_too() -> None:
    made = picker("round-robin", 2)
    made.add_worker(3, RuntimeConfig(data_parallel_size=2))
    turns = [astuple(made.pick(None, TOKENS))[:2] for _ in range(8)]
    assert turns == [(1, 0), (2, 0), (3, 0), (3, 1)] * 2


def test_round_robin_survives_a_change_of_the_workers() -> None:
    made = picker("round-robin")
    for _ in range(5):
        made.pick(None, TOKENS)
    made.remove_worker(2)
    assert Counter(made.pick(None, TOKENS).worker_id for _ in range(10)) == {1: 5, 3: 5}


def test_random_is_uniform() -> None:
    made = picker("random")
    counts = Counter(made.pick(None, TOKENS).worker_id for _ in range(3000))
    assert all(abs(count - 1000) < 120 for count in counts.values())


def test_least_loaded_follows_requests_in_flight() -> None:
    made = picker("least-loaded")
    first = [made.pick(str(i), TOKENS).worker_id for i in range(3)]
    assert sorted(first) == [1, 2, 3]
    made.free("1")
    assert made.pick("again", TOKENS).worker_id == first[1]


def test_power_of_two_never_takes_the_worst() -> None:
    made = picker("power-of-two")
    counts = Counter(made.pick(str(i), TOKENS).worker_id for i in range(300))
    assert len(counts) == 3 and max(counts.values()) - min(counts.values()) <= 3
    assert picker("power-of-two", 1).pick(None, TOKENS).worker_id == 1


def test_direct_needs_a_name() -> None:
    made = picker("direct")
    with pytest.raises(InvalidArgument, match="backend_instance_id"):
        made.pick("a", TOKENS)
    with pytest.raises(InvalidArgument, match="does not identify a known worker"):
        made.pick("a", TOKENS, routing=Routing(backend_instance_id=9))
    assert made.pick("a", TOKENS, routing=Routing(backend_instance_id=2)).worker_id == 2


@pytest.mark.parametrize("mode", MODES)
def test_common_life(mode: str) -> None:
    made = picker(mode)
    routing = Routing(backend_instance_id=2)
    decision = made.pick("a", TOKENS, routing=routing)
    assert (decision.worker_id, decision.dp_rank, decision.overlap_blocks) == (2, 0, 0)
    with pytest.raises(InvalidArgument, match="already exists"):
        made.pick("a", TOKENS, routing=routing)
    made.mark_prefill_complete("a")
    made.add_output_tokens("a", 3)
    made.free("a")
    made.free("a")
    made.pick("b", TOKENS, routing=routing)
    made.remove_worker(2)
    made.free("b")
    assert not any(inflight(made, Routing(backend_instance_id=1)))
    for worker_id in (1, 3, 3):
        made.remove_worker(worker_id)
    with pytest.raises(NoInstances):
        made.pick("c", TOKENS, routing=routing)


def test_devices_get_requests_by_capacity() -> None:
    """In flight / (workers × weight), weight 8 for a device other than a CPU."""
    made = InflightPicker("device-aware-weighted", Random(3))
    made.add_worker(1, RuntimeConfig(), "cuda")
    made.add_worker(2, RuntimeConfig(), "cpu")
    made.add_worker(3, RuntimeConfig(), "cpu")
    counts = Counter(made.pick(str(i), TOKENS).worker_id for i in range(100))
    assert counts == {1: 80, 2: 10, 3: 10}
    made.remove_worker(1)
    assert made.pick("on", TOKENS).worker_id in (2, 3)


def test_the_ratio_of_devices_is_a_setting() -> None:
    settings = RouterSettings(mode="device-aware-weighted", encoder_cuda_to_cpu_ratio=3)
    made = InflightPicker(settings.mode, Random(3), settings)
    made.add_worker(1, RuntimeConfig(), "cuda")
    made.add_worker(2, RuntimeConfig(), "cpu")
    counts = Counter(made.pick(str(i), TOKENS).worker_id for i in range(40))
    assert counts == {1: 30, 2: 10}


def test_a_removed_rank_leaves_no_load_in_its_slot() -> None:
    made = picker("least-loaded", 0)
    made.add_worker(1, RuntimeConfig(data_parallel_size=3))
    for number in range(3):
        made.pick(str(number), TOKENS)
    made.add_worker(1, RuntimeConfig(data_parallel_size=1))
    made.remove_worker(1)
    made.add_worker(2, RuntimeConfig(data_parallel_size=3))
    assert inflight(made) == [0, 0, 0]
