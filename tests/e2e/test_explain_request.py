"""``dynamo explain``, /v1/requests and x-dynamo-route against real frontends and mockers."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deployment import Deployment
from forked_kit import run_verb

TEXT = "The quick brown fox jumps over the lazy dog. " * 20
CHAT = "/v1/chat/completions"


def explain(deployment: Deployment, *words: str) -> subprocess.CompletedProcess[str]:
    return run_verb("explain", "--url", deployment.url, *words, env=deployment.env)


def chat(deployment: Deployment, text: str = TEXT, **more: Any) -> tuple[dict[str, str], bytes]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 4}
    headers = more.pop("headers", {})
    status, found, answer = deployment.request("POST", CHAT, {**body, **more}, headers)
    assert status == more.get("status", 200), answer
    return found, answer


def record(deployment: Deployment, name: str = "last") -> Any:
    status, _, body = deployment.request("GET", f"/v1/requests/{name}")
    assert status == 200, body
    return json.loads(body)


@pytest.fixture(scope="module")
def disaggregated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A prefill worker and a decode worker."""
    made = Deployment(tmp_path_factory.mktemp("disaggregated"))
    for mode in ("prefill", "decode"):
        made.mocker("--speedup-ratio", "0", "--block-size", "16", "--disaggregation-mode", mode)
    made.frontend("--router-mode", "kv", "--router-cost", "seconds")
    try:
        made.until(lambda: _ready(made), "both workers")
        yield made
    finally:
        made.close()


def _ready(deployment: Deployment) -> bool:
    try:
        workers = deployment.sample("dynamo_frontend_prefill_workers")
        return workers == 1 and bool(json.loads(deployment.request("GET", "/v1/models")[2])["data"])
    except OSError:
        return False


def test_the_terms_of_a_past_decision(either_deployment: Deployment) -> None:
    # A frontend that has just started asks for the events before; until then it says so.
    either_deployment.until(lambda: not _recovers(either_deployment), "an index that is complete")
    chat(either_deployment, "Once upon a time. " * 30, headers={"x-request-id": "story"})
    # Since then the caches, once the worker has published its blocks, and the last request differ.
    either_deployment.until(lambda: _is_cached(either_deployment), "a prompt that is cached")
    found = record(either_deployment, "story")
    route = found["route"]
    assert (route["mode"], found["outcome"]) == ("kv", "ok")
    assert route["index"] == ("exact" if _has_events(either_deployment) else "predicted")
    assert len(route["candidates"]) == 2
    for row in route["candidates"]:
        assert sum(row["terms"].values()) == pytest.approx(row["cost"])
        assert row.get("overlap_blocks", 0) == 0
    assert route["candidates"][0]["chosen"]
    assert route["candidates"][0]["worker"] == found["worker"]
    assert record(either_deployment)["route"]["candidates"][0]["terms"]["cached"] < 0


def _has_events(deployment: Deployment) -> bool:
    return not deployment.servers


def _recovers(deployment: Deployment) -> bool:
    chat(deployment, "A short one")
    return bool(record(deployment)["route"]["index"] == "recovering")


def _is_cached(deployment: Deployment) -> bool:
    """Ask once more: the worker that answers holds the prompt."""
    chat(deployment, TEXT)
    return bool(record(deployment)["route"]["candidates"][0]["overlap_blocks"] > 3)


def test_the_command(either_deployment: Deployment) -> None:
    chat(either_deployment, headers={"x-request-id": "mine"})
    asked = explain(either_deployment, "mine")
    assert asked.returncode == 0, asked.stderr
    first, *lines = asked.stdout.splitlines()
    assert first.startswith("mine (tiny, chat_completions): worker ")
    stages = [line.split()[0] for line in lines if "|" in line]
    assert stages == ["prepare", "queue", "prefill", "decode", "network"]
    assert sum(line.endswith("  chosen") for line in lines) == 1
    index = "exact" if _has_events(either_deployment) else "predicted"
    assert any(f"index {index}" in line for line in lines)
    assert json.loads(explain(either_deployment, "ine", "--json").stdout)["request_id"] == "mine"
    assert json.loads(explain(either_deployment, "--json").stdout)["client_id"] == "mine"
    unknown = explain(either_deployment, "ffff")
    assert unknown.returncode == 1 and "No request ffff: the last 1000 are kept" in unknown.stderr


@pytest.mark.parametrize("stream", [False, True])
def test_the_header(either_deployment: Deployment, stream: bool) -> None:
    assert "x-dynamo-route" not in chat(either_deployment, stream=stream)[0]
    headers, _ = chat(either_deployment, stream=stream, headers={"x-dynamo-route": "1"})
    route = json.loads(headers["x-dynamo-route"])
    found = record(either_deployment, route["request"])
    assert (route["worker"], route["reason"]) == (found["worker"], found["route"]["reason"])
    assert (route["overlap"], route["blocks"]) == (found["overlap_blocks"], found["prompt_blocks"])
    shown = [(one["worker"], one["cost"]) for one in found["route"]["candidates"]]
    assert [(one[0], one[3]) for one in route["candidates"]] == shown
    # A client that is no operator: the load of the others is not shown.
    asked = {"x-dynamo-route": "1", "x-forwarded-for": "10.0.0.1"}
    headers, _ = chat(either_deployment, stream=stream, headers=asked)
    assert "candidates" not in json.loads(headers["x-dynamo-route"])


def test_without_a_cost_in_seconds_nothing_is_learned(shared_deployment: Deployment) -> None:
    fits = explain(shared_deployment, "--model-fit")
    assert fits.returncode == 1
    assert fits.stdout == (
        "tiny: no cost in seconds; start the frontend with --router-cost seconds\n"
    )


def test_failed_requests(shared_deployment: Deployment) -> None:
    chat(shared_deployment, temperature=99, status=400, headers={"x-request-id": "bad"})
    found = record(shared_deployment, "bad")
    assert found["outcome"] == "validation" and "worker" not in found
    asked = explain(shared_deployment, "bad")
    assert "no worker got it; it ended with validation" in asked.stdout
    status, _, body = shared_deployment.request("GET", "/v1/requests?limit=3")
    listed = json.loads(body)["requests"]
    assert status == 200 and len(listed) == 3 and listed[0]["client_id"] == "bad"
    assert all("route" not in one for one in listed)


def test_both_decisions_of_a_disaggregated_request(disaggregated: Deployment) -> None:
    headers, answer = chat(disaggregated, headers={"x-dynamo-route": "1"})
    found = record(disaggregated, json.loads(answer)["id"])
    route = json.loads(headers["x-dynamo-route"])
    assert route["worker"] == found["worker"] != found["prefill_worker"] == route["prefill_worker"]
    assert found["route"]["reason"] == found["prefill_route"]["reason"] == "the only worker"
    assert found["prefill_route"]["candidates"][0]["worker"] == found["prefill_worker"]
    assert (found["prefill_route"]["unit"], found["route"]["unit"]) == ("seconds", "blocks")
    terms = found["prefill_route"]["candidates"][0]["terms"]
    assert set(terms) == {"wait", "compute", "others", "running"} and terms["compute"] > 0
    shown = explain(disaggregated).stdout
    assert "in milliseconds; the cost is the sum" in shown
    fits = explain(disaggregated, "--model-fit")
    assert fits.returncode == 0, fits.stderr
    title, row, *_ = fits.stdout.splitlines()
    assert title.startswith("tiny, prefill workers: a prompt takes ") and "measured" in title
    assert row == f"  worker {found['prefill_worker']}: 1.00 times as long"
    learned = json.loads(explain(disaggregated, "--model-fit", "--json").stdout)
    assert learned["tiny"]["prefill"]["speed"]["token_s"] > 0
    assert "\nprefill worker\n" in shown and "\ndecode worker\n" in shown
    assert f"prefilled by {found['prefill_worker']}, worker {found['worker']}" in shown


def test_without_the_admin_api(deployment: Deployment, tmp_path: Path) -> None:
    deployment.mocker("--speedup-ratio", "0", "--block-size", "16")
    deployment.frontend("--router-mode", "kv", DYN_DISABLE_FRONTEND_ADMIN_API="1")
    deployment.wait_for_workers(1)
    assert deployment.request("GET", "/v1/requests")[0] == 404
    headers, _ = chat(deployment, headers={"x-dynamo-route": "1"})
    route = json.loads(headers["x-dynamo-route"])
    assert route["reason"] == "the only worker" and "candidates" not in route
    assert explain(deployment).returncode == 1
