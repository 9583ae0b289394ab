"""The checks after the last fault: gauges, cancellation, what is left after the stop."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import orjson
import psutil
from chaos_load import PoolEntry
from chaos_world import World
from recording_client import Plan, RecordingClient
from validator import Violation

from dynamo.http.client import ResponseError, Target, call

__all__ = ["IN_FLIGHT", "cancel_latencies", "check_gauges", "count_lines", "tracebacks"]

IN_FLIGHT = re.compile(
    r"dynamo_frontend_(active|inflight|queued|stage|prefill_active)_requests"
    r"|dynamo_frontend_prefill_queue_depth"
    r"|dynamo_frontend_worker_active_(prefill_tokens|decode_blocks)"
    r"|dynamo_request_plane_inflight_requests"
    r"|dynamo_component_inflight_requests"
    r"|dynamo_component_router_queue_\w+"
    r"|dynamo_work_handler_(pool_active_tasks|queue_depth)"
    r"|dynamo_(engine_request|request_queue)"
    r"|vllm:num_requests_(running|waiting)"
)
"""The gauges of requests in flight, in queues and of the load they are."""

REQUIRED = {
    "frontend": ("dynamo_frontend_active_requests", "dynamo_request_plane_inflight_requests"),
    "worker": ("dynamo_component_inflight_requests", "vllm:num_requests_running"),
}
IDLE_TIMEOUT_S = 10.0
Samples = list[tuple[str, str, float]]
"""Name, labels and value of each line of a page."""


async def check_gauges(world: World) -> list[Violation]:
    """Wait until no request is in flight anywhere; name the gauges that stay above 0."""
    busy: list[str] = []

    async def idle() -> bool:
        busy[:] = [line async for line in _busy_gauges(world)]
        return not busy

    deadline_s = world.clock() + IDLE_TIMEOUT_S
    while not await idle():
        if world.clock() > deadline_s:
            return [Violation("deployment", "gauge", line) for line in busy]
        await asyncio.sleep(0.1)
    return [one async for one in _unequal_counters(world)]


async def _busy_gauges(world: World) -> AsyncIterator[str]:
    for role, name, port in pages(world):
        samples = await scrape(port)
        found = {sample[0] for sample in samples}
        for required in REQUIRED[role]:
            if required not in found:
                yield f"{name}: {required} is missing"
        for metric, labels, value in samples:
            if value and IN_FLIGHT.fullmatch(metric):
                yield f"{name}: {metric}{{{labels} is {value:g}"


async def _unequal_counters(world: World) -> AsyncIterator[Violation]:
    """Every request that a frontend accepted has ended; those it refused are counted, too."""
    samples = await scrape(world.port)
    started, ended = (
        sum(value for name, _, value in samples if name == f"dynamo_frontend_{which}_total")
        for which in ("requests_started", "requests")
    )
    if started > ended:
        detail = f"the frontend accepted {started:g} requests, {ended:g} ended"
        yield Violation("deployment", "ended once", detail)


def pages(world: World) -> Iterator[tuple[str, str, int]]:
    """Yield (role, name, port) of every process with a page of metrics."""
    yield "frontend", "frontend", world.port
    for pid in world.pids("dynamo.mocker"):
        for connection in psutil.Process(pid).net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                yield "worker", f"worker {pid}", connection.laddr.port


async def scrape(port: int) -> Samples:
    """Read a page of metrics; empty if there is none."""
    try:
        target = Target("127.0.0.1", port, False)
        client = await call(target, "GET", "/metrics", 1 << 24, 20)
    except (OSError, ResponseError):
        return []
    samples = []
    for line in client.body.decode().splitlines():
        if not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            samples.append((*series.partition("{")[::2], float(value)))
    return samples


async def cancel_latencies(world: World, pool: list[PoolEntry], rounds: int) -> list[float]:
    """Return, for each round, the seconds from the disconnects of many clients to idle engines.

    The clients leave together: some are queued, some in their prompts, some in their answers.
    """
    ports = [port for role, _, port in pages(world) if role == "worker"]
    longest = sorted(pool, key=lambda entry: entry.answer.completion_tokens)[-8:]
    latencies = []
    for number in range(rounds):
        clients = [RecordingClient(world.target, world.clock) for _ in range(48)]
        tasks = [
            asyncio.create_task(client.perform(_plan(longest[at % 8], number, at), 30))
            for at, client in enumerate(clients)
        ]
        await _until(world.clock, ports, idle=False)
        await asyncio.sleep(0.1)
        left_s = world.clock()
        for client in clients:
            client.close()
        latencies.append(await _until(world.clock, ports, idle=True) - left_s)
        await asyncio.gather(*tasks)
    return latencies


def _plan(entry: PoolEntry, number: int, at: int) -> Plan:
    body = orjson.loads(orjson.dumps(entry.body | {"stream": at % 3 > 0}))
    return Plan(f"leave {number}-{at}", entry.api, body, entry.answer)


async def _until(clock: Callable[[], float], ports: list[int], idle: bool) -> float:
    """Return when the first scrape of all workers without a request (or with one) came."""
    deadline_s = clock() + IDLE_TIMEOUT_S
    while clock() < deadline_s:
        found = await asyncio.gather(*(scrape(port) for port in ports))
        running = any(
            value for page in found for name, _, value in page if name.startswith("vllm:num_req")
        )
        if running != idle:
            return clock()
    return clock()


def count_lines(logs: Path, part: str) -> int:
    """Count the lines with ``part`` in the logs of the deployment."""
    return sum(path.read_text(errors="replace").count(part) for path in logs.glob("*.log*"))


def tracebacks(logs: Path) -> dict[str, int]:
    """Count the last lines of the tracebacks in the logs of the deployment."""
    found: dict[str, int] = {}
    for path in sorted(logs.glob("*.log*")):
        lines = path.read_text(errors="replace").splitlines()
        for at, line in enumerate(lines):
            if line.endswith("Traceback (most recent call last):"):
                margin = line.index("Traceback")
                end = next((one for one in lines[at + 1 :] if one[margin : margin + 1] != " "), "")
                key = f"{path.name.split('_')[1].removesuffix('.log')}: {end.strip()[:160]}"
                found[key] = found.get(key, 0) + 1
    return found
