"""Deaths and ends of a worker with a real engine: nothing is left, clients and logs say why."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from answers_kit import COMPLETIONS
from servers_kit import ENGINE_START_S, EngineDeployment, closing

LONG = {"model": "tiny", "prompt": "one two three", "max_tokens": 400, "ignore_eos": True}
FIRST_TOKENS = "dynamo_frontend_time_to_first_token_seconds_count"


@pytest.fixture
def made(tmp_path: Path) -> Iterator[EngineDeployment]:
    """Workers that start their EngineCores: a fork would inherit what the worker has open."""
    with closing(EngineDeployment(tmp_path / "deployment", cores_forked=False)) as deployment:
        yield deployment


@pytest.fixture
def started(tmp_path: Path) -> Iterator[EngineDeployment]:
    """Workers that import vLLM."""
    with closing(EngineDeployment(tmp_path / "deployment", forked=False)) as deployment:
        yield deployment


def own(made: EngineDeployment) -> set[psutil.Process]:
    """The processes that the test has started and that run."""
    return {psutil.Process(each.pid) for each in made.processes if each.poll() is None}


def ended(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process that the test has ended; ``close`` must not look at its status."""
    return process.wait(timeout=30)


def engine_sockets() -> set[Path]:
    """The sockets with random names that a running engine has bound."""
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    paths = {Path(fields[7]) for line in lines if len(fields := line.split()) > 7}
    return {path for path in paths if path.parent.suffix == ".engine"}


def test_the_engine_is_killed_and_then_a_worker(made: EngineDeployment, tiny_model: Path) -> None:
    made.frontend("--router-mode", "kv")
    others = engine_sockets()  # of engines that serve other tests
    worker = made.worker(tiny_model, "tiny")
    made.wait_for_models("tiny")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(made.request, "POST", COMPLETIONS, {**LONG, "stream": True})
        made.until(lambda: made.sample(FIRST_TOKENS) == 1, "a token")
        (core,) = made.engine_cores()
        sockets = engine_sockets() - others
        assert len(sockets) >= 2
        core.kill()
        _, _, body = answer.result(timeout=20)
    # An error, not as if the answer were complete.
    assert b'"error"' in body and b'"finish_reason":"length"' not in body
    assert ended(worker) == 1
    log = next(made.logs.glob("*-dynamo.vllm.log")).read_text()
    cause = "the vLLM engine died: EngineCore exited with status -9"
    assert cause in log and "Traceback" not in log.partition(cause)[2]
    assert made.request("POST", COMPLETIONS, LONG)[0] in (404, 503)
    made.until(lambda: made.descendants() == own(made), "the engine's processes have ended")
    assert not any(path.parent.exists() for path in sockets)

    made.processes.remove(worker)
    worker = made.worker(tiny_model, "tiny")
    made.wait_for_models("tiny")
    assert made.engine_cores()
    sockets = engine_sockets() - others
    worker.kill()
    assert ended(worker) == -signal.SIGKILL
    made.until(lambda: made.descendants() == own(made), "the guard has killed the engine")
    gone = "the frontend has removed the sockets of the dead worker"
    made.until(lambda: not any(path.parent.exists() for path in sockets), gone, 30)


def test_sigterm_while_the_engine_loads(started: EngineDeployment, tiny_model: Path) -> None:
    worker = started.worker(tiny_model, "tiny")
    started.until(started.engine_cores, "an engine process", ENGINE_START_S)
    worker.send_signal(signal.SIGTERM)
    assert ended(worker) == 0
    assert "engine ready" not in started.tail()


def test_sigterm_lets_requests_finish_until_the_deadline(
    made: EngineDeployment, tiny_model: Path
) -> None:
    """At its timeout a worker ends the stream itself, and exits as after a complete drain."""
    made.frontend("--router-mode", "kv")
    patient = made.worker(tiny_model, "tiny")
    hasty = made.worker(tiny_model, "hasty", DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS="0.3")
    made.wait_for_models("tiny", "hasty")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(made.post, COMPLETIONS, {**LONG, "max_tokens": 100})
        made.until(lambda: made.sample("dynamo_frontend_inflight_requests") == 1, "a request")
        patient.send_signal(signal.SIGTERM)
        assert answer.result(timeout=30)["usage"]["completion_tokens"] == 100
        assert ended(patient) == 0
        long = {**LONG, "model": "hasty", "stream": True}
        cut = pool.submit(made.request, "POST", COMPLETIONS, long)
        made.until(lambda: made.sample(FIRST_TOKENS, model="hasty") == 1, "a token")
        hasty.send_signal(signal.SIGTERM)
        _, _, body = cut.result(timeout=20)
    assert b'"error"' in body and b"[DONE]" in body
    assert ended(hasty) == 0
    assert "1 request was aborted at shutdown" in made.tail()
    made.until(lambda: made.descendants() == own(made), "the engine's processes have ended")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--no-such-flag",), "vLLM has no flag --no-such-flag"),  # of our table
        (("--max-num-seqs", "many"), "argument --max-num-seqs: invalid"),  # of vLLM's parser
    ],
)
def test_a_wrong_flag_of_vllm_exits_with_status_2(
    started: EngineDeployment, tiny_model: Path, words: tuple[str, ...], text: str
) -> None:
    worker = started.worker(tiny_model, "tiny", *words)
    assert worker.wait(timeout=60) == 2
    assert text in started.tail()
