"""Pipes, lines and log files: complete at the end, and bounded."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import stat
from pathlib import Path

import pytest

from dynamo.serve.supervision.output import (
    LogFile,
    OutputPipe,
    ServiceOutput,
    cause_in,
    refusal_in,
    telling_line,
)
from dynamo.status.logs import last_line


async def test_lines_arrive_complete_and_the_rest_at_the_end() -> None:
    lines: list[bytes] = []
    last = asyncio.Event()

    def take(line: bytes) -> None:
        lines.append(line)
        if line == b"rest":
            last.set()

    pipe = OutputPipe(take)
    writer = os.dup(pipe.write_fd)
    pipe.close_write_end()
    os.write(writer, b"one\r\ntw")
    os.write(writer, b"o\n\nrest")
    os.close(writer)
    async with asyncio.timeout(20):
        await last.wait()
    assert lines == [b"one", b"two", b"", b"rest"]
    pipe.close()
    pipe.close()


async def test_close_reads_the_rest_of_the_pipe() -> None:
    """The last output of a crashed process."""
    lines: list[bytes] = []
    pipe = OutputPipe(lines.append)
    os.write(pipe.write_fd, b"Traceback\nKeyError")
    pipe.close()
    assert lines == [b"Traceback", b"KeyError"]


async def test_close_does_not_wait_for_a_process_that_writes_for_ever() -> None:
    """Of another session, so that it did not end with the child."""
    lines: list[bytes] = []

    def take(line: bytes) -> None:
        lines.append(line)
        assert len(lines) < 10
        os.write(writer, b"again\n")

    pipe = OutputPipe(take)
    writer = os.dup(pipe.write_fd)
    os.write(writer, b"one\n")
    pipe.close()
    assert lines == [b"one"]
    with pytest.raises(BrokenPipeError):
        os.write(writer, b"later\n")
    os.close(writer)


async def test_an_endless_line_is_split() -> None:
    lines: list[bytes] = []
    pipe = OutputPipe(lines.append)
    for _ in range(40):
        os.write(pipe.write_fd, b"x" * 4096)
        await asyncio.sleep(0)
    pipe.close()
    assert b"".join(lines) == b"x" * 4096 * 40
    assert max(map(len, lines)) <= 2 * 65536


async def test_a_progress_bar_is_a_line_now_and_then() -> None:
    lines: list[bytes] = []
    pipe = OutputPipe(lines.append)
    for percent in range(100):
        os.write(pipe.write_fd, b"\rloading: %d%%" % percent)
        await asyncio.sleep(0)
    assert len(lines) == 1 and lines[0].startswith(b"loading: ")
    os.write(pipe.write_fd, b"\rloading: 100%\ndone\n")
    pipe.close()
    assert [line.rpartition(b"\r")[2] for line in lines[1:]] == [b"loading: 100%", b"done"]
    assert all(line.count(b"\r") <= 2 for line in lines)


def test_a_log_file_is_bounded(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "a.log", 1000)
    for number in range(500):
        log.write(b"line %d" % number)
    log.close()
    files = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(files) == {"a.log", "a.log.1"} and max(files.values()) <= 1000
    assert (tmp_path / "a.log").read_bytes().endswith(b"line 499\n")


def test_a_line_that_fills_a_log_file_is_written_whole(tmp_path: Path) -> None:
    """And an empty file does not replace the older one."""
    log, older = LogFile(tmp_path / "a.log", 10), tmp_path / "a.log.1"
    log.write(b"x" * 50)
    assert not older.exists()
    log.write(b"1234")
    assert older.stat().st_size == 51
    log.write(b"6789")  # with its line end it fits exactly
    assert (tmp_path / "a.log").read_bytes() == b"1234\n6789\n"
    log.write(b"1234")
    log.write(b"56789")  # one byte too many
    assert older.read_bytes() == b"1234\n"
    log.close()


async def test_a_child_may_write_much_before_it_is_read() -> None:
    pipe = OutputPipe(lambda line: None)
    size = fcntl.fcntl(pipe.write_fd, fcntl.F_GETPIPE_SZ)
    try:
        fcntl.fcntl(pipe.write_fd, fcntl.F_SETPIPE_SZ, 2 * 256 * 1024)
    except OSError:
        pytest.skip("beyond the user's share of memory for pipes")
    finally:
        pipe.close()
    assert size == 256 * 1024


def test_a_removed_or_moved_log_file_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "a.log"
    path.parent.mkdir()
    log = LogFile(path, 100)
    log.write(b"one")
    path.unlink()
    log.write(b"two")
    assert path.read_bytes() == b"two\n"
    path.rename(tmp_path / "moved")
    log.write(b"three")
    assert path.read_bytes() == b"three\n" and stat.S_IMODE(path.stat().st_mode) == 0o600
    shutil.rmtree(path.parent)
    log.write(b"x" * 95)
    log.write(b"four" * 3)  # which rotates it
    assert path.read_bytes() == b"four" * 3 + b"\n"
    shutil.rmtree(path.parent)
    tmp_path.joinpath("logs").touch()
    log.write(b"lost")
    path.parent.unlink()
    log.write(b"five")
    assert path.read_bytes() == b"five\n"
    log.close()


def test_a_full_disk_drops_only_the_line() -> None:
    log = LogFile(Path("/dev/full"), 1000)
    log.write(b"x")
    log.close()


def test_the_tail_is_kept(tmp_path: Path) -> None:
    shown: list[bytes] = []

    class Shown:
        def announce(self, text: str, level: int = logging.INFO) -> None: ...

        def output(self, watcher: str, line: bytes) -> None:
            shown.append(line)

    output = ServiceOutput("w", LogFile(tmp_path / "w.log", 10**6), Shown())
    for number in range(100):
        output(b"%d" % number)
    output.close()
    assert len(shown) == 100 and len(output.tail()) == 20 and output.tail()[-1] == "99"
    assert output.last_line() == "99"


VLLM = [
    "(Worker pid=4) ERROR 11-22 21:20:58 [executor.py:953]     raise RuntimeError(",
    "(Worker pid=4) ERROR 11-22 21:20:58 [executor.py:953] RuntimeError: Cannot find any weights",
    *["(EngineCore pid=3) INFO shutdown"] * 30,
    "(EngineCore pid=3) Exception: WorkerProc initialization failed. See trace for root cause.",
    "the vLLM engine did not start: Engine core initialization failed. See root cause above.",
]
LLAMA = [
    "I srv load_model: loading model",
    "E gguf_init: invalid magic characters: 'XXXX'",
    "E srv: failed to load model",
    "E srv: exiting due to model loading error",
]


def test_the_cause_of_a_failure_is_found() -> None:
    assert telling_line(VLLM) == cause_in(VLLM) == "RuntimeError: Cannot find any weights"
    assert telling_line(LLAMA) == LLAMA[-1] and cause_in(LLAMA) == LLAMA[1]
    assert telling_line(VLLM[-1:]) == VLLM[-1]
    assert cause_in(["Traceback:", "torch.OutOfMemoryError: CUDA out of memory", "bye"]) == (
        "torch.OutOfMemoryError: CUDA out of memory"
    )
    assert cause_in(["one", "two", ""]) == "two" and cause_in([]) == telling_line([]) == ""


def test_a_cause_is_kept_whole_with_its_remedy() -> None:
    long = f"ValueError: {'it needs more memory, ' * 20}. To resolve: decrease it"
    assert telling_line([long]) == cause_in([long]) == long
    prefix = "(EngineCore pid=3) ERROR 11-29 06:00:00 [core.py:9] "
    lines = ["Traceback", "ValueError: no room", "To resolve: decrease it", "Try less", ""]
    logged = [prefix + line for line in lines]
    whole = "ValueError: no room To resolve: decrease it Try less"
    for shown in (logged, lines):
        assert cause_in(shown) == telling_line([*shown, VLLM[-1]]) == whole
    endless = cause_in(["ValueError: " + "x" * 100_000, *["  y" * 1000] * 100])
    assert len(endless) == 1000


def test_the_error_of_a_rejected_start_is_found() -> None:
    usage = ["usage: x", "x.py: error: unrecognized arguments: --a", "Try 'x.py --help'."]
    assert refusal_in(usage) == "unrecognized arguments: --a"
    assert (
        refusal_in(["python -m dynamo.mocker: error: no model: error: it"]) == "no model: error: it"
    )
    assert refusal_in(["INFO the error: none", "bye"]) == refusal_in([]) == ""


def test_the_tail_begins_with_a_cause_beyond_it(tmp_path: Path) -> None:
    class Shown:
        def announce(self, text: str, level: int = logging.INFO) -> None: ...

        def output(self, watcher: str, line: bytes) -> None: ...

    output = ServiceOutput("w", LogFile(tmp_path / "w.log", 10**6), Shown())
    assert output.tail() == []
    for line in VLLM:
        output(line.encode())
    output.close()
    assert output.tail()[:2] == ["RuntimeError: Cannot find any weights", "…"]
    assert output.tail()[-1] == VLLM[-1] and len(output.tail()) == 22
    assert last_line(tmp_path / "w.log") == output.last_line() == output.tail()[0]
