"""``dynamo serve`` on two boxes: the second one has workers only, and its own state directory."""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from boxes import Etcd, Nats, needs_etcd, needs_nats
from deployment import free_port
from serving import ROOT, Serving
from until import poll

pytestmark = [needs_etcd, needs_nats]
GRAPH = f"""
Frontend:
  run: dynamo.frontend
  router-mode: kv
  http-port: PORT
Worker: &worker
  run: dynamo.mocker
  model-path: {ROOT}/examples/model
  model-name: tiny
  speedup-ratio: 0
"""


@pytest.fixture
def boxes(tmp_path: Path, etcd_server: Etcd, nats_server: Nats) -> Iterator[list[Serving]]:
    """Two state directories, one namespace, one etcd."""
    made = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        box = Serving(tmp_path / name)
        box.env.update(
            DYN_DISCOVERY_BACKEND="etcd",
            ETCD_ENDPOINTS=etcd_server.url,
            ETCD_LEASE_TTL="2",
            DYN_REQUEST_PLANE="tcp",
            DYN_EVENT_PLANE="nats",
            NATS_SERVER=nats_server.url,
        )
        made.append(box)
    made[1].namespace = made[0].namespace
    yield made
    for box in made:
        box.close()


def workers(port: int) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/health")
    found = json.loads(connection.getresponse().read())
    connection.close()
    return sum(one["endpoint"] == "generate" for one in found["instances"])


def until_workers(port: int, count: int, box: Serving) -> None:
    poll(lambda: workers(port) == count, lambda: f"{workers(port)} workers\n{box.text()}")


def test_two_boxes_serve_one_model(boxes: list[Serving]) -> None:
    first, second = boxes
    port = free_port()
    first.start(GRAPH.replace("PORT", str(port)), wait="ready: ")
    frontend, worker = GRAPH.split("Worker:")
    assert frontend
    second.start(f"Worker:{worker}", wait="serving tiny")
    until_workers(port, 2, first)
    (old,) = second.wait_for_pids("Worker")
    os.kill(old, signal.SIGKILL)
    second.wait_for_pids("Worker", unlike=old)
    second.wait_for("serving tiny")
    until_workers(port, 2, first)  # the new one is there, and the dead one's lease has run out
    assert second.stop(signal.SIGINT) == 0
    until_workers(port, 1, first)
    assert first.stop(signal.SIGINT) == 0
    for box in boxes:
        box.assert_clean()
