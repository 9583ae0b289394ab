"""The watchers of a graph, and their GPUs."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.errors import ConfigError
from dynamo.serve.gpus.gpus import Allocator, Gpu, Inventory, inventory_of
from dynamo.serve.graph.graph import parse_graph
from dynamo.serve.graph.watchers import WatcherSpec, place, plan

DEVICES = [Gpu(index=i, uuid=f"GPU-{i}{i}{i}-aaaa") for i in range(4)]


def specs(text: str) -> list[WatcherSpec]:
    return plan(
        parse_graph(text, "g.yaml"),
        python="/venv/python",
        working_dir="/graphs",
        env={"DYN_FILE_KV": "/kv"},
        graceful_timeout_s=30,
    )


def of(*ids: int | str) -> Inventory:
    return Inventory(ids=tuple(map(str, ids)), source="test")


def test_one_watcher_per_process() -> None:
    found = specs(
        "namespace: ns\n"
        "Frontend: {run: dynamo.frontend, http-port: 1}\n"
        "W: {run: [python, w.py], x: y, ServiceArgs: {workers: 3, envs: {DYN_FILE_KV: /own}}}\n"
        "Idle: {run: m, ServiceArgs: {workers: 0}}\n"
    )
    assert [spec.name for spec in found] == ["ns_Frontend", "ns_W", "ns_W_1", "ns_W_2"]
    assert found[0].argv == ("/venv/python", "-m", "dynamo.frontend", "--http-port", "1")
    assert found[1].argv == ("/venv/python", "w.py", "--x", "y")
    assert found[0].is_frontend and found[0].stop_stage < found[1].stop_stage
    assert found[0].env["DYN_FILE_KV"] == "/kv" and found[1].env["DYN_FILE_KV"] == "/own"
    assert found[2].env["DYN_WATCHER_NAME"] == "ns_W_1"
    assert all(spec.env["DYN_NAMESPACE"] == "ns" for spec in found)
    config = json.loads(found[0].env["DYNAMO_SERVICE_CONFIG"])
    assert config["W"]["x"] == "y" and "/own" not in found[0].env["DYNAMO_SERVICE_CONFIG"]


def test_watchers_need_different_names() -> None:
    with pytest.raises(ConfigError, match=r"g.yaml:2:1: W_1 and W both need .*dynamo_W_1"):
        specs("W: {run: m, ServiceArgs: {workers: 2}}\nW_1: {run: m}\n")


def test_every_worker_gets_its_own_gpus() -> None:
    text = "F: {run: m}\nW: {run: m, ServiceArgs: {workers: 2, resources: {gpu: 2}}}\n"
    found = place(specs(text), of(4, 5, 6, 7, 8))
    assert [spec.gpus for spec in found] == [(), ("4", "5"), ("6", "7")]
    assert "CUDA_VISIBLE_DEVICES" not in found[0].env
    assert found[2].env["CUDA_VISIBLE_DEVICES"] == "6,7"


def test_a_service_that_names_its_gpus_keeps_them() -> None:
    text = "W:\n  run: m\n  ServiceArgs: {resources: {gpu: 1}, envs: {CUDA_VISIBLE_DEVICES: '3'}}\n"
    (found,) = place(specs(text), of())
    assert found.gpus == () and found.env["CUDA_VISIBLE_DEVICES"] == "3"


def test_a_service_may_be_killed_at_once_or_later_than_others() -> None:
    text = "A: {run: m}\n" + "".join(
        f"{name}: {{run: m, ServiceArgs: {{graceful_timeout: {seconds}}}}}\n"
        for name, seconds in (("B", 0), ("C", 90))
    )
    assert [spec.graceful_timeout_s for spec in specs(text)] == [30, 0, 90]


def test_only_frontends_have_an_address() -> None:
    text = "F: {run: dynamo.frontend, http-port: 8123}\nW: {run: dynamo.mocker, http-port: 8124}\n"
    frontend, worker = (spec.address for spec in specs(text))
    assert frontend is not None and frontend.port == 8123 and worker is None


def test_shortage_is_an_error_with_the_table() -> None:
    text = "A: {run: m, ServiceArgs: {workers: 3, resources: {gpu: 1}}}\n"
    with pytest.raises(ConfigError) as caught:
        place(specs(text), of(0, 1))
    assert "dynamo_A_2 needs 1 GPU, 0 of 2 free (test)" in caught.value.message
    assert "GPU 0: dynamo_A\n" in caught.value.message
    assert "GPU 1: dynamo_A_1\n" in caught.value.message
    assert "--gpus N" in caught.value.message
    with pytest.raises(ConfigError, match="GPU 0: dynamo_A\n  GPU 1: free"):
        place(
            specs(
                text.replace("workers: 3", "workers: 1")
                + text.replace("A", "B", 1).replace("gpu: 1", "gpu: 2")
            ),
            of(0, 1),
        )


def test_vectors_of_dynamos_allocator() -> None:
    """Four GPUs; where Dynamo assigns GPUs that do not exist, ours raises."""
    one = Allocator(of(0, 1, 2, 3))
    assert (one.assign("a", 1.0), one.free) == (("0",), 3)
    assert (one.assign("b", 1), one.free) == (("1",), 2)
    half = Allocator(of(0, 1, 2, 3))
    assert (half.assign("a", 0.5), half.free) == (("0",), 3)
    assert (half.assign("b", 0.5), half.free) == (("0",), 3)
    assert half.assign("c", 0.5) == ("1",)
    mixed = Allocator(of(0, 1, 2, 3))
    assert mixed.assign("a", 0.3) == ("0",)
    assert mixed.assign("b", 0.5) == ("1",)
    assert mixed.assign("c", 0.3) == mixed.assign("d", 0.3) == ("0",)
    assert mixed.assign("e", 0.3) == ("2",)
    assert mixed.assign("f", 1) == ("3",)
    for count in (6.0, 1.5, 0, -1):
        with pytest.raises(ConfigError):
            Allocator(of(0, 1, 2, 3)).assign("x", count)


@given(
    st.integers(0, 9),
    st.lists(st.sampled_from([0.1, 0.25, 0.3, 0.5, 0.9, 1.0, 2.0, 3.0]), max_size=30),
)
def test_no_gpu_is_assigned_beyond_its_capacity(total: int, wishes: list[float]) -> None:
    allocator = Allocator(of(*range(total)))
    load = dict.fromkeys(map(str, range(total)), 0.0)
    for number, wish in enumerate(wishes):
        try:
            given_ids = allocator.assign(f"w{number}", wish)
        except ConfigError as error:
            assert "needs" in error.message
            continue
        assert len(set(given_ids)) == len(given_ids) == max(1, int(wish))
        for gpu in given_ids:
            load[gpu] += min(wish, 1.0)
    assert all(held <= 1.0 + 1e-6 for held in load.values())


@pytest.mark.parametrize(
    ("devices", "visible", "ids"),
    [
        (DEVICES, None, ("0", "1", "2", "3")),
        (DEVICES, "2,3", ("2", "3")),
        (DEVICES, " 3 , 1 ", ("3", "1")),
        (DEVICES, "", ()),
        (DEVICES, "-1", ()),
        (DEVICES, "1,-1,2", ("1",)),
        (DEVICES, "1,9,2", ("1",)),
        (DEVICES, "1,1", ("1",)),
        (DEVICES, "GPU-222,GPU-000", ("GPU-222", "GPU-000")),
        (DEVICES, "GPU-", ()),
        (DEVICES, "MIG-abc", ("MIG-abc",)),
        (DEVICES, "NoDevFiles", ()),
        (None, None, ()),
        (None, "6,7", ("6", "7")),
    ],
)
def test_visible_devices(devices: list[Gpu] | None, visible: str | None, ids: object) -> None:
    assert inventory_of(devices, visible).ids == ids


def test_device_order_is_set_only_with_the_drivers_numbers() -> None:
    assert inventory_of(DEVICES, None).env == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert inventory_of(DEVICES, "1").env == {}
