"""A failed test gets a second try by itself, and only a failed test does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]

PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
"""Others take half of the time of these runs."""

CONFTEST = """
import pytest
from second_try import record_failures

def pytest_configure(config):
    record_failures(config)
"""

UNLUCKY = """
from pathlib import Path

def test_unlucky_{number}():
    tries = Path("tries_{number}")
    tries.write_text(tries.read_text() + "." if tries.exists() else ".")
    assert len(tries.read_text()) != 1, "the first try of {number}"
"""

BROKEN = """
def test_broken():
    assert False, "always"
"""


LEAK = """
import gc, socket

def test_that_fails():
    left = socket.socket()
    held = [left]
    held.append(held)
    assert False, "while a socket is open"

def test_after_it():
    gc.collect()
"""


class Suite:
    """A small suite in a directory of its own, and its record of failures."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.record = directory / "failures"
        self.kept = directory / "second-tries"
        (directory / "conftest.py").write_text(CONFTEST)
        (directory / "pytest.ini").write_text("[pytest]")

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run pytest with the record, as ``scripts/test`` does."""
        command = [sys.executable, "-m", "pytest", "-q", *arguments]
        return self._start(command, DYN_TEST_FAILURES=str(self.record))

    def second_try(self) -> subprocess.CompletedProcess[str]:
        """Run the program that repeats what failed."""
        command = [sys.executable, str(TESTS / "second_try.py"), str(self.record)]
        return self._start(command, DYN_SECOND_TRIES=str(self.kept))

    def _start(self, command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(TESTS), **PLUGINS, **variables}
        return subprocess.run(
            command, cwd=self.directory, env=environment, capture_output=True, text=True
        )


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return Suite(tmp_path)


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_a_test_that_passes_by_itself_is_listed_with_its_first_failure(
    suite: Suite, workers: tuple[str, ...]
) -> None:
    (suite.directory / "test_a.py").write_text(UNLUCKY.format(number=1))
    assert suite.run(*workers).returncode == 66
    again = suite.second_try()
    assert again.returncode == 0, again.stdout
    listed = again.stdout.partition("passed at the second try")[2]
    assert "test_a.py::test_unlucky_1" in listed
    assert "the first try of 1" in listed


def test_a_test_that_fails_twice_fails_the_run(suite: Suite) -> None:
    (suite.directory / "test_a.py").write_text(UNLUCKY.format(number=1) + BROKEN)
    assert suite.run().returncode == 66
    again = suite.second_try()
    assert again.returncode == 1
    assert "test_unlucky_1" in again.stdout.partition("passed at the second try")[2]


def test_four_failed_tests_fail_the_run(suite: Suite) -> None:
    """Those that passed in an earlier part of the run count, too."""
    (suite.directory / "test_a.py").write_text("".join(UNLUCKY.format(number=n) for n in range(3)))
    (suite.directory / "test_b.py").write_text(UNLUCKY.format(number=3))
    assert suite.run("test_a.py").returncode == 66
    assert suite.second_try().returncode == 0
    assert suite.second_try().returncode == 0  # nothing is left to repeat
    assert suite.run("test_b.py").returncode == 66
    again = suite.second_try()
    assert again.returncode == 1
    assert "4 tests failed" in again.stdout


def test_a_run_that_failed_in_another_way_has_no_second_try(suite: Suite) -> None:
    (suite.directory / "test_a.py").write_text("import no_such_module")
    assert suite.run().returncode == pytest.ExitCode.INTERRUPTED
    assert not suite.record.exists()


def test_nothing_failed(suite: Suite) -> None:
    (suite.directory / "test_a.py").write_text("def test_passes(): pass")
    assert suite.run().returncode == 0
    assert suite.second_try().returncode == 0


def test_a_test_that_is_unlucky_in_two_of_ten_runs_is_named(suite: Suite) -> None:
    (suite.directory / "test_a.py").write_text("".join(UNLUCKY.format(number=n) for n in range(2)))
    names = ["test_a.py::test_unlucky_0", "test_a.py::test_unlucky_1"]
    runs = [{"run": str(number), "passed": names[:1] * (number == 0)} for number in range(9)]
    suite.kept.write_text("".join(json.dumps(run) + "\n" for run in runs))
    assert suite.run().returncode == 66
    told = suite.second_try().stdout
    assert f"last 10 runs: 3, in {suite.kept}" in told
    assert f"2 times, a defect: mend or remove {names[0]}" in told
    assert f"mend or remove {names[1]}" not in told
    suite.record = suite.directory / "failures of the next run"
    told = suite.second_try().stdout
    assert "last 10 runs: 2," in told and "mend or remove" not in told


def test_what_a_failed_test_left_open_fails_no_other_one(suite: Suite) -> None:
    (suite.directory / "pytest.ini").write_text("[pytest]\nfilterwarnings = error")
    (suite.directory / "test_a.py").write_text(LEAK)
    done = suite.run()
    assert "1 failed, 1 passed" in done.stdout, done.stdout
