"""The GPU ledger of a statefile: what each entry holds, and what is free."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo.errors import ConfigError
from dynamo.serve.gpus.gpus import fits
from dynamo.serve.state.document import Document
from dynamo.serve.state.ledger import GpuLedger

GONE, HERE = {"pid": 1}, {"pid": 2}


def entry(*gpus: str, each: float = 1.0, **more: Any) -> dict[str, Any]:
    assigned = {"resources": {"allocated_gpus": [*gpus]}, "gpus_per_worker": each}
    return {
        "watcher": {"status": "active"},
        "state": "running",
        "processes": [],
        **assigned,
        **more,
    }


def process(**gpus: float) -> dict[str, Any]:
    return {"pid": 7, "start_ticks": 1, "gpus": {name.strip("_"): gpus[name] for name in gpus}}


def ledger(total: int = 4, **entries: Any) -> GpuLedger:
    document = {
        "environment": {"SYSTEM_RESOURCES": {"gpu_info": [*map(str, range(total))]}},
        "components": entries,
    }
    return GpuLedger(Document.of(document), lambda owner: owner.pid == HERE["pid"])


def test_sums_of_fractions_fit() -> None:
    assert fits(3 - 14 * 0.2, 0.2)
    assert fits(0.3, 0.1 + 0.2)
    assert not fits(0.99, 1)
    shares: Any = {f"a{one}": entry("0", each=0.2) for one in range(5)}
    assert ledger(1, **shares).free() == {"0": pytest.approx(0)}
    assert ledger(1, **shares).free(without=["a0"])["0"] == pytest.approx(0.2)
    assert ledger(1, **dict(list(shares.items())[:4])).assign("x", 0.2) == ("0",)


@pytest.mark.parametrize(
    ("row", "held"),
    [
        (entry("1"), {"1": 1}),
        (entry("0", "2", each=2), {"0": 1, "2": 1}),
        (entry("1", each=0.5), {"1": 0.5}),
        (entry(), {}),
        (entry("1", watcher={"status": "stopped"}), {"1": 1}),
        (entry("1", watcher={"status": "given up"}), {}),
        (entry("1", watcher={"status": "given up"}, reserved_by=HERE), {}),
        # Its process may still run: given up while another one drains.
        (entry("1", watcher={"status": "given up"}, processes=[process(_1=1)]), {"1": 1}),
        (entry("1", watcher={"status": "given up"}, processes=[process()]), {"1": 1}),
        (entry("1", state="asleep", processes=[process(_1=1)]), {}),
        (entry("1", state="asleep", replacing={"since": 1.5, "gpus": {"2": 1}}), {"2": 1}),
        (entry("1", state="asleep", reserved_by=HERE), {"1": 1}),
        # A wake that was interrupted: its engine may hold the memory.
        (entry("1", state="asleep", reserved_by=GONE, processes=[process(_1=1)]), {"1": 1}),
        (entry("1", state="draining", processes=[process(_1=1)]), {"1": 1}),
        (entry("1", state="draining", holds_gpus=False, processes=[process(_1=1)]), {}),
        # A restart has moved it from 0 to 1, and its old process has not exited.
        (entry("1", processes=[process(_0=1), process(_1=1)]), {"0": 1, "1": 1}),
        (entry("0", reserved_by=HERE), {"0": 1}),
        (entry("0", each=0.5, processes=[process(_0=0.5), process(_0=0.5)]), {"0": 1}),
    ],
)
def test_what_an_entry_holds(row: dict[str, Any], held: dict[str, float]) -> None:
    assert ledger(a=row).held.get("a", {}) == held


def test_a_reservation_ends_with_its_process() -> None:
    """An entry that the arbiter never received then holds nothing."""
    added = entry("2", reserved_by=HERE)
    del added["watcher"]
    assert ledger(a=added).held == {"a": {"2": 1}}
    added["reserved_by"] = GONE
    assert ledger(a=added).held == {}
    added["processes"] = [{"pid": 7, "start_ticks": 1}]  # it was started before
    assert ledger(a=added).held == {"a": {"2": 1}}
    del added["reserved_by"], added["processes"]  # as another program writes it
    assert ledger(a=added).held == {"a": {"2": 1}}


def test_what_an_operation_reserves() -> None:
    found = ledger(3, a=entry("0", replacing={"since": 1.5, "gpus": {"1": 1}}))
    assert found.held == {"a": {"0": 1, "1": 1}}
    assert found.assign("b", 1) == ("2",)
    with pytest.raises(ConfigError, match=r"b needs 2 GPUs, 1 of 3 free (.|\n)*GPU 1: a"):
        found.assign("b", 2)
    assert found.assign("a", 2, without=["a"]) == ("0", "1")


def test_who_has_the_gpus_of_a_sleeper() -> None:
    rows: Any = {"a": entry("0", state="asleep"), "b": entry("0", each=0.5)}
    assert not ledger(**rows).can_hold("a")
    assert ledger(**rows).holders(["0"], without="a") == ["b"]
    assert ledger(**rows).can_hold("b")
    rows["a"]["gpus_per_worker"] = 0.5
    assert ledger(**rows).can_hold("a")
    assert ledger(a=entry("9", state="asleep")).can_hold("a")  # not of this deployment


def test_lowest_first_and_never_where_there_is_no_room() -> None:
    found = ledger(11, a=entry("1", "10"), half=entry("0", each=0.5))
    assert found.ids == [*map(str, range(11))]
    assert found.assign("x", 0.5) == ("0",)
    assert found.assign("x", 2) == ("2", "3")
    assert found.assign("x", 2, avoid=["2"]) == ("3", "4")
    assert found.amount("a") == 2
    assert found.amount("nothing") == 0
