"""Every declared metric of frontend, request plane, queue and worker is exported and changes."""

from __future__ import annotations

import json
import re
import socket
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest
from deployment import ROOT, Deployment, free_port
from metric_specs import AnySpec, absent_names, declared_in, kind_of
from promql import uses

from dynamo.frontend.requests import metrics as frontend
from dynamo.mocker import engine as mocker
from dynamo.router.queue import request_queue as queue
from dynamo.runtime.requests import admission
from dynamo.runtime.requests import admission as runtime
from dynamo.worker import publish

TESTED_ELSEWHERE = {
    "dynamo_frontend_cold_start_queue_requests": "needs a planner: test_cold_start",
    "dynamo_frontend_time_to_first_token_worker_wait_seconds_total": "the same",
    "dynamo_frontend_request_worker_wait_seconds_total": "the same",
    "dynamo_frontend_event_loop_stall_total": "a stall cannot be ordered: test_loop_delay",
    "dynamo_frontend_model_cards_rejected_total": "needs a worker that disagrees: test_models",
    "dynamo_frontend_model_migration_limit": "the limit is 0",
    "dynamo_frontend_models_dropped_total": "needs 65 models that are gone: test_cold_start",
    "dynamo_component_errors_total": "needs an engine that fails: test_distributed",
    "dynamo_component_model_load_time_seconds": "needs --startup-time: test_mocker_worker",
    "dynamo_frontend_images_per_request": "needs a model that takes images: test_image_urls",
    "dynamo_frontend_image_tokens_per_request": "needs an engine that counts: test_image_urls",
    "dynamo_frontend_embedding_latency_seconds": "needs embeddings: test_embeddings_route",
    "dynamo_log_lines_dropped_total": "needs an output that is not read: test_logs",
    "dynamo_frontend_router_queue_pending_cached_tokens": "needs a cached prompt: test_line",
    "dynamo_frontend_router_admission_rejected_total": "needs a full queue: test_router_queue",
    "dynamo_frontend_router_queue_left_total": "needs an impatient client: test_router_queue",
}
"""Metrics whose change another test shows, and why."""

ABSENT = {
    "dynamo_component_errors_total": "needs an engine that fails",
    "dynamo_component_kv_cache_event_warnings": "needs a lost event",
    "dynamo_component_health_checks_total": "needs DYN_HEALTH_CHECK_ENABLED",
    "dynamo_frontend_prefill_active_requests": "needs prefill workers",
    "dynamo_frontend_prefill_queue_depth": "needs prefill workers",
    "dynamo_frontend_prefill_workers": "needs prefill workers",
}
"""Metrics of the dashboards that these processes have no reason to export."""

WORKER = declared_in(mocker, admission, publish)
SPECS = {spec.name: spec for spec in [*declared_in(frontend, queue, runtime), *WORKER]}


_SAMPLE = re.compile(r"^([\w:]+)(\{.*\})? (\S+)", re.MULTILINE)


class Pages:
    """The two pages; the greatest value of every metric so far."""

    def __init__(self, deployment: Deployment, worker_port: int) -> None:
        self._urls = [f"{deployment.url}/metrics", f"http://127.0.0.1:{worker_port}/metrics"]
        self.greatest: dict[str, float] = {}
        self._labels: dict[str, set[str]] = {}

    def read(self) -> None:
        """One scrape. The value of a name is the sum of its samples."""
        for url in self._urls:
            with urllib.request.urlopen(url, timeout=20) as answer:
                text = answer.read().decode()
            sums: defaultdict[str, float] = defaultdict(float)
            for name, labels, value in _SAMPLE.findall(text):
                sums[name] += float(value)
                self._labels.setdefault(name, set()).add(labels)
            for name, seen in sums.items():
                self.greatest[name] = max(seen, self.greatest.get(name, 0.0))

    @property
    def labels(self) -> dict[str, set[str]]:
        """The names of the labels of each name."""
        return {
            name: {label for one in found for label in re.findall(r'(\w+)="', one)}
            for name, found in self._labels.items()
        }

    def value(self, spec: AnySpec) -> float | None:
        """The greatest value so far, a histogram's of its count; None if it was never exported."""
        name, kind = spec.name, kind_of(spec)
        if kind == "counter" and not name.endswith("_total"):
            name += "_total"
        if kind == "histogram":
            name += "_count"
        return self.greatest.get(name, self.greatest.get(spec.name))


def traffic(deployment: Deployment, seen: Pages) -> Iterator[Any]:
    """Concurrent requests beyond the capacity of router, worker and cache."""

    def ask(text: str, streaming: bool, tokens: int = 40) -> int:
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": tokens,
            "stream": streaming,
        }
        return deployment.request("POST", "/v1/chat/completions", body)[0]

    with ThreadPoolExecutor(12) as pool:
        yield [pool.submit(ask, f"{number % 3} " + "word " * 30, True) for number in range(12)]
    with ThreadPoolExecutor(1) as pool:
        yield [pool.submit(ask, "0 " + "word " * 30, False)]
    crowded = [spec for spec in [*declared_in(queue), *WORKER] if spec.name not in TESTED_ELSEWHERE]
    for _ in range(80):  # cached by now, so the router queues few of them: six fit into the worker
        seen.read()
        if all(seen.value(spec) for spec in crowded):
            break
        with ThreadPoolExecutor(16) as pool:
            yield [pool.submit(ask, "0 " + "word " * 30, True, 24) for _ in range(16)]


def nonsense(deployment: Deployment) -> None:
    """A request that the HTTP layer rejects, and a client that disconnects early."""
    with socket.create_connection(("127.0.0.1", deployment.port)) as client:
        client.sendall(b"BOTHER\r\n\r\n")
        client.recv(4096)
    body = b'{"model":"tiny","prompt":"leaver","max_tokens":80,"stream":true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", deployment.port)) as client:
        client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        client.recv(4096)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    """Metrics scraped before, during and after the traffic."""
    deployment, port = Deployment(tmp_path_factory.mktemp("pages")), free_port()
    small = ("--block-size", "4", "--num-gpu-blocks-override", "40", "--max-model-len", "150")
    few = ("--max-num-seqs", "3", "--engine-request-limit", "4", "--speedup-ratio", "3")
    limit = {"DYN_DYNAMO_REQUEST_QUEUE_LIMIT": "2"}
    deployment.mocker(*small, *few, **limit, DYN_SYSTEM_PORT=str(port))
    deployment.frontend("--router-mode", "kv", "--router-queue-threshold", "0.003")
    try:
        deployment.wait_for_workers(1)
        seen = Pages(deployment, port)
        for requests in traffic(deployment, seen):
            while wait(requests, timeout=0.02).not_done:
                seen.read()
            assert {request.result() for request in requests} <= {200, 503}
        nonsense(deployment)
        seen.read()
        yield seen
    finally:
        deployment.close()


@pytest.mark.parametrize(
    "spec",
    [spec for spec in SPECS.values() if spec.name not in TESTED_ELSEWHERE],
    ids=lambda spec: spec.name,
)
def test_the_metric_is_exported_and_changes(pages: Pages, spec: AnySpec) -> None:
    value = pages.value(spec)
    assert value is not None, f"{spec.name} is not exported"
    assert value > 0, f"{spec.name} stays 0"


def test_no_page_has_a_name_that_the_docs_call_absent(pages: Pages) -> None:
    absent = tuple(name.removesuffix("…") for name in absent_names())
    assert [name for name in pages.greatest if name.startswith(absent)] == []


@pytest.mark.parametrize("name", ["frontend", "router", "workers"])
def test_the_dashboards_show_what_the_pages_have(pages: Pages, name: str) -> None:
    """Each query of deploy/grafana finds a series with the labels that it names."""
    panels = json.loads((ROOT / f"deploy/grafana/{name}.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    missing = {
        use.metric
        for query in queries
        for use in uses(query)
        if not use.labels - {"instance", "job"} <= pages.labels.get(use.metric, {None})
    }
    assert missing - ABSENT.keys() == set()


def test_workers_name_their_model(pages: Pages) -> None:
    """Dynamo's dashboards filter by it."""
    for name in ("requests_total", "cancellation_total", "request_duration_seconds_count"):
        assert "model" in pages.labels[f"dynamo_component_{name}"]
