"""Puts small defects into modules, one at a time, and sees whether the tests named for it fail.

First the named tests run without a defect: a test that fails anyway finds nothing. A defect that
its finders miss survives, and the status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import drawn
from broken_module import replaced
from mutant_table import MUTANTS, ROOT, Mutant
from simulated import Hunt, counts, hunt, reach, simulate, write_seeds

Verdict = Literal["found", "survived", "not imported", "error"]
HERE = Path(__file__).resolve().parent
TIMEOUT_S = 120
"""For one test; a defect may make it wait for ever."""
FAILED = re.compile(r"^(?:FAILED|ERROR) (?:tests/)?(\S+)", re.M)
_SEEDS_AGAIN = 100


class Result(NamedTuple):
    """``finder`` is the first test that failed; ``output`` the end of what was printed."""

    mutant: Mutant
    verdict: Verdict
    finder: str
    seconds: float
    output: str


class Run(NamedTuple):
    """The status of a command that runs tests, and what it has printed."""

    status: int
    output: str


def run(finders: Sequence[str], environment: dict[str, str] | None = None, *plugin: str) -> Run:
    """Run the finders up to the first that fails."""
    own = {key: value for key, value in os.environ.items() if key != "DYN_TEST_FAILURES"}
    options = ["-x", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider"]
    options += ["--hypothesis-profile", "mutants", f"--timeout={TIMEOUT_S}", *plugin]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(f"tests/{finder}" for finder in finders)],
        cwd=ROOT,
        env={**own, **(environment or {})},
        capture_output=True,
        text=True,
    )
    return Run(done.returncode, done.stdout + done.stderr)


def build(mutant: Mutant, directory: Path) -> Path:
    """Compile the module with the defect in a copy of the compiled sources; return the result."""
    name = mutant.module.rpartition(".")[2]
    fast = directory / "dynamo/_fast"
    fast.mkdir(parents=True)
    for source in (ROOT / "dynamo/_fast").iterdir():
        if source.suffix in (".pxd", ".hpp", ".h", ".py") or source.name == f"{name}.pyx":
            shutil.copy(source, fast)
    for path in ("setup.py", "pyproject.toml", "dynamo/__init__.py", "dynamo/revision.py"):
        shutil.copy(ROOT / path, directory / path)
    source = fast / mutant.path.name
    source.write_text(replaced(source.read_text(), mutant.text, mutant.replacement))
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(command, cwd=directory, check=True, capture_output=True)
    return next(fast.glob(f"{name}.*.so"))


@contextmanager
def defect_environment(mutant: Mutant, mark: Path | None = None) -> Iterator[dict[str, str]]:
    """Give the variables that put the defect into each process; ``mark`` is made at its import.

    Raises ValueError, CalledProcessError: the text has changed, or does not compile.
    """
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        directory = Path(name)
        replaced(mutant.path.read_text(), mutant.text, mutant.replacement)
        extension = str(build(mutant, directory / "tree")) if mutant.is_compiled else ""
        defect = {
            "module": mutant.module,
            "text": mutant.text,
            "replacement": mutant.replacement,
            "extension": extension,
            "mark": str(mark or directory / "imported"),
        }
        (directory / "defect.json").write_text(json.dumps(defect))
        paths = [str(HERE / "hook"), str(HERE), os.environ.get("PYTHONPATH", "")]
        yield {
            "TEST_MUTANT": str(directory / "defect.json"),  # tests start processes without DYN_
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }


def judge(mutant: Mutant, finders: Sequence[str] = ()) -> Result:
    """Run the finders of a mutant with its defect; its seed of the simulation must fail, too."""
    since = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        mark = Path(name, "imported")
        try:
            with defect_environment(mutant, mark) as environment:
                status, output = run(finders or mutant.finders, environment)
        except (subprocess.CalledProcessError, ValueError) as error:
            return Result(mutant, "error", "", time.monotonic() - since, str(error))
        failed = FAILED.search(output)
        verdict: Verdict = "survived" if status == 0 else "found" if status == 1 else "error"
        if verdict == "survived" and not mark.exists():
            verdict = "not imported"
    finder = failed[1] if failed and verdict == "found" else ""
    if verdict == "found" and mutant.seed and not finders:
        seed = simulated_again(mutant)
        if not seed:
            output = f"no seed up to {_SEEDS_AGAIN} shows it any more; it was {mutant.seed}"
            return Result(mutant, "survived", "simulation", time.monotonic() - since, output)
        finder += f", seed {seed}"
    return Result(mutant, verdict, finder, time.monotonic() - since, output[-2000:])


def simulated_again(mutant: Mutant) -> int:
    """Return the seed that shows the mutant: the one of the table, or a new one; 0: none.

    A change of the product or the simulation makes another run of a seed.
    """
    with defect_environment(mutant) as environment, tempfile.TemporaryDirectory() as directory:
        own = Hunt({}, Path(directory, "answers"))
        simulate(["--seeds", "0", "--answers", str(own.answers)], {})
        found = own.look(mutant, [mutant.seed], environment)
        if found.verdict != "found":
            found = own.look(mutant, range(1, _SEEDS_AGAIN + 1), environment)
    return found.seed


def selected(options: argparse.Namespace) -> list[Mutant]:
    """Return the mutants that the options name."""
    unknown = set(options.only or ()) - {mutant.name for mutant in MUTANTS}
    if unknown:
        raise SystemExit(f"--only: no mutant is named {', '.join(sorted(unknown))}")
    mutants = [
        mutant
        for mutant in MUTANTS
        if (not options.only or mutant.name in options.only)
        and (not options.package or mutant.package == options.package)
        and (options.compiled or options.only or not mutant.is_compiled)
    ]
    if options.sample:
        command = ["git", "rev-list", "--count", "HEAD"]
        count = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        first = int(count.stdout) * options.sample % len(mutants)
        mutants = (mutants[first:] + mutants)[: options.sample]
    return mutants


def show(results: Sequence[Result], as_json: bool) -> None:
    """Print the sum; as JSON, with a row for each mutant."""
    found = sum(result.verdict == "found" for result in results)
    if as_json:
        rows = [
            {
                "mutant": result.mutant.name,
                "module": result.mutant.module,
                "verdict": result.verdict,
                "finder": result.finder,
                "seconds": round(result.seconds, 1),
            }
            for result in results
        ]
        print(json.dumps({"found": found, "of": len(results), "mutants": rows}, indent=2))
        return
    print(f"{found} of {len(results)} found")


def parsed() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="scripts/mutate", description=__doc__)
    parser.add_argument("--only", action="append", metavar="ID", help="this one; repeatable")
    parser.add_argument("--package", metavar="NAME", help="those of dynamo.NAME or dynamo_lab.NAME")
    parser.add_argument("--sample", type=int, metavar="N", help="N of them, others at each commit")
    parser.add_argument("--jobs", type=int, default=2, help="how many at once (default: 2)")
    parser.add_argument("--compiled", action="store_true", help="also those of compiled modules")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument(
        "--finders", nargs="+", metavar="TEST", help="run these tests instead, without a defect too"
    )
    parser.add_argument(
        "--simulate",
        type=int,
        metavar="N",
        help="see which of them the simulation finds in N seeds, and write these seeds into "
        "tests/mutants/mutant_seeds.py",
    )
    parser.add_argument(
        "--draw",
        type=int,
        metavar="N",
        help="draw N defects of --package that no table has, and print those that the tests of "
        "tests/unit/NAME, or --finders, do not find",
    )
    parser.add_argument("--seed", type=int, default=1, help="of --draw (default: 1)")
    options = parser.parse_args()
    if options.draw and not options.package:
        parser.error("--draw needs --package")
    return options


def draw(options: argparse.Namespace) -> int:
    """Try defects at random; print those that survive. A survivor may change nothing."""
    finders = options.finders or [f"unit/{options.package.partition('/')[0]}"]
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        results = Path(directory, "results")
        environment = {
            drawn.DRAWN: f"{options.package} {options.draw} {options.seed}",
            drawn.RESULTS: str(results),
            "PYTHONPATH": str(HERE),
        }
        healthy = run(finders, environment, "-p", "drawn", "-s")
        if not results.exists():
            print(f"{healthy.output[-4000:]}\nthese finders fail without a defect")
            return 1
        rows = [json.loads(line) for line in results.read_text().splitlines()]
    verdicts = Counter(row["verdict"] for row in rows)
    if options.json:
        print(json.dumps({"verdicts": verdicts, "mutants": rows}, indent=2))
        return 0
    for row in rows:
        if row["verdict"] == "survived":
            text = "{file}:{line} {function}: {text} -> {replacement} ({tests} tests)".format(**row)
            print(" ".join(text.split()))
    print(", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()))
    return 0


def simulate_all(mutants: Sequence[Mutant], options: argparse.Namespace) -> int:
    """Let the simulation look for each mutant, and print what it found."""
    results = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        answers = Path(directory, "answers")
        reached = reach(options.simulate, answers)
        for result in hunt(mutants, reached, answers, options.jobs, defect_environment):
            results.append(result)
            if not options.json:
                print(result, flush=True)
    write_seeds(results)
    if options.json:
        print(json.dumps([result.row() for result in results], indent=2))
    else:
        print(counts(results))
    return any(result.verdict == "error" for result in results)


def main() -> int:
    """Run ``scripts/mutate``; return the exit status."""
    options = parsed()
    if options.draw:
        return draw(options)
    mutants = selected(options)
    if options.simulate:
        return simulate_all(mutants, options)
    groups = {
        package: sorted(
            {finder for mutant in mutants if mutant.package == package for finder in mutant.finders}
        )
        for package in {mutant.package for mutant in mutants}
    }
    if options.finders:
        groups = {"": options.finders}
    with ThreadPoolExecutor(options.jobs) as pool:
        for finders, healthy in zip(groups.values(), pool.map(run, groups.values()), strict=True):
            if healthy.status and run(finders).status:  # once more: the machine may be busy
                print(healthy.output[-4000:])
                print("these finders fail without a defect")
                return 1
        results = []
        for result in pool.map(partial(judge, finders=options.finders or ()), mutants):
            results.append(result)
            if not options.json:
                mutant, verdict, finder, seconds, output = result
                print(f"{verdict:12} {mutant.name:44} {seconds:5.1f} s  {finder}", flush=True)
                if verdict == "error":
                    print(output)
    show(results, options.json)
    return any(result.verdict != "found" for result in results)


if __name__ == "__main__":
    sys.exit(main())
