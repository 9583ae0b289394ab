"""Models without workers get one when requests wait, and share one GPU: all processes are real."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest
from deployment import free_port
from forked_kit import run_verb
from lazy_module import openai
from load_kit import Load, under_load
from serving import ROOT, Serving

GRAPH = ROOT / "examples/two_models.yaml"
IDLE_S = 2


class Zero(Serving):
    """The example graph, with short times."""

    def __init__(self, tmp_path: Path) -> None:
        super().__init__(tmp_path)
        self.namespace = "two-models"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/v1"

    def run(self, *flags: str) -> None:
        self.start(GRAPH, *self.overrides(), "--gpus=1", *flags)

    def overrides(self) -> list[str]:
        return [
            f"--Frontend.http-port={self.port}",
            "--Frontend.ServiceArgs.graceful_timeout=65",
            f"--Planner.idle-timeout={IDLE_S}",
            "--Planner.min-residency=2",
            "--Chat.ServiceArgs.priority=0",
            "--Batch.enable-sleep-mode=true",
            "--Batch.wake-time=0.2",
            f"--Planner.log-dir={self.tmp_path}",
        ]

    def reload(self, *overrides: str) -> str:
        done = run_verb("reload", str(GRAPH), *self.overrides(), *overrides, env=self.env)
        assert done.returncode == 0, [done, self.text()]
        return done.stdout

    def tell_planner(self, word: str) -> None:
        run_verb("planner", word, env=self.env).check_returncode()

    def holders(self) -> dict[str, list[Any]]:
        """The GPUs in the statefile, by watcher."""
        entries = self.document()["components"].items()
        return {
            name: entry["resources"]["allocated_gpus"]
            for name, entry in entries
            if entry["resources"].get("allocated_gpus") and entry.get("state") != "asleep"
        }

    def until_zero(self) -> None:
        self.until(lambda: not self.holders(), 30)
        assert not any("chat" in one.cmdline() for one in self.workers())

    def instances(self) -> list[Any]:
        """The workers that the frontend lists."""
        found = httpx.get(f"{self.url.removesuffix('/v1')}/health").json()["instances"]
        return [one for one in found if one["endpoint"] == "generate"]

    def workers(self) -> list[psutil.Process]:
        return [one for one in self.survivors() if "dynamo.mocker" in one.cmdline()]

    def complete(self, model: str, timeout_s: float = 40) -> httpx.Response:
        body = {"model": model, "prompt": "hello", "max_tokens": 4}
        return httpx.post(f"{self.url}/completions", json=body, timeout=timeout_s)

    def planner(self) -> int:
        return int(self.pids("Planner")[0])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zero]:
    made = Zero(tmp_path_factory.mktemp("zero"))
    made.run()
    yield made
    made.close()


def test_the_ready_line_and_the_list_name_both_models(site: Zero) -> None:
    assert "started on demand: Batch" in site.text()
    assert site.document()["components"]["two-models_Batch"]["resources"] == {}

    def names() -> set[str]:
        return {one["id"] for one in httpx.get(f"{site.url}/models").json()["data"]}

    site.until(lambda: names() == {"chat", "batch"}, 30)  # without inotify within a second


def test_an_idle_model_has_no_worker_and_its_first_stream_waits(site: Zero) -> None:
    site.until_zero()
    assert {one.id for one in openai.OpenAI(base_url=site.url, api_key="x").models.list()} == {
        "chat",
        "batch",
    }
    with openai.OpenAI(base_url=site.url, api_key="x", max_retries=0) as client:
        stream = client.chat.completions.create(
            model="batch", messages=[{"role": "user", "content": "hello"}], stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert "hello" in text
    assert list(site.holders()) == ["two-models_Batch_1"]
    record = httpx.get(f"{site.url}/requests/last").json()
    assert record["worker_wait_s"] > record["prepare_s"]  # a process was started
    shown = run_verb("explain", f"--url={site.url[:-3]}", env=site.env).stdout
    assert "most of it waiting for a worker (" in shown
    assert "\n  waiting for a worker  " in shown and "\n  prepare               " in shown


def test_an_engine_that_can_sleep_is_woken(site: Zero) -> None:
    before = site.pids("Batch_1")
    site.until_zero()
    assert site.document()["components"]["two-models_Batch_1"]["state"] == "asleep"
    site.until(lambda: not site.instances(), 30)  # the frontend sees it too, perhaps a second later
    assert site.complete("batch").status_code == 200
    assert site.pids("Batch_1") == before
    # It may answer before the planner has written that it is awake, and holds its GPU.
    site.until(lambda: bool(site.holders()), 30)
    # An engine that is awake may answer before the statefile says so.
    site.until(
        lambda: site.document()["components"]["two-models_Batch_1"]["state"] == "running", 30
    )


def test_a_worker_that_slept_is_not_started_on_the_gpu_of_another(site: Zero) -> None:
    site.until_zero()
    with under_load(site.port, 1, "chat", None, 0.01) as load:
        site.until(lambda: load.answered and "two-models_Chat" in " ".join(site.holders()), 30)
        site.circusctl("restart", "two-models_Batch_1")
        site.wait_for("Batch_1: not replaced: it needs 1 GPU, held by two-models_Chat_1")
        assert all("Chat" in name for name in site.holders())
    assert site.complete("batch").status_code == 200  # the planner starts another one


def test_a_reload_leaves_idle_models_at_zero(site: Zero) -> None:
    site.until_zero()
    assert "asleep" in {one.get("state") for one in site.document()["components"].values()}
    changed = ("--Batch.speedup-ratio=7", "--Chat.speedup-ratio=7")
    assert "0 added, 0 restarted, 1 removed" in site.reload(*changed)
    assert not site.workers() and not site.holders()
    site.until(lambda: "7" in site.document()["components"]["two-models_Chat"]["argv"])
    for model in ("chat", "batch"):
        assert site.complete(model).status_code == 200
        assert any(model in (line := w.cmdline()) and "7" in line for w in site.workers())
        site.until_zero()
    assert "nothing to change" in site.reload(*changed)


def test_many_first_requests_are_all_answered(site: Zero) -> None:
    site.until_zero()

    async def ask() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=50)
        async with httpx.AsyncClient(timeout=40, limits=limits) as client:
            body = {"model": "chat", "prompt": "hello", "max_tokens": 4}
            asked = [client.post(f"{site.url}/completions", json=body) for _ in range(50)]
            return await asyncio.gather(*asked)

    answers = asyncio.run(ask())
    assert {one.status_code for one in answers} == {200}


def test_a_killed_planner_continues_at_zero(site: Zero) -> None:
    site.until_zero()
    before = site.planner()
    os.kill(before, signal.SIGKILL)
    assert site.complete("batch").status_code == 200  # it waits for the next planner
    assert site.wait_for_pids("Planner", unlike=before)


def test_a_request_waits_on_while_its_frontend_is_replaced(site: Zero) -> None:
    # A worker that sleeps is woken without the arbiter, which is busy with the restart.
    assert site.complete("batch").status_code == 200
    site.until_zero()
    (old,) = site.pids("Frontend")
    site.tell_planner("pause")  # no worker comes
    try:
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(site.complete, "batch", 75)
            waiting = 'cold_start_queue_requests{model="batch"} 1'
            metrics = site.url.replace("/v1", "/metrics")
            site.until(lambda: waiting in httpx.get(metrics).text)
            site.circusctl("restart", "two-models_Frontend")
            site.wait_for("draining 1 request")
            site.tell_planner("resume")
            assert asked.result().status_code == 200
    finally:
        site.tell_planner("resume")
    site.until(lambda: old not in site.pids("Frontend"))


def test_two_busy_models_take_turns_on_one_gpu(site: Zero) -> None:
    loads = [Load(site.port, 3, None, model, 0.01) for model in ("chat", "batch")]
    served: dict[str, int] = {"chat": 0, "batch": 0}
    turns: list[str] = []

    def there_were_three_turns() -> bool:
        for load in loads:
            if load.answered > served[load.model]:
                served[load.model] = load.answered
                if not turns or turns[-1] != load.model:
                    turns.append(load.model)
        holders = site.holders()
        assert sum(len(gpus) for gpus in holders.values()) <= 1, holders
        return len(turns) >= 3

    site.until(there_were_three_turns, 60)
    for load in loads:
        load.close()
    assert [load.failures for load in loads] == [[], []]


def test_a_stopped_model_answers_at_once(site: Zero) -> None:
    assert site.complete("chat").status_code == 200
    name = next(one for one in site.holders() if "Chat" in one)
    assert site.circusctl("stop", name, "--waiting") == "ok"
    answer = site.complete("chat")
    assert answer.status_code == 503
    assert f"{name} was stopped by a command" in answer.json()["message"]
    run_verb("load", "chat", env=site.env).check_returncode()
    # Without inotify the frontend sees the worker within a second.
    site.until(lambda: site.complete("chat").status_code == 200, 30)


def test_a_stop_ends_waiting_requests(site: Zero) -> None:
    site.until_zero()
    os.kill(site.planner(), signal.SIGSTOP)  # no worker comes
    results: dict[str, Any] = {}

    async def wait_and_stop() -> None:
        async with httpx.AsyncClient(timeout=40) as client:
            body = {"model": "chat", "prompt": "hello", "max_tokens": 4}
            unary = asyncio.ensure_future(client.post(f"{site.url}/completions", json=body))
            streamed = {**body, "stream": True}
            async with client.stream("POST", f"{site.url}/completions", json=streamed) as stream:
                lines = stream.aiter_lines()
                results["comment"] = await anext(lines)
                assert site.process is not None
                site.process.send_signal(signal.SIGTERM)
                results["unary"] = await unary
                results["rest"] = [line async for line in lines if line]

    asyncio.run(wait_and_stop())
    assert results["comment"].startswith(": loading, ")
    assert results["unary"].status_code == 503
    assert results["unary"].headers["retry-after"] == "1"
    error, done = results["rest"]
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == 503
    assert done == "data: [DONE]"
    os.kill(site.planner(), signal.SIGCONT)
    started_s = time.monotonic()
    assert site.wait(30) == 0
    assert time.monotonic() - started_s < 20
    site.assert_clean()
