"""`dynamo serve` with test services: start, control, restart, give up, stop, clean up."""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from deployment import MODEL, free_port, interrupt_again
from forked_kit import run_verb
from serving import CIRCUSCTL, ROOT, Serving, is_running

from dynamo.serve.state.rundir import OWNER_LOCK
from dynamo.serve.state.statefile import FileLock

TWO = """
A: {run: SLEEPER, ServiceArgs: {workers: 2}}
B: {run: SLEEPER}
"""
TALKS = "import signal; print(('x' * 99 + '\\n') * 20_000 + 'said'); signal.pause()"


def test_start_and_stop(serving: Serving) -> None:
    serving.start(TWO)
    serving.wait_for("control: circusctl --endpoint ipc://")
    ns = serving.namespace
    assert serving.circusctl("list") == f"{ns}_a,{ns}_a_1,{ns}_b"  # circus lower-cases
    assert f"{ns}_A_1: active" in serving.circusctl("status")
    assert serving.state_dir.stat().st_mode & 0o777 == 0o700
    pids = {name: serving.wait_for_pids(name) for name in ("A", "A_1", "B")}
    (process,) = map(psutil.Process, pids["A_1"])
    assert process.environ()["DYN_NAMESPACE"] == ns
    assert os.getsid(process.pid) == process.pid
    assert process.cwd() == str(serving.tmp_path)
    assert serving.stop() == 0
    assert "stopped" in serving.lines[-1]
    serving.assert_clean()
    logs = sorted(path.name for path in (serving.state_dir / ns / "logs").iterdir())
    assert logs == ["events.log", f"{ns}_A.log", f"{ns}_A_1.log", f"{ns}_B.log"]


def test_sockets_beside_and_away_from_the_run_directory(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The short name fits into the run directory, the long one does not; both have mode 0700."""
    with tempfile.TemporaryDirectory(prefix="s") as short:
        monkeypatch.setitem(serving.env, "XDG_RUNTIME_DIR", short)
        padding = 93 - len(f"{short}//{serving.namespace}")
        serving.state_dir = Path(short) / ("d" * padding)
        serving.env["DYN_LOCAL_STATE_DIR"] = str(serving.state_dir)
        before = os.umask(0)
        try:
            serving.start(TWO)
        finally:
            os.umask(before)
        document = serving.document()
        control, events = (
            Path(document[key].removeprefix("ipc://"))
            for key in ("circus_endpoint", "pubsub_endpoint")
        )
        assert control.parent == serving.state_dir / serving.namespace
        assert events.parent.parent == Path(short)
        for path in (control, events):
            assert path.is_socket() and path.stat().st_mode & 0o077 == 0
        made = [path for path in serving.state_dir.rglob("*") if not path.is_symlink()]
        assert [path for path in made if path.stat().st_mode & 0o077] == []
        assert serving.stop() == 0
        serving.assert_clean()
        assert list(Path(short).iterdir()) == [serving.state_dir]


def test_an_unread_stdout_does_not_delay_the_stop(serving: Serving) -> None:
    path = serving.graph(f"A: {{run: {json.dumps([sys.executable, '-uc', TALKS])}}}\n")
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb"):
        serving.process = subprocess.Popen(
            [sys.executable, "-m", "dynamo", "serve", str(path)],
            env={**serving.env, "PYTHONUNBUFFERED": ""},  # as users run it
            stdout=writing,
            stderr=writing,
        )
        os.close(writing)
        log = serving.state_dir / serving.namespace / "logs" / f"{serving.namespace}_A.log"
        serving.until(lambda: log.exists() and b"said" in log.read_bytes()[-100:])
        serving.process.send_signal(signal.SIGINT)
        assert serving.process.wait(15) == 0
    serving.assert_clean()


def test_stop_from_another_terminal(serving: Serving) -> None:
    def stop(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "dynamo", "stop", *words]
        return subprocess.Popen(
            command, env=serving.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    serving.start(TWO)
    serving.wait_for_pids("B")
    named = ("--namespace", serving.namespace)
    both = [stop(*named), stop(*named)]  # the second one changes nothing
    for one in both:
        out, err = one.communicate(timeout=60)
        assert one.returncode == 0 or "no deployment runs" in err, err
        assert one.returncode or out.splitlines()[-1] == "stopped"
    assert 0 in [one.returncode for one in both]
    assert serving.wait() == 0
    serving.assert_clean()
    late = stop(*named)
    assert "no deployment runs in namespace" in late.communicate(timeout=60)[1]
    assert late.returncode == 1


def dynamo(serving: Serving, *words: str) -> subprocess.CompletedProcess[str]:
    return run_verb(*words, env=serving.env)


def test_in_the_background(serving: Serving) -> None:
    path = str(serving.graph(TWO))
    named = ("--namespace", serving.namespace)
    logs = serving.state_dir / serving.namespace / "logs"
    logs.mkdir(mode=0o700, parents=True)
    earlier = b"earlier\n" * (1 << 18)
    (logs / "serve.log").write_bytes(earlier)
    try:
        begun = dynamo(serving, "serve", "-d", path, *named)
        assert (begun.returncode, begun.stderr) == (0, ""), begun.stdout
        *_, ready, hint = begun.stdout.splitlines()
        assert ready.startswith(("dynamo: ready: ", "dynamo: started: "))
        assert f"stop: dynamo stop --namespace {serving.namespace}" in hint
        assert serving.pids("A") and serving.pids("B")
        assert (logs / "serve.log.1").read_bytes() == earlier
        assert (logs / "serve.log").read_bytes().startswith(b"dynamo: ")
        again = dynamo(serving, "serve", "-d", path, *named)  # it says why, and changes nothing
        assert again.returncode == 1 and "is already served by process" in again.stderr
        assert serving.pids("A") and serving.pids("B")
    finally:
        assert dynamo(serving, "stop", *named).returncode == 0
    serving.assert_clean()


def test_the_second_of_two_first_runs_says_run_it_again(serving: Serving) -> None:
    """In the background it neither reads the messages of the first one nor disturbs it."""
    logs = serving.state_dir / serving.namespace / "logs"
    logs.mkdir(mode=0o700, parents=True)
    directory = os.open(logs, os.O_RDONLY)
    named = ("--namespace", serving.namespace)
    run = ("run", str(ROOT / "examples/model"), "--engine", "mocker", *named)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)  # as the first one while it starts
        second = dynamo(serving, *run, "-d")
        assert second.returncode == 1 and "when it is ready, run it again" in second.stderr
        assert not (logs / "serve.log").exists()
    finally:
        os.close(directory)
    first = FileLock(logs.parent / OWNER_LOCK)
    assert first.try_acquire()  # before its statefile
    second = dynamo(serving, *run, "--port", str(free_port()))
    first.release(remove=True)
    assert second.returncode == 1 and "Traceback" not in second.stderr
    assert "run the same command again to add the model to it" in second.stderr


CRASHES = "import time; time.sleep(0.2); raise SystemExit('no card')"


@pytest.mark.parametrize("others", ["", "Good: {run: SLEEPER}\n"])
def test_in_the_background_a_service_that_crashes_is_not_started(
    serving: Serving, others: str
) -> None:
    """Nothing but its life proves that it works; without another service all ends."""
    bad = f"Bad: {{run: {json.dumps([sys.executable, '-c', CRASHES])}}}\n"
    named = ("--namespace", serving.namespace)
    serving.env["DYN_SERVE_RESTART_BURST"] = "2"
    try:
        begun = dynamo(serving, "serve", "-d", str(serving.graph(bad + others)), *named)
        assert begun.returncode == 1 and "no card" in begun.stdout + begun.stderr, begun
        assert f"gave up {serving.namespace}_Bad: 2 deaths" in begun.stdout
        log = serving.state_dir / serving.namespace / "logs"
        assert str(log) in begun.stderr and "started: " not in begun.stdout
        assert bool(others) == (f"its log: {log}/{serving.namespace}_Bad.log" in begun.stderr)
    finally:
        assert dynamo(serving, "stop", *named).returncode == (0 if others else 1)
    serving.assert_clean()


def test_ctrl_c_ends_what_starts_in_the_background(serving: Serving) -> None:
    text = f"A: {{run: {json.dumps([sys.executable, '-uc', TALKS])}}}\n"
    frontend = f"Frontend: {{run: dynamo.frontend, http-port: {free_port()}}}\n"
    path = str(serving.graph(text + frontend))
    command = [sys.executable, "-m", "dynamo", "serve", "-d", path]
    starting = subprocess.Popen([*command, "--namespace", serving.namespace], env=serving.env)
    statefile = serving.state_dir / f"{serving.namespace}.json"
    # Its frontend waits for a model for ever.
    serving.until(lambda: statefile.exists() and bool(serving.pids("A")))
    starting.send_signal(signal.SIGINT)
    assert starting.wait(60) == 130
    serving.assert_clean()


def test_circusctl_stop_start_incr_quit(serving: Serving) -> None:
    serving.start(TWO)
    ns = serving.namespace
    serving.wait_for_pids("B")
    assert serving.circusctl("stop", f"{ns}_B", "--waiting") == "ok"
    assert serving.circusctl("status", f"{ns}_B") == "stopped"
    assert serving.pids("B") == [] or not psutil.pid_exists(serving.pids("B")[0])
    assert serving.circusctl("start", f"{ns}_B", "--waiting").endswith("ok")
    assert serving.circusctl("incr", f"{ns}_B", "--waiting") == "2"
    assert serving.circusctl("numprocesses", f"{ns}_B") == "2"
    assert serving.circusctl("decr", f"{ns}_B", "--waiting") == "1"
    assert serving.circusctl("restart", f"{ns}_B", "--waiting").endswith("ok")
    assert serving.circusctl("decr", f"{ns}_B", "--waiting") == "0"
    assert serving.circusctl("status", f"{ns}_B") == "stopped"
    serving.until(lambda: not serving.pids("B"))
    assert serving.document()["components"][f"{ns}_B"]["watcher"]["status"] == "stopped"
    assert serving.circusctl("start", f"{ns}_B", "--waiting").endswith("ok")
    assert serving.circusctl("numprocesses", f"{ns}_B") == "1"
    assert serving.circusctl("quit") == "ok"
    assert serving.wait() == 0
    serving.assert_clean()


def test_a_system_port_in_the_shell_with_several_workers(serving: Serving) -> None:
    """Each process takes the next free port and says so; another program keeps its own."""
    model = f"run: dynamo.mocker, model-path: {MODEL}, model-name: tiny"
    frontend = f"Frontend: {{run: dynamo.frontend, http-port: {free_port()}}}\n"
    text = f"{frontend}W: {{{model}, ServiceArgs: {{workers: 3}}}}\n"
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        serving.start(text, wait="workers: 3", DYN_SYSTEM_PORT=str(port))
        said = [line for line in serving.lines if "status server listens on" in line]
        ports = {int(line.rpartition(":")[2]) for line in said}
        assert len(said) == len(ports) == 3 and port < min(ports) and max(ports) <= port + 100
        for number in ports:
            assert http_status(number, "/health") == 200
        assert sum(f"port {port} is in use" in line for line in serving.lines) == 3
        watchers = [one["watcher"] for one in serving.document()["components"].values()]
        assert {one["status"] for one in watchers} == {"active"}
        assert not any(one.get("restarts") for one in watchers)
        assert serving.stop() == 0


def http_status(port: int, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_every_stop_signal(serving: Serving, signum: int) -> None:
    serving.start(TWO)
    assert serving.stop(signum) == 0
    serving.assert_clean()


def test_a_hangup_that_nohup_ignores_stays_ignored(serving: Serving) -> None:
    serving.start(TWO, under=["nohup"])
    arbiter = int(serving.document()["arbiter"]["pid"])
    for pid in (serving.pid, arbiter):
        os.kill(pid, signal.SIGHUP)
    assert serving.circusctl("restart", f"{serving.namespace}_B", "--waiting").endswith("ok")
    assert not any("stopping" in line for line in serving.lines)
    assert serving.stop(signal.SIGTERM) == 0
    assert serving.text().count("stopping") == 1
    serving.assert_clean()


def test_a_killed_worker_is_restarted_at_once(serving: Serving) -> None:
    serving.start(TWO)
    (old,) = serving.wait_for_pids("A_1")
    began_s = time.monotonic()
    os.kill(old, signal.SIGKILL)
    serving.wait_for_pids("A_1", unlike=old)
    assert time.monotonic() - began_s < 20
    serving.wait_for("A_1 .* was killed by SIGKILL; restarting it now")
    assert serving.stop() == 0


@pytest.mark.parametrize("by_command", [False, True])
def test_a_draining_sibling_does_not_delay_a_restart(serving: Serving, by_command: bool) -> None:
    serving.start("Slow: {run: SLEEPER, drain: 100}\nB: {run: SLEEPER}\n")
    (old,) = serving.wait_for_pids("B")
    words = ("--timeout", "100", "stop", f"{serving.namespace}_Slow", "--waiting")
    control = subprocess.Popen([CIRCUSCTL, "--endpoint", serving.endpoint, *words])
    with control:
        (slow,) = serving.pids("Slow")
        name = f"{serving.namespace}_Slow"
        serving.until(lambda: serving.circusctl("status", name) == "stopping")
        if by_command:
            assert serving.circusctl("kill", f"{serving.namespace}_B") == "ok"
        else:
            os.kill(old, signal.SIGKILL)
        serving.wait_for_pids("B", unlike=old)
        assert psutil.pid_exists(slow), "it still drains"
        os.kill(slow, signal.SIGKILL)
        assert control.wait(40) == 0
    assert serving.stop() == 0
    assert "Traceback" not in serving.text()


def test_children_of_a_worker_end_with_it(serving: Serving) -> None:
    """Children in its session, and children in other sessions."""
    serving.start("A: {run: SLEEPER, children: 2}\nB: {run: SLEEPER, children: 2, escape: true}\n")
    for service in ("A", "B"):
        (old,) = serving.wait_for_pids(service)
        parent = psutil.Process(old)
        serving.until(lambda parent=parent: len(parent.children()) == 2)  # type: ignore[misc]
        children = parent.children()
        os.kill(old, signal.SIGKILL)
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive
        serving.wait_for_pids(service, unlike=old)
    assert serving.stop() == 0
    serving.assert_clean()


def test_a_bad_flag_is_shown_and_not_retried(serving: Serving) -> None:
    serving.start("A: {run: SLEEPER, no-such-flag: 1}\n", wait="")
    assert serving.wait() == 1
    text = serving.text()
    assert f"gave up {serving.namespace}_A: unrecognized arguments: --no-such-flag 1 (exit" in text
    assert "no worker is left; stopping" in text
    assert "restarting it" not in text
    serving.assert_clean()


def test_a_service_that_keeps_dying_is_given_up_and_the_others_continue(serving: Serving) -> None:
    serving.start(
        "A: {run: SLEEPER}\nBad: {run: SLEEPER, exit: 3}\n",
        wait="gave up .*_Bad: 3 deaths within 60 s",
        DYN_SERVE_RESTART_BURST="3",
    )
    serving.wait_for("about to fail")
    serving.wait_for("the other services continue")
    (pid,) = serving.wait_for_pids("A")
    assert psutil.pid_exists(pid)
    assert serving.circusctl("status", f"{serving.namespace}_Bad") == "stopped"
    assert serving.stop() == 1
    serving.assert_clean()


def test_a_program_that_cannot_be_started(serving: Serving) -> None:
    program = serving.tmp_path / "not-executable"
    program.write_text("x")
    serving.start(f"A: {{run: [{program}]}}\n", wait="")
    assert serving.wait() == 1
    assert "cannot start it: [Errno 13] Permission denied" in serving.text()
    serving.assert_clean()


def test_a_stubborn_worker_is_killed_after_its_time(serving: Serving) -> None:
    graph = "A: {run: SLEEPER, stubborn: true, ServiceArgs: {graceful_timeout: 0.5}}\n"
    serving.start(graph, wait=r"\| started")
    began_s = time.monotonic()
    assert serving.stop() == 0
    took_s, text = time.monotonic() - began_s, serving.text()
    assert "not now" in text and "did not exit within 0.5 s; killing it" in text, text
    assert took_s > 0.4, text
    serving.assert_clean()


def test_the_second_ctrl_c_kills(serving: Serving) -> None:
    serving.start("A: {run: SLEEPER, stubborn: true}\n", wait=r"\| started")
    assert serving.process is not None
    serving.process.send_signal(signal.SIGINT)
    serving.wait_for("not now")
    interrupt_again(serving.process)
    assert serving.wait() == 0
    assert "killing the remaining processes" in serving.text()
    serving.assert_clean()


def test_workers_may_finish_their_work(serving: Serving) -> None:
    serving.start("A: {run: SLEEPER, drain: 1}\n", wait=r"\| started")
    began_s = time.monotonic()
    assert serving.stop() == 0
    assert time.monotonic() - began_s > 0.9
    assert "killing" not in serving.text()


def test_a_second_deployment_is_rejected(serving: Serving, tmp_path: Path) -> None:
    serving.start(TWO)
    other = Serving(tmp_path)
    other.namespace = serving.namespace
    try:
        other.start(TWO, wait="")
        assert other.wait() == 1
        assert f"already served by process {serving.pid}" in other.text()
        assert f"or: dynamo stop --namespace {serving.namespace}" in other.text()
    finally:
        other.close()
    assert serving.circusctl("status").count("active") == 3
    assert serving.stop() == 0
    serving.assert_clean()


def test_two_namespaces_do_not_touch_each_other(serving: Serving, tmp_path: Path) -> None:
    serving.start(TWO)
    other = Serving(tmp_path)
    try:
        other.start(other.graph("A: {run: SLEEPER}\n", "other.yaml"))
        assert other.stop() == 0
        other.wait_until_gone()
        assert serving.circusctl("status").count("active") == 3
        assert serving.statefile.exists()
    finally:
        other.close()
    assert serving.stop() == 0


@pytest.mark.parametrize("escape", ["false", "true"])
def test_after_a_crash_the_next_start_cleans_up(serving: Serving, escape: str) -> None:
    """Guard and arbiter are killed together: only then the next start has to clean up.

    Only the environment connects a child in another session with the deployment.
    """
    graph = f"A: {{run: SLEEPER, children: 1, escape: {escape}}}\n"
    serving.start(graph)
    (worker,) = serving.wait_for_pids("A")
    serving.until(psutil.Process(worker).children)
    children = psutil.Process(worker).children()
    os.kill(serving.pid, signal.SIGSTOP)  # the guard cannot react
    os.kill(serving.arbiter_pid, signal.SIGKILL)
    os.kill(serving.pid, signal.SIGKILL)
    assert serving.process is not None and serving.process.wait(10) == -signal.SIGKILL
    serving.until(lambda: not is_running(worker))  # PR_SET_PDEATHSIG
    assert children[0].is_running() and serving.statefile.exists()
    serving.start(graph, wait="ended without clean-up: killed 1 of its processes")
    serving.wait_for("started: ")
    assert children[0].status() == psutil.STATUS_ZOMBIE if children[0].is_running() else True
    assert serving.stop() == 0
    serving.assert_clean()


def test_a_damaged_statefile_is_replaced(serving: Serving) -> None:
    serving.state_dir.mkdir(mode=0o700)
    serving.statefile.write_text('{"namespace": ')
    serving.start(TWO, wait="replacing a bad statefile: .* is damaged")
    serving.wait_for("started: ")
    serving.wait_for_pids("B")
    serving.statefile.write_text("{")  # damaged again, while it runs
    for process in serving.survivors():
        if process.environ().get("DYN_WATCHER_NAME") == f"{serving.namespace}_B":
            process.kill()
    serving.wait_for("replacing the statefile")
    serving.wait_for("B .*started")
    assert serving.stop() == 0
    serving.assert_clean()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_drained_worker_is_not_started_again(serving: Serving, signum: int) -> None:
    """Scale-down: mark as draining, stop the process; the arbiter removes the watcher.

    Also if the process dies while it drains.
    """
    serving.start(TWO)
    (pid,) = serving.wait_for_pids("A_1")
    name = f"{serving.namespace}_A_1"
    script = (
        "import sys, pathlib; from dynamo.serve.state.statefile import Statefile\n"
        "Statefile(pathlib.Path(sys.argv[1]), sys.argv[2]).update(\n"
        "    lambda doc: setattr(doc.components[sys.argv[3]], 'state', 'draining'))"
    )
    words = [sys.executable, "-c", script, str(serving.state_dir), serving.namespace, name]
    subprocess.run(words, check=True, timeout=20)
    os.kill(pid, signum)
    serving.until(lambda: name not in serving.document()["components"])
    assert name.lower() not in serving.circusctl("list")
    assert serving.stop() == 0
    assert "restarting it" not in serving.text()


def test_circusctl_add_starts_a_supervised_worker(serving: Serving) -> None:
    """A watcher added by command, as the planner does, is supervised like the others."""
    serving.start(TWO)
    base = serving.document()["components"][f"{serving.namespace}_B"]
    name = f"{serving.namespace}_B_1"
    for outside in ("../../x", "..", "/tmp/x", "a/b"):
        assert "must be at most 200 letters" in serving.circusctl("add", outside, "sleep 9")
    assert not list(serving.tmp_path.rglob("x.log*"))
    assert serving.circusctl("add", "--start", name, base["cmd"]).endswith("ok")
    serving.wait_for("B_1 .*started")
    (added,) = (p for p in serving.survivors() if p.environ().get("DYN_WATCHER_NAME") == name)
    assert added.cmdline() == base["argv"] and os.getsid(added.pid) == added.pid
    added.kill()
    serving.wait_for("B_1 .*started")
    assert serving.stop() == 0
    serving.assert_clean()


def test_gpus_are_placed_and_shown(serving: Serving) -> None:
    text = "W: {run: SLEEPER, ServiceArgs: {workers: 2, resources: {gpu: 2}}}\n"
    serving.start(text, "--gpus", "5")
    first, second = serving.wait_for_pids("W"), serving.wait_for_pids("W_1")
    seen = [psutil.Process(pid).environ()["CUDA_VISIBLE_DEVICES"] for pid in first + second]
    assert seen == ["0,1", "2,3"]
    entry = serving.document()["components"][f"{serving.namespace}_W_1"]
    assert entry["resources"] == {"allocated_gpus": [2, 3]}
    assert "Singleton" in serving.circusctl("incr", f"{serving.namespace}_W")
    assert serving.stop() == 0


def test_a_state_directory_too_deep_for_sockets(serving: Serving) -> None:
    serving.state_dir = serving.tmp_path / ("d" * 60) / ("e" * 60)
    serving.env["DYN_LOCAL_STATE_DIR"] = str(serving.state_dir)
    serving.start(TWO)
    path = Path(serving.endpoint.removeprefix("ipc://"))
    assert path.is_socket() and len(str(path)) <= 107
    assert serving.circusctl("status").count("active") == 3
    assert serving.stop() == 0
    serving.assert_clean()
    assert not path.parent.exists()


def test_tcp_control_only_when_asked(serving: Serving, unused_tcp_port: int) -> None:
    endpoint = f"tcp://127.0.0.1:{unused_tcp_port}"
    serving.start(TWO, "--circus-endpoint", endpoint)
    assert serving.endpoint == endpoint
    assert serving.circusctl("status").count("active") == 3
    other = Serving(serving.tmp_path / "other")
    (serving.tmp_path / "other").mkdir()
    try:
        other.start(other.graph(TWO), "--circus-endpoint", endpoint, wait="")
        assert other.wait() == 2
        assert f"cannot listen on {endpoint}" in other.text()
        other.assert_clean()
    finally:
        other.close()
    assert serving.stop() == 0


def test_jsonl(serving: Serving) -> None:
    graph = "A: {run: SLEEPER, say: '{\"a\":1}'}\n"
    serving.start(graph, wait='"watcher"', DYN_LOGGING_JSONL="1")
    assert serving.stop() == 0
    rows = [json.loads(line) for line in serving.lines]
    assert {"message", "level", "time"} <= set(rows[0])
    assert any(row.get("watcher") == f"{serving.namespace}_A" for row in rows)


def test_dry_run_starts_nothing(serving: Serving) -> None:
    path = serving.graph("W: {run: SLEEPER, x: 'a b', ServiceArgs: {resources: {gpu: 1}}}\n")
    flags = ["--dry-run", "--json", "--gpus", "2", "--W.ServiceArgs.workers=2"]
    command = [sys.executable, "-m", "dynamo", "serve", str(path), *flags]
    done = subprocess.run(command, env=serving.env, capture_output=True, text=True, timeout=30)
    shown = json.loads(done.stdout)
    assert [w["name"] for w in shown["watchers"]] == [
        *(f"{serving.namespace}_W", f"{serving.namespace}_W_1"),
    ]
    assert [w["gpus"] for w in shown["watchers"]] == [["0"], ["1"]]
    assert shown["watchers"][0]["command"][-2:] == ["--x", "a b"]
    text = subprocess.run(
        [*command[:5], "--dry-run", "--gpus", "1"], env=serving.env, capture_output=True, text=True
    ).stdout
    assert "--x 'a b'" in text and "GPUs: 0" in text and f"in       {path.parent}" in text
    assert not serving.state_dir.exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "no graph file given"),
        (["/nowhere.yaml"], "cannot read /nowhere.yaml: No such file"),
        ([str(ROOT / "examples/agg.yaml"), "--gpus", "1"], "agg_Worker_1 needs 1 GPU, 0 of 1 free"),
        ([str(ROOT / "examples/quickstart.yaml"), "--X.y=1"], "no service 'X'"),
        (
            [str(ROOT / "examples/quickstart.yaml"), "--Frontend.ServiceArgs.workers=2"],
            "dynamo_Frontend and dynamo_Frontend_1 would both listen on http://127.0.0.1:8000",
        ),
        (
            [str(ROOT / "examples/quickstart.yaml"), "--Worker.run=dynamo.mokker"],
            "Worker.run: no Python module dynamo.mokker",
        ),
        (
            [str(ROOT / "examples/quickstart.yaml"), '--Worker.run=["no-such-program"]'],
            "Worker.run: no program no-such-program",
        ),
        ([str(ROOT / "examples/quickstart.yaml"), "--gpus", "-1"], "between 0 and 1024"),
        ([str(ROOT / "examples/quickstart.yaml"), "--gpu", "1"], "unrecognized arguments"),
        (
            [str(ROOT / "examples/quickstart.yaml"), "--http-port", "8001"],
            "unrecognized arguments: --http-port 8001; for a service: --Frontend.http-port=VALUE",
        ),
    ],
)
def test_mistakes_are_named(serving: Serving, flags: list[str], message: str) -> None:
    done = run_verb("serve", *flags, env=serving.env, timeout=30)
    assert done.returncode == 2 and message in done.stderr, done
    assert "Traceback" not in done.stderr
