"""deploy/grafana with a real Prometheus: targets, the queries of every panel, alerts that fire."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from boxes import Server, binary, needs
from deployment import MODEL, Deployment, free_port
from load_kit import under_load
from serving import ROOT, Serving

FOLDER = ROOT / "deploy/grafana"
RANGE = "10s"  # of rates, for a scrape each half second
GRAPH = """
Common: {{model-path: {model}, model-name: tiny, block-size: 16, speedup-ratio: 5}}
Frontend:
  run: dynamo.frontend
  http-port: {frontend}
  router-mode: kv
  router-queue-threshold: 1
PrefillWorker:
  run: dynamo.mocker
  common-configs: [model-path, model-name, block-size, speedup-ratio]
  disaggregation-mode: prefill
  ServiceArgs: {{envs: {{DYN_SYSTEM_PORT: "{prefill}"}}}}
DecodeWorker:
  run: dynamo.mocker
  common-configs: [model-path, model-name, block-size, speedup-ratio]
  disaggregation-mode: decode
  ServiceArgs:
    workers: 2
    min: 2
    envs:
      DYN_SYSTEM_PORT: "{decode}"
      DYN_HEALTH_CHECK_ENABLED: "true"
      DYN_CANARY_WAIT_TIME: "0.5"
Planner:
  run: dynamo.planner
  mode: load+sla
  adjustment-interval: 1
  max-gpu-budget: 3
  ServiceArgs: {{envs: {{DYN_SYSTEM_PORT: "{planner}"}}}}
"""
HEALTH_CHECKS = ("workers", "Health checks", "{{result}}")
"""An idle worker is checked, so that load may leave this without data."""
MAY_BE_EMPTY = {
    # A counter has no series before its first event.
    ("frontend", "Rejected, cancelled, migrated", "rejected"),
    ("frontend", "Rejected, cancelled, migrated", "migrated"),
    ("router", "Warnings", "{{warning_kind}}"),
    ("workers", "Errors", "{{worker_id}} {{error_type}}"),
    # The planner first learns what a request costs, under more load than here.
    ("planner", "Time to first token", "{{model}} estimated ttft ms"),
    ("planner", "Time between tokens", "{{model}} estimated itl ms"),
    ("planner", "Requests per second", "{{model}} predicted requests per second"),
    ("planner", "Prompt tokens", "{{model}} predicted input sequence tokens"),
    ("planner", "Output tokens", "{{model}} predicted output sequence tokens"),
}
pytestmark = needs("prometheus", "prometheus")


class Prometheus(Server):
    """A Prometheus with the files of deploy/grafana, at other ports and shorter intervals."""

    def __init__(self, folder: Path, frontend: int, planner: int, workers: list[int]) -> None:
        program = binary("prometheus")
        assert program is not None
        port = free_port()
        folder.mkdir()
        text = (FOLDER / "prometheus.yml").read_text()
        for old, new in ((8000, frontend), (9100, workers[0]), (9090, planner)):
            assert f'"127.0.0.1:{old}"' in text
            text = text.replace(f'"127.0.0.1:{old}"', f'"127.0.0.1:{new}"')
        (folder / "prometheus.yml").write_text(text.replace("_interval: 10s", "_interval: 500ms"))
        rules = (FOLDER / "alerts.yml").read_text()
        rules = re.sub(r"for: \d+m", "for: 1s", rules)
        (folder / "alerts.yml").write_text(rules.replace("[5m]", f"[{RANGE}]"))
        others = [f"127.0.0.1:{port}" for port in workers[1:]]
        group = {"targets": others, "labels": {"namespace": "dynamo"}}
        (folder / "targets.json").write_text(json.dumps([group]))
        command = [
            *(program, "--config.file", str(folder / "prometheus.yml")),
            *("--storage.tsdb.path", str(folder / "data")),
            *("--web.listen-address", f"127.0.0.1:{port}", "--log.level", "warn"),
        ]
        super().__init__(command, "127.0.0.1", port, folder / "prometheus.log")

    def _answers(self) -> bool:
        """Whether it is ready: it listens before, and answers queries with 503."""
        with contextlib.suppress(OSError):
            url = f"http://127.0.0.1:{self.port}/-/ready"
            with urllib.request.urlopen(url, timeout=10) as answer:
                return bool(answer.status == 200)
        return False

    def get(self, path: str, **params: str) -> Any:
        query = urllib.parse.urlencode(params)
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{query}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    def targets(self) -> dict[str, str]:
        found = self.get("targets")["activeTargets"]
        return {one["scrapeUrl"]: one["health"] for one in found}

    def query(self, expression: str) -> Any:
        return self.get("query", query=expression)["result"]

    def firing(self) -> set[str]:
        alerts = self.get("alerts")["alerts"]
        return {one["labels"]["alertname"] for one in alerts if one["state"] == "firing"}


class Query(NamedTuple):
    """A query of a panel, its variables replaced."""

    dashboard: str
    panel: str
    legend: str
    expression: str


def queries() -> Iterator[Query]:
    """Those of all dashboards."""
    for path in FOLDER.glob("*.json"):
        document = json.loads(path.read_text())
        for panel in document["panels"]:
            for target in panel.get("targets", ()):
                text = target["expr"].replace("$__rate_interval", RANGE)
                for one in document["templating"]["list"]:
                    text = text.replace(f"${one['name']}", ".*")
                yield Query(path.stem, panel["title"], target["legendFormat"], text)


def empty(prometheus: Prometheus, among: Iterable[Query]) -> set[Query]:
    """Those of ``among`` without data. Legends name labels that the data has."""
    found = set()
    for query in among:
        rows = prometheus.query(query.expression)
        if not rows:
            found.add(query)
        for row in rows:
            assert set(re.findall(r"{{(\w+)}}", query.legend)) <= row["metric"].keys(), query
    return found


def send_wrong_and_cancelled(port: int) -> None:
    body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": -1})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    assert connection.getresponse().status == 400
    connection.close()
    prompt = "a b c d e f g h " * 8  # more than a block
    asked = {"model": "tiny", "prompt": prompt, "max_tokens": 4000, "ignore_eos": True}
    body = json.dumps({**asked, "stream": True})
    head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
        assert client.recv(65536).startswith(b"HTTP/1.1 200")  # it streams


def test_every_panel_shows_data(serving: Serving, tmp_path: Path) -> None:
    frontend, planner, prefill, decode, second = _ports()
    text = GRAPH.format(
        model=MODEL, frontend=frontend, planner=planner, prefill=prefill, decode=decode
    )
    workers = [decode, second, prefill]
    prometheus = Prometheus(tmp_path / "prometheus", frontend, planner, workers)
    prometheus.start()
    try:
        serving.start(serving.graph(text), wait="ready: http://")
        with under_load(frontend, clients=4, tokens=20):
            serving.until(lambda: set(prometheus.targets().values()) == {"up"})
            assert len(prometheus.targets()) == 5
            left = _until_only_these_are_empty(
                serving, prometheus, frontend, set(queries()), {*MAY_BE_EMPTY, HEALTH_CHECKS}
            )
        # Without requests: only an idle worker is checked.
        _until_only_these_are_empty(serving, prometheus, None, left, MAY_BE_EMPTY)
        # The planner may replace a worker for longer than the second that these rules wait.
        assert prometheus.firing() <= {"DynamoWorkersMissing"}
    finally:
        prometheus.kill()


def _ports() -> list[int]:
    """Free ports; the last two are successive, for the workers of one service."""
    for _ in range(50):
        ports = [free_port() for _ in range(4)]
        with socket.socket() as probe:
            if ports[3] < 65535 and probe.connect_ex(("127.0.0.1", ports[3] + 1)):
                return [*ports, ports[3] + 1]
    raise AssertionError("no two free ports in a row")


def _until_only_these_are_empty(
    serving: Serving,
    prometheus: Prometheus,
    frontend: int | None,
    left: set[Query],
    these: set[tuple[str, str, str]],
) -> set[Query]:
    """Wait for data of all queries in ``left`` but ``these``; return those without."""

    def seen() -> bool:
        nonlocal left
        if frontend is not None:
            send_wrong_and_cancelled(frontend)
        left = empty(prometheus, left)
        return {one[:3] for one in left} <= these

    try:
        serving.until(seen)
    except AssertionError:
        raise AssertionError(f"without data: {left}") from None
    return left


def test_faults_fire_alerts(deployment: Deployment, tmp_path: Path) -> None:
    """A hung worker, a model without workers, a dead frontend."""
    first, second = free_port(), free_port()
    no_planner = 1  # nothing listens there; a free port could become Prometheus's own
    prometheus = Prometheus(tmp_path / "prometheus", deployment.port, no_planner, [first, second])
    prometheus.start()
    try:
        for port in (first, second):
            deployment.mocker("--speedup-ratio", "0", DYN_SYSTEM_PORT=str(port), ETCD_LEASE_TTL="2")
        deployment.frontend(ETCD_LEASE_TTL="2")
        deployment.wait_for_workers(2)
        up = f'up{{instance=~".*:({first}|{second})"}} == 1'
        deployment.until(lambda: len(prometheus.query(up)) == 2)
        deployment.until(lambda: not prometheus.firing())
        hung, dead, frontend = deployment.processes
        hung.send_signal(signal.SIGSTOP)
        try:
            deployment.until(lambda: prometheus.firing() == {"DynamoWorkerDown"})
        except AssertionError:
            raise AssertionError(f"firing: {prometheus.get('alerts')}") from None
        hung.kill()
        dead.kill()
        both = {"DynamoWorkerDown", "DynamoModelNotReady"}
        deployment.until(lambda: prometheus.firing() >= both)
        frontend.kill()
        deployment.until(lambda: "DynamoFrontendDown" in prometheus.firing())
    finally:
        prometheus.kill()
