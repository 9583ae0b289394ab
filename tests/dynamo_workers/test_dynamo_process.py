"""What a worker's process shows and configures: metrics, health, logs, deprecations, shutdown."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel

from dynamo import prometheus_names
from dynamo.config.runtime import RuntimeSettings
from dynamo.config.system import SystemSettings
from dynamo.health_check import HEALTH_CHECK_KEY, HealthCheckPayload, load_health_check_from_env
from dynamo.http.client import Target, call
from dynamo.llm import WorkerType
from dynamo.runtime import DistributedRuntime, dynamo_endpoint, dynamo_worker
from dynamo.runtime.distributed import runtime as distributed
from dynamo.runtime.logging import (
    configure_sglang_logging,
    configure_vllm_logging,
    get_bool_env_var,
    log_message,
)

MakeRuntime = Callable[[], DistributedRuntime]
VLLM = "# HELP vllm:requests Requests.\n# TYPE vllm:requests counter\nvllm:requests_total 3.0\n"


async def test_an_engines_metrics_are_appended(
    make_runtime: MakeRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = make_runtime().endpoint("ns.backend.generate").metrics

    def fail() -> str:
        raise RuntimeError("not now")

    before = metrics.render()
    metrics.register_prometheus_expfmt_callback(lambda: VLLM)
    metrics.register_prometheus_expfmt_callback(fail)
    metrics.register_prometheus_expfmt_callback(lambda: "sglang:tokens 5\n\n")
    metrics.register_prometheus_typed_callback(lambda: [("x", "", "counter", "", [])])
    for accept in ("", "application/openmetrics-text; version=1.0.0"):
        body, content_type = metrics.exposition(accept)
        text = body.decode()
        families = {one.name for one in text_string_to_metric_families(text)}
        assert {"vllm:requests", "sglang:tokens", "dynamo_component_uptime_seconds"} <= families
        assert content_type.startswith("text/plain") and text.endswith("sglang:tokens 5\n")
    assert len(before) > 100 and caplog.text.count("missing from scrapes") == 1


async def test_health_and_url_of_the_status_server(tmp_path: Path) -> None:
    system = SystemSettings(port=0, host="127.0.0.1", grace_period_s=0.0)
    settings = RuntimeSettings(discovery_backend="mem", state_dir=str(tmp_path))
    loop = asyncio.get_running_loop()
    runtime = DistributedRuntime(loop, settings, system=system)
    assert runtime.system_status_server_url() is None and runtime.event_loop() is loop
    endpoint = runtime.endpoint("ns.backend.generate")
    await endpoint.register_endpoint_instance()
    source: Any = await cast(Any, endpoint).first_token_source(WorkerType.Decode)
    assert source is None
    url = runtime.system_status_server_url()
    assert url is not None and url.startswith("http://127.0.0.1:")
    statuses = []
    for ready in (None, False, True):
        if ready is not None:
            runtime.set_health_status(ready)
        host, _, port = url.removeprefix("http://").partition(":")
        response = await call(Target(host, int(port), False), "GET", "/health", 10_000, 10)
        statuses.append(response.status)
        response.close()
    assert statuses == [200, 503, 200]
    await runtime.close()


def test_a_shutdown_outside_of_a_loop_is_no_error(tmp_path: Path) -> None:
    made: list[DistributedRuntime] = []

    async def main() -> None:
        settings = RuntimeSettings(discovery_backend="mem", state_dir=str(tmp_path))
        made.append(DistributedRuntime(asyncio.get_running_loop(), settings))

    asyncio.run(main())
    made[0].shutdown()
    made[0].shutdown()


async def test_a_shutdown_from_another_thread_ends_the_service(make_runtime: MakeRuntime) -> None:
    async def never(request: Any) -> Any:
        await asyncio.Event().wait()
        yield 1

    runtime = make_runtime()
    endpoint = runtime.endpoint("ns.backend.generate")
    served = asyncio.ensure_future(endpoint.serve_endpoint(never))
    client = await endpoint.client()
    async with asyncio.timeout(20):
        await client.wait_for_instances()
        threading.Thread(target=runtime.shutdown).start()
        await served


def test_enable_nats_is_deprecated(recwarn: pytest.WarningsRecorder) -> None:
    for function in (DistributedRuntime, dynamo_worker):
        assert inspect.signature(function).parameters["enable_nats"].default is None
    assert callable(dynamo_worker()) and not recwarn.list
    for value in (True, False):
        with pytest.warns(DeprecationWarning, match="enable_nats"):
            decorate = dynamo_worker(enable_nats=value)

        async def work(runtime: Any) -> None:
            """Do nothing."""

        assert inspect.iscoroutinefunction(decorate(work))


async def test_a_decorator_with_plain_types_parses_nothing() -> None:
    @dynamo_endpoint(str, str)
    async def echo(request: str) -> Any:
        yield request.upper()
        yield {"any": 1}

    assert [item async for item in echo("text")] == ["TEXT", {"any": 1}]


class Asked(BaseModel):
    x: int = 0


class Answered(BaseModel):
    y: int = 0


async def test_a_decorator_passes_items_on_unchanged() -> None:
    """As observed with Dynamo 1.6.1: the second type is not used."""
    items: list[Any] = [{"y": 1, "more": 2}, {"y": "text"}, {"z": 1}, "text", 5, None]

    @dynamo_endpoint(Asked, Answered)
    async def answer(request: Asked) -> Any:
        assert request.x == 1
        for item in (*items, Answered(y=3)):
            yield item

    assert [item async for item in answer({"x": 1, "other": 2})] == [*items, {"y": 3}]
    with pytest.raises(ValueError, match="x"):
        await anext(answer({"x": "text"}))


async def test_nats_as_request_plane_is_tcp_with_one_warning(
    store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    distributed._instead_of_nats.cache_clear()
    loop = asyncio.get_running_loop()
    runtimes = [DistributedRuntime(loop, "file", "nats") for _ in range(2)]
    assert [runtime.settings.request_plane for runtime in runtimes] == ["tcp", "tcp"]
    assert caplog.text.count("no request plane 'nats'") == 1
    for runtime in runtimes:
        await runtime.close()


async def test_a_bad_event_plane_is_a_value_error(store: Path) -> None:
    with pytest.raises(ValueError, match=r"Invalid event_plane value 'bogus'\. Valid"):
        DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="bogus")


class Payload(HealthCheckPayload):
    def __init__(self) -> None:
        self.default_payload = {"default": 1}
        super().__init__()


@pytest.mark.parametrize(
    ("text", "payload"),
    [
        ('{"x": 1}', {"x": 1}),
        ("@FILE", {"y": 2}),
        ("@/no/such/file", None),
        ("[1]", None),
        ("{", None),
        ("", None),
    ],
)
def test_the_health_check_payload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, payload: dict[str, int] | None
) -> None:
    file = tmp_path / "payload.json"
    file.write_text('{"y": 2}')
    monkeypatch.setenv("DYN_HEALTH_CHECK_PAYLOAD", text.replace("FILE", str(file)))
    assert load_health_check_from_env() == payload
    assert Payload().to_dict() == (payload or {"default": 1})
    assert HEALTH_CHECK_KEY == "_HEALTH_CHECK"
    with pytest.raises(NotImplementedError, match="default_payload"):
        HealthCheckPayload()


def test_names_of_metrics() -> None:
    names = prometheus_names
    assert (names.name_prefix.FRONTEND, names.labels.NAMESPACE) == (
        "dynamo_frontend",
        "dynamo_namespace",
    )
    known = json.dumps({name: vars(getattr(names, name)) for name in names.__all__}, default=str)
    for name in ("time_to_first_token_seconds", "kv_hit_rate", "model_load_time_seconds"):
        assert name in known


def test_logging_of_engines(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for configure, name in ((configure_vllm_logging, "vllm"), (configure_sglang_logging, "sglang")):
        engine = logging.getLogger(name)
        engine.addHandler(logging.NullHandler())
        engine.propagate = False
        configure(logging.WARNING)
        assert engine.propagate and not engine.handlers and engine.level == logging.WARNING
    with caplog.at_level(logging.INFO):
        log_message("warn", "hello %s", "my.module", "file.py", 7)
        log_message("debug", "silent", "my.module", "file.py", 8)
    [record] = caplog.records
    assert (record.name, record.lineno, record.getMessage()) == ("my.module", 7, "hello %s")
    for text, expected in (("1", True), ("True", True), ("false", False), ("maybe", False)):
        monkeypatch.setenv("SOME_SWITCH", text)
        assert get_bool_env_var("SOME_SWITCH") is expected
    assert get_bool_env_var("NO_SUCH_SWITCH", "true") is True
    assert "SOME_SWITCH=maybe" in caplog.text
