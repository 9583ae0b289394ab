"""The local connector against a real `dynamo serve`: workers added and removed, at each step."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest
from forked_kit import run_verb
from serving import QUICKSTART, ROOT, Serving, is_running

from dynamo.config.planner import PlannerSettings
from dynamo.config.runtime import RuntimeSettings
from dynamo.operations.steps.limits import ActionFailed
from dynamo.planner.connector import DRAINING, READY
from dynamo.planner.live.local_connector import open_connector
from dynamo.serve.state.statefile import FileLock

SCHEMA = json.loads((ROOT / "statefiles/statefile.schema.json").read_text())
MODEL = QUICKSTART.parent / "model"
GRAPH = f"""
Frontend: {{run: dynamo.frontend, http-port: PORT}}
Decode:
  run: dynamo.mocker
  model-path: {MODEL}
  model-name: tiny
  ServiceArgs: {{resources: {{gpu: 1}}, graceful_timeout: 10, envs: {{SECRET: hidden}}}}
"""


DISAGG = f"""
Frontend: {{run: dynamo.frontend, http-port: PORT, router-mode: kv}}
Prefill: &worker
  run: dynamo.mocker
  model-path: {MODEL}
  model-name: tiny
  disaggregation-mode: prefill
  ServiceArgs: {{resources: {{gpu: 2}}}}
Decode:
  <<: *worker
  disaggregation-mode: decode
  ServiceArgs: {{resources: {{gpu: 1}}}}
"""


def runtime(serving: Serving) -> RuntimeSettings:
    return RuntimeSettings(namespace=serving.namespace, state_dir=str(serving.state_dir))


def entries(serving: Serving) -> dict[str, Any]:
    """The entries of the decode workers, without the namespace in their names."""
    document = serving.document()
    jsonschema.validate(document, SCHEMA)
    cut = len(serving.namespace) + 1
    return {k[cut:]: v for k, v in document["components"].items() if "Decode" in k}


class Load:
    """Clients that send one request after another until the end of the block."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.failures: list[str] = []
        self.finished = 0
        self.ended = threading.Event()
        self.progress = threading.Condition()

    @contextmanager
    def running(self, clients: int = 6) -> Iterator[None]:
        threads = [threading.Thread(target=self.client) for _ in range(clients)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self.ended.set()
            for thread in threads:
                thread.join()

    def wait_for(self, finished: int) -> None:
        """Wait until so many requests have finished."""
        with self.progress:
            assert self.progress.wait_for(lambda: self.finished >= finished, 30), self.finished

    def client(self) -> None:
        body = {"model": "tiny", "prompt": "hello " * 40, "max_tokens": 60, "ignore_eos": True}
        while not self.ended.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
            try:
                connection.request(
                    "POST",
                    "/v1/completions",
                    json.dumps(body),
                    {"content-type": "application/json"},
                )
                answer = connection.getresponse()
                found = json.loads(answer.read())
                tokens = found.get("usage", {}).get("completion_tokens")
                if answer.status != 200 or tokens != 60:
                    self.failures.append(f"{answer.status} {found}")
            except (OSError, ValueError) as error:
                self.failures.append(repr(error))
            finally:
                connection.close()
            with self.progress:
                self.finished += 1
                self.progress.notify_all()


def test_one_two_one_none_one(serving: Serving, unused_tcp_port: int) -> None:
    """The steps of the seed: 1, 2, 1, 0 and 1 worker."""
    serving.start(GRAPH.replace("PORT", str(unused_tcp_port)), "--gpus", "3", wait="ready: ")
    base = f"{serving.namespace}_Decode"

    async def steps() -> None:
        async with open_connector(runtime(serving), PlannerSettings()) as connector:
            (worker,) = (await connector.services())["Decode"].workers
            assert (worker.name, worker.state, worker.gpus) == (base, READY, ("0",))
            first = entries(serving)["Decode"]
            assert await connector.add("Decode") == f"{base}_1"
            found = entries(serving)
            assert found["Decode"] == first
            assert found["Decode_1"]["resources"] == {"allocated_gpus": [1]}
            assert found["Decode_1"]["argv"] == first["argv"] and found["Decode_1"]["lease"]
            assert "reserved_by" not in found["Decode_1"] and "hidden" not in json.dumps(found)
            env = psutil.Process(found["Decode_1"]["processes"][0]["pid"]).environ()
            assert (env["CUDA_VISIBLE_DEVICES"], env["SECRET"]) == ("1", "hidden")
            service = (await connector.services())["Decode"]
            assert [one.state for one in service.workers] == [READY, READY]
            assert (service.model, service.pool, service.gpus_per_worker) == ("tiny", "decode", 1)
            assert await connector.remove("Decode") == f"{base}_1"
            assert entries(serving) == {"Decode": first}
            assert await connector.remove("Decode") == base
            left = entries(serving)["Decode"]
            assert (left["resources"], left["lease"], "state" in left) == ({}, None, False)
            assert left["argv"] == first["argv"] and not left["processes"]
            assert (await connector.services())["Decode"].workers == ()
            with pytest.raises(ActionFailed, match="Decode: no worker to remove"):
                await connector.remove("Decode")
            assert await connector.add("Decode") == f"{base}_1"
            found = entries(serving)
            assert found["Decode_1"]["resources"] == {"allocated_gpus": [0]}
            assert found["Decode"]["resources"] == {}

    asyncio.run(steps())
    assert serving.stop() == 0
    assert "restarting it" not in serving.text()
    serving.assert_clean()


def test_no_request_fails_while_both_pools_change(serving: Serving, unused_tcp_port: int) -> None:
    serving.start(DISAGG.replace("PORT", str(unused_tcp_port)), "--gpus", "6", wait="ready: ")
    load = Load(unused_tcp_port)

    async def change() -> None:
        async with open_connector(runtime(serving), PlannerSettings()) as connector:
            async with asyncio.TaskGroup() as group:  # the starts overlap
                group.create_task(connector.add("Decode"))
                group.create_task(connector.add("Prefill"))
            found = await connector.services()
            assert found["Prefill"].pool == "prefill"
            gpus = [gpu for one in found.values() for worker in one.workers for gpu in worker.gpus]
            assert sorted(gpus) == ["0", "1", "2", "3", "4", "5"]
            with pytest.raises(ActionFailed, match=r"needs 2 GPUs, 0 of 6 free"):
                await connector.add("Prefill")
            await asyncio.to_thread(load.wait_for, load.finished + 30)
            async with asyncio.TaskGroup() as group:
                group.create_task(connector.remove("Decode"))
                group.create_task(connector.remove("Prefill"))
            assert await connector.reconcile() == []

    with load.running():
        asyncio.run(change())
    assert load.failures == [] and load.finished > 30
    assert "revoking its lease" not in serving.text()
    assert re.search(r"Prefill_1 .*SIGTERM: draining", read_logs(serving))
    assert re.search(r"Decode_1 .*was revoked: finishing", read_logs(serving))
    assert serving.stop() == 0
    serving.assert_clean()


def read_logs(serving: Serving) -> str:
    """The lines of all logs, each behind the name of its watcher."""
    logs = (serving.state_dir / serving.namespace / "logs").glob("*.log")
    return "\n".join(f"{log.stem} {line}" for log in logs for line in log.read_text().splitlines())


def test_a_person_with_circusctl_meanwhile(serving: Serving, unused_tcp_port: int) -> None:
    """Statefile and GPUs follow stop, start, rm and incr; the planner counts what there is."""
    serving.start(GRAPH.replace("PORT", str(unused_tcp_port)), "--gpus", "2", wait="ready: ")
    base = f"{serving.namespace}_Decode"

    async def session() -> None:
        async with open_connector(runtime(serving), PlannerSettings()) as connector:

            async def states() -> list[str]:
                return [one.state for one in (await connector.services())["Decode"].workers]

            async def circusctl(*words: str) -> str:
                return await asyncio.to_thread(serving.circusctl, *words)

            await connector.add("Decode")
            assert "Singleton" in await circusctl("incr", f"{base}_1")
            assert (await circusctl("stop", f"{base}_1", "--waiting")).endswith("ok")
            assert await states() == [READY]
            with pytest.raises(ActionFailed, match="0 of 2 free"):  # it may be started again
                await connector.add("Decode")
            assert (await circusctl("rm", f"{base}_1", "--waiting")) == "ok"
            assert await connector.add("Decode") == f"{base}_1"
            adding = asyncio.create_task(connector.remove("Decode"))
            assert (await circusctl("rm", base, "--waiting")) == "ok"
            assert await adding == f"{base}_1"
            assert set(await states()) <= {DRAINING}
            await asyncio.to_thread(serving.until, lambda: not serving.pids("Decode"))
            assert await states() == [] and await connector.reconcile() == []
            assert entries(serving)["Decode"]["resources"] == {}
            assert list(entries(serving)) == ["Decode"]

    asyncio.run(session())
    assert serving.stop() == 0
    serving.assert_clean()


def test_a_reload_reaches_added_workers(serving: Serving, unused_tcp_port: int) -> None:
    """They run the changed command, on their own GPUs, and leave with their service."""
    text = GRAPH.replace("PORT", str(unused_tcp_port)) + "B: {run: SLEEPER}\n"
    path = serving.graph(text)
    serving.start(path, "--gpus", "4", wait="ready: ")
    env = {**serving.env, "DYN_NAMESPACE": serving.namespace}

    def act(verb: str) -> str:
        async def once() -> str:
            async with open_connector(runtime(serving), PlannerSettings()) as connector:
                return str(await getattr(connector, verb)("Decode"))

        return asyncio.run(once())

    def reload() -> str:
        done = run_verb("reload", str(path), env=env, timeout=90)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert act("add").endswith("Decode_1")
    serving.graph(text.replace("graceful_timeout: 10", "graceful_timeout: 9, workers: 1"))
    assert "0 added, 2 restarted, 0 removed, 2 unchanged" in reload()
    serving.until(lambda: len(serving.pids("Decode_1")) == 1)
    # Each moved to a free GPU while it was replaced.
    found = entries(serving)
    gpus = [gpu for entry in found.values() for gpu in entry["resources"]["allocated_gpus"]]
    assert len({str(gpu) for gpu in gpus}) == 2
    assert act("add").endswith("Decode_2")
    serving.graph("B: {run: SLEEPER}\n")
    assert "0 added, 0 restarted, 4 removed, 1 unchanged" in reload()
    serving.until(lambda: not entries(serving))
    assert serving.stop() == 0
    serving.assert_clean()


KILLED = """
import asyncio, sys, os, signal
from dynamo.config import from_env
from dynamo.config.planner import PlannerSettings
from dynamo.config.runtime import RuntimeSettings
from dynamo.planner.live.local_connector import open_connector

async def main():
    async with open_connector(from_env(RuntimeSettings), PlannerSettings()) as connector:
        access = connector._access
        verb, step = sys.argv[1:]
        async def die(*args):
            os.kill(os.getpid(), signal.SIGKILL)
        setattr(access.registrations if step == "revoke" else access.circus, step, die)
        await getattr(connector, verb)("Decode")

asyncio.run(main())
"""


def test_a_planner_that_was_killed(serving: Serving, unused_tcp_port: int) -> None:
    """Whatever step it had reached, `dynamo state repair` leaves what is right."""
    serving.start(GRAPH.replace("PORT", str(unused_tcp_port)), "--gpus", "2", wait="ready: ")
    env = {**serving.env, "DYN_NAMESPACE": serving.namespace}

    def state(*words: str) -> str:
        done = run_verb("state", *words, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def killed(verb: str, step: str) -> None:
        command = [sys.executable, "-c", KILLED, verb, step]
        assert subprocess.run(command, env=env, timeout=60).returncode == -signal.SIGKILL

    name = f"{serving.namespace}_Decode_1"
    killed("add", "add")  # GPUs reserved
    assert f"{name}: deleted its entry, which had no watcher; GPU 1 is free again" in (
        state("repair", "--dry-run")
    )
    assert name in serving.document()["components"]
    assert "GPU 1 is free" in state("repair") and state("repair") == "nothing to repair\n"
    killed("add", "start")  # watcher added
    assert f"{name}: removed its watcher" in state("repair")
    assert list(entries(serving)) == ["Decode"] and name not in serving.circusctl("status")
    killed("remove", "revoke")  # marked as draining
    assert "draining" in state("show")
    assert f"{serving.namespace}_Decode: finished its removal" in state("repair")
    shown = json.loads(state("show", "--json"))
    assert shown["gpus"] == {"0": [], "1": []} and shown["arbiter_alive"]
    assert [one["state"] for one in shown["components"]] == ["running", "stopped"]
    assert serving.stop() == 0
    serving.assert_clean()


def test_repair_after_the_arbiter_was_killed(serving: Serving, tmp_path: Path) -> None:
    serving.start("B: {run: SLEEPER}\n")
    env = {**serving.env, "DYN_NAMESPACE": serving.namespace}
    document = serving.document()

    def state(*words: str) -> subprocess.CompletedProcess[str]:
        return run_verb("state", *words, env=env)

    for pid in (document["arbiter"]["guard_pid"], document["arbiter"]["pid"]):
        os.kill(pid, signal.SIGKILL)
    serving.until(lambda: not is_running(document["arbiter"]["pid"]))
    assert "dead; see: dynamo state repair" in state("show").stdout
    lock = FileLock(serving.statefile.with_suffix("") / "serve.lock")
    assert lock.try_acquire()  # as an arbiter that runs beside a damaged statefile
    refused = state("repair", "--dry-run")
    assert refused.returncode == 1 and "is already served by process" in refused.stderr
    lock.release()
    assert f"{serving.statefile} removed" in state("repair", "--dry-run").stdout
    assert "ended without clean-up" in state("repair").stdout
    assert not serving.statefile.exists()
    gone = state("show")
    assert gone.returncode == 1 and "no deployment runs in namespace" in gone.stderr
