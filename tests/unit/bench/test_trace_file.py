"""The file that ``dynamo record`` writes: whole lines at any time, numbers in place of ids."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from dynamo.bench.recording import Numbers, TraceFile
from dynamo.bench.trace import read_trace
from dynamo.errors import ConfigError, DynamoError
from dynamo.protocols.status import RecordedRequest


def record(arrived_ms: float, *blocks: int, **more: Any) -> RecordedRequest:
    given: dict[str, Any] = {"model": "m", "ended_ms": arrived_ms + 10, "output_length": 3}
    given |= {"input_length": 512 * len(blocks), "blocks": list(blocks)} | more
    return RecordedRequest(arrived_ms=arrived_ms, **given)


def test_it_is_sorted_begins_at_zero_and_has_small_numbers(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with TraceFile(path) as file:
        file.add(record(7000, 10**14, 5))
        file.add(record(5000.25, 10**14, 6))
        file.add(record(6000, 10**14, model="other"))
        assert [one.timestamp for one in read_trace(path)] == [5000.25, 6000, 7000]
        file.finish()
    first, second, third = read_trace(path)
    assert [one.timestamp for one in (first, second, third)] == [0, 999.75, 1999.75]
    assert (third.hash_ids, first.hash_ids, second.hash_ids) == ([0, 1], [0, 2], [3])
    assert first.input_length == 1024 and first.output_length == 3
    assert path.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in tmp_path.iterdir()] == ["trace.jsonl"]


def test_sessions_are_renumbered_with_their_delays(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with TraceFile(path) as file:
        file.add(record(0, 1, session=999))
        file.add(record(5, 1, session=888))
        file.add(record(100, 1, session=999))
        file.add(record(105, 1, session=999))  # overlaps the one before
        file.finish()
    found = read_trace(path)
    assert [one.session_id for one in found] == ["0", "1", "0", "0"]
    assert [one.delay for one in found] == [0, 0, 90, 0]


def test_a_crash_at_any_byte_leaves_whole_lines(tmp_path: Path) -> None:
    path, cut = tmp_path / "trace.jsonl", tmp_path / "cut.jsonl"
    with TraceFile(path) as file:
        for number in range(4):
            file.add(record(number, number, number + 1))
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        cut.write_bytes(whole[:size])
        lines = whole[:size].count(b"\n")
        if whole[:size].rpartition(b"\n")[2].endswith(b"}"):
            lines += 1  # only the line end is missing
        if lines:
            assert len(read_trace(cut)) == lines
        else:
            with pytest.raises(ConfigError, match=r"cut\.jsonl"):
                read_trace(cut)


def test_a_torn_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"hash_ids": [1], "output_length": 2}\n{"hash_i\n{"hash_ids": [1]}')
    with pytest.raises(ConfigError, match=r"trace\.jsonl:2"):
        read_trace(path)


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.jsonl"
    write, room = os.write, 150
    with TraceFile(path) as file:

        def limited(number: int, data: bytes) -> int:
            return write(number, data[: max(0, room - path.stat().st_size)])

        monkeypatch.setattr(os, "write", limited)
        with pytest.raises(DynamoError, match="disk is full"):
            for number in range(9):
                file.add(record(number, number))
        monkeypatch.undo()
        assert file.lines == path.read_bytes().count(b"\n") > 0
        file.finish()
    assert len(read_trace(path)) == file.lines


def test_an_existing_file_is_kept_and_an_empty_one_removed(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="exists"):
        TraceFile(path)
    assert path.read_text() == "mine"
    with pytest.raises(ConfigError, match="cannot write"):
        TraceFile(tmp_path / "none" / "x")
    with TraceFile(tmp_path / "empty") as file:
        file.finish()
    assert [one.name for one in tmp_path.iterdir()] == ["trace.jsonl"]


def test_numbers_forget_the_key_that_was_used_least_lately() -> None:
    numbers = Numbers(3)
    assert [numbers["m", key] for key in (1, 2, 3, 1)] == [0, 1, 2, 0]
    assert [numbers["m", key] for key in (4, 1, 2)] == [3, 0, 4]  # 2 was forgotten
    numbers = Numbers(100)
    assert [numbers["m", key] for key in range(1000)] == list(range(1000))
    assert [numbers["m", key] for key in range(900, 1000)] == list(range(900, 1000))
    assert [numbers["m", key] for key in range(100)] == list(range(1000, 1100))  # all forgotten


def test_the_lines_of_a_finished_trace_are_in_the_order_of_arrival(tmp_path: Path) -> None:
    """For readers that do not sort them."""
    path = tmp_path / "trace.jsonl"
    with TraceFile(path) as file:
        for arrived_ms in (7000, 5000, 6000):
            file.add(record(arrived_ms, arrived_ms))
        file.finish()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["timestamp"] for line in lines] == [0, 1000, 2000]


def test_a_line_of_which_a_part_was_written_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk may be full in the middle of it."""
    path, write = tmp_path / "trace.jsonl", os.write
    with TraceFile(path) as file:
        file.add(record(0, 1))
        whole = path.read_bytes()
        monkeypatch.setattr(os, "write", lambda number, data: write(number, data[:10]))
        with pytest.raises(DynamoError, match="the disk is full"):
            file.add(record(1, 2))
        assert path.read_bytes() == whole
        monkeypatch.setattr(os, "write", write)
        file.add(record(2, 3))
    assert [one.timestamp for one in read_trace(path)] == [0, 2]
