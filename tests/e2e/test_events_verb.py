"""``dynamo events`` over real deployments: deaths, operators, reloads, the page's frontends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

from deployment import free_port
from forked_kit import run_verb
from serving import ROOT, Serving

from dynamo.config import from_env
from dynamo.config.runtime import RuntimeSettings
from dynamo.doctor.alert_watch import AlertWatch

GRAPH = f"""
Frontend: {{run: dynamo.frontend, http-port: PORT, api-key-file: KEYS}}
Worker:
  run: dynamo.mocker
  model-path: {ROOT}/examples/model
  model-name: tiny
  speedup-ratio: 100
  enable-sleep-mode: true
  ServiceArgs: {{workers: 2}}
"""


def dynamo(serving: Serving, *words: str) -> str:
    done = run_verb(*words, env=serving.env, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def events(serving: Serving, *words: str) -> list[dict[str, str]]:
    lines = dynamo(serving, "events", "--json", "--namespace", serving.namespace, *words)
    return [json.loads(line) for line in lines.splitlines()]


def kinds(serving: Serving, *words: str) -> list[str]:
    return [one["kind"] for one in events(serving, *words)]


def test_what_happens_is_kept_with_who_asked_for_it(tmp_path: Path) -> None:
    serving = Serving(tmp_path)
    keys = tmp_path / "keys"
    key = dynamo(
        serving, "key", "add", "root", "--role", "operator", "--api-key-file", str(keys)
    ).split()[-1]
    text = GRAPH.replace("PORT", str(port := free_port())).replace("KEYS", str(keys))
    try:
        serving.start(serving.graph(text), wait="ready: ")
        worker = f"{serving.namespace}_Worker_1"
        (pid,) = serving.wait_for_pids("Worker_1")
        os.kill(pid, signal.SIGKILL)
        serving.until(lambda: kinds(serving, "--name", worker).count("serving") == 2)
        found = events(serving, "--name", "Worker", "--since", "1h")
        assert {one["name"] for one in found} == {worker, f"{serving.namespace}_Worker"}
        assert kinds(serving, "--name", worker) == [
            "started",
            "serving",
            "died",
            "started",
            "serving",
        ]
        died = next(one for one in found if one["kind"] == "died")
        assert died["text"] == f"pid {pid} was killed by SIGKILL; restarting it now"
        assert died["model"] == "tiny" and "by" not in died

        dynamo(serving, "sleep", worker, "--namespace", serving.namespace)
        slept = events(serving, "--name", worker)[-1]
        assert slept["kind"] == "sleep" and "(pid " in slept["by"]
        body = json.dumps({"action": "wake", "name": worker}).encode()
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        url = f"http://127.0.0.1:{port}/ui/actions"
        with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
            assert answer.status == 200
        woken = events(serving, "--name", worker)[-1]
        assert (woken["kind"], woken["by"]) == ("wake", "the web page, key root")

        serving.graph(text.replace("workers: 2", "workers: 3"))
        dynamo(serving, "reload", "--namespace", serving.namespace)
        reload = next(one for one in events(serving) if one["kind"] == "reload")
        assert reload["text"] == "1 added, 0 restarted, 0 removed, 3 unchanged"
        assert "(pid " in reload["by"]
        dynamo(serving, "drain", f"{serving.namespace}_Worker_2", "--namespace", serving.namespace)
        assert kinds(serving, "--name", "Worker")[-2:] == ["drain", "drained"]

        follower = subprocess.Popen(
            [sys.executable, "-m", "dynamo", "events", "-f", "--namespace", serving.namespace],
            env=serving.env,
            stdout=subprocess.PIPE,
            text=True,
        )
        output = follower.stdout
        assert output is not None
        try:
            lines = iter(output.readline, "")
            assert any("drained" in line for line in lines)
            dynamo(serving, "key", "add", "bob", "--api-key-file", str(keys))
            line = next(line for line in lines if " keys " in line)
            assert line.rstrip().endswith("added bob") and "\x1b" not in line
            assert serving.stop() == 0
            assert any(" stop " in line for line in lines)
        finally:
            follower.kill()
            follower.wait()
            output.close()
        assert kinds(serving)[-1] == "stop"  # after the end, too
        serving.assert_clean()
    finally:
        serving.close()


def test_an_alert_begins_and_ends_once_beside_two_frontends(tmp_path: Path) -> None:
    serving = Serving(tmp_path)
    text = "".join(
        f"{name}: {{run: dynamo.frontend, http-port: {free_port()}}}\n" for name in ("A", "B")
    )
    text += "Worker: {run: dynamo.mocker, model-path: MODEL, model-name: tiny}\n"
    try:
        serving.start(
            serving.graph(text.replace("MODEL", f"{ROOT}/examples/model")), wait="ready: "
        )
        runtime = from_env(
            RuntimeSettings, namespace=serving.namespace, state_dir=str(serving.state_dir)
        )
        (hung,) = serving.wait_for_pids("B")
        name = f"{serving.namespace}_B"
        with AlertWatch(runtime, scale=0.01):  # a hundred times as fast as the arbiter's own
            os.kill(hung, signal.SIGSTOP)
            try:
                serving.until(lambda: "alert" in kinds(serving, "--name", name))
            finally:
                os.kill(hung, signal.SIGCONT)
            serving.until(lambda: "cleared" in kinds(serving, "--name", name))
        found = [one for one in events(serving) if one["kind"] in ("alert", "cleared")]
        assert [(one["kind"], one["alert"], one["name"]) for one in found] == [
            ("alert", "DynamoFrontendDown", name),
            ("cleared", "DynamoFrontendDown", name),
        ]
        text = "DynamoFrontendDown: the frontend does not answer; see: dynamo ps"
        assert found[0]["text"] == text
        assert serving.stop() == 0
        serving.assert_clean()
    finally:
        serving.close()
