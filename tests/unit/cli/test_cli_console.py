"""The terminal: names, JSON lines, and a reader that is slow or closed."""

from __future__ import annotations

import io
import json
import logging
import os

from dynamo.cli.console import Console, ConsoleLog


def shown(console: Console, stream: io.BytesIO) -> list[str]:
    console.close()
    return stream.getvalue().decode().splitlines()


def test_lines_carry_the_name_of_the_service() -> None:
    stream = io.BytesIO()
    console = Console("ns", stream=stream)
    console.announce("hello")
    console.output("ns_Frontend", b"listening")
    console.output("ns_Worker_1", b"\xff raw \x1b[31mred")
    assert console_lines(console, stream) == [
        b"dynamo: hello",
        b"Frontend | listening",
        b"Worker_1 | \xff raw \x1b[31mred",
    ]


def console_lines(console: Console, stream: io.BytesIO) -> list[bytes]:
    console.close()
    return stream.getvalue().splitlines()


def test_quiet_shows_only_messages_of_dynamo_serve() -> None:
    stream = io.BytesIO()
    console = Console("ns", quiet=True, stream=stream)
    console.output("ns_A", b"chatter")
    console.announce("ready")
    assert shown(console, stream) == ["dynamo: ready"]


def test_json_lines() -> None:
    stream = io.BytesIO()
    console = Console("ns", jsonl=True, stream=stream)
    console.announce("ready", logging.WARNING)
    console.output("ns_A", b'{"level":"INFO","message":"in JSON"}')
    console.output("ns_A", b'plain "text"')
    console.output("ns_A", b"{}")
    rows = [json.loads(line) for line in shown(console, stream)]
    assert rows[0]["message"] == "ready" and rows[0]["level"] == "WARNING"
    assert rows[1] == {"watcher": "ns_A", "level": "INFO", "message": "in JSON"}
    assert rows[2]["watcher"] == "ns_A" and rows[2]["message"] == 'plain "text"'
    assert rows[3]["message"] == "{}"


def test_log_records_are_shown() -> None:
    stream = io.BytesIO()
    console = Console("ns", stream=stream)
    logger = logging.getLogger("test.console")
    logger.addHandler(ConsoleLog(console))
    logger.warning("careful: %d", 3)
    try:
        raise ValueError("bad\ndynamo: ready")
    except ValueError as error:
        logger.warning("failed: %s\ud800", error, exc_info=True)
    logger.handlers.clear()
    first, second, *traceback = shown(console, stream)
    assert first == "dynamo: careful: 3"
    assert second == r"dynamo: failed: bad\ndynamo: ready\ud800"
    assert all(line.startswith("  ") for line in traceback)
    assert traceback[-1] == "  dynamo: ready"


def test_a_stopped_terminal_blocks_nothing() -> None:
    """With an unread pipe, lines are dropped and counted."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb", buffering=0) as stream:
        console = Console("ns", stream=stream)
        for number in range(30_000):
            console.output("ns_A", b"line %d" % number)
        console.announce("still here")
        os.close(reader)
        console.close()


def test_a_closed_reader_is_not_an_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb", buffering=0) as stream:
        console = Console("ns", stream=stream)
        console.announce("anyone?")
        console.close()
