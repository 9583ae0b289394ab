"""A plugin of pytest that draws defects at random and lets the tests of the session find them.

After the tests have passed, each drawn function gets a code object with a defect, in a fork of the
session, and the tests that called it run there up to the first that fails. So one collection and
one import serve hundreds of defects. Defaults, class bodies and constants of modules stay as they
are, and so do compiled modules and what runs in another process.
"""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import select
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, Literal, NamedTuple

import pytest
from edits import Edit, broken_code, edits_of, functions_of

DRAWN = "TEST_DRAWN_MUTANTS"
RESULTS = "TEST_DRAWN_RESULTS"
"""The file of results, a line of JSON each."""
ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = (ROOT / "dynamo", ROOT / "lab/dynamo_lab")
_MOST_S = 15.0
"""The tests of one defect, as fast as they were without it."""
_HANGS_CPU_S = 60
_HANGS_S = 200.0
"""A defect with which they need longer has been found, too."""
Verdict = Literal["found", "survived", "hangs", "invalid"]
_SURVIVED, _FOUND, _INVALID = range(3)
_VERDICTS: tuple[Verdict, ...] = ("survived", "found", "invalid")
"""By the exit status of a fork."""


class Drawn(NamedTuple):
    """An edit of the function ``name``, whose code object begins at ``first_line`` of ``path``."""

    path: Path
    name: str
    first_line: int
    edit: Edit

    @property
    def function(self) -> tuple[str, int]:
        """The file and the first line of its code object."""
        return str(self.path), self.first_line

    def row(self, verdict: str, tests: int) -> dict[str, Any]:
        """The defect as JSON."""
        source = self.path.read_bytes()
        return {
            "file": str(self.path.relative_to(ROOT)),
            "line": self.edit.line,
            "function": self.name,
            "kind": self.edit.kind,
            "text": source[self.edit.begin : self.edit.end].decode(),
            "replacement": self.edit.replacement,
            "tests": tests,
            "verdict": verdict,
        }


class DrawnMutants:
    """Records which test calls which function; then tries ``count`` defects of ``package``."""

    def __init__(self, package: str, count: int, seed: int) -> None:
        first = package.partition("/")[0]
        self._root = next(root for root in _PACKAGES if any(root.glob(f"{first}*")))
        self._inside = f"{self._root / package}"
        self._count = count
        self._dice = random.Random(seed)
        self._codes: set[CodeType] = set()
        self._tests: dict[tuple[str, int], dict[pytest.Item, float]] = defaultdict(dict)
        self._records = True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Record the functions that a test calls, and how long it takes."""
        if not self._records:
            return (yield)
        self._codes.clear()
        since_s = time.perf_counter()
        sys.setprofile(self._called)
        threading.setprofile(self._called)
        try:
            return (yield)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            seconds = time.perf_counter() - since_s
            for code in self._codes:
                if code.co_filename.startswith(self._inside):
                    self._tests[code.co_filename, code.co_firstlineno][item] = seconds

    def _called(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            self._codes.add(frame.f_code)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        """Try the defects, if all tests pass without one."""
        result = yield
        self._records = False
        if not session.testsfailed:
            with Path(os.environ[RESULTS]).open("a") as results:
                for drawn in self._drawn():
                    tests = self._finders(drawn)
                    row = drawn.row(_tried(session, drawn, tests), len(tests))
                    print(json.dumps(row), file=results, flush=True)
        return result

    def _drawn(self) -> Iterator[Drawn]:
        choices = []
        for path in sorted(self._root.rglob("*.py")):
            if str(path).startswith(self._inside):
                source = path.read_bytes()
                choices += [
                    Drawn(path, function.name, line, edit)
                    for line, function in functions_of(source)
                    if (str(path), line) in self._tests
                    for edit in edits_of(source, function)
                ]
        self._dice.shuffle(choices)
        return iter(choices[: self._count])

    def _finders(self, drawn: Drawn) -> list[pytest.Item]:
        """Return the tests that call the function, the fastest, in the order of the session."""
        chosen: list[pytest.Item] = []
        left_s = _MOST_S
        tests = self._tests[drawn.function]
        for item in sorted(tests, key=tests.__getitem__):
            left_s -= tests[item]
            if chosen and left_s < 0:
                break
            chosen.append(item)
        return [item for item in tests if item in set(chosen)]


def _tried(session: pytest.Session, drawn: Drawn, tests: Sequence[pytest.Item]) -> Verdict:
    """Run the tests in a fork that has the defect."""
    functions = _functions(drawn)
    source = drawn.edit.apply(drawn.path.read_bytes())
    code = broken_code(source, str(drawn.path), drawn.first_line, drawn.name)
    if code is None or not functions:
        return "invalid"
    pid = os.fork()
    if pid == 0:
        _run(session, functions, code, tests)
    descriptor = os.pidfd_open(pid)
    try:
        ended, _, _ = select.select([descriptor], [], [], _HANGS_S)
        if not ended:
            os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    finally:
        os.close(descriptor)
    if not ended or os.WIFSIGNALED(status):
        return "hangs"
    return _VERDICTS[os.WEXITSTATUS(status)]


def _functions(drawn: Drawn) -> list[FunctionType]:
    gc.unfreeze()
    return [
        function
        for function in gc.get_objects()
        if isinstance(function, FunctionType)
        and (function.__code__.co_filename, function.__code__.co_firstlineno) == drawn.function
        and function.__name__ == drawn.name
    ]


def _run(
    session: pytest.Session,
    functions: Sequence[FunctionType],
    code: CodeType,
    tests: Sequence[pytest.Item],
) -> None:
    """Run the tests in this fork, and end it."""
    status = _INVALID
    try:
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (_HANGS_CPU_S, _HANGS_CPU_S))
        quiet = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(quiet, descriptor)
        _forget_threads()
        for function in functions:
            function.__code__ = code  # ValueError: the defect takes a name of a closure away
        session.config.pluginmanager.register(_EndAtFailure())
        for test, following in zip(tests, [*tests[1:], None], strict=True):
            session.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
        status = _SURVIVED
    finally:
        os._exit(status)


def _forget_threads() -> None:
    """Let the pools start threads of their own: a fork has none of those that they count on."""
    for pool in gc.get_objects():
        if isinstance(pool, ThreadPoolExecutor):
            pool._threads = set()
            pool._idle_semaphore = threading.Semaphore(0)


class _EndAtFailure:
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            os._exit(_FOUND)


def pytest_configure(config: pytest.Config) -> None:
    """Read from the environment what to draw: package, number, seed."""
    package, count, seed = os.environ[DRAWN].split()
    config.pluginmanager.register(DrawnMutants(package, int(count), int(seed)))
