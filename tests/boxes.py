"""Real etcd and nats-server processes for a test, on free loopback ports."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from deployment import free_port

ROOT = Path(__file__).resolve().parents[1]
UNPACKED = ROOT / "build/debian/usr"
START_TIMEOUT_S = 60.0


def binary(name: str) -> str | None:
    """The path of a server: installed, or unpacked by scripts/test."""
    places = [*os.environ.get("PATH", "").split(":"), "/usr/sbin", "/usr/local/sbin"]
    own = f"{UNPACKED}/bin:{UNPACKED}/sbin"
    return shutil.which(name, path=":".join([*places, own]))


def needs(name: str, package: str) -> pytest.MarkDecorator:
    """Skips where the server is missing, naming the Debian package that has it."""
    return pytest.mark.skipif(
        binary(name) is None, reason=f"{name} is missing: apt-get install {package}"
    )


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="no IPv6 loopback")
needs_etcd = needs("etcd", "etcd-server")
needs_nats = needs("nats-server", "nats-server")


class Server:
    """A process that listens on ``host:port``; tests stop, freeze and restart it."""

    def __init__(self, command: list[str], host: str, port: int, log: Path) -> None:
        self.command = command
        self.host = host
        self.port = port
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, prefix: tuple[str, ...] = ()) -> None:
        """Start it and wait until it accepts connections."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*prefix, *self.command], stdout=log, stderr=subprocess.STDOUT
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            assert self.process.poll() is None, self.log.read_text(errors="replace")[-3000:]
            assert time.monotonic() < deadline, self.log.read_text(errors="replace")[-3000:]
            time.sleep(0.02)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Kill it."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(number)
            self.process.wait(15)
            self.process = None

    def freeze(self) -> None:
        """Suspend it: its sockets stay open and nothing answers."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Resume it."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        with socket.socket() as probe:
            probe.settimeout(0.5)
            return probe.connect_ex((self.host, self.port)) == 0


class Etcd(Server):
    """One etcd with its data in ``directory``."""

    def __init__(self, directory: Path, host: str = "127.0.0.1", *flags: str) -> None:
        port, peer = free_port(), free_port()
        program = binary("etcd")
        assert program is not None
        self.data = directory / "etcd"
        self.url = f"http://{host}:{port}"
        peer_url = f"http://127.0.0.1:{peer}"
        command = [
            *(program, "--name", "one", "--data-dir", str(self.data)),
            *("--listen-client-urls", self.url, "--advertise-client-urls", self.url),
            *("--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url),
            *("--initial-cluster", f"one={peer_url}", "--log-level", "error"),
            *("--heartbeat-interval", "20", "--election-timeout", "200", *flags),
        ]
        super().__init__(command, host, port, directory / "etcd.log")

    def wipe(self) -> None:
        """Delete all data, while it is stopped."""
        shutil.rmtree(self.data)


class Nats(Server):
    """One nats-server."""

    def __init__(self, directory: Path, host: str = "127.0.0.1", *flags: str) -> None:
        port = free_port()
        program = binary("nats-server")
        assert program is not None
        self.url = f"nats://{host}:{port}"
        command = [program, "--addr", host, "--port", str(port), *flags]
        super().__init__(command, host, port, directory / "nats.log")
