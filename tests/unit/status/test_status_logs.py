"""Log files as ``dynamo logs`` reads them: last lines, new lines, rotation, truncation."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo.errors import InvalidArgument
from dynamo.serve.supervision.output import LogFile
from dynamo.status import logs
from dynamo.status.logs import LogReader, follow, select_watchers


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[LogReader]:
    made = LogReader(tmp_path, "ns", "")
    yield made
    made.close()


def write(directory: Path, watcher: str, *lines: str, size_bytes: int = 1 << 20) -> None:
    file = LogFile(directory / f"{watcher}.log", size_bytes)
    for line in lines:
        file.write(line.encode())
    file.close()


def test_names(tmp_path: Path) -> None:
    for watcher in ("ns_A", "ns_A_1", "ns_AB", "ns_B"):
        write(tmp_path, watcher, "x")
    assert select_watchers(tmp_path, "ns", "A") == ["ns_A", "ns_A_1"]
    assert select_watchers(tmp_path, "ns", "ns_A") == ["ns_A"]
    assert select_watchers(tmp_path, "ns", "A_1") == ["ns_A_1"]
    assert len(select_watchers(tmp_path, "ns", "")) == 4
    with pytest.raises(InvalidArgument, match="there are ns_A, ns_AB, ns_A_1, ns_B"):
        select_watchers(tmp_path, "ns", "C")
    with pytest.raises(InvalidArgument, match="no deployment of namespace 'other' has run"):
        select_watchers(tmp_path, "other", "")


def test_the_last_lines_are_sorted_by_time(tmp_path: Path, reader: LogReader) -> None:
    json_line = '{"time":"2026-01-01T00:00:02Z","message":"two"}'
    write(tmp_path, "ns_A", "2026-01-01T00:00:01.5Z one", "  more of it", "2026-01-01T00:00:03Z 3")
    write(tmp_path, "ns_B", json_line)
    assert [line.decode() for _, line in reader.last(10)] == [
        "2026-01-01T00:00:01.5Z one",
        "  more of it",
        json_line,
        "2026-01-01T00:00:03Z 3",
    ]
    assert list(reader.read()) == []


def test_the_older_file_counts(tmp_path: Path, reader: LogReader) -> None:
    write(tmp_path, "ns_A", *map(str, range(100)), size_bytes=160)
    assert (tmp_path / "ns_A.log.1").exists()
    assert [int(line) for _, line in reader.last(60)] == [*range(40, 100)]
    assert reader.last(0) == []


def test_long_files_are_read_from_their_end(tmp_path: Path, reader: LogReader) -> None:
    write(tmp_path, "ns_A", *(f"{number} {'x' * 999}" for number in range(300)))
    assert [int(line.split()[0]) for _, line in reader.last(100)] == [*range(200, 300)]


def test_nothing_is_lost_over_rotation_truncation_and_new_files(
    tmp_path: Path, reader: LogReader
) -> None:
    file = LogFile(tmp_path / "ns_A.log", 200)
    file.write(b"before")
    reader.last(0)
    seen: list[int] = []
    for number in range(200):
        file.write(str(number).encode())
        if number % 7 == 0:
            seen += [int(line) for _, line in reader.read()]
    seen += [int(line) for _, line in reader.read()]
    assert seen == [*range(200)]
    file.close()
    (tmp_path / "ns_A.log").write_bytes(b"again\nhal")
    assert list(reader.read()) == [("ns_A", b"again")]
    with (tmp_path / "ns_A.log").open("ab") as more:
        more.write(b"f\n")
    write(tmp_path, "ns_A_1", "first")
    assert list(reader.read()) == [("ns_A", b"half"), ("ns_A_1", b"first")]


async def test_follow(tmp_path: Path, reader: LogReader) -> None:
    write(tmp_path, "ns_A", "old")
    reader.last(0)
    lines = follow(reader.directory, reader.read)
    async with asyncio.timeout(20):
        waiting = asyncio.ensure_future(anext(lines))
        await asyncio.sleep(0)
        write(tmp_path, "ns_B", "new")
        assert await waiting == ("ns_B", b"new")
        write(tmp_path, "ns_A", "next")
        assert await anext(lines) == ("ns_A", b"next")
    await lines.aclose()


async def test_follow_goes_on_in_a_directory_that_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_AGAIN_S", 0.01)
    directory = tmp_path / "logs"
    directory.mkdir()
    write(directory, "ns_A", "old")
    reader = LogReader(directory, "ns", "")
    reader.last(0)
    lines = follow(directory, reader.read)
    async with asyncio.timeout(30):
        waiting = asyncio.ensure_future(anext(lines))
        await asyncio.sleep(0)
        shutil.rmtree(directory)
        directory.mkdir()
        write(directory, "ns_A", "new")
        assert await waiting == ("ns_A", b"new")
        write(directory, "ns_A", "next")
        assert await anext(lines) == ("ns_A", b"next")
    await lines.aclose()
    reader.close()
