"""The form of log lines, as text and as JSON, and the limit on repeated ones."""

from __future__ import annotations

import fcntl
import io
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from memory_kit import memory_of

from dynamo.observability.logs import NonBlockingPipe, RepeatFilter, counted, setup_logging


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    for name in ("dynamo.test", "dynamo.router", "dynamo.router.explanations.decision_log"):
        logging.getLogger(name).setLevel(logging.NOTSET)


def test_a_line_of_text() -> None:
    out = io.StringIO()
    setup_logging("svc", stream=out)
    log = logging.getLogger("dynamo.test")
    log.info("hello %s", "world")
    log.debug("hidden")
    try:
        raise ValueError("boom")
    except ValueError:
        log.exception("failed")
    lines = out.getvalue().splitlines()
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO dynamo\.test: hello world", lines[0]
    )
    assert "hidden" not in out.getvalue()
    assert lines[2] == "  Traceback (most recent call last):"
    assert lines[-1] == "  ValueError: boom"


def test_a_count_and_its_noun_agree() -> None:
    assert [counted(n, "request") for n in (0, 1, 1204)] == [
        "0 requests",
        "1 request",
        "1,204 requests",
    ]
    assert counted(1, "key was", "keys were") == "1 key was"
    assert [counted(n, "GPU is", "GPUs are") for n in (1.0, 0.5)] == ["1 GPU is", "0.5 GPUs are"]


def test_quoted_text_cannot_forge_a_line() -> None:
    out = io.StringIO()
    setup_logging("svc", stream=out)
    log = logging.getLogger("dynamo.test")
    forged = "x\n2026-01-31T12:00:00.123Z INFO dynamo.test: forged\r\x1b[2K\x85\u2028\ud800\té"
    log.warning("worker says %s", forged)
    try:
        raise ValueError(forged)
    except ValueError:
        log.exception("failed")
    first, second, *traceback = out.getvalue().splitlines()
    shown = r"INFO dynamo.test: forged\r\x1b[2K\x85\u2028\ud800" + "\té"
    assert first.endswith(r"WARNING dynamo.test: worker says x\n2026-01-31T12:00:00.123Z " + shown)
    assert second.endswith("ERROR dynamo.test: failed")
    assert traceback and all(line.startswith("  ") for line in traceback)


def test_a_json_line_may_hold_anything() -> None:
    out = io.StringIO()
    setup_logging("svc", jsonl=True, stream=out)
    logging.getLogger("dynamo.test").warning("%s", "a\nb\ud800", extra={"size": 1 << 70})
    (line,) = out.getvalue().splitlines()
    row = json.loads(line)
    assert row["message"] == "a\nb\ud800" and row["size"] == 1 << 70


def test_json_lines() -> None:
    out = io.StringIO()
    setup_logging("svc", jsonl=True, stream=out)
    logging.getLogger("dynamo.test").warning("hello", extra={"request_id": "r1"})
    row = json.loads(out.getvalue())
    assert row.pop("time").endswith("Z")
    assert row == {
        "level": "WARNING",
        "target": "dynamo.test",
        "message": "hello",
        "service": "svc",
        "request_id": "r1",
    }


def test_levels_by_module_and_unknown_words() -> None:
    out = io.StringIO()
    setup_logging("svc", "warn,dynamo::test=debug,what", stream=out)
    logging.getLogger("dynamo.test").debug("shown")
    logging.getLogger("dynamo.other").info("not shown")
    assert "not shown" not in out.getvalue() and "shown" in out.getvalue()


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        ("info", False),
        ("info,dynamo.router=info", False),
        ("info,dynamo.router.explanations.decision_log=info", True),
        ("info,dynamo.router=debug", True),
        ("debug", True),
        ("warn", False),
    ],
)
def test_lines_per_request_are_shown_on_demand(level: str, shown: bool) -> None:
    out = io.StringIO()
    setup_logging("svc", "debug", stream=out)
    setup_logging("svc", level, stream=out)
    logging.getLogger("dynamo.router.explanations.decision_log").info("Selected worker")
    assert ("Selected worker" in out.getvalue()) is shown


def test_repeated_records_are_limited_and_counted() -> None:
    now_s = 0.0
    limit = RepeatFilter(lambda: now_s)

    def passed(count: int, message: str, level: int = logging.WARNING) -> list[int | None]:
        shown = []
        for number in range(count):
            record = logging.LogRecord("dynamo.test", level, "", 0, message, (number,), None)
            if limit.filter(record):
                shown.append(getattr(record, "suppressed", None))
        return shown

    assert passed(100, "bad %s") == [None] * 20
    assert passed(1, "other %s") == [None], "each kind by itself"
    assert passed(100, "info %s", logging.INFO) == [None] * 100
    now_s = 2.5
    assert passed(100, "bad %s") == [80, None]
    now_s = 1000.0
    assert passed(100, "bad %s") == [98] + [None] * 19
    logging.getLogger("dynamo.test").setLevel(logging.DEBUG)
    assert passed(100, "bad %s") == [None] * 100, "DEBUG shows all"


def test_the_number_of_suppressed_records_is_shown() -> None:
    for jsonl in (False, True):
        out = io.StringIO()
        setup_logging("svc", jsonl=jsonl, stream=out)
        log = logging.getLogger("dynamo.test")
        for number in range(30):
            log.error("bad payload %d", number)
        assert out.getvalue().count("bad payload") == 20
        log.error("bad payload", extra={"suppressed": 3})
        last = out.getvalue().splitlines()[-1]
        assert "(3 more of this kind" in last or json.loads(last)["suppressed"] == 3


def test_kinds_are_bounded() -> None:
    limit = RepeatFilter(lambda: 0.0)

    def passes(text: str) -> bool:
        return limit.filter(logging.LogRecord("dynamo.test", logging.ERROR, "", 0, text, (), None))

    assert sum(passes("often") for _ in range(30)) == 20
    assert all(passes(f"{number}") for number in range(1000))
    assert passes("often"), "forgotten"


TALKER = """
import logging, os, sys
from dynamo.observability.logs import dropped_lines, setup_logging

setup_logging("svc")
log = logging.getLogger("dynamo.test")
for number in range(2000):
    log.info("line %d %s", number, "x" * 100)
    print("printed", number)
log.info("long %s", "y" * 100_000)
os.write(1, b"c code\\n")
os.write(int(sys.argv[1]), b"done")
os.close(int(sys.argv[1]))
sys.stdin.readline()
print("again")
log.info("again")
print(dropped_lines())
"""


def test_a_process_never_waits_for_the_reader_of_its_output() -> None:
    """As of a stopped arbiter: lines are dropped and counted, and the next line says how many."""
    (reader, writer), (done, said) = os.pipe(), os.pipe()
    command = [sys.executable, "-c", TALKER, str(said)]
    with os.fdopen(reader, "rb") as output, os.fdopen(done, "rb") as finished:
        talker = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=writer, stderr=writer, pass_fds=[said]
        )
        os.close(writer)
        os.close(said)
        assert finished.read() == b"done"
        head = [output.readline()]
        while head[-1] != b"c code\n":
            head.append(output.readline())
        assert sum(map(len, head)) < fcntl.fcntl(reader, fcntl.F_GETPIPE_SZ) * 3 // 4
        talker.communicate(b"\n", timeout=20)
        tail = output.read().decode().splitlines()
    dropped = 4001 - (len(head) - 1)
    notes = [re.search(r"dynamo: (\d+) lines were dropped here", line) for line in tail]
    assert sum(int(note[1]) for note in notes if note) == dropped
    rest = [line for line, note in zip(tail, notes, strict=True) if not note]
    assert rest[0] == "again" and rest[1].endswith("again") and rest[2:] == [str(dropped)]
    assert talker.returncode == 0


def output_of(before: str, after: str, last: str) -> tuple[str, int]:
    """What a process wrote to a pipe that is read after ``after`` ran; and the pipe's size."""
    (reader, writer), (done, said) = os.pipe(), os.pipe()
    setup = "import os, sys\nfrom dynamo.observability.logs import setup_logging"
    lines = (setup, before, "setup_logging('svc')", after, "os.close(int(sys.argv[1]))", last)
    command = [sys.executable, "-c", "\n".join(lines), str(said)]
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    child = subprocess.Popen(
        command, stdout=writer, stderr=writer, pass_fds=[said], env=environment
    )
    os.close(writer)
    os.close(said)
    with os.fdopen(done, "rb") as finished, os.fdopen(reader, "rb") as output:
        finished.read()
        text, size = output.read().decode(), fcntl.fcntl(reader, fcntl.F_GETPIPE_SZ)
    child.wait(timeout=20)
    return text, size


def test_what_was_printed_before_comes_first() -> None:
    text, _ = output_of("print('first')", "print('second')", "os._exit(0)")
    assert text == "first\nsecond\n"


@pytest.mark.parametrize(
    "error", ["raise SystemExit('the cause')", "raise ValueError('the cause')"]
)
def test_the_error_at_the_exit_of_a_process_is_not_dropped(error: str) -> None:
    text, size = output_of("", "for _ in range(9999): print('x' * 99)", error)
    assert text.endswith("the cause\n") and len(text) < size
    assert re.search(r"dynamo: \d+ lines were dropped here", text)


def test_the_end_of_a_long_text_follows_at_the_exit() -> None:
    text, _ = output_of("", "print('y' * 200_000 + 'end')", "")
    assert text == "y" * 200_000 + "end\n"


def test_a_program_may_close_its_output() -> None:
    text, _ = output_of("", "print('y' * 200_000)", "sys.stdout.close()")
    assert text == "y" * 200_000 + "\n"


def test_a_forked_process_does_not_repeat_what_its_parent_has_not_written_yet() -> None:
    fork = "if not os.fork(): print('child', flush=True)\nelse: os.wait()"
    text, _ = output_of("", "print('y' * 100_000 + 'end')", fork)
    assert text.count("end\n") == 1 and text.count("child\n") == 1


def test_a_fork_leaves_the_rest_of_a_text_to_its_parent() -> None:
    reader, writer = os.pipe()
    pipe = NonBlockingPipe(writer)
    try:
        pipe.write(b"z" * 150_000 + b"\n")
        pipe.forked()
        size = len(os.read(reader, 200_000))
        pipe.finish()
        os.set_blocking(reader, False)
        with pytest.raises(BlockingIOError):
            os.read(reader, 1)
        assert 0 < size < 150_000
    finally:
        pipe.close()
        os.close(reader)
        os.close(writer)


def test_what_waits_for_the_reader_is_bounded() -> None:
    reader, writer = os.pipe()
    pipe = NonBlockingPipe(writer)
    try:

        def write() -> None:
            for _ in range(20):  # a slow reader: each text is longer than what it has read
                pipe.write(b"z" * 150_000 + b"\n")
                os.read(reader, 50_000)

        assert memory_of(write).left < 400_000
        assert pipe.dropped
    finally:
        pipe.close()
        os.close(reader)
        os.close(writer)
