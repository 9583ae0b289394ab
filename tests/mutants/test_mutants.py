"""The table of mutants is true: each text is in its module once, each finder exists."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import mutate
import pytest
from broken_module import replaced
from edits import broken_code, edits_of, functions_of
from mutant_table import MUTANTS, ROOT, Mutant
from mutate import judge
from simulated import Hunt, function_of, simulate


@cache
def functions(path: str) -> set[str]:
    """The tests of a file, by name; a function that the file imports counts."""
    names: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / "tests" / path).read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):  # TestQueue = RuleBasedStateMachine.TestCase
            names.update(one.id for one in node.targets if isinstance(one, ast.Name))
    return names


def test_names_are_unique() -> None:
    assert [name for name, count in Counter(one.name for one in MUTANTS).items() if count > 1] == []


def test_each_text_is_in_its_module_once() -> None:
    broken = []
    for mutant in MUTANTS:
        try:
            source = replaced(mutant.path.read_text(), mutant.text, mutant.replacement)
        except ValueError as error:
            broken.append(f"{mutant.name}: {error}")
            continue
        if not mutant.is_compiled:
            compile(source, str(mutant.path), "exec", dont_inherit=True)
    assert not broken, "\n".join(broken)


def test_each_finder_exists() -> None:
    missing = []
    for mutant in MUTANTS:
        assert mutant.finders, mutant.name
        for finder in mutant.finders:
            path, _, test = finder.partition("::")
            name = test.rpartition("::")[2].partition("[")[0]
            if not (ROOT / "tests" / path).exists() or (name and name not in functions(path)):
                missing.append(f"{mutant.name}: {finder}")
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize(
    ("test", "verdict"),
    [
        (
            "unit/serve/test_serve_statefile.py::test_a_statefile_of_a_newer_version_is_refused",
            "found",
        ),
        ("unit/serve/test_serve_statefile.py::test_round_trip_and_modes", "survived"),
        ("unit/test_errors.py::test_round_trip", "not imported"),
        ("unit/serve/test_serve_statefile.py::test_that_does_not_exist", "error"),
    ],
)
def test_a_verdict_is_that_of_the_finders(test: str, verdict: str) -> None:
    mutant = next(one for one in MUTANTS if one.name == "newer-statefile-is-read")
    assert judge(mutant, (test,)).verdict == verdict


def test_a_text_that_has_changed_is_an_error() -> None:
    finder = "unit/test_errors.py"
    gone = Mutant("gone", "dynamo.errors", "a text that is not there", "", (finder,))
    result = judge(gone)
    assert result.verdict == "error" and "occurs 0 times" in result.output


def of_name(name: str) -> Mutant:
    return next(one for one in MUTANTS if one.name == name)


def test_the_function_of_a_defect_is_found() -> None:
    mutant = of_name("id-of-an-ended-request-stays-taken")
    lines = mutant.path.read_text().splitlines()
    line = next(at for at, text in enumerate(lines, 1) if text.startswith("    def remove("))
    assert function_of(mutant) == f"frontend/requests/registry.py:{line}"
    constant = mutant._replace(text="_MIB = 1024 * 1024", replacement="_MIB = 1000 * 1000")
    assert function_of(constant) == "frontend/requests/registry.py:0"


def test_drawn_defects_are_found_by_tests_that_call_their_functions() -> None:
    before = (ROOT / "dynamo/errors.py").read_bytes()
    command = [sys.executable, mutate.__file__, "--draw", "8", "--package", "errors.py", "--json"]
    command += ["--finders", "unit/test_errors.py"]
    done = subprocess.run(command, capture_output=True, check=True)
    rows = json.loads(done.stdout)["mutants"]
    assert len(rows) == 8
    assert all(row["tests"] and row["text"] != row["replacement"] for row in rows)
    assert "found" in {row["verdict"] for row in rows}
    assert (ROOT / "dynamo/errors.py").read_bytes() == before


@pytest.mark.parametrize(
    ("text", "replacements"),
    [
        ("return a < b", ["return a <= b"]),
        ("return a is None", ["return (not a)"]),
        ("return a and b", ["return ((b))", "return ((a))"]),
        ("return a[b + 1]", ["return a[(b)]"]),
        ("a.b += 1", ["pass"]),
        ("log.info(a)", []),
        ("if not a:\n  return b", ["if False:\n  return b", "if bool(a):\n  return b"]),
    ],
)
def test_the_defects_of_a_function(text: str, replacements: list[str]) -> None:
    source = f"def f(a, b):\n {text}\n".encode()
    ((line, function),) = functions_of(source)
    broken = [edit.apply(source) for edit in edits_of(source, function)]
    assert broken == [f"def f(a, b):\n {each}\n".encode() for each in replacements]
    assert all(broken_code(each, "f.py", line, "f") for each in broken)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_simulation_finds_a_defect_where_a_seed_calls_its_function(tmp_path: Path) -> None:
    shown, hidden = of_name("id-of-an-ended-request-stays-taken"), of_name("class-limit-off-by-one")
    own = Hunt({function_of(shown): [1, 2]}, tmp_path / "answers")
    simulate(["--seeds", "0", "--answers", str(own.answers)], {})
    found = own.look(shown, own.seeds(shown), {})
    assert (found.verdict, found.seed, found.tried) == ("found", 1, 1)
    assert own.look(hidden, [1], {}).verdict == "not found"
    assert own.look(hidden, own.seeds(hidden), {}).verdict == "not reached"
    together = {one.mutant.name: one.verdict for one in own.look_together([shown, hidden])}
    assert together == {shown.name: "found", hidden.name: "not found"}
