"""Disaggregated serving with real processes: equal answers, killed, missing and late workers."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from deployment import Deployment
from mocker_kit import caller

from dynamo.protocols import codec
from dynamo.protocols.kv import PrefillQueueState

PROMPT = "Disaggregated serving computes the prompt in one place and the answer in another. " * 4
_QUEUE = codec.decoder(PrefillQueueState).decode


def prefiller(deployment: Deployment, *flags: str, **env: str) -> subprocess.Popen[bytes]:
    mode = "--disaggregation-mode", "prefill"
    return deployment.mocker(*mode, "--block-size", "16", *flags, **env)


def decoder(deployment: Deployment, *flags: str) -> subprocess.Popen[bytes]:
    return deployment.mocker("--disaggregation-mode", "decode", "--block-size", "16", *flags)


def prefill_overlap(deployment: Deployment) -> int:
    """Return the blocks of PROMPT that a prefill worker has cached, as the router counts them."""
    answer = deployment.request("POST", "/v1/route", {"model": "tiny", "prompt": PROMPT})[2]
    prefill = json.loads(answer)["prefill"] or {"candidates": []}
    return max((row["overlap_blocks"] for row in prefill["candidates"]), default=0)


def complete(deployment: Deployment, prompt: str = PROMPT, **more: Any) -> tuple[int, Any]:
    """Return status and body of one completion with a seed, so that its tokens are known."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 6,
        "seed": 3,
        "nvext": {"extra_fields": ["worker_id", "timing"]},
        **more,
    }
    status, _, answer = deployment.request("POST", "/v1/completions", body)
    return status, json.loads(answer)


def route(deployment: Deployment, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run ``dynamo route`` for the prompt."""
    command = [sys.executable, "-m", "dynamo", "route", "--url", deployment.url]
    return subprocess.run(
        [*command, "--prompt-file", "-", *flags],
        env=deployment.env,
        input=PROMPT,
        capture_output=True,
        text=True,
        timeout=60,
    )


def prefill_workers(deployment: Deployment, count: int) -> None:
    def there() -> bool:
        return deployment.sample("dynamo_frontend_prefill_workers") == count

    deployment.until(there, f"{count} prefill workers")


def test_the_answer_is_that_of_an_aggregated_worker(deployment: Deployment) -> None:
    """Serve with one aggregated worker first, then with prefill workers that start later."""
    fast = ("--speedup-ratio", "10")
    decoder(deployment, *fast, "--kv-bytes-per-token", "16000000")
    deployment.frontend("--router-mode", "kv")
    deployment.wait_for_workers(1)
    status, alone = complete(deployment)
    assert status == 200
    prefiller(deployment, *fast)
    prefill_workers(deployment, 1)
    status, apart = complete(deployment)
    assert status == 200
    assert apart["choices"] == alone["choices"]
    assert apart["usage"] == alone["usage"]
    ids, timing = apart["nvext"]["worker_id"], apart["nvext"]["timing"]
    assert ids["decode_worker_id"] == alone["nvext"]["worker_id"]["decode_worker_id"]
    assert ids["prefill_worker_id"] != ids["decode_worker_id"]
    assert 0 < timing["prefill_wait_time_ms"] < timing["ttft_ms"]
    transfer_ms = apart["usage"]["prompt_tokens"] * 16e6 / 64e9 / 10 * 1e3
    after_ms = timing["ttft_ms"] - timing["prefill_wait_time_ms"] - timing["prefill_time_ms"]
    assert after_ms >= transfer_ms, "the first token waits for the blocks"
    deployment.until(lambda: prefill_overlap(deployment) > 0, "the prefill router has its events")
    _, again = complete(deployment)
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0 and cached % 16 == 0, (
        "the prefill worker's cache, reported by the decode worker"
    )
    assert again["nvext"]["timing"]["kv_hit_rate"] > 0, "the prefill router indexes that cache"
    for phase, keys in (
        ("prefill", {"prefill_worker_id", "prefill_dp_rank"}),
        ("decode", {"decode_worker_id", "decode_dp_rank"}),
        ("", ids.keys()),
    ):
        nvext = {"annotations": [f"query_instance_id:{phase}"]}
        body = {"model": "tiny", "prompt": PROMPT, "nvext": nvext}
        event = deployment.request("POST", "/v1/completions", body)[2].split(b"\n")[0]
        found = json.loads(event.removeprefix(b"data: "))["nvext"]["worker_id"]
        assert found == {key: ids[key] for key in keys}
    asked = route(deployment)
    assert asked.stdout.startswith(f"prefill: worker {ids['prefill_worker_id']:x} ")
    assert f"\ndecode: worker {ids['decode_worker_id']:x} " in asked.stdout
    table = route(deployment, "--explain").stdout
    assert table.startswith("prefill workers\n") and "\ndecode workers\n" in table
    assert table.count("chosen") == 2
    label = 'worker_type="prefill"'
    page = deployment.request("GET", "/metrics")[2].decode()
    assert re.search(rf"dynamo_frontend_worker_last_input_sequence_tokens{{.*{label}}} \d+", page)
    assert deployment.sample("dynamo_frontend_prefill_requests_total") == 2
    assert deployment.sample("dynamo_frontend_prefill_seconds_count") == 2
    assert deployment.sample("dynamo_frontend_prefill_queue_wait_seconds_count") == 2


async def test_a_killed_prefill_worker_loses_nothing(deployment: Deployment) -> None:
    """Requests run on both prefill workers and are queued; one is killed, then the other."""
    doomed = prefiller(deployment, "--speedup-ratio", "0.001")
    other = prefiller(deployment, "--speedup-ratio", "0.001")
    decoder(deployment, "--speedup-ratio", "10")
    deployment.frontend("--router-mode", "kv", "--router-prefill-slots", "1")
    await asyncio.to_thread(deployment.wait_for_workers, 3)
    await asyncio.to_thread(prefill_workers, deployment, 2)
    states: list[PrefillQueueState] = []
    with ThreadPoolExecutor(8) as pool:
        async with caller(deployment, 2, "prefill") as here:
            subscription = here.runtime.subscribe(
                deployment.namespace,
                "prefill",
                "prefill_queue",
                lambda _publisher, _sequence, payload: states.append(_QUEUE(payload)),
            )
            await subscription.ready()
            await asyncio.to_thread(deployment.until, lambda: bool(states), "a queue state")
            answers = [pool.submit(complete, deployment, f"{n} {PROMPT}") for n in range(6)]
            await asyncio.to_thread(
                deployment.until,
                lambda: any(one.size == 4 for one in states),
                "a queue of 4",
            )
            assert deployment.sample("dynamo_frontend_prefill_queue_depth") == 4
            doomed.send_signal(signal.SIGKILL)
            requeues = "dynamo_frontend_prefill_requeues_total"
            await asyncio.to_thread(
                deployment.until, lambda: deployment.sample(requeues) == 1, "a requeue"
            )
            other.send_signal(signal.SIGKILL)
            done = [await asyncio.to_thread(answer.result, 30) for answer in answers]
            await asyncio.to_thread(
                deployment.until, lambda: states[-1].size == 0, "an empty queue"
            )
    assert [status for status, _ in done] == [200] * 6, deployment.tail()
    assert all(body["usage"]["completion_tokens"] == 6 for _, body in done)
    assert {one.model for one in states} == {"tiny"} and states[0].workers == 2
    assert deployment.sample("dynamo_frontend_prefill_fallbacks_total") >= 4
    status, body = await asyncio.to_thread(complete, deployment)
    ids = body["nvext"]["worker_id"]
    assert status == 200 and ids["prefill_worker_id"] == ids["decode_worker_id"]


def test_enforced_disaggregation_fails_without_a_prefill_worker(deployment: Deployment) -> None:
    decoder(deployment, "--speedup-ratio", "10")
    deployment.frontend("--router-mode", "round-robin", "--enforce-disagg")
    deployment.wait_for_workers(1)
    status, body = complete(deployment)
    assert status == 503 and "--enforce-disagg" in body["message"]
    late = prefiller(deployment, "--speedup-ratio", "10")
    prefill_workers(deployment, 1)
    status, body = complete(deployment)
    assert status == 200 and set(body["nvext"]["worker_id"]) == {
        "prefill_worker_id",
        "decode_worker_id",
    }
    late.send_signal(signal.SIGTERM)
    prefill_workers(deployment, 0)
    assert complete(deployment)[0] == 503
    assert deployment.sample("dynamo_frontend_prefill_refused_total") == 2


def test_a_client_that_leaves_during_prefill_frees_the_slot(deployment: Deployment) -> None:
    """The prefill takes a minute; the next client is still answered at once."""
    prefiller(deployment, "--speedup-ratio", "0.0003")
    decoder(deployment, "--speedup-ratio", "10")
    deployment.frontend("--router-mode", "kv", DYN_ROUTER_PREFILL_SLOTS="1")
    deployment.wait_for_workers(2)
    prefill_workers(deployment, 1)
    body = json.dumps({"model": "tiny", "prompt": PROMPT, "max_tokens": 4}).encode()
    clients = []
    for _ in range(2):
        client = http.client.HTTPConnection("127.0.0.1", deployment.port, timeout=30)
        client.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        clients.append(client)
    names = [f"dynamo_frontend_prefill_{name}" for name in ("active_requests", "queue_depth")]

    def state() -> list[float]:
        return [deployment.sample(name) for name in names]

    deployment.until(lambda: state() == [1, 1], "one at work and one waiting")
    clients[0].close()
    deployment.until(lambda: deployment.sample(names[1]) == 0, "the slot")
    assert deployment.sample(names[0]) == 1
    clients[1].close()
    deployment.until(lambda: state() == [0, 0], "nothing left")
    load = "dynamo_frontend_worker_active_prefill_tokens"
    deployment.until(lambda: deployment.sample(load) == 0, "no load left")


def test_a_hung_prefill_worker_is_abandoned(deployment: Deployment) -> None:
    """Its connection stays open: its lease expires, then the drain timeout."""
    hung = prefiller(deployment, "--speedup-ratio", "10", ETCD_LEASE_TTL="0.5")
    decoder(deployment, "--speedup-ratio", "10")
    deployment.frontend(
        "--router-mode", "kv", "--router-prefill-slots", "1", DYN_PREFILL_DRAIN_TIMEOUT_S="0.3"
    )
    deployment.wait_for_workers(2)
    prefill_workers(deployment, 1)
    hung.send_signal(signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(2) as pool:
            answers = [pool.submit(complete, deployment, f"{n} {PROMPT}") for n in range(2)]
            done = [answer.result(20) for answer in answers]
    finally:
        hung.send_signal(signal.SIGCONT)
    assert [status for status, _ in done] == [200, 200], deployment.tail()
    assert all(body["usage"]["completion_tokens"] == 6 for _, body in done)
    assert deployment.sample("dynamo_frontend_prefill_fallbacks_total") == 2
    prefill_workers(deployment, 1)
    status, body = complete(deployment)
    ids = body["nvext"]["worker_id"]
    assert status == 200 and ids["prefill_worker_id"] != ids["decode_worker_id"], "it is back"


def test_queued_prefills_are_served_during_the_drain(
    deployment: Deployment,
) -> None:
    """SIGTERM while one prompt is computed and two are queued: all three are answered."""
    prefiller(deployment, "--speedup-ratio", "0.05")
    decoder(deployment, "--speedup-ratio", "10")
    frontend = deployment.frontend("--router-mode", "kv", "--router-prefill-slots", "1")
    deployment.wait_for_workers(2)
    prefill_workers(deployment, 1)
    depth = "dynamo_frontend_prefill_queue_depth"
    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(complete, deployment, f"{n} {PROMPT}") for n in range(3)]
        deployment.until(lambda: deployment.sample(depth) == 2, "two that wait")
        frontend.send_signal(signal.SIGTERM)
        done = [answer.result(20) for answer in answers]
    assert [status for status, _ in done] == [200] * 3, deployment.tail()
    assert frontend.wait(10) == 0


def test_queued_requests_fail_when_the_drain_ends(deployment: Deployment) -> None:
    """Both in the prefill queue and in the queue for decode workers."""
    slow = ("--speedup-ratio", "0.0003")
    prefiller(deployment, *slow)
    deployment.mocker("--block-size", "16", *slow)
    frontend = deployment.frontend(
        "--router-mode",
        "kv",
        "--router-queue-threshold",
        "0.001",
        "--router-conditional-disagg",
        "--router-conditional-disagg-config",
        '{"eff_isl_threshold": 60, "max_prefill_queue_size": null}',
        DYN_ROUTER_PREFILL_SLOTS="1",
        DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS="0.2",
    )
    deployment.wait_for_workers(2)
    prefill_workers(deployment, 1)
    depths = "dynamo_frontend_prefill_queue_depth", "dynamo_frontend_router_queue_pending_requests"
    half = PROMPT[: len(PROMPT) // 2]
    prompts = [PROMPT, PROMPT, half, half]
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(complete, deployment, prompt) for prompt in prompts]
        deployment.until(
            lambda: [deployment.sample(name) for name in depths] == [1, 1],
            "one request in each queue",
        )
        frontend.send_signal(signal.SIGTERM)
        done = [answer.result(20) for answer in answers]
    assert [status for status, _ in done] == [503] * 4, deployment.tail()
    assert {body["message"] for _, body in done} == {"Service is shutting down"}
    assert frontend.wait(10) == 0
