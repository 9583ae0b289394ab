"""The frontends of a statefile: where they listen, and what happens when one does not answer."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import pytest
from deployment import free_port
from planner_kit import service

from dynamo.config.planner import PlannerSettings
from dynamo.config.runtime import RuntimeSettings
from dynamo.frontend.requests.metrics import FrontendMetrics
from dynamo.observability.metrics import Registry
from dynamo.planner.connector import READY, ScaledWorker
from dynamo.planner.live.model_state import ScaledModel
from dynamo.planner.live.sources import FrontendPages, LiveSources, frontends_of
from dynamo.prometheus_names import name_prefix
from dynamo.protocols import codec
from dynamo.protocols.control import ModelCard
from dynamo.protocols.kv import PREFILL_QUEUE, PrefillQueueState
from dynamo.runtime import DistributedRuntime
from dynamo.serve.graph.facts import FrontendAddress
from dynamo.serve.state.document import Document
from dynamo.serve.state.frontends import frontends_in
from dynamo.serve.state.process_table import stat
from dynamo.serve.state.statefile import Statefile


def component(*flags: str, module: str = "dynamo.frontend", pid: int | None = None) -> Any:
    found = None if pid is None else stat(pid)
    processes = [{"pid": pid, "start_ticks": found.start_ticks if found else 1}] if pid else []
    return {"argv": ["python", "-m", module, *flags], "processes": processes}


def found(**components: Any) -> list[tuple[str, str]]:
    document = {"components": components}
    listening = [frontend.listens for frontend in frontends_in(Document.of(document))]
    return [(one.address.url, one.metrics_prefix) for one in listening if one.address]


def test_flags_name_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DYN_HTTP_PORT", raising=False)
    assert found(
        a=component("--http-port", "8001", "--http-host", "0.0.0.0"),
        b=component("--http-port=8002", "--router-mode", "kv", "--metrics-prefix", "mine"),
        c=component(),
        d=component("--http-port", "9", module="dynamo.mocker"),
        e={"argv": None},
    ) == [
        ("http://127.0.0.1:8001", "dynamo_frontend"),
        ("http://127.0.0.1:8002", "mine"),
        ("http://127.0.0.1:8000", "dynamo_frontend"),
    ]


def test_the_arbiter_writes_where_a_frontend_listens() -> None:
    """A service's ``envs`` are not in the statefile."""
    listens = {"host": "127.0.0.1", "port": 8123, "metrics_prefix": "mine"}
    assert found(a={**component("--http-port", "1"), "listens": listens}) == [
        ("http://127.0.0.1:8123", "mine")
    ]


@pytest.mark.parametrize("flags", [("--http-port", "0"), ("--http-port", "x"), ("--unknown", "1")])
def test_an_address_that_is_not_known_is_left_out(flags: tuple[str, ...]) -> None:
    assert found(a=component(*flags)) in ([], [("http://127.0.0.1:8000", "dynamo_frontend")])


@contextmanager
def page(body: bytes, status: int = 200) -> Iterator[int]:
    """Serve ``body`` at every path; yield the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def deployed(tmp_path: Path, *ports: int) -> FrontendPages:
    components = {
        f"f{port}": component("--http-port", str(port), pid=os.getpid()) for port in ports
    }
    return frontend_pages(tmp_path, components)


def frontend_pages(tmp_path: Path, components: dict[str, Any]) -> FrontendPages:
    statefile = Statefile(tmp_path, "box")
    document = {"namespace": "box", "circus_endpoint": "x", "environment": {}}
    statefile.create(Document.of({**document, "components": components}))
    return FrontendPages(frontends_of(statefile))


async def test_each_frontend_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metrics = FrontendMetrics(Registry())
    metrics.model("tiny").active.value = 3
    closed = free_port()
    with page(metrics.registry.render()) as good, page(b"x 1\n") as other, page(b"", 500) as bad:
        pages = deployed(tmp_path, good, other, bad, closed)
        for _ in range(2):
            read, missing = await pages.read()
    assert list(read) == [f"http://127.0.0.1:{good}"]
    assert read[f"http://127.0.0.1:{good}"].models["tiny"]["active_requests"] == 3
    assert missing == {f"http://127.0.0.1:{port}" for port in (other, bad, closed)}
    assert caplog.text.count("its traffic is unknown") == 2  # once per outage
    assert str(closed) not in caplog.text  # it may be starting
    assert "status 500" in caplog.text and "process_start_time_seconds" in caplog.text


async def test_a_frontend_that_does_not_listen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    page_bytes = FrontendMetrics(Registry()).registry.render()
    with page(page_bytes) as port:
        pages = deployed(tmp_path, port)
        await pages.read()
    await pages.read()  # it has answered before
    assert f":{port}: no metrics: it does not listen; its traffic is unknown" in caplog.text
    never = free_port()
    (tmp_path / "never").mkdir()
    pages = deployed(tmp_path / "never", never)
    await pages.read()
    assert f":{never}: " not in caplog.text
    monkeypatch.setattr("dynamo.planner.live.sources._START_UP_S", -1)
    for _ in range(2):
        await pages.read()
    assert caplog.text.count(f":{never}: no metrics: it does not listen") == 1


async def test_a_frontend_without_a_process_is_not_waited_for(tmp_path: Path) -> None:
    gone = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await gone.wait()
    metrics = FrontendMetrics(Registry())
    with page(metrics.registry.render()) as port:
        components = {
            "runs": component("--http-port", str(port), pid=os.getpid()),
            "stopped": component("--http-port", str(free_port())),
            "dead": component("--http-port", str(free_port()), pid=gone.pid),
        }
        read, missing = await frontend_pages(tmp_path, components).read()
    assert list(read) == [f"http://127.0.0.1:{port}"]
    assert missing == frozenset()


def test_many_other_processes_hide_no_frontend() -> None:
    workers = {f"w{number}": component(module="dynamo.mocker") for number in range(64)}
    assert found(**workers, f=component()) == [("http://127.0.0.1:8000", "dynamo_frontend")]


async def test_a_frontend_that_hangs_has_a_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dynamo.planner.live.sources._TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server:  # it never answers
        port = server.getsockname()[1]
        read, missing = await deployed(tmp_path, port).read()
    assert read == {} and missing == {f"http://127.0.0.1:{port}"}
    assert "no answer in 0.05 s" in caplog.text


async def test_without_a_statefile_there_are_none(tmp_path: Path) -> None:
    assert await FrontendPages(frontends_of(Statefile(tmp_path, "box"))).read() == ({}, frozenset())
    (tmp_path / "box.json").write_text("{")
    assert await FrontendPages(frontends_of(Statefile(tmp_path, "box"))).read() == ({}, frozenset())


async def test_requests_for_an_adapter_count_for_its_model(tmp_path: Path) -> None:
    settings = RuntimeSettings(state_dir=str(tmp_path))
    planner, box = (DistributedRuntime(None, settings) for _ in range(2))
    metrics = FrontendMetrics(Registry())
    for name, started in (("tiny", 2), ("sql", 5), ("other", 9)):
        metrics.model(name).started["completions", name, "unary"].value = started
    # As of a frontend that starts after the planner.
    start_time = f"process_start_time_seconds {time.time() + 60}".encode()
    body = re.sub(rb"(?m)^process_start_time_seconds .*", start_time, metrics.registry.render())
    await box.start()
    lease = await box.granted()
    for name, tail in (("tiny", ""), ("sql", "/sql")):
        card = ModelCard(name, name, "/m", "dynamo", "prefill", "generate", box.instance_id)
        card.worker_type, card.lora_name = "Prefill", "sql" if tail else None
        key = f"v1/mdc/dynamo/prefill/generate/{box.instance_id:x}{tail}"
        await box.discovery.put(key, msgspec.json.encode(card), lease.id)
    queues = await box.publisher("dynamo", "prefill", PREFILL_QUEUE)
    worker = (ScaledWorker(name="w", state=READY, worker_id=box.instance_id),)
    serving = replace(service("Worker", pool="prefill"), workers=worker)
    asleep = replace(serving, workers=())
    with page(body) as port:
        address = FrontendAddress("127.0.0.1", port)

        async def frontends() -> dict[str, tuple[FrontendAddress, str]]:
            return {address.url: (address, name_prefix.FRONTEND)}

        sources = LiveSources(planner, frontends, PlannerSettings())
        try:
            await planner.start()
            await sources.start()
            model = ScaledModel("tiny", service("Decode", 0), serving)
            async with asyncio.timeout(60):
                while sources.pull(model, 0.0).prefill_queue != 7:
                    sources.follow([model])
                    for name, size in (("tiny", 3), ("sql", 4), ("other", 50)):
                        queues.publish(codec.encode(PrefillQueueState(name, size)))
                    await asyncio.sleep(0.01)
            sources.follow([replace(model, prefill=asleep)])  # its last requests are counted
            await sources.read_frontends()
            assert sources.traffic("tiny", 1.0, ends=False).arrived == 7
        finally:
            await planner.close()
            await box.close()
