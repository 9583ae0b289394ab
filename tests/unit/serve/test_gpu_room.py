"""What a load of a model would take, wake and remove."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dynamo.operations.loading import check_turn
from dynamo.operations.steps.limits import ActionFailed
from dynamo.protocols.status import LoadEffect
from dynamo.serve.gpus.gpus import Gpu
from dynamo.serve.state.document import Document
from dynamo.serve.state.entries import read_services
from dynamo.serve.state.process_table import ledger_of
from dynamo.serve.state.room import group_rivals, load_effects, sleepers_on

VLLM = ["python", "-m", "dynamo.vllm", "--model", "x"]
GIB = 1 << 30


def entry(service: str, *gpus: str, pid: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "watcher_name": f"d_{service}",
        "service": service,
        "argv": VLLM,
        "resources": {"allocated_gpus": [*gpus]},
        "gpus_per_worker": 1.0,
        "processes": [{"pid": pid, "start_ticks": 1}] if pid else [],
        "state": "running",
        "watcher": {"status": "active" if gpus else "absent"},
        **more,
    }


def effects(
    *entries: dict[str, Any], total: int = 2, used: tuple[int, ...] = ()
) -> dict[str, LoadEffect]:
    devices = [
        Gpu(index=index, memory_bytes=80 * GIB, used_bytes=gib * GIB)
        for index, gib in enumerate(used)
    ]
    return load_effects(document_of(*entries, total=total), devices)


def document_of(
    *entries: dict[str, Any], total: int = 2, groups: dict[str, list[str]] | None = None
) -> Document:
    config = {
        one["service"]: {
            "ServiceArgs": {
                "resources": {"gpu": 1},
                "group": (groups or {}).get(one["service"], []),
            }
        }
        for one in entries
    }
    document = {
        "namespace": "d",
        "environment": {
            "DYNAMO_SERVICE_CONFIG": json.dumps(config),
            "SYSTEM_RESOURCES": {"gpu_info": [*map(str, range(total))]},
        },
        "components": {one["watcher_name"]: one for one in entries},
    }
    return Document.of(document)


def test_a_free_gpu_is_taken() -> None:
    assert effects(entry("A", "0", pid=7), entry("B")) == {
        "B": LoadEffect(text="starts a worker", gpus=("1",))
    }


def test_on_a_box_without_gpus_a_worker_starts_on_none() -> None:
    found = effects(entry("A", pid=7), entry("B"), total=0)
    assert found == {"B": LoadEffect(text="starts a worker, which needs no GPU")}


def test_a_full_gpu_is_passed_over() -> None:
    assert effects(entry("B"), used=(70, 1))["B"].gpus == ("1",)


def test_the_gpu_of_a_sleeper_is_taken_last() -> None:
    asleep = entry("A", "0", pid=7, state="asleep")
    found = effects(asleep, entry("B"))["B"]
    assert (found.gpus, found.keeps_asleep) == (("1",), ())
    found = effects(asleep, entry("B"), entry("C", "1", pid=8))["B"]
    assert (found.gpus, found.keeps_asleep) == (("0",), ("d_A",))
    document = document_of(asleep, entry("B"), total=3)
    assert ledger_of(document).assign("two", 2) == ("1", "2")
    assert ledger_of(document).assign("three", 3) == ("0", "1", "2")
    assert ledger_of(document).assign("a share", 0.5) == ("1",)


def test_a_sleeper_is_woken_before_another_is_started() -> None:
    asleep = entry("B", "1", pid=8, state="asleep")
    assert effects(entry("A", "0", pid=7), asleep) == {
        "B": LoadEffect(text="wakes d_B", gpus=("1",))
    }


def test_a_sleeper_of_another_model_goes_if_its_memory_is_needed() -> None:
    asleep = entry("B", "1", pid=8, state="asleep")
    found = effects(entry("A", "0", pid=7), asleep, entry("C"), used=(70, 20))
    assert found["C"] == LoadEffect(text="starts a worker", gpus=("1",), removes=("d_B",))
    beside = effects(asleep, entry("C"), used=(1, 20))["C"]
    assert (beside.gpus, beside.removes, beside.keeps_asleep) == (("0",), (), ())
    on_it = effects(entry("A", "0", pid=7), asleep, entry("C"), used=(70, 2))["C"]
    assert (on_it.gpus, on_it.removes, on_it.keeps_asleep) == (("1",), (), ("d_B",))


def test_a_sleeper_that_is_being_woken_stays() -> None:
    asleep = entry("B", "1", pid=8, state="asleep")
    assert [one.name for _, one in sleepers_on(document_of(asleep), ["1"])] == ["d_B"]
    woken = {**asleep, "reserved_by": {"pid": 7, "operation": "wake"}}
    assert sleepers_on(document_of(woken), ["1"]) == []


def test_a_stopped_worker_is_started_again() -> None:
    stopped = entry("B", "1", watcher={"status": "stopped"})
    assert effects(stopped)["B"] == LoadEffect(text="starts d_B again", gpus=("1",))


@pytest.mark.parametrize("used", [(), (70, 70)])
def test_without_a_gpu_it_says_who_has_them(used: tuple[int, ...]) -> None:
    full = [entry("A", "0", pid=7), entry("B", "1", pid=8)]
    found = effects(*full, entry("C"), used=used)["C"]
    assert found.blocked_by == ("d_A", "d_B") and found.gpus == ()
    assert found.text == "needs 1 GPU, more than is free"


def named(service: str, *gpus: str, **more: Any) -> dict[str, Any]:
    return entry(service, *gpus, argv=[*VLLM[:3], "--model", service.lower()], **more)


@pytest.mark.parametrize(
    ("argv", "model"),
    [
        (("--model", "org/name"), "org/name"),
        (("--model=org/name", "--served-model-name", "x"), "x"),
        (("--model", "./never/made/tiny"), "tiny"),
        (("--model-path", "/never/made/tiny/"), "tiny"),
        ((), "W"),
    ],
)
def test_the_model_of_a_service_is_that_of_its_command(argv: tuple[str, ...], model: str) -> None:
    (service,) = read_services(document_of(entry("W", argv=[*VLLM[:3], *argv]))).values()
    assert service.model == model


def test_the_entries_of_a_service_are_in_the_order_of_their_numbers() -> None:
    names = ["d_W_10", "d_W_2", "d_W", "d_W_1"]
    document = document_of(*({**entry("W"), "watcher_name": name} for name in names))
    (service,) = read_services(document).values()
    assert [one.name for one in service.entries] == ["d_W", "d_W_1", "d_W_2", "d_W_10"]
    assert service.template.name == "d_W"


@pytest.mark.parametrize("value", ["2", 1.5, True, [], None])
def test_bounds_that_are_no_numbers_are_none(value: object) -> None:
    """In a statefile that other programs write."""
    config = {"W": {"ServiceArgs": {"min": value, "max": value, "priority": value}}}
    document = document_of(entry("W"))
    document.environment.service_config = json.dumps(config)
    (service,) = read_services(document).values()
    facts = service.facts
    assert (facts.minimum, facts.maximum, facts.priority) == (None, None, 0)


def test_models_of_a_group_take_turns() -> None:
    asleep = named("C", "1", pid=8, state="asleep")
    workers = (named("A", "0", pid=7), named("B"), asleep, named("D"))
    groups = {"A": ["big"], "B": ["big", "other"], "C": ["other"], "D": ["small"]}
    document = document_of(*workers, groups=groups)
    services = read_services(document)
    rivals = {name: group_rivals(document, [services[name]], ()) for name in services}
    assert rivals == {"A": [], "B": ["d_A"], "C": [], "D": []}
    found = load_effects(document, [])
    assert found["B"] == LoadEffect(text="takes turns with d_A: unload that model first")
    assert found["C"].text == "wakes d_C"
    with pytest.raises(ActionFailed, match="take turns, and d_A is awake: first put its model"):
        check_turn(document, [services["B"]], ())
