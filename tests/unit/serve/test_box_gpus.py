"""The GPUs of the box: of pinned services, other deployments, and other users' programs."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from dynamo.config.serve import ServeSettings
from dynamo.errors import ConfigError
from dynamo.serve.gpus import nvml
from dynamo.serve.gpus.gpus import Gpu
from dynamo.serve.graph.engine_gpus import with_engine_gpus
from dynamo.serve.graph.graph import Graph, parse_graph
from dynamo.serve.graph.watchers import DeploymentPlan, plan
from dynamo.serve.state.document import Document
from dynamo.serve.state.process_table import ledger_of
from dynamo.serve.state.record import StatefileWriter, document_of
from dynamo.serve.state.statefile import Statefile
from dynamo.setup.graph_plan import Placement, place_workers

GIB = 1 << 30
ONE = "ServiceArgs: {resources: {gpu: 1}}"
PINNED = "P: {run: dynamo.mocker, ServiceArgs: {envs: {CUDA_VISIBLE_DEVICES: '%s'}%s}}"
GPU = ", resources: {gpu: 1}"


def parsed(text: str, namespace: str = "ns") -> Graph:
    graph = parse_graph(text, "g.yaml")
    services = with_engine_gpus(graph.services, Path("/"))
    return Graph(namespace=namespace, services=services, config=graph.config, source="g.yaml")


def placed(
    text: str, gpus: int | None = 2, deployed: Document | None = None, namespace: str = "ns"
) -> Placement:
    graph = parsed(text, namespace)
    specs = plan(graph, python="py", working_dir="/", env={}, graceful_timeout_s=1)
    return place_workers(graph, specs, ServeSettings(gpus=gpus), deployed)


def gpus(placement: Placement) -> dict[str, tuple[str, ...]]:
    return {spec.name.partition("_")[2]: spec.gpus for spec in placement.specs}


def plan_of(placement: Placement, namespace: str) -> DeploymentPlan:
    return DeploymentPlan(
        namespace=namespace,
        specs=placement.specs,
        config={},
        gpu_ids=placement.gpu_ids,
        endpoint="ipc:///nowhere",
        pubsub_endpoint="ipc:///nowhere-events",
    )


def running(directory: Path, text: str, namespace: str, gpus: int = 2) -> Statefile:
    """Write the statefile of a deployment whose arbiter is this process."""
    beside = Document(namespace=namespace, directory=str(directory))
    placement = placed(text, gpus, beside, namespace)
    statefile = Statefile(directory, namespace)
    statefile.create(document_of(plan_of(placement, namespace)))
    return statefile


def beside(directory: Path, namespace: str = "b") -> Document:
    return Document(namespace=namespace, directory=str(directory))


# Pinned by the graph


@pytest.mark.parametrize("others_first", [True, False])
def test_a_pinned_gpu_is_not_given_to_another_service(others_first: bool) -> None:
    pinned = PINNED % ("0", GPU)
    other = f"A: {{run: dynamo.mocker, {ONE}}}"
    text = "\n".join([other, pinned] if others_first else [pinned, other])
    assert gpus(placed(text)) == {"P": ("0",), "A": ("1",)}


def test_a_pin_counts_without_a_number_of_gpus_and_by_uuid(monkeypatch: Any) -> None:
    devices = [Gpu(index=0, uuid="GPU-aa"), Gpu(index=1, uuid="GPU-bb")]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(nvml, "probe", lambda: devices)
    pinned = PINNED % ("GPU-aa", "")
    placement = placed(f"A: {{run: dynamo.mocker, {ONE}}}\n{pinned}", None)
    assert gpus(placement) == {"A": ("1",), "P": ("0",)}
    assert placement.specs[1].env["CUDA_VISIBLE_DEVICES"] == "GPU-aa"
    assert placement.specs[1].env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_a_pin_names_no_gpu_or_belongs_to_no_engine() -> None:
    text = PINNED.replace("mocker", "frontend") % ("0", "") + "\n"
    text += PINNED.replace("P:", "Q:") % ("", GPU) + "\n"
    assert gpus(placed(text + f"A: {{run: dynamo.mocker, {ONE}}}"))["A"] == ("0",)


def test_pinned_workers_share_what_their_owner_gives_them(tmp_path: Path) -> None:
    text = PINNED % ("0", GPU)
    statefile = running(tmp_path, f"{text}\n{text.replace('P:', 'Q:')}", "a")
    document = statefile.read()
    assert document is not None
    ledger = ledger_of(document)
    assert ledger.can_hold("a_P") and ledger.can_hold("a_Q")
    assert ledger.assign("another", 1) == ("1",)
    assert document.components["a_P"].written()["pinned"] == [0]


# Other deployments of this user


def test_two_deployments_get_different_gpus(tmp_path: Path) -> None:
    text = f"A: {{run: dynamo.mocker, {ONE}}}"
    running(tmp_path, text, "a")
    assert gpus(placed(text, 2, beside(tmp_path), "b")) == {"A": ("1",)}
    running(tmp_path, text, "b")
    with pytest.raises(ConfigError) as caught:
        placed(text, 2, beside(tmp_path, "c"), "c")
    assert "GPU 0: a_A of namespace a\n  GPU 1: b_A of namespace b" in caught.value.message


def test_shares_of_two_deployments_add_up(tmp_path: Path) -> None:
    text = "A: {run: dynamo.mocker, ServiceArgs: {resources: {gpu: 0.5}}}"
    for namespace in "ab":
        running(tmp_path, text, namespace)
    assert gpus(placed(text, 2, beside(tmp_path, "c"), "c")) == {"A": ("1",)}


def test_a_pin_of_another_deployment_counts_without_assignment(tmp_path: Path) -> None:
    running(tmp_path, PINNED % ("0", ""), "a", 0)
    assert gpus(placed(f"A: {{run: dynamo.mocker, {ONE}}}", 2, beside(tmp_path))) == {"A": ("1",)}


def test_a_deployment_that_ended_holds_nothing(tmp_path: Path) -> None:
    text = f"A: {{run: dynamo.mocker, {ONE}}}"
    statefile = running(tmp_path, text, "a")
    written = json.loads(statefile.path.read_text())
    written["arbiter"]["start_ticks"] -= 1
    statefile.path.write_text(json.dumps(written))
    assert gpus(placed(text, 2, beside(tmp_path), "b")) == {"A": ("0",)}


def test_a_reload_keeps_what_its_own_deployment_holds(tmp_path: Path) -> None:
    text = f"A: {{run: dynamo.mocker, {ONE}}}"
    statefile = running(tmp_path, text, "a")
    assert gpus(placed(text, 2, statefile.read(), "a")) == {"A": ("0",)}


def test_starts_at_the_same_time_settle_on_different_gpus(tmp_path: Path) -> None:
    """Planned before either was written, both would have GPU 0."""
    text = f"A: {{run: dynamo.mocker, {ONE}}}"
    plans = [plan_of(placed(text, 4, None, name), name) for name in "abcd"]
    assert all(one.specs[0].gpus == ("0",) for one in plans)
    settled: list[DeploymentPlan] = []

    def create(one: DeploymentPlan) -> None:
        writer = StatefileWriter(Statefile(tmp_path, one.namespace), one, list)
        settled.append(writer.create())

    threads = [threading.Thread(target=create, args=(one,)) for one in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(one.specs[0].gpus for one in settled) == [("0",), ("1",), ("2",), ("3",)]
    for one in settled:
        document = Statefile(tmp_path, one.namespace).read()
        assert document is not None
        assert document.components[f"{one.namespace}_A"].gpus == one.specs[0].gpus
        assert one.specs[0].env["CUDA_VISIBLE_DEVICES"] == one.specs[0].gpus[0]
    assert not list(tmp_path.glob(".gpus.lock"))


def test_gpu_ids_have_one_type(tmp_path: Path) -> None:
    statefile = running(tmp_path, f"A: {{run: dynamo.mocker, {ONE}}}", "a")
    document = statefile.read()
    assert document is not None
    template = document.components["a_A"]
    template.assign(("1",))
    written = document.written()
    resources = written["environment"]["SYSTEM_RESOURCES"]
    assert resources["gpu_info"] == [0, 1]
    assert written["components"]["a_A"]["resources"]["allocated_gpus"] == [1]


# Memory that others use


def memory(*used_gib: float) -> list[Gpu]:
    return [
        Gpu(index=i, uuid=f"GPU-{i}{i}", memory_bytes=80 * GIB, used_bytes=int(used * GIB))
        for i, used in enumerate(used_gib)
    ]


@pytest.mark.parametrize(
    ("used", "service", "chosen"),
    [
        ((76, 0.4), "{run: dynamo.vllm, load-format: dummy}", ("1",)),
        ((76, 0.4), f"{{run: dynamo.mocker, {ONE}}}", ("1",)),
        ((5, 0.4), f"{{run: dynamo.mocker, {ONE}}}", ("1",)),
        ((0.4, 0.4), f"{{run: dynamo.mocker, {ONE}}}", ("0",)),
        # In use and with too little room: the one with room.
        ((60, 20), "{run: dynamo.vllm, load-format: dummy, gpu-memory-utilization: 0.5}", ("1",)),
        # Only crowded ones: the lowest, with the warning that says what to change.
        ((76, 76), "{run: dynamo.vllm, load-format: dummy}", ("0",)),
        ((76, 0.4, 0.4), "{run: dynamo.vllm, load-format: dummy, tensor-parallel-size: 2}",
         ("1", "2")),
    ],
)  # fmt: skip
def test_the_first_plan_prefers_free_memory(
    used: tuple[float, ...], service: str, chosen: tuple[str, ...], monkeypatch: Any
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(nvml, "probe", lambda: memory(*used))
    placement = placed(f"A: {service}", None)
    assert gpus(placement) == {"A": chosen}


def test_workers_of_the_plan_count_as_memory_in_use(monkeypatch: Any) -> None:
    """Two workers of 45% each fit beside nothing, but not beside 30 GiB of others."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(nvml, "probe", lambda: memory(30, 30, 30))
    service = "run: dynamo.vllm, load-format: dummy, gpu-memory-utilization: 0.45"
    args = "ServiceArgs: {workers: 2, resources: {gpu: 0.5}}"
    placement = placed(f"A: {{{service}, {args}}}", None)
    assert gpus(placement) == {"A": ("0",), "A_1": ("1",)}


def test_memory_of_the_own_deployment_does_not_move_it(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    text = f"A: {{run: dynamo.mocker, {ONE}}}"
    statefile = running(tmp_path, text, "a")
    monkeypatch.setattr(nvml, "probe", lambda: memory(76, 0.4))
    assert gpus(placed(text, None, statefile.read(), "a")) == {"A": ("0",)}
