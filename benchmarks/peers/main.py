"""Ours beside other frontends on this machine: same model, same load, in turn.

benchmarks/peers/run                       the rows that have a bar, about ten minutes
benchmarks/peers/run --rows 'unary-*'      some of them (--list names them all)
benchmarks/peers/run --rows 'core-*'       over EngineCore, beside vLLM's and SGLang's frontends
benchmarks/peers/run --full --seconds 2    every combination of the load's dimensions
benchmarks/peers/run --soak 200000 --json figures.json --markdown figures.md
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from fnmatch import fnmatch
from itertools import groupby
from pathlib import Path
from typing import Any

import alone
import report
from core_rounds import Effort, measure_core
from core_systems import CorePrograms, Setup
from environment import (
    SetupError,
    describe,
    engine_python,
    find_wrk,
    gateways_python,
    their_python,
    vllm_rs,
)
from load import LoadError
from real_engine import measure_real
from results import Figure
from rich.console import Console
from rounds import Measurer, Pair
from rows import Row, default_rows, full_rows
from systems import MockerSystem, Product

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
_ISOLATED = "--isolated"
_SIOCSIFFLAGS, _IFF_UP, _IFF_RUNNING = 0x8914, 0x1, 0x40


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/peers/run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--rows", default="*", metavar="GLOB", help="only the rows whose key matches")
    add("--full", action="store_true", help="every combination of prompt, length, connections")
    add("--list", action="store_true", help="name the rows and stop")
    add("--seconds", type=float, default=5.0, help="of load for each system, row and round")
    add("--rounds", type=int, default=3)
    add("--soak", type=int, default=20_000, metavar="N", help="requests before RSS is compared")
    add("--json", type=Path, metavar="FILE", help="write everything measured")
    add("--markdown", type=Path, metavar="FILE", help="write the table for a README")
    add("--model", type=Path, default=ROOT / "examples/model", help="directory both serve")
    add("--ours", type=Path, default=ROOT, metavar="DIR", help="checkout (built) to measure")
    add("--their-python", type=Path, help="interpreter that has the peer; default: make one")
    add("--engine-python", type=Path, help="interpreter that has vLLM; default: .venv-engines")
    add("--their-log", default="error", help="their DYN_LOG; the default spares them work")
    add(_ISOLATED, action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Exit with status 0 if every bar of the rows holds, 1 if not, 2 if the run failed."""
    args = parse(argv)
    rows = [row for row in _rows(args.full) if fnmatch(row.key, args.rows)]
    if args.list:
        print("\n".join(f"{row.key:<34} {row.title}" for row in rows))
        return 0
    try:
        wrk = find_wrk()
        python = args.their_python or BUILD / "peers-venv/bin/python"
        paired = any(row.needs_systems for row in rows)
        if not args.isolated and args.their_python is None and paired:
            python = their_python(BUILD / "peers-venv")
        programs = _core_programs(args) if any(row.over_vllm for row in rows) else None
        if not args.isolated:
            _enter_own_network(argv)
        figures, facts = Comparison(args, wrk, python, programs).run(rows)
    except (SetupError, LoadError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    _publish(figures, facts, args)
    return 1 if any(figure.holds is False for figure in figures) else 0


class Comparison:
    """Runs rows, starting both systems once for each group that shares settings."""

    def __init__(
        self, args: argparse.Namespace, wrk: str, python: Path, core: CorePrograms | None
    ) -> None:
        self._args = args
        self._core = core
        self._wrk = wrk
        self._console = Console(stderr=True)
        self._ours = Product("ours", Path(sys.executable), {"PYTHONPATH": str(args.ours.resolve())})
        self._theirs = Product("theirs", python, {"DYN_LOG": args.their_log})

    def run(self, rows: Sequence[Row]) -> tuple[list[Figure], dict[str, Any]]:
        """The figures in the order of ``rows``, and the facts around them."""
        engine = self._core.engine_python if self._core else None
        facts = describe(self._ours.python, self._theirs.python, engine) | {
            "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            "revision": _revision(self._args.ours),
            "their_log": self._args.their_log,
            "rounds": self._args.rounds,
            "seconds": self._args.seconds,
            "model": str(self._args.model),
        }
        found: dict[str, list[Figure]] = {}
        with tempfile.TemporaryDirectory(prefix="dynamo-peers-") as name:
            directory = Path(name)
            paired = sorted((row for row in rows if row.needs_systems), key=lambda r: r.setting)
            for number, (_, group) in enumerate(groupby(paired, key=lambda r: r.setting)):
                found |= self._group(list(group), directory / str(number))
            found |= self._beside_vllm([row for row in rows if row.kind == "real"], directory)
            found |= self._over_core([row for row in rows if row.kind == "core"], directory)
            for row in rows:
                if row.kind in ("startup", "decision"):
                    found[row.key] = [self._alone(row, directory / row.key)]
        figures = [figure for row in rows for figure in found[row.key]]
        return figures, facts | {"others": report.others_share(figures)}

    def _group(self, rows: list[Row], directory: Path) -> dict[str, list[Figure]]:
        speedup, best_tokenizer, _ = rows[0].setting
        args, model = self._args, self._args.model.resolve()
        tuned = {"DYN_TOKENIZER": "fastokens"} if best_tokenizer else {}
        with (
            MockerSystem(self._ours, directory / "ours", model, speedup, {}) as ours,
            MockerSystem(self._theirs, directory / "theirs", model, speedup, tuned) as theirs,
        ):
            pair = Pair(ours, theirs, self._wrk, args.seconds, args.rounds, args.soak, self._say)
            measurer = Measurer(pair)
            return {row.key: self._measured(measurer, row) for row in rows}

    def _beside_vllm(self, rows: list[Row], directory: Path) -> dict[str, list[Figure]]:
        if self._core is None or not rows:
            return {}
        args = self._args
        setup = Setup(directory / "real", args.model.resolve(), self._ours, self._core)
        effort = Effort(self._wrk, args.seconds, args.rounds, self._say)
        return measure_real(rows, setup, effort)

    def _over_core(self, rows: list[Row], directory: Path) -> dict[str, list[Figure]]:
        if self._core is None or not rows:
            return {}
        args = self._args
        setup = Setup(directory / "core", args.model.resolve(), self._ours, self._core)
        effort = Effort(self._wrk, args.seconds, args.rounds, self._say)
        return measure_core(rows, setup, effort)

    def _measured(self, measurer: Measurer, row: Row) -> list[Figure]:
        """Measure one row; a failure is reported in its place and does not stop the others."""
        try:
            return measurer.measure(row)
        except (LoadError, OSError) as error:
            notes = [f"not measured: {error}"]
            return [Figure(row.key, row.title, "", [], limit=row.bar, valid=False, notes=notes)]

    def _alone(self, row: Row, directory: Path) -> Figure:
        self._say(row.title)
        root = self._args.ours.resolve()
        if row.kind == "startup":
            return alone.startup(self._ours, root, directory, self._args.rounds)
        return alone.decision(self._ours, root, directory)

    def _say(self, text: str) -> None:
        self._console.print(f"[dim]{text}[/dim]", highlight=False)


def _core_programs(args: argparse.Namespace) -> CorePrograms:
    engine = args.engine_python or engine_python(ROOT)
    gateways = gateways_python(BUILD / "gateways-venv")
    return CorePrograms(engine, vllm_rs(BUILD / "vllm-rs", gateways), gateways)


def _rows(full: bool) -> list[Row]:
    return full_rows() if full else default_rows()


def _publish(figures: list[Figure], facts: dict[str, Any], args: argparse.Namespace) -> None:
    report.print_table(Console(width=None if sys.stdout.isatty() else 180), figures)
    if args.json:
        args.json.write_text(json.dumps(report.as_json(figures, facts), indent=1) + "\n")
    if args.markdown:
        args.markdown.write_text(report.markdown(figures, facts))


def _enter_own_network(argv: Sequence[str]) -> None:
    """Restart in a network namespace with only loopback; return if that is not permitted.

    The peer listens on all interfaces; in the namespace no other host can reach it.
    """
    flags = ["--net"] if os.geteuid() == 0 else ["--map-root-user", "--net"]
    trial = subprocess.run(["unshare", *flags, "true"], capture_output=True)
    if trial.returncode:
        print("note: no own network namespace; the peer listens on all interfaces")
        return
    os.execvp("unshare", ["unshare", *flags, "--", sys.executable, __file__, *argv, _ISOLATED])


def _loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", _IFF_UP | _IFF_RUNNING)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, request)


def _revision(root: Path) -> str:
    result = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True
    )
    return result.stdout.strip() or "no revision"


def _end(signal_number: int, frame: object) -> None:
    raise SystemExit(128 + signal_number)  # through every `with`


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    if _ISOLATED in sys.argv:
        _loopback_up()
    sys.exit(main(sys.argv[1:]))
