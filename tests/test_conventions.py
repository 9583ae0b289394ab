"""Checks of conventions that the linters cannot express: sizes, docstrings, imports, words.

A test lists all its findings at once. Each rule about text is a row of a table, so a new word or
identifier is one more row.
"""

from __future__ import annotations

import ast
import functools
import gc
import importlib
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAB = ROOT / "lab"
SOURCES = sorted([*(ROOT / "dynamo").rglob("*.py"), *(LAB / "dynamo_lab").rglob("*.py")])
COMPILED = sorted((ROOT / "dynamo").rglob("*.pyx"))
LINES = 106_335
"""Lines of Python in dynamo/: what comes in pays with what goes out, or its commit says why not."""
FILE_LINES = 500
FUNCTION_LINES = 60
PROTOCOLS = 26
COMMENT_SHARE = 0.0200
VAGUE_NAMES = {"each", "found", "given", "held", "known", "made", "one", "place", "shown"}
COMMENT_FOR_TOOLS = re.compile(r"# (?:type:|noqa|fmt:|pragma)")
FRONTEND_ENTRIES = 12
BANNED_FILE_NAMES = ("utils", "helpers", "manager", "handler")

# Words that are never right in this code base, and what to write instead.
WORDS = {
    r"shall": "use the present tense, or 'must'",
    r"anew": "write 'again'",
    r"nobody|somebody|whoever": "name the subject: a client, a worker, a caller",
    r"meanwhile": "write 'at the same time', or drop it",
    r"in words(?! of)": "drop it",
    r"oneself|ceases?": "use the everyday word",
    r"knobs?": "write 'option' or 'setting'",
    r"twins?|twinned": "write 'reference implementation'",
    r"tickets?": "write 'request' or 'queue entry'",
    r"desks?|manners|tidings": "use the field's term",
    r"the house|this house": "write 'the architecture' or 'the conventions'",
    r"goes without|go without": "say what happens to the request",
    r"a bug in": "say what failed; the log has the exception",
    r"(?:and|but|for|[,;:]) who (?:comes?|waits?|asks?|listens|speaks|leaves|left|goes)": (
        "name the subject of the clause"
    ),
    r"(?:hears?|heard) (?:of|from|about|that|503|the)": "software receives",
    r"(?:router|worker|frontend|client|engine|index) (?:believes|knows|wants|hears|tells)": (
        "software assumes, stores, requests, receives, sends"
    ),
    # Texts that the repository does not contain.
    r"specs? (?:sections? )?\d[\d.]*|seeds?:? (?:planner|router|request|routing)|api-gaps"
    r"|shared/(?:seeds|spec|design)|(?:tree|style|language)\.md": (
        "state the rule, or cite Dynamo's page or our docs"
    ),
}
ANY_WORD = re.compile(rf"\b(?:{'|'.join(WORDS)})\b", re.IGNORECASE)
WORD_RULES = [(re.compile(rf"\b(?:{word})\b", re.IGNORECASE), why) for word, why in WORDS.items()]
BANNED_IDENTIFIERS = {"knob", "twin", "ticket", "desk", "house", "anew", "tidings"}
ANY_IDENTIFIER = re.compile("|".join(BANNED_IDENTIFIERS), re.IGNORECASE)

# Ids are printed in hexadecimal; the texts of these modules are Dynamo's.
DECIMAL_IDS_ALLOWED = {
    "dynamo/router/decision/explanation.py",
    "dynamo/router/eligibility/filters.py",
    "dynamo/router/load/active_load.py",
    "dynamo/runtime/endpoints/client.py",
}
ID_NAME = re.compile(r"(?:^|_)(?:worker|instance|lease|publisher|router)_id$")
NUMBER_OR_NONE = re.compile(r"(?:^|_)(?:dp_rank|worker_id|instance_id|lease_id|publisher_id)$")
LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
FORMAT_FIELD = re.compile(r"%(?:%|[-#0 +]*[\d.*]*([a-zA-Z]))")


def module_name(path: Path) -> str:
    parts = path.relative_to(LAB if LAB in path.parents else ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = [module_name(path) for path in SOURCES]
# They import an engine, which is not a test dependency; tests/engines_real runs them.
NEEDS_VLLM = {
    f"dynamo.vllm.{name}"
    for name in (
        "async_llm",
        "core",
        "engine_args",
        "engine_inputs",
        "metrics",
        "plain_requests",
        "pooling_model",
    )
}
# Modules with an __all__, besides packages: other programs import them by name.
PUBLIC_MODULES = {
    "dynamo._core.backend",
    "dynamo.errors",
    "dynamo.health_check",
    "dynamo.llm.exceptions",
    "dynamo.prometheus_names",
    "dynamo.runtime.logging",
    "dynamo.runtime.requests.frames",
}
PUBLIC = sorted(
    PUBLIC_MODULES | {module_name(path) for path in SOURCES if path.name == "__init__.py"}
)
IMPORTABLE = [name for name in MODULES if not name.endswith("__main__") and name not in NEEDS_VLLM]


@functools.cache
def text(path: Path) -> str:
    return path.read_text()


@functools.cache
def syntax(path: Path) -> ast.Module:
    return ast.parse(text(path))


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(syntax(path)))


@functools.cache
def tokens(path: Path) -> list[tokenize.TokenInfo]:
    return list(tokenize.generate_tokens(io.StringIO(text(path)).readline))


@pytest.fixture(autouse=True, scope="module")
def files_are_read_once() -> Iterator[None]:
    """Keep what was read for all tests: a million objects, which the collector does not visit."""
    gc.disable()
    yield
    for cached in (text, syntax, nodes, tokens):
        cached.cache_clear()
    gc.enable()


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def report(findings: Iterable[str], rule: str) -> None:
    """Fail with all ``findings``, one a line, if there are any."""
    lines = sorted(findings)
    assert not lines, f"{rule}:\n" + "\n".join(lines)


def test_files_are_small() -> None:
    sizes = {path: text(path).count("\n") for path in (*SOURCES, *COMPILED)}
    report(
        (f"{place(path, 1)}: {lines} lines" for path, lines in sizes.items() if lines > FILE_LINES),
        f"files of more than {FILE_LINES} lines",
    )


def test_file_names_say_something() -> None:
    report(
        (
            place(path, 1)
            for path in (*SOURCES, *COMPILED)
            if any(word in path.stem for word in BANNED_FILE_NAMES)
        ),
        "file names that say nothing",
    )


def test_names_of_test_files_are_unique() -> None:
    """Pytest imports each by its name alone."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    report((name for name, count in names.items() if count > 1), "test files of one name")


def test_functions_are_small() -> None:
    report(
        (
            f"{place(path, function.lineno)} {function.name}"
            for path in SOURCES
            for function in nodes(path)
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
            and (function.end_lineno or 0) - function.lineno >= FUNCTION_LINES
        ),
        f"functions of more than {FUNCTION_LINES} lines",
    )


def test_locals_say_what_they_hold() -> None:
    report(
        (
            f"{place(path, name.lineno)} {name.id}"
            for path in SOURCES
            for function in nodes(path)
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
            for name in ast.walk(function)
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
            if name.id in VAGUE_NAMES
        ),
        "locals that do not say what they hold",
    )


def test_modules_have_docstrings() -> None:
    report(
        (place(path, 1) for path in SOURCES if not ast.get_docstring(syntax(path))),
        "modules without a docstring",
    )


def test_comments_are_not_fewer() -> None:
    """The share of lines with a comment. It only rises: raise the constant with it."""
    comments = sum(
        token.type == tokenize.COMMENT and not COMMENT_FOR_TOOLS.match(token.string)
        for path in SOURCES
        if "#" in text(path)
        for token in tokens(path)
    )
    share = comments / sum(text(path).count("\n") for path in SOURCES)
    assert share >= COMMENT_SHARE, f"{share:.2%} of the lines have a comment"


def test_the_package_does_not_grow() -> None:
    """The lab does not count. Lower the constant with the lines."""
    lines = sum(text(path).count("\n") for path in SOURCES if LAB not in path.parents)
    assert lines <= LINES, f"dynamo/ has {lines} lines of Python, and its budget is {LINES}"


def test_protocols_are_not_more() -> None:
    """A Protocol is for two implementations or a border of layers. Lower the constant with them."""
    protocols = [
        f"{place(path, node.lineno)} {node.name}"
        for path in SOURCES
        for node in nodes(path)
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base).split("[")[0] == "Protocol" for base in node.bases)
    ]
    assert len(protocols) <= PROTOCOLS, "\n".join(protocols)


def test_the_frontend_package_has_few_entries() -> None:
    entries = sorted(
        path.name
        for path in (ROOT / "dynamo/frontend").iterdir()
        if path.suffix == ".py" or (path.is_dir() and any(path.glob("*.py")))
    )
    entries.remove("__init__.py")
    assert len(entries) <= FRONTEND_ENTRIES, entries


def test_all_is_true() -> None:
    modules = {name: importlib.import_module(name) for name in PUBLIC}
    bare = [name for name, module in modules.items() if not hasattr(module, "__all__")]
    report(bare, "public modules without __all__")
    report(
        (
            f"{name}.{public}"
            for name, module in modules.items()
            for public in module.__all__
            if not hasattr(module, public) or list(module.__all__).count(public) > 1
        ),
        "names in __all__ that do not exist, or twice",
    )


def test_only_public_modules_have_all() -> None:
    found = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if module_name(path) not in PUBLIC and re.search(r"^__all__\b", text(path), re.M)
    ]
    assert not found, f"__all__ in modules that are not public: {found}"


def test_public_names_have_docstrings() -> None:
    bare = []
    for path in SOURCES:
        for node in syntax(path).body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if not node.name.startswith("_") and not ast.get_docstring(node):
                bare.append(f"{place(path, node.lineno)} {node.name}")
    assert not bare, "public names without a docstring:\n" + "\n".join(bare)


def test_names_of_types_are_unique() -> None:
    """One name, one class or alias of a type: private ones included."""
    types: dict[str, list[str]] = {}
    for path in SOURCES:
        classes = [node for node in nodes(path) if isinstance(node, ast.ClassDef)]
        for node in (*classes, *filter(is_alias, syntax(path).body)):
            name = node.name if isinstance(node, ast.ClassDef) else ast.unparse(targets(node)[0])
            types.setdefault(name, []).append(place(path, node.lineno))
    report(
        (f"{name}: {', '.join(places)}" for name, places in types.items() if len(places) > 1),
        "names of types in use more than once",
    )


def targets(node: ast.AST) -> list[ast.expr]:
    """Return what an assignment assigns to."""
    if isinstance(node, ast.AnnAssign):
        return [node.target]
    return node.targets if isinstance(node, ast.Assign) else []


def is_alias(node: ast.stmt) -> bool:
    """Whether a statement of a module names a type: ``Name = …``, not a constant or a TypeVar."""
    names = [ast.unparse(target).lstrip("_") for target in targets(node)]
    return bool(names) and names[0][:1].isupper() and not names[0].isupper()


def test_every_module_imports() -> None:
    """Without a warning. There is no import circle, so the order makes no difference."""
    script = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\n"
    command = [sys.executable, "-W", "error", "-c", script, *IMPORTABLE]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stderr[-3000:]


def imported(node: ast.AST) -> list[str]:
    """Return the modules, or names of modules, that an import statement names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def for_types(path: Path) -> set[ast.AST]:
    """Return what is under ``if TYPE_CHECKING``."""
    return {
        inner
        for node in nodes(path)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }


def import_graph() -> dict[str, set[str]]:
    """Return the modules that each module imports, functions included.

    Imports for types alone count only where they leave the package.
    """
    known = set(MODULES)
    graph: dict[str, set[str]] = {}
    for path in SOURCES:
        module = module_name(path)
        package = ".".join(module.split(".")[:2]) + "."
        types = for_types(path)
        targets = {
            name
            for node in nodes(path)
            for name in imported(node)
            if node not in types or not name.startswith(package)
        }
        # `from a.b import c` imports the module a.b.c where there is one, else a.b.
        modules = {name if name in known else name.rpartition(".")[0] for name in targets}
        graph[module] = (modules & known) - {module}
    return graph


def test_no_import_circles() -> None:
    """Imports form no circle; those for types alone may, within a package."""
    graph, circles = import_graph(), []
    while True:
        try:
            TopologicalSorter(graph).prepare()
            break
        except CycleError as error:  # record it, cut it open, look for the next one
            circle = error.args[1]
            circles.append(" <- ".join(circle))
            graph[circle[1]].discard(circle[0])
    assert not circles, "import circles:\n" + "\n".join(circles)


def test_only_config_reads_the_environment() -> None:
    readers = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if "config" not in path.parts
        and any(word in text(path) for word in ("os.environ", "os.getenv", "getenv("))
    ]
    assert not readers, f"read the environment through dynamo.config: {readers}"


def test_only_the_command_line_prints() -> None:
    allowed = {"cli", "bench", "setup"}
    printers = [
        place(path, node.lineno)
        for path in SOURCES
        if not allowed & set(path.parts) and path.stem != "__main__"
        for node in nodes(path)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"
    ]
    assert not printers, f"only dynamo.cli prints: {printers}"


def test_an_engine_request_alone_changes_itself() -> None:
    owned = re.compile(r"(^|\.)_?(engine_request|prefill)$")
    report(
        (
            f"{place(path, node.lineno)} {ast.unparse(node)}"
            for path in SOURCES
            if "frontend" in path.parts
            for node in ast.walk(syntax(path))
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            if owned.search(ast.unparse(node.value))
        ),
        "fields of a request that others set; its method should name the event",
    )


def test_no_orphan_tasks() -> None:
    """Every task has a parent: a TaskGroup, or dynamo.runtime.process.tasks."""
    bare = []
    for path in SOURCES:
        if path.name == "tasks.py":
            continue
        for node in nodes(path):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner = ast.unparse(node.func.value)
            if node.func.attr in ("ensure_future", "gather") and owner == "asyncio":
                bare.append(place(path, node.lineno))
            if node.func.attr == "create_task" and (owner == "asyncio" or owner.endswith("loop")):
                bare.append(place(path, node.lineno))
    assert not bare, f"tasks without a parent: {bare}"


DEFAULT_POOL = {
    "dynamo/observability/otel.py": "waits two seconds at most, when the process ends",
}
"""Where asyncio's default pool is used, and why nothing of ours can be held up there."""


def test_no_work_of_ours_is_in_the_default_pool() -> None:
    """What is stuck there (users' code, a hub, a name server) must stop nothing of ours; see
    dynamo.runtime.process.threads."""
    found = set()
    for path in SOURCES:
        for node in nodes(path):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            in_default = node.func.attr == "run_in_executor" and ast.unparse(node.args[0]) == "None"
            if in_default or node.func.attr in ("to_thread", "set_default_executor"):
                found.add(str(path.relative_to(ROOT)))
    report(found - DEFAULT_POOL.keys(), "in asyncio's default pool of threads")
    assert not DEFAULT_POOL.keys() - found, "no longer needed"


def test_compiled_modules_have_a_stub_and_a_reference() -> None:
    """Every extension loads as compiled code, has a stub and a reference implementation."""
    for path in COMPILED:
        module = importlib.import_module(f"dynamo._fast.{path.stem}")
        assert module.__file__ is not None and module.__file__.endswith(".so")
        assert path.with_suffix(".pyi").exists(), f"{path.name} has no .pyi"
        reference = ROOT / "tests/oracle" / f"{path.stem}.py"
        assert reference.exists(), f"{path.name} has no reference implementation"


# Words: comments, docstrings, texts for logs and errors, and documentation.

PYTHON = [
    path
    for folder in ("dynamo", "lab", "tests", "benchmarks", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path != Path(__file__).resolve()
]
PLAIN = [
    path
    for pattern in (
        "dynamo/_fast/*.py[xi]",
        "dynamo/_fast/*.pxd",
        "dynamo/_fast/*.hpp",
        "docs/**/*.md",
        "*/README.md",
        "*/*/README.md",
        "*.md",
        "examples/*.yaml",
        "scripts/*",
        "circus.ini",
        "pyproject.toml",
        "setup.py",
    )
    for path in sorted(ROOT.glob(pattern))
    if not any(part.startswith(".") or part == "build" for part in path.relative_to(ROOT).parts)
]
TEXT_TOKENS = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)}


def lines_of_prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number and text of each line that a reader sees as prose."""
    if path.suffix != ".py":
        yield from enumerate(text(path).splitlines(), 1)
        return
    for token in tokens(path):
        if token.type in TEXT_TOKENS:
            yield from enumerate(token.string.split("\n"), token.start[0])


def test_words_are_plain() -> None:
    report(
        (
            f"{place(path, number)}: '{match.group()}': {why}"
            for path in (*PYTHON, *PLAIN)
            if ANY_WORD.search(text(path))
            for number, line in lines_of_prose(path)
            for rule, why in WORD_RULES
            if (match := rule.search(line))
        ),
        "words to avoid",
    )


def test_identifiers_are_plain() -> None:
    report(
        {
            f"{place(path, token.start[0])}: {token.string}"
            for path in PYTHON
            if ANY_IDENTIFIER.search(text(path))
            for token in tokens(path)
            if token.type == tokenize.NAME
            and BANNED_IDENTIFIERS
            & {word.lower() for word in re.findall(r"[A-Z]?[a-z]+", token.string)}
        },
        "identifiers with a metaphor",
    )


# Ids: hexadecimal in logs and errors.


def is_id(node: ast.AST) -> bool:
    name = getattr(node, "attr", getattr(node, "id", ""))
    return isinstance(node, ast.Attribute | ast.Name) and bool(ID_NAME.search(name))


def decimal_arguments(call: ast.Call) -> Iterator[ast.AST]:
    """Yield the ids that a log call formats with anything but %x."""
    template, *arguments = call.args or [ast.Constant("")]
    if isinstance(template, ast.Constant) and isinstance(template.value, str):
        kinds = [match[1] for match in FORMAT_FIELD.finditer(template.value) if match[1]]
        pairs = zip(kinds, arguments, strict=False)
        yield from (node for kind, node in pairs if is_id(node) and kind not in "xX")


def decimal_fields(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the ids that f-strings under ``tree`` format with anything but ``:x``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FormattedValue) and is_id(node.value):
            spec = ast.unparse(node.format_spec) if node.format_spec else ""
            if "x" not in spec.lower().strip("'f\""):
                yield node.value


def decimal_ids(path: Path) -> Iterator[ast.AST]:
    for node in nodes(path):
        if isinstance(node, ast.Raise) and node.exc:
            yield from decimal_fields(node.exc)
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if isinstance(node.func, ast.Attribute) and name in LOG_METHODS:
            yield from decimal_arguments(node)
            yield from decimal_fields(node)
        elif name.endswith(("Error", "Exception")):
            yield from decimal_fields(node)


def test_ids_are_printed_in_hexadecimal() -> None:
    found = Counter(
        f"{place(path, node.lineno)} {ast.unparse(node)}"
        for path in SOURCES
        if str(path.relative_to(ROOT)) not in DECIMAL_IDS_ALLOWED
        for node in decimal_ids(path)
        if isinstance(node, ast.expr)
    )
    assert not found, "ids in decimal in a log or error text:\n" + "\n".join(found)


# Ids and ranks: 0 is one of them, so "absent" is `is None`.


def truth_tests(node: ast.AST) -> list[ast.expr]:
    """Return the operands of ``node`` whose truth it uses."""
    if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
        return [node.test]
    if isinstance(node, ast.BoolOp):
        return node.values[:-1]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return [node.operand]
    return list(node.ifs) if isinstance(node, ast.comprehension) else []


def operand_name(node: ast.expr) -> str:
    """Return the name of a variable, an attribute or a key that is read; else ""."""
    if isinstance(node, ast.BoolOp):
        return operand_name(node.values[-1])
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "get" and node.args:
        node = node.args[0] if isinstance(node.args[0], ast.Constant) else node
    elif isinstance(node, ast.Subscript):
        node = node.slice
    name = getattr(node, "attr", getattr(node, "id", getattr(node, "value", "")))
    return name if isinstance(name, str) else ""


def test_ids_and_ranks_are_compared_with_none() -> None:
    report(
        (
            f"{place(path, operand.lineno)} {ast.unparse(operand)}"
            for path in SOURCES
            for node in nodes(path)
            for operand in truth_tests(node)
            if NUMBER_OR_NONE.search(operand_name(operand))
        ),
        "0 is a rank and an id: write `is None`",
    )
