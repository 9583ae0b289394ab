"""The server of ``dynamo.attach`` dies, hangs, comes back; or the worker started it itself."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
from pathlib import Path

import psutil
import pytest
from attach_kit import SERVER, Cards, fetch, open_request, upstream
from deployment import Deployment, free_port
from mocker_kit import caller
from serving import is_running

EXEC = shlex.join([sys.executable, str(SERVER), "PORT", "vllm", "m"]).replace("PORT", "{port}")
TREE = f"""
import subprocess, sys, os
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
open({{pids!r}}, "w").write(f"{{{{os.getpid()}}}} {{{{child.pid}}}}")
os.execv(sys.executable, [sys.executable, {str(SERVER)!r}, sys.argv[1], "vllm", "m"])
"""


async def test_a_dead_server_leaves_routing_and_returns(deployment: Deployment) -> None:
    with upstream(deployment, "vllm") as server:
        deployment.start("dynamo.attach", "--url", server.url, "--poll-interval-secs", "0.05")
        async with asyncio.timeout(60), caller(deployment) as here:
            found = Cards(here)
            server.set(health=503)
            await here.until(lambda: not here.client.instance_ids())
            server.set(health=200)
            await here.until(lambda: bool(here.client.instance_ids()))
            server.kill()
            await here.until(lambda: not here.client.instance_ids())
            assert found.names == ["m"]  # a model without workers, not an unknown one
            await asyncio.to_thread(server.start)
            await here.until(lambda: bool(here.client.instance_ids()))
            assert (await fetch(here, {"model": "m"}))[0].status == 200


async def test_a_server_that_hangs_leaves_routing_and_returns(deployment: Deployment) -> None:
    process = deployment.start("dynamo.attach", "--exec", EXEC, "--poll-interval-secs", "0.05")
    async with asyncio.timeout(60), caller(deployment) as here:
        (launcher,) = psutil.Process(process.pid).children()
        (server,) = launcher.children()
        here.client.on_inhibited(lambda *_: here.changed())
        server.suspend()
        await here.until(lambda: bool(here.client.outages()))
        # Noticed by its state, before its health checks.
        (outage,) = here.client.outages().values()
        assert f"process {server.pid} is stopped" in outage.text
        await here.until(lambda: not here.client.instance_ids())
        server.resume()
        await here.until(lambda: bool(here.client.instance_ids()))
        assert (await fetch(here, {"model": "m"}))[0].status == 200


async def test_other_models_after_a_restart(deployment: Deployment) -> None:
    with upstream(deployment, "vllm", ("a", "b")) as server:
        deployment.start("dynamo.attach", "--url", server.url, "--poll-interval-secs", "0.05")
        async with asyncio.timeout(60), caller(deployment) as here:
            found = Cards(here)
            await here.until(lambda: found.names == ["a", "b"])
            server.set(health=503)
            await here.until(lambda: not here.client.instance_ids())
            server.set(health=200, models=["a", "c"])
            await here.until(lambda: found.names == ["a", "c"])


async def test_a_worker_waits_for_its_server(deployment: Deployment) -> None:
    port = free_port()
    process = deployment.start("dynamo.attach", "--url", f"http://127.0.0.1:{port}")
    await asyncio.to_thread(deployment.until, lambda: "not reachable" in deployment.tail())
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, 20) == 0


async def test_a_started_server_ends_with_the_worker(deployment: Deployment) -> None:
    process = deployment.start("dynamo.attach", "--exec", EXEC)
    async with asyncio.timeout(60), caller(deployment) as here:
        body = {"model": "m", "mode": "stream", "pieces": 20, "pause_s": 0.05}
        stream = open_request(here, body)
        await anext(stream)
        process.send_signal(signal.SIGTERM)
        pieces = [item async for item in stream]
        assert b"".join(pieces) == b"data: x\n\n" * 20  # drained first
    assert await asyncio.to_thread(process.wait, 20) == 0
    assert "server: loading the model" in deployment.tail()


@pytest.mark.parametrize("victim", ["worker", "launcher", "server"])
async def test_no_kill_leaves_a_process_behind(
    deployment: Deployment, tmp_path: Path, victim: str
) -> None:
    script, pids = tmp_path / "tree.py", tmp_path / "pids"
    script.write_text(TREE.format(pids=str(pids)))
    command = f"{sys.executable} {script} {{port}}"
    process = deployment.start("dynamo.attach", "--exec", command)
    async with asyncio.timeout(60), caller(deployment) as here:
        server, grandchild = (psutil.Process(int(pid)) for pid in pids.read_text().split())
        launcher = server.parent()
        assert launcher is not None and launcher.ppid() == process.pid
        {"worker": psutil.Process(process.pid), "launcher": launcher, "server": server}[
            victim
        ].kill()
        await here.until(lambda: not here.client.instance_ids())
        status = await asyncio.to_thread(process.wait, 20)
        tree = (server.pid, grandchild.pid, launcher.pid)
        await asyncio.to_thread(deployment.until, lambda: not any(map(is_running, tree)))
        assert status == (-signal.SIGKILL if victim == "worker" else 1)
        if victim != "worker":
            assert "was ended by SIGKILL" in deployment.tail()


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("sh -c 'echo out of memory; exit 3' {port}", "exited with status 3"),
        ("no-such-server {port}", "cannot start 'no-such-server'"),
    ],
)
def test_a_server_that_does_not_start(deployment: Deployment, command: str, reason: str) -> None:
    process = deployment.start("dynamo.attach", "--exec", command)
    assert process.wait(20) == 1
    assert reason in deployment.tail()
    if "memory" in command:
        assert "its last output:\n  out of memory" in deployment.tail().replace("\\n", "\n")


def test_a_server_that_is_too_slow(deployment: Deployment) -> None:
    command = "sh -c 'sleep 100' {port}"
    process = deployment.start("dynamo.attach", "--exec", command, "--startup-timeout-secs", "1")
    assert process.wait(20) == 1
    assert "raise --startup-timeout-secs" in deployment.tail()
    assert not [one for one in psutil.process_iter() if one.ppid() == process.pid]


def test_ctrl_c_reaches_the_worker_alone(deployment: Deployment) -> None:
    process = deployment.start("dynamo.attach", "--exec", EXEC)
    deployment.until(lambda: "routes" in deployment.tail())
    (launcher,) = psutil.Process(process.pid).children()
    assert os.getsid(launcher.pid) == launcher.pid != os.getsid(process.pid)
