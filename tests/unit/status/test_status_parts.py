"""Log tails, the status socket, the quick options of ps."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import msgspec
import psutil
import pytest
from status_documents import MOCKER, document, entry

from dynamo.config import from_env
from dynamo.config.runtime import RuntimeSettings
from dynamo.protocols.control import LeaseRecord, ModelCard
from dynamo.protocols.status import PlannedModel, PlannerReport, WorkerStatus
from dynamo.runtime.discovery.layout import encode_stored, lease_path
from dynamo.runtime.process.os_process import host_id, start_ticks
from dynamo.serve.state.registered import registered_workers
from dynamo.status.deployment import ask
from dynamo.status.logs import last_line, planner_summary, progress_in
from dynamo.status.models import FrontendView
from dynamo.status.reading import BoxReader, UnreadableCertificate, problems_of, trusting
from dynamo.status.status_socket import StatusSocket


def test_the_last_line_is_what_the_terminal_shows(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    assert last_line(log) == ""
    log.write_bytes(b"first\n\x1b[31m 10%\r 20% done\x1b[0m\n\n")
    assert last_line(log) == "20% done"
    os.utime(log, (1, 100))
    assert last_line(log, since_s=101) == "" and last_line(log, since_s=99)
    log.write_bytes(b"x" * 20_000)
    assert 0 < len(last_line(log)) <= 1000


def test_the_last_output_is_that_of_the_process_that_lives(tmp_path: Path) -> None:
    """A process that loads has not yet failed as the one before, nor loaded as much."""
    log = tmp_path / "d/logs/d_W.log"
    log.parent.mkdir(parents=True)
    log.write_text("loading weights: 43 %\n")
    reader = BoxReader(RuntimeSettings(namespace="d", state_dir=str(tmp_path)))
    here = {"pid": os.getpid(), "start_ticks": start_ticks(os.getpid())}
    before_s, since_s = psutil.Process().create_time() - 100, time.time()
    ended = {"processes": [], "watcher": {"status": "given up"}}
    for more, at_s, cause, progress in (
        ({"processes": [here]}, before_s, "", None),
        ({"processes": [here]}, since_s, "last output: loading weights: 43 %", 0.43),
        (ended, since_s, "given up; last output: loading weights: 43 %", None),
    ):
        found = document(entry("d_W", MOCKER, **more)) | {"arbiter": {**here, "host": host_id()}}
        (tmp_path / "d.json").write_text(json.dumps(found))
        os.utime(log, (0, at_s))
        (worker,) = reader.read(None).workers
        assert (worker.cause, worker.progress) == (cause, progress)


@pytest.mark.parametrize(
    ("line", "share"),
    [
        ("downloading org/m: 43 % of 8.10 GB", 0.43),
        ("Loading safetensors checkpoint shards:  50% Completed | 2/4 [00:01<00:01]", 0.5),
        ("Capturing CUDA graphs: 100%|####| 67/67", 1.0),
        ("loading weights took 4.2 s", None),
        ("GPU KV cache usage: 12.0%", None),
        ("downloading 143 % of it", None),
    ],
)
def test_progress(line: str, share: float | None) -> None:
    assert progress_in(line) == share


def test_the_status_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "status.sock")
    keys: list[str | None] = []

    def report(key: str | None) -> bytes:
        keys.append(key)
        if key == "bad":
            raise RuntimeError("a defect")
        return b"x" * 1_000_000

    with StatusSocket(path, report):
        assert Path(path).stat().st_mode & 0o077 == 0
        assert len(ask(path, None, 5.0)) == 1_000_000
        assert ask(path, "bad", 5.0) == b""
        assert ask(path, "k", 5.0)
    assert keys == [None, "bad", "k"]
    with pytest.raises(OSError):
        ask(path, None, 5.0)


def test_a_report_decodes(tmp_path: Path) -> None:
    from dynamo.protocols.status import BoxStatus
    from dynamo.status.reading import report

    runtime = from_env(RuntimeSettings, {"DYN_LOCAL_STATE_DIR": str(tmp_path)})
    found = msgspec.json.decode(report(runtime), type=BoxStatus)
    assert (found.state, found.frontend, found.problems) == ("stopped", "none", ())
    (tmp_path / "dynamo.json").write_text("{")
    (problem,) = json.loads(report(runtime))["problems"]
    assert "is damaged" in problem


@pytest.mark.parametrize(("due", "next_s"), [((90.0, 103.0), 3.0), ((90.0,), 0.0), ((), None)])
def test_the_next_decision_is_not_in_the_past(due: tuple[float, ...], next_s: float | None) -> None:
    models = tuple(PlannedModel(model="m", at_s=0.0, text="", next_at_s=at) for at in due)
    report = PlannerReport(pid=1, start_ticks=1, state="running", mode="load", models=models)
    assert planner_summary(report, 100.0).next_s == next_s


def test_a_lease_that_is_not_renewed_is_silent(tmp_path: Path) -> None:
    pid, ticks = os.getpid(), start_ticks(os.getpid())
    assert ticks is not None
    record = LeaseRecord(lease_id=7, pid=pid, pid_start=ticks, ttl_s=10, host=host_id())
    file = lease_path(tmp_path, 7)
    file.parent.mkdir()
    file.write_bytes(msgspec.json.encode(record))
    session = os.getsid(0)
    assert not registered_workers(tmp_path)[session].silent
    os.utime(file, (0, 0))
    assert registered_workers(tmp_path)[session].silent


def test_a_worker_has_the_names_of_its_adapters(tmp_path: Path) -> None:
    pid, ticks = os.getpid(), start_ticks(os.getpid())
    assert ticks is not None
    lease = LeaseRecord(lease_id=7, pid=pid, pid_start=ticks, ttl_s=10, host=host_id())
    (tmp_path / "leases").mkdir()
    lease_path(tmp_path, 7).write_bytes(msgspec.json.encode(lease))
    (tmp_path / "v1/mdc").mkdir(parents=True)
    for name, adapter in (("sql", "sql"), ("base", None)):
        card = ModelCard(name, name, "m", "ns", "c", "e", 7, lora_name=adapter)
        stored = encode_stored(7, msgspec.json.encode(card))
        (tmp_path / "v1/mdc" / name).write_bytes(stored)
    (worker,) = registered_workers(tmp_path).values()
    assert (worker.model, worker.adapters) == ("base", ("sql",))


def test_a_deployment_that_stops_has_no_problems_to_mend() -> None:
    failed = WorkerStatus(name="d_W", service="W", state="failed", cause="c", remedy="r")
    down = FrontendView(name="d_F", url="", state="down", problem="its process does not run")
    assert len(problems_of((failed,), (down,), stopping=False)) == 2
    off = PlannedModel(model="m", at_s=0.0, text="", problem="the policy is switched off: x")
    report = PlannerReport(pid=1, start_ticks=1, state="running", mode="load", models=(off,))
    (text,) = problems_of((), (), False, report)
    assert text.startswith("planner, model m: the policy is switched off: x. See: dynamo planner")
    (text,) = problems_of((failed,), (down,), stopping=True)
    assert "the deployment stops" in text


def test_a_certificate_that_cannot_be_read_does_not_make_its_frontend_fail(tmp_path: Path) -> None:
    file = tmp_path / "c.pem"
    begin = trusting(file)
    with socket.socket() as plain:
        with pytest.raises(UnreadableCertificate, match=r"c\.pem: No such file"):
            begin(plain)
        file.write_text("x")
        with pytest.raises(UnreadableCertificate, match=r"c\.pem: no PEM certificate"):
            begin(plain)
