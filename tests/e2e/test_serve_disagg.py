"""The example of disaggregated serving."""

from __future__ import annotations

import json
import urllib.request

from deployment import free_port
from serving import ROOT, Serving


def test_prefill_and_decode_run_on_different_workers(serving: Serving) -> None:
    serving.namespace = "disagg"
    url = f"http://127.0.0.1:{free_port()}"
    port = f"--Frontend.http-port={url.rpartition(':')[2]}"
    serving.start(ROOT / "examples/disagg.yaml", port)
    serving.until(lambda: b'prefill_workers{model="tiny"} 2' in _get(f"{url}/metrics"))
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello " * 50}],
        "max_tokens": 4,
        "nvext": {"extra_fields": ["worker_id"]},
    }
    answer = json.loads(_get(f"{url}/v1/chat/completions", json.dumps(body).encode()))
    ids = answer["nvext"]["worker_id"]
    assert answer["usage"]["completion_tokens"] == 4
    assert ids["prefill_worker_id"] != ids["decode_worker_id"]
    assert serving.stop() == 0
    serving.assert_clean()


def _get(url: str, body: bytes | None = None) -> bytes:
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return bytes(answer.read())
    except OSError:
        return b""
