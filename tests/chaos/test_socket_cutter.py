"""Cutting a connection of another process, found by the path of its peer."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from socket_cutter import cut_one

CLIENT = """
import socket, sys
connections = []
for path in sys.argv[1:]:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    connections.append(connection)
print("connected", flush=True)
assert connections[0].recv(1) == b""
print("cut", flush=True)
assert connections[1].recv(1) == b"x"
"""


class Listeners:
    """Two sockets, and a process with a connection to each."""

    def __init__(self, directory: Path) -> None:
        self.paths = [directory / "one.sock", directory / "two.sock"]
        self.sockets = [socket.socket(socket.AF_UNIX) for _ in self.paths]
        for listener, path in zip(self.sockets, self.paths, strict=True):
            listener.bind(str(path))
            listener.listen()
        command = [sys.executable, "-c", CLIENT, *map(str, self.paths)]
        self.client = subprocess.Popen(command, stdout=subprocess.PIPE)
        self.accepted = [listener.accept()[0] for listener in self.sockets]
        assert self.line() == b"connected\n"

    def line(self) -> bytes:
        assert self.client.stdout is not None
        return self.client.stdout.readline()

    def close(self) -> None:
        for one in (*self.sockets, *self.accepted):
            one.close()
        self.client.kill()
        self.client.communicate()


@pytest.fixture
def listeners(tmp_path: Path) -> Iterator[Listeners]:
    made = Listeners(tmp_path)
    yield made
    made.close()


def test_a_cut_ends_one_connection_on_both_sides(listeners: Listeners) -> None:
    dice = random.Random(1)
    try:
        cut = cut_one(listeners.client.pid, lambda path: path.endswith("one.sock"), dice)
    except PermissionError:
        pytest.skip("tracing a child is forbidden here")
    assert cut == str(listeners.paths[0])
    assert listeners.accepted[0].recv(1) == b""
    assert listeners.line() == b"cut\n"
    listeners.accepted[1].send(b"x")  # the other connection lives
    assert listeners.client.wait(10) == 0


def test_nothing_is_cut_without_such_a_connection(listeners: Listeners) -> None:
    assert cut_one(listeners.client.pid, lambda path: False, random.Random(1)) == ""
