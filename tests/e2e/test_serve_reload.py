"""Rolling restarts and changed graphs under load: no request fails."""

from __future__ import annotations

import json
import socket
import subprocess
from itertools import chain

import psutil
import pytest
from deployment import MODEL, free_port
from forked_kit import run_verb
from load_kit import GRAPH, some_requests, under_load
from serving import ROOT, Serving


def graph(serving: Serving, port: int, workers: int = 2, speed: float = 2, more: str = "") -> str:
    text = GRAPH.format(port=port, model=MODEL, workers=workers, speed=speed) + more
    return str(serving.graph(text))


def start(serving: Serving, workers: int = 2, more: str = "") -> int:
    port = free_port()
    graph(serving, port, workers, more=more)
    ready = f"ready: http://127.0.0.1:.* model: tiny   workers: {workers}"
    serving.start(serving.tmp_path / "graph.yaml", wait=ready)
    return port


def reload(serving: Serving, *words: str) -> subprocess.CompletedProcess[str]:
    """Run ``dynamo reload``."""
    return run_verb("reload", *words, env=serving.env)


@pytest.mark.parametrize("workers", [2, 1])
@pytest.mark.parametrize("verb", ["restart", "reload"])
def test_restart_of_every_worker_under_load(serving: Serving, workers: int, verb: str) -> None:
    port = start(serving, workers)
    names = ["Worker", "Worker_1"][:workers]
    old = {name: serving.pids(name)[0] for name in names}
    with under_load(port) as load:
        some_requests(serving, load)
        for name, pid in old.items():
            answer = serving.circusctl(verb, f"{serving.namespace}_{name}", "--waiting")
            assert "error" not in answer
            assert serving.wait_for_pids(name, unlike=pid) and not psutil.pid_exists(pid)
        some_requests(serving, load)
    assert serving.stop() == 0
    assert "killing" not in serving.text()
    serving.assert_clean()


def test_restart_of_everything_under_load(serving: Serving) -> None:
    """The frontend, too: clients keep their connections or open new ones, none is refused."""
    port = start(serving)
    old = [serving.pids(name)[0] for name in ("Frontend", "Worker", "Worker_1")]
    with under_load(port) as load:
        some_requests(serving, load)
        assert serving.circusctl("restart", "--waiting") == "ok"
        assert not any(psutil.pid_exists(pid) for pid in old)
        some_requests(serving, load)
    assert serving.stop() == 0
    assert "killing" not in serving.text()
    serving.assert_clean()


DISAGG = """
Frontend: {{run: dynamo.frontend, http-port: {port}, router-mode: kv}}
PrefillWorker:
  run: dynamo.mocker
  disaggregation-mode: prefill
  model-path: {model}
  model-name: tiny
DecodeWorker:
  run: dynamo.mocker
  disaggregation-mode: decode
  model-path: {model}
  model-name: tiny
"""


def test_restart_of_prefill_and_decode_workers(serving: Serving) -> None:
    port = free_port()
    path = serving.graph(DISAGG.format(port=port, model=MODEL))
    serving.start(path, wait="ready: http://127.0.0.1:.* model: tiny")
    old = [serving.pids(name)[0] for name in ("PrefillWorker", "DecodeWorker")]
    with under_load(port) as load:
        some_requests(serving, load)
        assert serving.circusctl("restart", f"{serving.namespace}_*Worker", "--waiting") == "ok"
        assert not any(psutil.pid_exists(pid) for pid in old)
        some_requests(serving, load)
    assert serving.stop() == 0


def test_restart_of_a_worker_of_ones_own(serving: Serving) -> None:
    """It registers a model, so the new process takes over as one of ours does."""
    port = free_port()
    command = ["python", str(ROOT / "examples/worker_hello.py"), str(MODEL)]
    frontend = f"Frontend: {{run: dynamo.frontend, http-port: {port}}}\n"
    path = serving.graph(f"{frontend}Own: {{run: {json.dumps(command)}}}\n")
    serving.start(path, wait="ready: http://")
    (old,) = serving.wait_for_pids("Own")
    with under_load(port, model="hello", tokens=None) as load:
        some_requests(serving, load)
        serving.circusctl("restart", f"{serving.namespace}_Own", "--waiting")
        assert not psutil.pid_exists(old)
        some_requests(serving, load)
    assert serving.stop() == 0


def test_a_changed_frontend_keeps_its_port(serving: Serving) -> None:
    port = start(serving)
    (old,) = serving.pids("Frontend")
    with under_load(port) as load:
        some_requests(serving, load)
        done = reload(serving, "--namespace", serving.namespace, "--Frontend.router-mode=random")
        assert done.returncode == 0, [done, serving.text()]
        assert not psutil.pid_exists(old)
        some_requests(serving, load)
    other = free_port()
    done = reload(serving, "--namespace", serving.namespace, f"--Frontend.http-port={other}")
    assert done.returncode == 0, [done, serving.text()]
    with under_load(other) as load:
        some_requests(serving, load)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
    assert serving.stop() == 0
    serving.assert_clean()


def test_the_same_by_a_pattern(serving: Serving) -> None:
    port = start(serving)
    old = [serving.pids(name)[0] for name in ("Worker", "Worker_1")]
    with under_load(port) as load:
        some_requests(serving, load)
        assert serving.circusctl("restart", f"{serving.namespace}_Worker*", "--waiting") == "ok"
        assert not any(psutil.pid_exists(pid) for pid in old)
        some_requests(serving, load)
    assert serving.stop() == 0


def test_changed_flags_and_replicas(serving: Serving) -> None:
    port = start(serving)
    (frontend,) = serving.pids("Frontend")
    old = {name: serving.pids(name)[0] for name in ("Worker", "Worker_1")}
    with under_load(port) as load:
        some_requests(serving, load)
        path = graph(serving, port, workers=3, speed=3)
        shown = reload(serving, path, "--dry-run", "--namespace", serving.namespace)
        assert shown.returncode == 0, shown
        assert f"add      {serving.namespace}_Worker_2\n" in shown.stdout
        assert f"restart  {serving.namespace}_Worker   changed: command\n" in shown.stdout
        done = reload(serving, path, "--namespace", serving.namespace)
        assert done.returncode == 0, [done, serving.text()]
        assert "reloaded: 1 added, 2 restarted, 0 removed, 1 unchanged" in done.stdout
        some_requests(serving, load)
        serving.wait_for("ready: .* workers: 3")
        done = reload(
            serving, path, "--namespace", serving.namespace, "--Worker.ServiceArgs.workers=1"
        )
        assert "reloaded: 0 added, 0 restarted, 2 removed, 2 unchanged" in done.stdout, done
        some_requests(serving, load)
    assert serving.pids("Frontend") == [frontend]
    assert serving.pids("Worker") != [old["Worker"]]
    document = serving.document()
    assert set(document["components"]) == {
        f"{serving.namespace}_{n}" for n in ("Frontend", "Worker")
    }
    assert '"speedup-ratio": 3' in document["environment"]["DYNAMO_SERVICE_CONFIG"]
    assert serving.stop() == 0
    serving.assert_clean()


def test_a_graph_with_an_error_changes_nothing(serving: Serving) -> None:
    port = start(serving)
    serving.until(lambda: all(one["lease"] for one in serving.document()["components"].values()))
    before = serving.document()
    path = graph(serving, port, workers=3, more="  no-such-option: 1\n")
    done = reload(serving, path, "--namespace", serving.namespace)
    assert done.returncode == 2
    assert "Worker.no-such-option is not an option of dynamo.mocker" in done.stderr
    done = reload(serving, path, "--namespace", "nowhere")
    assert done.returncode == 1 and "no deployment runs in namespace 'nowhere'" in done.stderr
    assert "not an option" in serving.circusctl("reloadconfig", "--waiting")
    assert serving.document() == before
    assert serving.stop() == 0


@pytest.mark.usefixtures("needs_inotify")  # else requests find no worker for up to a second
def test_another_context_length_takes_over(serving: Serving) -> None:
    """The frontend refuses new workers whose card differs, until the last old one leaves."""
    port = start(serving)
    with under_load(port) as load:
        some_requests(serving, load)
        path = graph(serving, port, more="  block-size: 32\n")
        done = reload(serving, path, "--namespace", serving.namespace)
        assert done.returncode == 0, [done, serving.text()]
        some_requests(serving, load)
    assert serving.stop() == 0


def test_services_are_added_removed_and_moved(serving: Serving) -> None:
    serving.start("A: {run: SLEEPER, ServiceArgs: {workers: 2}}\nB: {run: SLEEPER}\n")
    (kept,) = serving.wait_for_pids("A")
    path = serving.graph("A: {run: SLEEPER}\nC: {run: SLEEPER, say: new}\n")
    done = reload(serving, str(path))
    assert "reloaded: 1 added, 0 restarted, 2 removed, 1 unchanged" in done.stdout, done
    serving.until(lambda: len(serving.document()["components"]) == 2)
    assert serving.wait_for_pids("A") == [kept] and serving.wait_for_pids("C")
    assert reload(serving, "--namespace", serving.namespace).stdout.startswith("nothing to change")
    serving.stop()
    serving.assert_clean()


def test_a_new_command_that_fails_leads_back_to_the_old_one(serving: Serving) -> None:
    serving.start("A: {run: SLEEPER}\nB: {run: SLEEPER}\n")
    (kept,) = serving.wait_for_pids("B")
    path = serving.graph("A: {run: SLEEPER, no-such-flag: 1}\nB: {run: SLEEPER, say: x}\n")
    done = reload(serving, str(path))
    assert done.returncode == 1
    assert "the new process exited before it served; the old command runs again" in done.stderr
    assert serving.wait_for_pids("A") and serving.pids("B") == [kept]
    assert serving.stop() == 0
    serving.assert_clean()


@pytest.mark.parametrize("command", ["[python, -c, 'raise SystemExit(3)']", "[sh, -c, 'exit 0']"])
def test_an_added_program_that_dies_at_once_removes_nothing(serving: Serving, command: str) -> None:
    serving.start("A: {run: SLEEPER}\nB: {run: SLEEPER}\n")
    (kept,) = serving.wait_for_pids("B")
    path = serving.graph(f"A: {{run: SLEEPER}}\nC: {{run: {command}}}\n")
    done = reload(serving, str(path))
    assert done.returncode == 1 and f"{serving.namespace}_C: " in done.stderr, done
    assert "reloaded in part" in done.stderr and "reloaded: 1 added" not in done.stdout, done
    assert serving.pids("B") == [kept]
    path = serving.graph("A: {run: SLEEPER}\nC: {run: SLEEPER}\n")
    done = reload(serving, str(path))
    assert done.returncode == 0, done
    serving.until(lambda: f"{serving.namespace}_B" not in serving.document()["components"])
    assert serving.stop() in (0, 1)
    serving.assert_clean()


def placed(serving: Serving) -> dict[str, list[int]]:
    entries = serving.document()["components"].values()
    return {
        e["watcher_name"].partition("_")[2]: e["resources"]["allocated_gpus"]
        for e in entries
        if e["resources"]
    }


def test_gpus_are_assigned_again(serving: Serving) -> None:
    """A spare GPU lets the new process start beside the old one; without one, the old one stops."""
    text = "A: {run: SLEEPER, ServiceArgs: {workers: %d, resources: {gpu: %d}}}\n"
    serving.start(text % (2, 1), "--gpus", "3")
    serving.wait_for_pids("A_1")
    assert placed(serving) == {"A": [0], "A_1": [1]}
    path = str(serving.graph(text % (4, 1)))
    done = reload(serving, path)
    assert done.returncode == 2 and "A_3 needs 1 GPU, 0 of 3 free" in done.stderr, done
    assert placed(serving) == {"A": [0], "A_1": [1]}
    done = reload(serving, str(serving.graph(text % (1, 3))))
    assert done.returncode == 0, [done, serving.text()]
    serving.until(lambda: placed(serving) == {"A": [0, 1, 2]})
    more = "B: {run: SLEEPER, ServiceArgs: {resources: {gpu: 2}}}\n"
    done = reload(serving, str(serving.graph(text % (1, 1) + more)))
    assert done.returncode == 0, [done, serving.text()]
    serving.until(lambda: sorted(chain(*placed(serving).values())) == [0, 1, 2])
    (pid,) = serving.wait_for_pids("B")
    assert psutil.Process(pid).environ()["CUDA_VISIBLE_DEVICES"] == "1,2"
    assert serving.stop() == 0
    serving.assert_clean()


def test_a_worker_moves_to_a_free_gpu(serving: Serving) -> None:
    port = free_port()
    text = GRAPH.format(port=port, model=MODEL, workers=1, speed=2)
    text = text.replace("{workers: 1}", "{workers: 1, resources: {gpu: 1}}")
    serving.start(serving.graph(text), "--gpus", "2", wait="ready: http")
    (old,) = serving.pids("Worker")
    with under_load(port) as load:
        some_requests(serving, load)
        serving.circusctl("restart", f"{serving.namespace}_Worker", "--waiting")
        (new,) = serving.wait_for_pids("Worker", unlike=old)
        assert psutil.Process(new).environ()["CUDA_VISIBLE_DEVICES"] == "1"
        some_requests(serving, load)
    assert placed(serving) == {"Worker": [1]}
    assert serving.stop() == 0
