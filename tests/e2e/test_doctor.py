"""`dynamo doctor` on this machine, on graphs, and on a running deployment with faults."""

from __future__ import annotations

import json
import os
import socket
import time
import urllib.request
from typing import Any

from deployment import MODEL, free_port
from forked_kit import run_verb
from serving import QUICKSTART, Serving

GRAPH = f"""
Frontend: {{{{run: dynamo.frontend, http-port: {{port}}, router-mode: kv}}}}
Worker:
  run: dynamo.mocker
  model-path: {MODEL}
  model-name: tiny
  block-size: 16
"""


def doctor(serving: Serving, *words: str) -> tuple[int, list[dict[str, Any]]]:
    done = run_verb(
        "doctor", *words, "--json", env={**serving.env, "DYN_NAMESPACE": serving.namespace}
    )
    assert done.stdout, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["findings"]
    return done.returncode, found


def errors(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for one in found if one["severity"] == "error"]


def test_this_machine_in_two_seconds(serving: Serving) -> None:
    start_s = time.monotonic()
    _, found = doctor(serving)
    assert time.monotonic() - start_s < 30  # two on an idle machine
    assert {"gpu", "engines", "nofile", "memlock", "nproc", "shm", "hugepages", "logs"} <= {
        one["check"] for one in found
    }
    assert {"models", "clock", "ports", "exposure"} <= {one["check"] for one in found}
    assert all(one["severity"] == "ok" or one["remedy"] for one in found)
    assert not serving.state_dir.exists()  # nothing is changed


def test_every_problem_of_a_graph_is_a_finding(serving: Serving) -> None:
    graph = serving.graph(GRAPH.format(port=free_port()) + "  bloc-size: 3\n  sped: 1\n")
    status, found = doctor(serving, str(graph))
    assert status == 1
    texts = [one["summary"] for one in errors(found) if one["check"] == "graph"]
    assert len(texts) == 2 and "bloc-size" in texts[0] and "sped" in texts[1]


def test_a_program_on_the_port_is_named(serving: Serving) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        graph = serving.graph(GRAPH.format(port=other.getsockname()[1]))
        status, found = doctor(serving, str(graph))
    (one,) = errors(found)
    assert status == 1 and one["check"] == "ports" and f"(pid {os.getpid()})" in one["summary"]


def test_a_wrong_file_is_no_finding(serving: Serving) -> None:
    done = run_verb("doctor", "nowhere.yaml", env=serving.env)
    assert done.returncode == 2 and "cannot read nowhere.yaml" in done.stderr


def test_a_running_deployment_and_a_dead_event_channel(serving: Serving) -> None:
    graph = serving.graph(GRAPH.format(port=free_port()))
    serving.start(graph, wait="ready: ")
    status, found = doctor(serving)
    by_check = {one["check"]: one for one in found}
    assert status == 0 and errors(found) == []
    assert "1 of 1 workers publish" in by_check["events"]["summary"]
    assert by_check["block-size"]["severity"] == "ok"

    for record in (serving.state_dir / serving.namespace).glob("store/v1/event_channels/*"):
        endpoint = json.loads(record.read_text().partition("\n")[2])["transport"]["endpoint"]
        other = serving.state_dir / "other"  # a removed socket would be bound again
        other.touch()
        other.replace(endpoint.removeprefix("ipc://"))
    graph.write_text(graph.read_text().replace("block-size: 16", "block-size: 32"))
    status, found = doctor(serving, str(graph))
    assert status == 1
    texts = {one["check"]: one["summary"] for one in errors(found)}
    assert f"{serving.namespace}_Worker (tiny) publishes KV events on a dead" in texts["events"]
    assert f"16 ({serving.namespace}_Worker), 32 (Worker)" in texts["block-size"]


def test_a_worker_that_stays_silent_after_a_prompt(serving: Serving) -> None:
    """Its channel works, but its engine caches nothing, so it publishes nothing."""
    port = free_port()
    text = GRAPH.format(port=port) + "  enable-prefix-caching: false\n  speedup-ratio: 0\n"
    serving.start(serving.graph(text), wait="ready: ")
    body = {"model": "tiny", "prompt": "word " * 200, "max_tokens": 2}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    urllib.request.urlopen(request, timeout=30).close()
    found: list[dict[str, Any]] = []

    def is_named() -> bool:
        found[:] = [one for one in doctor(serving)[1] if one["check"] == "events"]
        return bool(found[0]["severity"] == "warning")

    serving.until(is_named)  # the router waits two seconds for events
    assert "1 worker of tiny served prompts, but the KV events" in found[0]["summary"]


def test_the_text_has_a_line_for_each_remedy(serving: Serving) -> None:
    done = run_verb("doctor", str(QUICKSTART), env=serving.env)
    assert "quickstart.yaml: 3 processes" in done.stdout
    lines = done.stdout.splitlines()
    marked = [line for line in lines if line.startswith(("WARN", "ERROR"))]
    assert len(marked) == sum(line.lstrip().startswith("-> ") for line in lines)
    assert " error" in lines[-1]
