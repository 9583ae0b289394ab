"""Each finding of `dynamo doctor`: the facts that cause it, its severity and its remedy."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest

from dynamo.doctor.deployment import (
    check_block_sizes,
    check_events,
    check_frontends,
    check_listeners,
    check_names,
)
from dynamo.doctor.facts import (
    ClockFacts,
    DiskFacts,
    EngineFacts,
    FileSystemFacts,
    Finding,
    FrontendFacts,
    GpuFacts,
    LimitFacts,
    ListenerFacts,
    MemoryFacts,
    RouterFacts,
    WorkerFacts,
)
from dynamo.doctor.machine import (
    check_clock,
    check_cpu_memory,
    check_disks,
    check_engines,
    check_gpus,
    check_limits,
    check_memory,
)
from dynamo.serve.gpus.gpus import Gpu, GpuProcess

GIB = 1 << 30
LIMITS = LimitFacts(files_soft=1024, files_hard=65536, locked_bytes=-1, tasks=-1, tasks_used=0)
MEMORY = MemoryFacts(shm_bytes=16 * GIB, shm_free_bytes=16 * GIB, ram_bytes=64 * GIB)
DISK = FileSystemFacts(path="/srv", kind="ext4", free_bytes=100 * GIB)
CLOCK = ClockFacts(synchronized=True)
FRONTEND = FrontendFacts(service="Frontend", url="http://127.0.0.1:8000", port=8000)
WORKER = WorkerFacts(worker="a1", model="m", name="dynamo_Worker", block_size=16)
GPU = Gpu(index=0, name="H100", memory_bytes=80 * GIB)
GPUS = GpuFacts(devices=(GPU,), boards=1, driver="580.65", cuda=(13, 0))


def changed(facts: Any, **fields: Any) -> Any:
    return dataclasses.replace(facts, **fields)


def bad(findings: Iterable[Finding]) -> list[Finding]:
    """The findings that are not ok, each of which says why and what to do."""
    found = list(findings)
    assert found
    for one in found:
        assert one.severity in ("ok", "warning", "error") and one.summary
        assert bool(one.cause) == bool(one.remedy) == (one.severity != "ok"), one
    return [one for one in found if one.severity != "ok"]


def the_one(findings: Iterable[Finding]) -> Finding:
    (found,) = bad(findings)
    return found


def test_a_good_machine_has_no_findings() -> None:
    for findings in (
        check_limits(LIMITS),
        check_memory(MEMORY),
        check_disks(DiskFacts(state=DISK, models=DISK)),
        check_clock(CLOCK),
        check_gpus(GPUS),
        check_gpus(GpuFacts(devices=None)),
        check_frontends([FRONTEND]),
        check_engines([EngineFacts(name="vllm", version="0.32.1", tested=("0.32",))], GPUS),
        check_events([WORKER], RouterFacts()),
        check_block_sizes([WORKER], RouterFacts()),
        check_names([WORKER, changed(WORKER, block_size=32, files="x")]),
    ):
        assert bad(findings) == []


@pytest.mark.parametrize(
    ("fields", "check", "severity", "remedy"),
    [
        ({"files_hard": 4096}, "nofile", "warning", "prlimit --pid $$ --nofile=65536"),
        ({"files_hard": 256}, "nofile", "error", "--nofile"),
        ({"locked_bytes": 8 << 20, "transfers_blocks": True}, "memlock", "warning", "--memlock"),
        ({"tasks": 4096, "tasks_used": 1000}, "nproc", "warning", "--nproc"),
        ({"tasks": 512, "tasks_used": 500}, "nproc", "error", "--pids-limit"),
        (
            {"inotify_instances": 128, "inotify_instances_used": 123},
            *("inotify", "warning", "fs.inotify.max_user_instances=1024"),
        ),
        (
            {"inotify_watches": 8192, "inotify_watches_used": 8000, "processes_needed": 20},
            *("inotify", "warning", "fs.inotify.max_user_watches=524288"),
        ),
    ],
)
def test_limits(fields: dict[str, Any], check: str, severity: str, remedy: str) -> None:
    found = the_one(check_limits(changed(LIMITS, **fields)))
    assert (found.check, found.severity) == (check, severity) and remedy in found.remedy


def test_locked_memory_matters_only_for_transfers() -> None:
    assert bad(check_limits(changed(LIMITS, locked_bytes=8 << 20))) == []


@pytest.mark.parametrize(
    ("fields", "check", "severity", "remedy"),
    [
        ({"shm_bytes": None}, "shm", "error", "mount -t tmpfs"),
        ({"shm_bytes": 64 << 20, "shm_free_bytes": 64 << 20}, "shm", "warning", "--shm-size"),
        ({"shm_bytes": 64 << 20, "shm_free_bytes": 0, "shards": 2}, "shm", "error", "remount"),
        ({"shm_free_bytes": 1 << 20}, "shm", "warning", "ls -lhS /dev/shm"),
        (
            {"huge_bytes": 32 * GIB, "huge_free_bytes": 30 * GIB},
            *("hugepages", "warning", "vm.nr_hugepages=0"),
        ),
    ],
)
def test_memory(fields: dict[str, Any], check: str, severity: str, remedy: str) -> None:
    found = the_one(check_memory(changed(MEMORY, **fields)))
    assert (found.check, found.severity) == (check, severity) and remedy in found.remedy


def test_used_huge_pages_are_no_waste() -> None:
    assert bad(check_memory(changed(MEMORY, huge_bytes=32 * GIB, huge_free_bytes=GIB))) == []


@pytest.mark.parametrize(
    ("facts", "check", "severity"),
    [
        (DiskFacts(state=changed(DISK, free_bytes=500 << 20)), "logs", "warning"),
        (DiskFacts(state=changed(DISK, free_bytes=5 << 20)), "logs", "error"),
        (DiskFacts(state=changed(DISK, free_bytes=2 * GIB), log_bytes=3 * GIB), "logs", "warning"),
        (DiskFacts(state=changed(DISK, free_files=0)), "logs", "error"),
        (DiskFacts(state=changed(DISK, kind="nfs4")), "state", "error"),
        (DiskFacts(state=changed(DISK, writable=False)), "state", "error"),
        (DiskFacts(state=changed(DISK, writable=False, read_only=True)), "state", "error"),
        (DiskFacts(state=DISK, models=changed(DISK, free_bytes=9 * GIB)), "models", "warning"),
        (DiskFacts(state=DISK, models=changed(DISK, free_bytes=1 << 20)), "models", "error"),
    ],
)
def test_disks(facts: DiskFacts, check: str, severity: str) -> None:
    found = the_one(check_disks(facts))
    assert (found.check, found.severity) == (check, severity) and "/srv" in found.summary
    assert ("remount,rw" in found.remedy) == facts.state.read_only
    assert "$USER" not in found.remedy or not facts.state.read_only


@pytest.mark.parametrize(
    ("fields", "summary"),
    [
        ({"synchronized": False}, "not synchronized"),
        ({"stepped_s": -0.3}, "jumped by -0.30 s"),
        ({"paused_s": 1.2}, "paused for 1.2 s"),
        ({"suspended_s": 3600.0}, "suspended for 3600 s"),
    ],
)
def test_clocks(fields: dict[str, Any], summary: str) -> None:
    found = the_one(check_clock(changed(CLOCK, **fields)))
    assert (found.check, found.severity) == ("clock", "warning") and summary in found.summary


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("Driver Not Loaded", "modprobe nvidia"),
        ("Driver/library version mismatch", "sudo reboot"),
    ],
)
def test_boards_without_a_driver(reason: str, remedy: str) -> None:
    found = the_one(check_gpus(GpuFacts(devices=None, boards=2, reason=reason)))
    assert (found.check, found.severity) == ("gpu", "error")
    assert reason in found.summary and remedy in found.remedy


def test_a_gpu_that_the_driver_lacks() -> None:
    found = the_one(check_gpus(changed(GPUS, boards=2)))
    assert "1 of the 2 GPUs" in found.summary and "Xid" in found.remedy


def test_holders_of_gpu_memory_are_named_unless_they_are_ours() -> None:
    processes = (
        GpuProcess(10, "python", 30 * GIB),
        GpuProcess(11, "Xorg", 20 << 20),
        GpuProcess(12, "worker", 20 * GIB),
    )
    gpu = changed(GPU, used_bytes=50 * GIB, processes=processes)
    facts = changed(GPUS, devices=(gpu,), own_pids=frozenset({12}))
    found = the_one(check_gpus(facts))
    assert found.summary == "GPU 0 (H100): python (pid 10) holds 30.0 GiB"
    assert found.remedy.startswith("kill 10 ")


def test_memory_of_processes_that_are_not_visible() -> None:
    hidden = the_one(check_gpus(changed(GPUS, devices=(changed(GPU, used_bytes=3 * GIB),))))
    assert "3.0 GiB in use by processes that are not visible" in hidden.summary
    other = changed(GPU, used_bytes=3 * GIB, processes=(GpuProcess(9, "another process", 0),))
    found = the_one(check_gpus(changed(GPUS, devices=(other,))))
    assert "memory of unknown size" in found.summary


@pytest.mark.parametrize(
    ("engine", "severity", "summary"),
    [
        (
            EngineFacts(name="vllm", version="0.40.0", tested=("0.32",)),
            *("warning", "vllm 0.40.0 is not tested; tested: 0.32"),
        ),
        (EngineFacts(name="vllm", version="0.32.0", cuda=(14, 1)), "error", "built for CUDA 14.1"),
        (EngineFacts(name="vllm", version="0.32.0", is_cpu_build=True), "warning", "for the CPU"),
    ],
)
def test_engines(engine: EngineFacts, severity: str, summary: str) -> None:
    found = the_one(check_engines([engine], GPUS))
    assert (found.check, found.severity) == ("engines", severity) and summary in found.summary


def test_no_engine() -> None:
    assert "pip install" in the_one(check_engines([], GPUS)).remedy


@pytest.mark.parametrize(
    ("fields", "check", "severity", "text"),
    [
        (
            {"problem": "cannot listen", "holder": "nginx (pid 7)", "free_port": 8003},
            *("ports", "error", "cannot listen; nginx (pid 7) listens there"),
        ),
        ({"is_ours": True, "answers": False}, "ports", "error", "does not answer at http://127"),
        ({"is_loopback": False}, "exposure", "warning", "everyone who reaches"),
        ({"is_loopback": False, "has_keys": True}, "exposure", "warning", "in plain text"),
    ],
)
def test_frontends(fields: dict[str, Any], check: str, severity: str, text: str) -> None:
    found = the_one(check_frontends([changed(FRONTEND, **fields)]))
    assert (found.check, found.severity) == (check, severity) and text in found.summary
    if "free_port" in fields:
        assert found.remedy.endswith("--Frontend.http-port=8003")


def test_a_running_frontend_and_one_with_keys_and_tls_are_fine() -> None:
    protected = changed(FRONTEND, is_loopback=False, has_keys=True, has_tls=True)
    assert bad(check_frontends([changed(FRONTEND, is_ours=True), protected])) == []


def test_other_sockets_on_the_network() -> None:
    socket = ListenerFacts(
        component="dynamo_Worker", program="python", pid=5, address="0.0.0.0", port=5557
    )
    found = the_one(check_listeners([socket, changed(socket, port=80, is_frontend=True)]))
    assert "dynamo_Worker: python (pid 5) listens on 0.0.0.0:5557" in found.summary


def test_workers_without_kv_events() -> None:
    found = the_one(check_events([changed(WORKER, publishes=False)], RouterFacts()))
    assert found.severity == "warning" and "dynamo_Worker (m) publishes no KV" in found.summary
    dead = changed(WORKER, event_problem="ipc:///x.sock: Connection refused")
    found = the_one(check_events([dead, WORKER], RouterFacts()))
    assert found.severity == "error" and found.remedy == "dynamo restart dynamo_Worker"
    found = the_one(check_events([WORKER], RouterFacts(silent=(("m", 1), ("n", 0)))))
    assert found.severity == "warning" and "1 worker of m served prompts" in found.summary


def test_events_are_not_expected_without_token_routing() -> None:
    quiet = changed(WORKER, publishes=False)
    assert list(check_events([quiet], RouterFacts(follows_events=False))) == []
    assert list(check_events([changed(quiet, takes_tokens=False)], RouterFacts())) == []


@pytest.mark.parametrize(
    ("workers", "router", "text"),
    [
        (
            [WORKER, changed(WORKER, name="dynamo_Other", block_size=32)],
            RouterFacts(),
            "m: KV blocks of different sizes: 16 (dynamo_Worker), 32 (dynamo_Other)",
        ),
        (
            [WORKER],
            RouterFacts(block_sizes=(("Worker", "m", 64),)),
            "m: KV blocks of different sizes: 16 (dynamo_Worker), 64 (Worker)",
        ),
        ([WORKER], RouterFacts(block_size=64), "blocks of 16 tokens, but the router hashes"),
        (
            [],
            RouterFacts(block_sizes=(("Prefill", "m", 16), ("Decode", "m", 32))),
            "16 (Prefill), 32 (Decode)",
        ),
    ],
)
def test_block_sizes(workers: list[WorkerFacts], router: RouterFacts, text: str) -> None:
    found = the_one(check_block_sizes(workers, router))
    assert found.severity == "error" and text in found.summary and "dynamo reload" in found.remedy


def test_different_models_of_one_name() -> None:
    others = [changed(WORKER, name=name, files="x") for name in ("dynamo_B", "dynamo_B_1")]
    found = the_one(check_names([WORKER, *others]))
    assert (found.check, found.severity) == ("names", "error")
    assert found.summary.startswith("m: dynamo_Worker and dynamo_B, dynamo_B_1 have different")
    assert found.remedy.startswith("in the graph: served-model-name: ANOTHER, then: dynamo reload")


def test_memory_that_vllm_reserves_on_a_cpu() -> None:
    facts = changed(MEMORY, ram_available_bytes=32 * GIB)
    assert check_cpu_memory(facts, 0.5).severity == "ok"
    found = check_cpu_memory(facts, 0.92)
    assert found.severity == "error" and "50% of 64.0 GiB available" in found.summary
    assert found.remedy.startswith("gpu-memory-utilization: 0.4 ")
