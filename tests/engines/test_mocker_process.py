"""A real mocker process and a real client: responses, rejection, cancellation, shutdown."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest
from deployment import Deployment, free_port, interrupt_again
from kv_events import held_after
from mocker_kit import caller, leftovers

from dynamo.errors import InvalidArgument
from dynamo.protocols.kv import KvQuery
from dynamo.runtime import Context


@pytest.fixture(autouse=True)
def _one_token_in_an_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests count the mocker's own outputs."""
    monkeypatch.setattr("deployment.OUTPUTS", ())


async def ended(process: subprocess.Popen[bytes]) -> int:
    return await asyncio.to_thread(process.wait, 20)


@pytest.mark.parametrize("plane", ["uds", "tcp"])
async def test_responses_stream_and_the_cache_is_reused(deployment: Deployment, plane: str) -> None:
    deployment.mocker("--speedup-ratio", "0", "--block-size", "4", "--request-plane", plane)
    async with caller(deployment) as here:
        items = await here.answer(list(range(20)), 6)
        tokens = [token for item in items for token in item["token_ids"]]
        assert len(tokens) == 6 and len(items) == 6
        assert items[-1]["finish_reason"] == "length"
        assert items[-1]["completion_usage"]["prompt_tokens"] == 20
        again = await here.answer(list(range(20)), 1)
        assert again[-1]["completion_usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


async def test_timing_is_that_of_an_engine(deployment: Deployment) -> None:
    deployment.mocker("--speedup-ratio", "1")
    async with caller(deployment) as here:
        loop = asyncio.get_running_loop()
        started = loop.time()
        stamps = []
        async for _ in await here.generate(list(range(12)), 20):
            stamps.append(loop.time() - started)
        # From the start: a busy machine delivers tokens late, and then several at once.
        assert stamps[0] > 0.016
        assert 0.016 + 19 * 0.0055 < stamps[-1] < 20


async def test_a_request_that_is_too_long_is_rejected_at_once(deployment: Deployment) -> None:
    deployment.mocker("--num-gpu-blocks-override", "10", "--block-size", "4")
    async with caller(deployment) as here:
        with pytest.raises(InvalidArgument, match=r"prompt \(30 tokens\) plus max_tokens \(11\)"):
            await here.answer(list(range(30)), 11)
        assert len(await here.answer(list(range(30)), 10)) == 10


@pytest.mark.parametrize("kind", ["stop", "kill"])
async def test_cancellation_frees_the_blocks(deployment: Deployment, kind: str) -> None:
    deployment.mocker("--speedup-ratio", "10", "--block-size", "4")
    async with caller(deployment) as here:
        (instance,) = here.client.instance_ids()
        context = Context()
        stream = await here.generate(list(range(40)), 10_000, context=context)
        await anext(stream)
        await here.until(lambda: (here.used_blocks(instance) or 0) >= 10)
        if kind == "stop":
            context.stop_generating()
            items = [item async for item in stream]
            assert items[-1]["finish_reason"] == "cancelled"
        else:
            context.kill()
        await here.until(lambda: here.used_blocks(instance) == 0)


async def test_events_match_the_cache_exactly(deployment: Deployment) -> None:
    deployment.mocker(
        "--speedup-ratio", "0", "--block-size", "4", "--num-gpu-blocks-override", "12"
    )
    async with caller(deployment) as here:
        (instance,) = here.client.instance_ids()
        for start in range(0, 90, 15):
            await asyncio.gather(*(here.answer([start, *range(n)], n) for n in range(3, 12, 4)))
        dump = await here.query(KvQuery())
        assert dump.kind == "tree_dump"
        key = instance, 0
        last = dump.last_event_id
        await here.until(lambda: key in here.events and here.events[key][-1].event_id == last)
        events = here.events[key]
        if events[0].event_id > 1:  # the first ones came before the subscription was connected
            missed = await here.query(
                KvQuery(start_event_id=1, end_event_id=events[0].event_id - 1)
            )
            events = [*missed.events, *events]
        ids = [event.event_id for event in events]
        assert ids == list(range(1, ids[-1] + 1))
        held = held_after(events)
        assert sorted(held.values()) == sorted(held_after(dump.events).values())
        assert 0 < len(held) <= 12
        part = await here.query(KvQuery(start_event_id=3, end_event_id=5))
        assert part.events == events[2:5]
        late = await here.query(KvQuery(start_event_id=ids[-1] + 1))
        assert (late.kind, late.newest_available) == ("too_new", ids[-1])


async def test_sigterm_drains_streams_and_removes_all_files(deployment: Deployment) -> None:
    process = deployment.mocker("--speedup-ratio", "1")
    async with caller(deployment) as here:
        stream = await here.generate(list(range(12)), 60)
        count = len((await anext(stream))["token_ids"])
        process.send_signal(signal.SIGTERM)
        await here.until(lambda: not here.client.instance_ids())
        async for item in stream:
            count += len(item["token_ids"])
        assert count == 60
        assert await ended(process) == 0
    assert leftovers(deployment.state_dir) == []


async def test_a_revoked_lease_ends_the_worker(deployment: Deployment) -> None:
    process = deployment.mocker("--speedup-ratio", "1")
    async with caller(deployment) as here:
        (instance,) = here.client.instance_ids()
        stream = await here.generate(list(range(12)), 30)
        await anext(stream)
        await here.runtime.discovery.revoke(instance)
        assert len([item async for item in stream]) == 29
        assert await ended(process) == 0
    assert leftovers(deployment.state_dir) == []


async def test_a_second_signal_aborts_streams(deployment: Deployment) -> None:
    process = deployment.mocker("--speedup-ratio", "1")
    async with caller(deployment) as here:
        stream = await here.generate(list(range(12)), 100_000)
        await anext(stream)
        process.send_signal(signal.SIGTERM)
        await here.until(lambda: not here.client.instance_ids())
        await asyncio.to_thread(interrupt_again, process)
        assert await ended(process) == 0
    assert leftovers(deployment.state_dir) == []


async def test_many_workers_and_ranks_in_one_process(deployment: Deployment) -> None:
    deployment.mocker(
        *("--num-workers", "3", "--data-parallel-size", "2"),
        *("--speedup-ratio", "0", "--block-size", "4"),
    )
    async with caller(deployment, workers=3) as here:
        for instance in here.client.instance_ids():
            for rank in (0, 1):
                prompt = list(range(9))
                first = await here.answer(prompt, 1, instance, rank)
                assert first[-1]["completion_usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        await here.until(lambda: len(here.events) == 6)
        assert all(events[0].event_id == 1 for events in here.events.values())
        cards = await here.runtime.discovery.list("v1/mdc/")
        assert len(cards) == 3


async def test_a_prefill_worker_returns_transfer_parameters(deployment: Deployment) -> None:
    deployment.mocker("--disaggregation-mode", "prefill", "--speedup-ratio", "0")
    async with caller(deployment, component="prefill") as here:
        (item,) = await here.answer(list(range(12)), 50)
        assert len(item["token_ids"]) == 1 and item["disaggregated_params"]


async def test_the_status_port_has_the_engine_metrics(deployment: Deployment) -> None:
    port = free_port()
    deployment.mocker("--speedup-ratio", "0", DYN_SYSTEM_PORT=str(port))
    async with caller(deployment) as here:
        await here.answer(list(range(12)), 50)
        text = await asyncio.to_thread(_read, f"http://127.0.0.1:{port}/metrics")
        assert 'vllm:e2e_request_latency_seconds_count{engine="0",model_name="tiny"} 1' in text
        assert 'dynamo_component_requests_total{dynamo_component="backend"' in text
        assert "dynamo_engine_request 0" in text
        assert '"ready"' in await asyncio.to_thread(_read, f"http://127.0.0.1:{port}/health")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--model-path", "/nowhere"], "no such directory: the model '/nowhere'"),
        (["--block-size", "0"], "--block-size must be between 1 and 4096, got 0"),
        (["--max-num-batched-tokens", "5"], "--max-num-seqs 256"),
        (["--endpoint-types", "poems"], "got 'poems'"),
        (["--custom-jinja-template", "/nowhere"], "/nowhere: no such file"),
        (["--speedup-ratio", "-1"], "--speedup-ratio must be"),
    ],
)
def test_a_bad_flag_is_named(deployment: Deployment, flags: list[str], says: str) -> None:
    process = deployment.mocker(*flags)
    assert process.wait(20) == 2
    assert says in deployment.tail()


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def test_an_interrupted_start_leaves_no_files(deployment: Deployment, tmp_path: Path) -> None:
    process = deployment.mocker("--startup-time", "60")
    status = Path(f"/proc/{process.pid}/status")

    def handles_signals() -> bool:
        caught = int(status.read_text().partition("SigCgt:")[2].split()[0], 16)
        return bool(caught & 1 << signal.SIGTERM - 1)

    deployment.until(handles_signals)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert not deployment.state_dir.exists() or leftovers(deployment.state_dir) == []


@pytest.mark.parametrize("delay_s", [0.2, 0.6, 0.8, 1.0, 1.2, 1.4])
def test_a_signal_at_any_moment_of_start_up(deployment: Deployment, delay_s: float) -> None:
    process = deployment.mocker("--num-workers", "8")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(delay_s)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) in (0, -signal.SIGTERM), deployment.tail()
    if deployment.state_dir.exists():
        assert leftovers(deployment.state_dir) == []
