"""``scripts/fuzz``: searches inputs by the coverage of the code that reads them (atheris)."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["CORPUS", "main"]

HERE = Path(__file__).resolve().parent
CORPUS = HERE / "corpus"
_TESTS = HERE.parent
_SLOW_S = 5
_MEMORY_MB = 2048
_SHOWN_LINES = 30
_STATS = re.compile(r"stat::number_of_executed_units:\s*(\d+)")
_COVERAGE = re.compile(r"cov: (\d+) ft: (\d+)")


def main(argv: Sequence[str] | None = None) -> int:
    """Fuzz the named targets; return 0 without a finding, 1 with one, 2 for a wrong option."""
    sys.path[:0] = [str(_TESTS), str(_TESTS / "unit/frontend"), str(HERE)]
    from targets import TARGETS

    parser = argparse.ArgumentParser(
        prog="scripts/fuzz",
        description="Feed inputs to what reads them, guided by coverage, and report each exception "
        "that no reader promises.",
        epilog="A finding is a file; repeat it with --input FILE. Exit status: 0 none, 1 a "
        "finding, 2 an option is wrong.",
    )
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of: {', '.join(TARGETS)}")
    parser.add_argument("--seconds", type=int, default=20, metavar="S", help="each (20)")
    parser.add_argument(
        "--inputs", type=int, default=-1, metavar="N",
        help="end each after N inputs, which are the same ones for a seed; replaces --seconds",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=1, help="of the random numbers (1)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="targets at once")
    parser.add_argument("--input", type=Path, metavar="FILE", help="feed only this to the target")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        _fuzz(options.child)
    unknown = [name for name in options.targets if name not in TARGETS]
    if unknown:
        parser.error(f"no target {unknown[0]!r}; there are: {', '.join(TARGETS)}")
    if options.input is not None:
        if len(options.targets) != 1:
            parser.error("--input needs one target")
        TARGETS[options.targets[0]]()(options.input.read_bytes())
        print("no finding")
        return 0
    try:
        import atheris  # noqa: F401
    except ImportError:
        print("scripts/fuzz: needs atheris, which has no wheel for this Python and machine")
        return 2
    return _fuzz_all(options.targets or list(TARGETS), options)


def _fuzz_all(names: Sequence[str], options: argparse.Namespace) -> int:
    found = Path(tempfile.mkdtemp(prefix="dynamo-fuzz-"))

    def run(name: str) -> bool:
        return _run(name, options, found / name)

    with ThreadPoolExecutor(options.jobs) as pool:
        clean = list(pool.map(run, names))
    if all(clean):
        for directory in sorted(found.rglob("*"), reverse=True):
            directory.rmdir() if directory.is_dir() else directory.unlink()
        found.rmdir()
        return 0
    return 1


def _run(name: str, options: argparse.Namespace, found: Path) -> bool:
    """Fuzz one target in a process; print a line, and a finding. Return whether it is clean."""
    with tempfile.TemporaryDirectory() as grown:
        (found / "findings").mkdir(parents=True)
        (CORPUS / name).mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable, str(HERE / "fuzz.py"), "--child", name,
            f"-max_total_time={options.seconds if options.inputs < 0 else 0}",
            f"-runs={options.inputs}", f"-seed={options.seed}", f"-timeout={_SLOW_S}",
            f"-rss_limit_mb={_MEMORY_MB}", "-max_len=4096", "-print_final_stats=1",
            f"-artifact_prefix={found}/findings/", grown, str(CORPUS / name),
        ]  # fmt: skip
        begun = time.monotonic()
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=grown, env=environment
        )
    text = done.stdout + done.stderr
    executed = _STATS.search(text)
    covered = _COVERAGE.findall(text)
    edges, features = covered[-1] if covered else ("0", "0")
    print(
        f"{name:16} {executed[1] if executed else '?':>9} inputs in {time.monotonic() - begun:.0f} "
        f"s, {edges} edges, {features} features: "
        + ("no finding" if done.returncode == 0 else "FINDING"),
        flush=True,
    )
    if done.returncode == 0:
        return True
    _, _, shown = text.partition("=== Uncaught Python exception: ===")
    lines = (shown.partition("\n==")[0] if shown else text[-2000:]).strip().splitlines()
    print("\n".join(lines if len(lines) <= _SHOWN_LINES else [*lines[:8], "…", *lines[-16:]]))
    for path in sorted((found / "findings").iterdir()):
        print(f"repeat: scripts/fuzz {name} --input {path}", flush=True)
    return False


def _fuzz(name: str) -> None:
    """Run in the child: hand over to atheris, which exits."""
    import atheris

    with atheris.instrument_imports(include=["dynamo", "yaml"], enable_loader_override=False):
        from targets import TARGETS

        check = TARGETS[name]()
    libfuzzer = [word for word in sys.argv if word.startswith("-") and "--child" not in word]
    directories = [word for word in sys.argv[3:] if not word.startswith("-")]
    atheris.Setup([sys.argv[0], *libfuzzer, *directories], check)
    atheris.Fuzz()
    sys.exit(0)


if __name__ == "__main__":
    if "--child" in sys.argv:
        sys.path[:0] = [str(_TESTS), str(_TESTS / "unit/frontend"), str(HERE)]
        _fuzz(sys.argv[sys.argv.index("--child") + 1])
    sys.exit(main())
