"""Three network namespaces on one switch: ``hub``, ``a`` and ``b``, and cables that can be cut.

The switch is a bridge in its own namespace, so the host's network is unchanged. A
cable is cut at the switch in one of two ways: ``down`` takes the hub's neighbour off the air with
its carrier; ``silent`` leaves every link up, and what is sent is swallowed.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["Network", "why_not"]

ADDRESSES = {"hub": "10.87.0.1", "a": "10.87.0.2", "b": "10.87.0.3"}
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def why_not() -> str:
    """Why there can be no namespaces here; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "ip is not here: apt-get install iproute2"
    name = f"dyn{uuid.uuid4().hex[:6]}"
    try:
        _ip("netns", "add", name)
        _ip("-n", name, "link", "add", "sw", "type", "bridge")
        _ip("-n", name, "link", "add", "x", "type", "veth", "peer", "name", "y")
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return ""


class Network:
    """The namespaces; always :meth:`close` it."""

    def __init__(self) -> None:
        self._tag = f"dyn{uuid.uuid4().hex[:6]}"
        self._made: list[str] = []
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    @contextmanager
    def inside(self, place: str) -> Iterator[None]:
        """Run this thread, and the processes that it starts, in ``place``."""
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        there = os.open(Path("/run/netns") / self._name(place), os.O_RDONLY)
        try:
            _enter(there)
            yield
        finally:
            _enter(home)
            os.close(home)
            os.close(there)

    def cut(self, place: str, how: str) -> None:
        """Cut the cable of ``place``."""
        if how == "down":
            _ip("-n", self._name("sw"), "link", "set", _port(place), "down")
        else:
            _ip("-n", self._name("sw"), "link", "set", _port(place), "nomaster")

    def heal(self, place: str) -> None:
        """Plug it in again."""
        _ip("-n", self._name("sw"), "link", "set", _port(place), "master", "bridge", "up")

    def close(self) -> None:
        """Remove all of it."""
        while self._made:
            subprocess.run(["ip", "netns", "del", self._made.pop()], capture_output=True)

    def _build(self) -> None:
        for place in ("sw", *ADDRESSES):
            _ip("netns", "add", self._name(place))
            self._made.append(self._name(place))
            _ip("-n", self._name(place), "link", "set", "lo", "up")
        switch = self._name("sw")
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge", "stp_state", "0")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for place, address in ADDRESSES.items():
            there = self._name(place)
            peer = ("peer", "name", "eth0", "netns", there)
            _ip("-n", switch, "link", "add", _port(place), "type", "veth", *peer)
            _ip("-n", switch, "link", "set", _port(place), "master", "bridge", "up")
            _ip("-n", there, "address", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", there, "link", "set", "eth0", "up")

    def _name(self, place: str) -> str:
        return f"{self._tag}-{place}"


def _port(place: str) -> str:
    return f"to-{place}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=10)


def _enter(descriptor: int) -> None:
    if _libc.setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
