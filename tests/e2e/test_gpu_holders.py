"""No GPU is given twice and none is lost: restarts, reloads and verbs at the same time."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
from collections import Counter
from typing import Any

import jsonschema
import psutil
from deployment import MODEL, free_port
from forked_kit import run_verb
from serving import ROOT, Serving

from dynamo.serve.state.document import Document
from dynamo.serve.state.process_table import ledger_of

SCHEMA = json.loads((ROOT / "statefiles/statefile.schema.json").read_text())


def dynamo(serving: Serving, *words: str) -> subprocess.Popen[str]:
    env = {**serving.env, "DYN_NAMESPACE": serving.namespace}
    command = [sys.executable, "-m", "dynamo", *words]
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(serving: Serving, *words: str) -> tuple[int, str]:
    done = run_verb(*words, env={**serving.env, "DYN_NAMESPACE": serving.namespace})
    return done.returncode, done.stdout + done.stderr


def held(serving: Serving) -> dict[str, list[str]]:
    """The GPUs of each holder; the statefile is valid, and none is held twice."""
    document = serving.document()
    jsonschema.validate(document, SCHEMA)
    ledger = ledger_of(Document.of(document))
    total: Counter[str] = Counter()
    for shares in ledger.held.values():
        total.update(shares)
    assert all(share <= 1 for share in total.values()), ledger.held
    cut = len(serving.namespace) + 1
    return {name[cut:]: sorted(shares) for name, shares in ledger.held.items()}


def record(serving: Serving, worker: str) -> dict[str, Any]:
    entry: dict[str, Any] = serving.document()["components"][f"{serving.namespace}_{worker}"]
    return entry


def visible(pid: int) -> list[str]:
    return psutil.Process(pid).environ()["CUDA_VISIBLE_DEVICES"].split(",")


PIN = "ServiceArgs: {envs: {CUDA_VISIBLE_DEVICES: '2'}, resources: {gpu: 1}}"
SLEEPERS = """
A: {{run: SLEEPER, say: {say}, ServiceArgs: {{resources: {{gpu: {gpus}}}}}}}
B: {{run: SLEEPER, ServiceArgs: {{resources: {{gpu: 1}}}}}}
{more}
"""


def sleepers(say: str = "a", gpus: int = 1, more: str = "") -> str:
    return SLEEPERS.format(say=say, gpus=gpus, more=more)


def test_a_stopped_service_gets_other_gpus_than_those_in_use(serving: Serving) -> None:
    serving.start(sleepers(), "--gpus", "4")
    (other,) = serving.wait_for_pids("B")
    assert visible(other) == ["1"]
    name = f"{serving.namespace}_A"
    serving.circusctl("stop", name, "--waiting")
    status, text = run(serving, "reload", str(serving.graph(sleepers(gpus=2))))
    assert status == 0, text
    assert held(serving) == {"A": ["0", "2"], "B": ["1"]}
    serving.circusctl("start", name, "--waiting")
    (pid,) = serving.wait_for_pids("A")
    assert visible(pid) == ["0", "2"]
    assert held(serving) == {"A": ["0", "2"], "B": ["1"]}
    assert serving.stop() == 0


def test_a_reload_that_failed_is_completed_by_the_next(serving: Serving) -> None:
    wrong = "\nC: {run: SLEEPER, no-such-flag: 1}\n"
    serving.start(sleepers(), "--gpus", "3")
    serving.wait_for_pids("B")
    without_b = sleepers(gpus=2).replace("B:", "D:")
    status, text = run(serving, "reload", str(serving.graph(without_b + wrong)))
    assert status == 1, text
    assert serving.pids("B")  # removals come last
    status, text = run(serving, "reload", str(serving.graph(without_b)))
    assert status == 0, text
    assert held(serving).keys() == {"A", "D"}
    assert not any("_B" in name or "_C" in name for name in serving.document()["components"])
    assert run(serving, "reload")[1].startswith("nothing to change")
    assert serving.stop() == 0
    serving.assert_clean()


MODELS = """
Frontend: {{run: dynamo.frontend, http-port: {port}}}
A:
  run: dynamo.mocker
  model-path: {model}
  model-name: tiny
  decode-speedup-ratio: 0.2
  enable-sleep-mode: true
  ServiceArgs: {{resources: {{gpu: 1}}}}
S:
  run: dynamo.mocker
  model-path: {model}
  model-name: small
  enable-sleep-mode: true
  ServiceArgs: {{resources: {{gpu: 1}}}}
M:
  run: dynamo.mocker
  model-path: {model}
  model-name: more
  enable-sleep-mode: true
  ServiceArgs: {{workers: 0, min: 0, resources: {{gpu: 1}}}}
"""


def test_the_gpu_of_a_worker_that_was_given_up_is_free(serving: Serving) -> None:
    """Started again, it gets another one, or an error that names the holder."""
    models = MODELS.format(port=free_port(), model=MODEL)
    frontend, more = models.partition("A:\n")[0], "M:\n" + models.partition("M:\n")[2]
    failing = "A: {run: SLEEPER, exit: 2, ServiceArgs: {resources: {gpu: 1}}}\nX: {run: SLEEPER}\n"
    serving.start(frontend + failing + more, "--gpus", "1", wait="gave up")
    serving.until(lambda: held(serving) == {})
    status, text = run(serving, "load", "more")
    assert status == 0, text
    assert held(serving) == {"M_1": ["0"]}
    serving.circusctl("start", f"{serving.namespace}_A")
    serving.wait_for(r"gave up \S+_A: .*_A needs 1 GPU, 0 of 1 free")
    assert held(serving) == {"M_1": ["0"]}
    serving.stop()


def stream(port: int) -> http.client.HTTPConnection:
    """A request to A that has begun, and takes long: until the connection is closed."""
    body: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 4000, "stream": True}
    body["ignore_eos"] = True
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    assert answer.status == 200
    assert answer.readline().startswith(b"data:")
    return connection


def test_a_restart_keeps_the_gpu_until_the_old_process_has_exited(serving: Serving) -> None:
    port = free_port()
    graph = MODELS.format(port=port, model=MODEL)
    serving.start(serving.graph(graph), "--gpus", "2", wait="ready: http://")
    (old,) = serving.wait_for_pids("A")
    assert run(serving, "sleep", "S")[0] == 0
    assert held(serving) == {"A": ["0"]}
    answer = stream(port)
    restart = dynamo(serving, "restart", "A")
    serving.until(lambda: len(serving.pids("A")) == 2)
    assert held(serving) == {"A": ["0", "1"]}
    status, text = run(serving, "wake", "S")
    assert status == 1
    assert "GPU 1 is in use by" in text
    status, text = run(serving, "load", "more")
    assert status == 1, [text, held(serving), serving.text()]
    assert "0 of 2 free" in text
    assert run(serving, "state", "repair")[1] == "nothing to repair\n"
    answer.close()
    out, err = restart.communicate(timeout=60)
    assert restart.returncode == 0, out + err
    assert not psutil.pid_exists(old)
    assert held(serving) == {"A": ["1"]}
    _interrupt_a_sleep(serving, port)
    _reload_beside_a_sleeper(serving, graph)
    assert serving.stop() == 0


def _interrupt_a_sleep(serving: Serving, port: int) -> None:
    """The engine goes on: a repair waits for it."""
    answer = stream(port)
    sleep = dynamo(serving, "sleep", "A")
    assert sleep.stdout is not None
    assert "to sleep" in sleep.stdout.readline()
    serving.until(
        lambda: "reserved_by" in serving.document()["components"][f"{serving.namespace}_A"]
    )
    sleep.send_signal(signal.SIGINT)
    sleep.communicate(timeout=60)
    assert held(serving) == {"A": ["1"]}
    assert re.search("_A +failed.*its sleep was interrupted", run(serving, "ps")[1])
    answer.close()
    assert "_A: finished its sleep\n" in run(serving, "state", "repair")[1]
    assert (record(serving, "A")["state"], held(serving)) == ("asleep", {})
    assert run(serving, "wake", "A")[0] == 0
    assert held(serving) == {"A": ["1"]}
    stream(port).close()


def _reload_beside_a_sleeper(serving: Serving, graph: str) -> None:
    """It holds no GPU: a new service gets the one it is bound to."""
    assert run(serving, "load", "more")[0] == 0
    assert run(serving, "sleep", "M")[0] == 0
    assert record(serving, "M_1")["resources"] == {"allocated_gpus": [0]}
    head, _, rest = graph.partition("S:\n")
    new = "N: {run: SLEEPER, ServiceArgs: {resources: {gpu: 1}}}\nM:\n"
    status, text = run(
        serving, "reload", str(serving.graph(head + new + rest.partition("M:\n")[2]))
    )
    assert status == 0, text
    assert held(serving) == {"A": ["1"], "N": ["0"]}
    status, text = run(serving, "wake", "M")
    assert status == 1
    assert f"GPU 0 is in use by {serving.namespace}_N;" in text
    # Killed by a command, as by a person: no process follows on a GPU that is another's.
    serving.circusctl("kill", f"{serving.namespace}_M_1")
    serving.until(lambda: f"{serving.namespace}_M_1" not in serving.document()["components"])
    assert held(serving) == {"A": ["1"], "N": ["0"]}


POOLS = """
Frontend: {{run: dynamo.frontend, http-port: {port}}}
P:
  run: dynamo.mocker
  model-path: {model}
  model-name: tiny
  disaggregation-mode: prefill
  ServiceArgs: {{workers: 0, min: 0, resources: {{gpu: 1}}}}
D:
  run: dynamo.mocker
  model-path: {model}
  model-name: tiny
  disaggregation-mode: decode
  ServiceArgs: {{workers: 0, min: 0, resources: {{gpu: 3}}}}
M:
  run: dynamo.mocker
  model-path: {model}
  model-name: more
  ServiceArgs: {{workers: 0, min: 0, resources: {{gpu: 1}}}}
"""


def test_loads_at_the_same_time_and_interrupted_ones(serving: Serving) -> None:
    graph = POOLS.format(port=free_port(), model=MODEL)
    serving.start(serving.graph(graph), "--gpus", "3", wait="listening on")
    status, text = run(serving, "load", "tiny")
    assert status == 1
    assert "D_1 needs 3 GPUs, 2 of 3 free" in text
    assert held(serving) == {}
    assert not any(name.endswith("_1") for name in serving.document()["components"])

    loads = [dynamo(serving, "load", "more") for _ in range(3)]
    texts = [process.communicate(timeout=60) for process in loads]
    assert 0 in [process.returncode for process in loads], texts
    for process, (text, error) in zip(loads, texts, strict=True):
        assert process.returncode == 0 or "it is served already" in text + error, texts
    assert held(serving).keys() == {"M_1"}
    assert run(serving, "drain", "M")[0] == 0

    load = dynamo(serving, "load", "more")
    assert load.stdout is not None
    load.stdout.readline()
    load.kill()
    load.communicate(timeout=60)
    without = graph.partition("M:\n")[0]
    status, text = run(serving, "reload", str(serving.graph(without)))
    assert status == 0, text
    serving.until(lambda: held(serving) == {})
    serving.until(lambda: not any("_M" in name for name in serving.document()["components"]))
    assert serving.stop() == 0
    serving.assert_clean()


def test_two_deployments_get_different_gpus(serving: Serving) -> None:
    """A start, a reload and a restart of one respect what the other holds."""
    other = Serving(serving.tmp_path)  # of the same user: the same state directory
    serving.start(sleepers(), "--gpus", "4")
    try:
        other.start(other.graph(f"A: {{run: SLEEPER, {PIN}}}\n", "other.yaml"), "--gpus", "4")
        assert held(serving) == {"A": ["0"], "B": ["1"]}
        assert held(other) == {"A": ["2"]}
        assert visible(*other.wait_for_pids("A")) == ["2"]
        status, text = run(serving, "reload", str(serving.graph(sleepers(gpus=3))))
        assert status == 2 and f"{other.namespace}_A of namespace {other.namespace}" in text, text
        status, text = run(serving, "restart", "A")
        assert status == 0, text
        assert held(serving) == {"A": ["0"], "B": ["1"]}
        status, text = run(other, "restart", "A")
        assert status == 0 and held(other) == {"A": ["2"]}, text
    finally:
        other.stop()
    status, text = run(serving, "reload", str(serving.graph(sleepers(gpus=3))))
    assert status == 0, text
    assert held(serving)["B"] == ["1"] and held(serving)["A"] == ["0", "2", "3"]
