"""``dynamo doctor``: find what disturbs a deployment on this machine, and say what to do."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import msgspec

from dynamo.cli.doctor_checks import Examination, Part
from dynamo.cli.options import DoctorSettings
from dynamo.config import load
from dynamo.doctor.facts import Finding
from dynamo.errors import ConfigError, DynamoError

DESCRIPTION = "Check this machine and a deployment: drivers, limits, disks, ports, KV events."
EPILOG = """Nothing is changed. Each finding has a remedy: a command, or a key of the graph.
Exit status: 0 no errors (there may be warnings), 1 errors, 2 the arguments are wrong."""

_PROGRESS_S = 0.4
_MARKS = {"ok": "ok", "warning": "WARN", "error": "ERROR"}
_COLOURS = {"ok": 32, "warning": 33, "error": 31}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; return the exit status."""
    (settings,) = load("dynamo doctor", DESCRIPTION, [DoctorSettings], argv, epilog=EPILOG)
    try:
        examination = Examination.of(settings)
        # Not beside the others: it changes the working directory for a moment.
        findings = [*examination.graph_findings(), *_run(examination.parts())]
    except (DynamoError, OSError) as error:
        print(f"dynamo doctor: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    if settings.json:
        document = {"findings": findings, "errors": _count(findings, "error")}
        print(msgspec.json.format(msgspec.json.encode(document)).decode())
    else:
        print(_text(findings))
    return 1 if _count(findings, "error") else 0


def _run(parts: Sequence[Part]) -> list[Finding]:
    """Run all parts at once; return their findings in the order of the parts."""
    with ThreadPoolExecutor(len(parts)) as pool:
        futures = {pool.submit(_findings, run): name for name, run in parts}
        _show_progress(futures)
        return [finding for future in futures for finding in future.result()]


def _findings(run: Callable[[], Iterable[Finding]]) -> list[Finding]:
    return list(run())


def _show_progress(futures: dict[Future[Any], str]) -> None:
    """Name on a terminal what takes long."""
    pending = wait(futures, _PROGRESS_S).not_done
    if not sys.stderr.isatty():
        return
    while pending:
        names = ", ".join(name for future, name in futures.items() if future in pending)
        print(f"\r\x1b[Kchecking: {names} …", end="", file=sys.stderr, flush=True)
        pending = wait(pending, _PROGRESS_S).not_done
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _count(findings: Iterable[Finding], severity: str) -> int:
    return sum(finding.severity == severity for finding in findings)


def _text(findings: Sequence[Finding]) -> str:
    width = min(shutil.get_terminal_size().columns, 100)
    lines = [line for finding in findings for line in _lines(finding, width)]
    counts = {word: _count(findings, word) for word in ("error", "warning")}
    total = ", ".join(
        f"{count} {word}{'' if count == 1 else 's'}" for word, count in counts.items()
    )
    return "\n".join((*lines, "", total))


def _lines(finding: Finding, width: int) -> Iterable[str]:
    mark = f"{_MARKS[finding.severity]:<6}"
    indent = " " * len(mark)
    summary = textwrap.fill(
        finding.summary, width - len(mark), subsequent_indent=indent, break_long_words=False
    )
    yield f"{_coloured(mark, finding.severity)}{summary}"
    if finding.cause:
        yield textwrap.fill(finding.cause, width, initial_indent=indent, subsequent_indent=indent)
    if finding.remedy:  # one line: it is made to be copied
        yield f"{indent}-> {finding.remedy}"


def _coloured(text: str, severity: str) -> str:
    return f"\x1b[{_COLOURS[severity]}m{text}\x1b[0m" if sys.stdout.isatty() else text
