"""OpenTelemetry: spans of real processes at an OTLP receiver that decodes them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from deployment import Deployment, free_port
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CHAT = "/v1/chat/completions"


class Collector:
    """An OTLP/HTTP receiver; ``spans`` are those that arrived, ``services`` their resources."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        self.arrived = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                status = 200 if self.path == "/v1/traces" else 404
                if status == 200:
                    collector.add(ExportTraceServiceRequest.FromString(body))
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def add(self, request: Any) -> None:
        with self.arrived:
            for resource in request.resource_spans:
                names = {one.key: one.value.string_value for one in resource.resource.attributes}
                self.services.add(names["service.name"])
                for scope in resource.scope_spans:
                    self.spans += scope.spans
            self.arrived.notify_all()

    def wait(self, count: int, trace: str) -> list[Any]:
        """The spans of ``trace`` once there are ``count``."""
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.of(trace)) >= count, 30), self.spans
            return self.of(trace)

    def of(self, trace: str) -> list[Any]:
        return [one for one in self.spans if one.trace_id.hex() == trace]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def start(deployment: Deployment, url: str, *modes: str) -> None:
    deployment.env |= {
        "OTEL_EXPORT_ENABLED": "true",
        "OTEL_EXPORTER_OTLP_ENDPOINT": url,
        "OTEL_BSP_SCHEDULE_DELAY": "50",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
    }
    for mode in modes or ("agg",):
        deployment.mocker(
            *("--speedup-ratio", "0", "--block-size", "16", "--disaggregation-mode", mode),
            OTEL_SERVICE_NAME=f"worker-{mode}",
        )
    deployment.frontend("--router-mode", "kv")
    deployment.wait_for_workers(len(modes or "1"))


def chat(deployment: Deployment, **headers: str) -> Any:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    status, _, answer = deployment.request("POST", CHAT, body, headers)
    assert status == 200, answer
    return json.loads(answer)


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def test_the_trace_of_a_disaggregated_request(deployment: Deployment, collector: Collector) -> None:
    start(deployment, collector.url, "prefill", "decode")
    deployment.until(
        lambda: deployment.sample("dynamo_frontend_prefill_workers") == 1, "prefill worker"
    )
    answer = chat(deployment, traceparent=f"00-{TRACE}-{PARENT}-01", tracestate="vendor=1")
    spans = collector.wait(7, TRACE)
    by_name: dict[str, list[Any]] = {}
    for span in spans:
        by_name.setdefault(span.name, []).append(span)
    (root,) = by_name["http-request"]
    assert root.parent_span_id.hex() == PARENT and root.trace_state == "vendor=1"
    found = attributes(root)
    assert found["gen_ai.request.model"] == "tiny" and found["dynamo.outcome"] == "ok"
    assert found["gen_ai.usage.output_tokens"] == 4
    assert answer["id"] == f"chatcmpl-{found['dynamo.request_id']}"
    assert found["dynamo.worker"] != found["dynamo.prefill_worker"]
    moments = [root.start_time_unix_nano]
    for name in ("prepare", "queue", "prefill", "decode"):
        (stage,) = by_name[name]
        assert stage.parent_span_id == root.span_id
        assert stage.start_time_unix_nano == pytest.approx(moments[-1], abs=2000)
        moments.append(stage.end_time_unix_nano)
    assert moments == sorted(moments) and moments[-1] <= root.end_time_unix_nano
    handlers = by_name["handle_payload"]
    assert len(handlers) == 2 and {one.parent_span_id for one in handlers} == {root.span_id}
    assert len({attributes(one)["dynamo.endpoint"] for one in handlers}) == 2
    assert collector.services == {"dynamo", "worker-prefill", "worker-decode"}


def test_new_traces_and_failed_requests(deployment: Deployment, collector: Collector) -> None:
    start(deployment, collector.url)
    chat(deployment, traceparent="nonsense")
    body = {"model": "tiny", "prompt": "a", "nvext": {"backend_instance_id": 1}}
    assert deployment.request("POST", "/v1/completions", body)[0] == 400
    body = {"model": "none", "prompt": "a"}
    assert deployment.request("POST", "/v1/completions", body)[0] == 404
    deployment.processes[0].kill()
    deployment.wait_for_workers(0)
    body = {"model": "tiny", "prompt": "a"}
    assert deployment.request("POST", "/v1/completions", body)[0] == 503
    with collector.arrived:
        # The status ERROR (2) is for failures of the server.
        roots = [("not_found", 0), ("ok", 0), ("unavailable", 2), ("validation", 0)]
        assert collector.arrived.wait_for(lambda: _roots(collector) == roots, 30), collector.spans
    assert len({one.trace_id for one in collector.spans}) == 4


def _roots(collector: Collector) -> list[tuple[str, int]]:
    """Outcome and status code of the spans without a parent."""
    found = [one for one in collector.spans if not one.parent_span_id]
    return sorted((attributes(one)["dynamo.outcome"], one.status.code) for one in found)


def test_a_dead_collector(deployment: Deployment) -> None:
    start(deployment, f"http://127.0.0.1:{free_port()}")
    log = next(deployment.logs.glob("*dynamo.frontend.log"))
    for _ in range(3):
        chat(deployment)
    deployment.until(lambda: "takes no spans" in log.read_text(), "the warning")
    for _ in range(20):
        chat(deployment)
    frontend = deployment.processes[-1]
    frontend.terminate()
    assert frontend.wait(20) == 0
    assert log.read_text().count("takes no spans") == 1
    assert "Traceback" not in log.read_text() and "opentelemetry" not in log.read_text()


def test_without_it_nothing_is_imported(deployment: Deployment) -> None:
    code = (
        "import sys, dynamo.frontend.service, dynamo.mocker.worker, dynamo.runtime\n"
        "dynamo.runtime.DistributedRuntime()\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    done = subprocess.run([sys.executable, "-c", code], env=deployment.env, check=False)
    assert done.returncode == 0


def test_only_http(deployment: Deployment) -> None:
    process = deployment.frontend(OTEL_EXPORT_ENABLED="1", OTEL_EXPORTER_OTLP_PROTOCOL="grpc")
    assert process.wait(30) in (1, 2)
    text = next(deployment.logs.glob("*dynamo.frontend.log")).read_text()
    assert "OTEL_EXPORTER_OTLP_PROTOCOL" in text and "http/protobuf" in text
