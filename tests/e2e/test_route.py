"""``dynamo route`` and POST /v1/route against a real frontend with two mockers."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from deployment import Deployment
from forked_kit import run_verb

TEXT = "The quick brown fox jumps over the lazy dog. " * 20


def route(deployment: Deployment, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return run_verb("route", "--url", deployment.url, *words, env=deployment.env, stdin=stdin)


def test_a_prompt_goes_to_the_worker_that_cached_it(
    either_deployment: Deployment, tmp_path: Path
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(TEXT)
    asked = route(either_deployment, "--prompt-file", str(file), "--explain")
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.count("chosen") == 1
    assert len(asked.stdout.splitlines()) == 4  # the prompt, the titles, two workers
    found: dict[str, Any] = json.loads(
        route(either_deployment, "--prompt-file", str(file), "--json").stdout
    )
    assert found["prompt_blocks"] > 3
    given = json.loads(route(either_deployment, TEXT, "--json").stdout)
    assert given["isl_tokens"] == found["isl_tokens"]
    assert len(found["candidates"]) == 2 and found["error"] == ""
    assert [row["active_requests"] for row in found["candidates"]] == [0, 0]


def test_a_chat_body_and_its_pin(either_deployment: Deployment) -> None:
    body = {"messages": [{"role": "user", "content": TEXT}]}
    asked = route(either_deployment, "--prompt-file", "-", "--json", stdin=json.dumps(body))
    assert asked.returncode == 0, asked.stderr
    rows = json.loads(asked.stdout)["candidates"]
    other = next(row["worker_id"] for row in rows if not row["chosen"])
    pinned = {**body, "nvext": {"backend_instance_id": other}}
    asked = route(either_deployment, "--prompt-file", "-", stdin=json.dumps(pinned))
    assert f"worker {other:x} dp_rank 0" in asked.stdout


def test_invalid_requests(either_deployment: Deployment, tmp_path: Path) -> None:
    assert route(either_deployment).returncode == 2
    both = route(either_deployment, TEXT, "--prompt-file", "-")
    assert (both.returncode, "not both" in both.stderr) == (2, True)
    assert route(either_deployment, "--prompt-file", str(tmp_path / "none")).returncode == 2
    wrong = route(either_deployment, "--prompt-file", "-", "--model", "nope", stdin="hello")
    assert (wrong.returncode, "404" in wrong.stderr) == (1, True)
    assert "Model not found: nope" in wrong.stderr and "{" not in wrong.stderr
    unreachable = route(either_deployment, "--url", "http://127.0.0.1:9", "--prompt-file", "-")
    assert (unreachable.returncode, "can't reach" in unreachable.stderr) == (1, True)


def test_the_table_gives_reasons(either_deployment: Deployment) -> None:
    body = {"prompt": TEXT, "nvext": {"allowed_worker_ids": [1]}}
    asked = route(either_deployment, "--prompt-file", "-", "--explain", stdin=json.dumps(body))
    assert asked.returncode == 1
    head, titles, *rows, last = asked.stdout.splitlines()
    assert "full blocks of 16; cost = 1 * prefill blocks + decode blocks" in head
    for title in ("overlap", "active prefill", "active decode", "credit", "cost", "note"):
        assert title in titles
    assert [row.endswith("not in the request's allow-list") for row in rows] == [True, True]
    assert last == "no worker: no endpoints: none of the request's allowed workers is registered"


def test_a_server_that_is_not_a_frontend() -> None:
    class Stranger(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>hello</html>")

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Stranger) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        command = [sys.executable, "-m", "dynamo", "route", "--url", url, "--prompt-file", "-"]
        asked = subprocess.run(command, input="x", capture_output=True, text=True, timeout=60)
        server.shutdown()
    assert asked.returncode == 1
    assert asked.stderr == f"dynamo route: {url} is not a Dynamo frontend\n"
