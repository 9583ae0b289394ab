"""Deployments for the tests that need real processes."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import signal
import socket
import struct
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from boxes import Etcd, Nats, binary
from deployment import Deployment
from hypothesis import HealthCheck, Phase, settings
from second_try import record_failures
from serving import Serving

from dynamo.runtime.process.inotify import InotifyInstance

# A shell starts its background jobs with SIGINT ignored, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Nor do children inherit what nohup does to the suite, which goes on.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

# Without bytecode, each process of each test would compile all its modules.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# The path of a socket has at most 107 bytes, of which pytest needs 60 for the directory of a test.
LONGEST_TEMPORARY_DIRECTORY = 24
if len(tempfile.gettempdir()) > LONGEST_TEMPORARY_DIRECTORY and os.access("/tmp", os.W_OK):
    os.environ["TMPDIR"] = "/tmp"
    tempfile.tempdir = None

# A busy machine is slow; no test of hypothesis is about time.
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("suite", settings.get_profile("random"), derandomize=True)
settings.register_profile(
    "mutants", settings.get_profile("suite"), phases=(Phase.explicit, Phase.generate)
)  # that a test fails is enough: no smaller example is searched
settings.register_profile(
    "long", settings.get_profile("random"), max_examples=1000, stateful_step_count=100
)
settings.load_profile("suite")

# Of these, the ones before wait longer than the ones behind; all other tests come after them.
PROCESS_TESTS = ("adversity", "several_boxes", "e2e", "engines")

_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1


def pytest_configure(config: pytest.Config) -> None:
    """Give each worker of pytest-xdist a network of its own, if root, and a short directory."""
    gc.disable()  # nearly all that a collection of tests creates is kept
    record_failures(config)
    if not hasattr(config, "workerinput"):
        return
    # Its default, "popen-gw0", would make the paths of sockets too long.
    config.option.basetemp = config.option.basetemp.replace("popen-gw", "")
    if ctypes.CDLL(None).unshare(_CLONE_NEWNET) == 0:
        with socket.socket() as control:
            fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))


def pytest_collection_finish() -> None:
    """Let the collector visit what tests create, and not the tests of the whole suite."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest tests first, so that no worker is left with them at the end."""
    items.sort(key=_rank)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Show with a failure what the deployment of the test has printed."""
    report = yield
    made = getattr(item, "funcargs", {}).get("serving")
    if report.failed and isinstance(made, Serving):
        report.sections.append(("dynamo serve", made.text()))
    return report


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """Replace what UTF-8 cannot encode: a worker of pytest-xdist could not send it."""
    return _encodable((yield))


def _encodable(data: Any) -> Any:
    if isinstance(data, str):
        return data.encode(errors="replace").decode()
    if isinstance(data, dict):
        return {key: _encodable(value) for key, value in data.items()}
    return type(data)(map(_encodable, data)) if isinstance(data, list | tuple) else data


def _rank(item: pytest.Item) -> int:
    directory = item.path.parent.name
    return PROCESS_TESTS.index(directory) if directory in PROCESS_TESTS else len(PROCESS_TESTS)


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    """A deployment for one test."""
    made = Deployment(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared_deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Two mockers behind a KV router, for tests that do not change it."""
    made = Deployment(tmp_path_factory.mktemp("deployment"))
    made.mocker("--speedup-ratio", "0", "--num-workers", "2", "--block-size", "16")
    made.frontend("--router-mode", "kv")
    try:
        made.wait_for_workers(2)
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def attached_deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """As ``shared_deployment``, with workers in front of a server of another make."""
    made = Deployment(tmp_path_factory.mktemp("attached"))
    try:
        port = made.openai_server()
        for _ in range(2):
            made.attached(port, "--block-size", "16")
        made.frontend("--router-mode", "kv")
        made.wait_for_workers(2)
        yield made
    finally:
        made.close()


@pytest.fixture(params=["shared_deployment", "attached_deployment"])
def either_deployment(request: pytest.FixtureRequest) -> Deployment:
    """The one and the other, for what must not depend on where a model is served."""
    found: Deployment = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    """A ``dynamo serve``, not started yet."""
    made = Serving(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium for the tests of a file."""
    from web_kit import chromium  # loads playwright and the web page: only for tests that ask

    with chromium() as opened:
        yield opened


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    """An etcd of the test's own."""
    server = Etcd(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """One etcd for the tests that neither stop nor compact it."""
    if binary("etcd") is None:
        pytest.skip("etcd is missing: apt-get install etcd-server")
    server = Etcd(tmp_path_factory.mktemp("etcd"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nats]:
    """One nats-server for the tests that do not stop it."""
    if binary("nats-server") is None:
        pytest.skip("nats-server is missing: apt-get install nats-server")
    server = Nats(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def needs_inotify() -> None:
    """Skip a test of the events of the kernel where a user's limit leaves none."""
    try:
        instance = InotifyInstance()
    except OSError as error:
        pytest.skip(f"no inotify instance is left: {error}")
    instance.close()


@pytest.fixture
def other_users(tmp_path: Path) -> None:
    """Skip where files of other users cannot be made, nor processes of theirs be started."""
    mine = tmp_path / "mine"
    mine.touch()
    try:
        os.chown(mine, 1, 1)
    except OSError as error:
        pytest.skip(f"there are no other users here: {error}")
