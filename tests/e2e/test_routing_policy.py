"""A routing policy in Python, live: it decides, and what it breaks goes on without it."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

from deployment import free_port
from serving import ROOT, Serving

EXAMPLE = ROOT / "examples/routing_policy"


def start(serving: Serving, directory: Path, wait: str = "ready: ") -> str:
    """Serve the example from a copy in ``directory``; return the URL."""
    for name in ("graph.yaml", "policy.yaml", "even_batches.py"):
        if not (directory / name).exists():
            (directory / name).write_text((EXAMPLE / name).read_text())
    url = f"http://127.0.0.1:{free_port()}"
    serving.namespace = "routing-policy"
    options = f"--Frontend.http-port={url.rpartition(':')[2]}", "--Worker.speedup-ratio=0"
    model = f"--Worker.model-path={ROOT / 'examples/model'}"
    serving.start(directory / "graph.yaml", *options, model, wait=wait)
    return url


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


def complete(url: str, count: int, **more: str) -> None:
    body = json.dumps({"model": "tiny", "prompt": "hello there", "max_tokens": 4}).encode()
    headers = {"content-type": "application/json", **more}
    for _ in range(count):
        request = urllib.request.Request(f"{url}/v1/completions", body, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.status == 200


def samples(url: str, family: str) -> dict[str, float]:
    lines = [line for line in read(f"{url}/metrics").splitlines() if line.startswith(family)]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_the_example_chooses_workers(serving: Serving, tmp_path: Path) -> None:
    url = start(serving, tmp_path)
    assert "policy even-batches" in serving.text() and "no effect" not in serving.text()
    complete(url, 3)
    (active,) = samples(url, "dynamo_frontend_router_policy_active").items()
    assert 'policy="even-batches"' in active[0] and active[1] == 1
    (decided,) = samples(url, "dynamo_frontend_router_policy_seconds_count").values()
    assert decided >= 3
    assert serving.stop() == 0
    serving.assert_clean()


CLASSES = """
default_policy_family: standard
uncached_isl_buckets:
  - {min_tokens: 0, bucket: short}
  - {min_tokens: 3072, bucket: long}
policy_classes:
  - {name: short, policy_family: standard, cache_bucket: short, quantum: 2048}
  - {name: long, policy_family: standard, cache_bucket: long, quantum: 512}
  - {name: nightly, quantum: 128, prefill_busy_threshold: 0, request_queue_limit_per_worker: 64}
"""


CLASSIFIER = """
class NightShift:
    def __init__(self, prefix):
        self.prefix = prefix

    def classify(self, request):
        return "nightly" if (request.session_id or "").startswith(self.prefix) else None
"""


def test_a_class_in_python_names_the_class_of_requests(serving: Serving, tmp_path: Path) -> None:
    (tmp_path / "shift.py").write_text(CLASSIFIER)
    named = "request_classifier: {type: 'shift.py:NightShift', parameters: {prefix: batch-}}\n"
    (tmp_path / "policy.yaml").write_text(CLASSES + named)
    url = start(serving, tmp_path)
    complete(url, 1)
    complete(url, 3, **{"x-dynamo-session-id": "batch-7"})
    complete(url, 2, **{"x-dynamo-session-id": "user-7"})
    received = samples(url, "dynamo_frontend_router_admission_received_total")
    counts = {name.split('policy_class="')[1].split('"')[0]: n for name, n in received.items()}
    assert counts == {"short": 3, "long": 0, "nightly": 3}
    assert serving.stop() == 0
    serving.assert_clean()


def test_clients_name_the_class_of_their_requests(serving: Serving, tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(CLASSES)
    url = start(serving, tmp_path)
    assert "queue by policy classes" in serving.text()
    complete(url, 2)
    complete(url, 3, **{"x-dynamo-meta-policy-class": "nightly"})
    received = samples(url, "dynamo_frontend_router_admission_received_total")
    counts = {name.split('policy_class="')[1].split('"')[0]: n for name, n in received.items()}
    assert counts == {"short": 2, "long": 0, "nightly": 3}
    assert serving.stop() == 0
    serving.assert_clean()


def test_a_policy_that_fails_is_switched_off(serving: Serving, tmp_path: Path) -> None:
    text = (EXAMPLE / "even_batches.py").read_text()
    fails = text.replace("return [", "assert request.tokens == 100, 'boom'\n        return [")
    (tmp_path / "even_batches.py").write_text(fails)  # the sample request has 100
    url = start(serving, tmp_path)
    complete(url, 3)
    assert list(samples(url, "dynamo_frontend_router_policy_active").values()) == [0]
    failures = samples(url, "dynamo_frontend_router_policy_failures_total")
    assert sum(failures.values()) == 1
    serving.wait_for("policy even-batches is switched off until the router restarts")
    serving.wait_for("AssertionError: boom")
    assert serving.stop() == 0


def test_a_policy_that_cannot_be_made_ends_the_start(serving: Serving, tmp_path: Path) -> None:
    (tmp_path / "even_batches.py").write_text("class EvenBatches:\n    pass\n")
    start(serving, tmp_path, wait="EvenBatches")
    assert "EvenBatches() takes no arguments" in serving.text()
    assert serving.process is not None and serving.process.wait(60) == 2
