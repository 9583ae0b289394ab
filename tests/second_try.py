"""Failed tests, each run once more by itself: ``python tests/second_try.py FILE``.

``scripts/test`` names the file in ``DYN_TEST_FAILURES``. While tests run, each failure becomes a
line of JSON in it, and pytest exits with 66 if these failures are all that went wrong. Afterwards,
when nothing else runs, this program repeats them. A test that passes then is listed, and does not
fail the run. More than three failed tests do.

The tests that passed so are kept with those of the nine runs before, in the file that
``DYN_SECOND_TRIES`` names or in ``.second-tries`` of the checkout. One that is there twice is named
at the end of each run until it is mended.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest

VARIABLE = "DYN_TEST_FAILURES"
MOST_FAILURES = 3
KEPT = "DYN_SECOND_TRIES"
KEPT_RUNS = 10
RECORDED = 66
_SHOWN_LINES = 60


class FailureRecord:
    """A plugin of pytest that appends each failure of the run to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._recorded = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Append a failed report: a test may have two, of its call and of its teardown."""
        if not report.failed:
            return
        failure = {
            "test": report.nodeid,
            "text": report.longreprtext,
            # A worker of pytest-xdist gives its tests a network of their own.
            "distributed": hasattr(report, "node"),
        }
        with self._path.open("a") as file:
            file.write(json.dumps(failure) + "\n")
        self._recorded = True

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Distinguish recorded failures from a run that failed in another way."""
        if exitstatus == pytest.ExitCode.TESTS_FAILED and self._recorded:
            session.exitstatus = RECORDED


class FailureEnd:
    """A plugin of pytest by which what a failed test left open fails no other test.

    The error keeps its local variables alive; they would be collected in a later test, which the
    warnings of open sockets and files would fail.
    """

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Collect them after a test that failed."""
        failed = item.session.testsfailed
        result = yield
        if item.session.testsfailed > failed:
            for name in ("last_exc", "last_type", "last_value", "last_traceback"):
                vars(sys).pop(name, None)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)
                gc.collect()
        return result


def record_failures(config: pytest.Config) -> None:
    """Register the record in the process that collects reports, if the environment names a file.

    The end of a failed test is registered in each process.
    """
    config.pluginmanager.register(FailureEnd())
    # Not inherited: neither workers nor a pytest that a test starts may record.
    path = os.environ.pop(VARIABLE, None)
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailureRecord(Path(path)))


def main(path: Path) -> int:
    """Run the failed tests of ``path`` that were not repeated yet; return the exit status.

    The file then also names what passed, so that a second call of the same run counts all failures
    and repeats only new ones.
    """
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    repeated = {line["repeated"] for line in lines if "repeated" in line}
    failures = {line["test"]: line for line in reversed(lines) if "test" in line}
    waiting = [failure for name, failure in reversed(failures.items()) if name not in repeated]
    if not waiting:
        _keep(str(path), [])
        return 0
    if len(failures) > MOST_FAILURES:
        print(f"{len(failures)} tests failed, more than {MOST_FAILURES}: no second try")
        print(*(f"  {name}" for name in reversed(failures)), sep="\n")
        _keep(str(path), [])
        return 1
    passed = [failure for failure in waiting if _passes(failure)]
    with path.open("a") as file:
        file.writelines(json.dumps({"repeated": failure["test"]}) + "\n" for failure in passed)
    _report(passed)
    _keep(str(path), [failure["test"] for failure in passed])
    return 0 if len(passed) == len(waiting) else 1


def _passes(failure: dict[str, str]) -> bool:
    print(f"second try, by itself: {failure['test']}", flush=True)
    workers = ["-n", "1"] if failure["distributed"] else []
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *workers]
    return subprocess.run([*command, failure["test"]]).returncode == 0


def _report(passed: Sequence[dict[str, str]]) -> None:
    """Print each test that passed with the end of its first failure."""
    if passed:
        print("\npassed at the second try (a test listed twice in ten runs is a defect):")
    for failure in passed:
        text = failure["text"].splitlines()[-_SHOWN_LINES:]
        print(f"  {failure['test']}", *(f"    {line}" for line in text), sep="\n")


def _keep(run: str, passed: list[str]) -> None:
    """Add ``passed`` to the tests of this ``run``; print those that the last runs have twice."""
    file = Path(os.environ.get(KEPT) or Path(__file__).resolve().parents[1] / ".second-tries")
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if not lines or lines[-1]["run"] != run:  # a second call of the same run adds to its line
        lines.append({"run": run, "passed": []})
    lines[-1]["passed"] += passed
    lines = lines[-KEPT_RUNS:]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    counts = Counter(name for line in lines for name in line["passed"])
    print(f"second tries of the last {len(lines)} runs: {counts.total()}, in {file}")
    for name, count in counts.items():
        if count > 1:
            print(f"  {count} times, a defect: mend or remove {name}")


if __name__ == "__main__":
    os.environ.pop(VARIABLE, None)
    sys.exit(main(Path(sys.argv[1])))
