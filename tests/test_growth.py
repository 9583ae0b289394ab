"""No regular expression and no parser of foreign bytes takes more than linear time.

Every pattern in ``dynamo`` is found by its syntax and gets inputs that are made of its own parts:
a beginning that matches, a piece many times, an end that does not match. The measure is the time
of a text against that of one a quarter as long, far from both four times and sixteen.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import importlib
import itertools
import json
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hub_server import answering

from dynamo.attach.profiles import LoadNames, prometheus_load
from dynamo.doctor.alert_watch import parse_counts
from dynamo.errors import ConfigError, DynamoError, StatefileError
from dynamo.frontend.formats.message import AnswerMessage, CallProbe
from dynamo.frontend.formats.reasoning import ReasoningParser
from dynamo.frontend.formats.request_tools import RequestTools
from dynamo.frontend.formats.table import REASONING_FORMATS, TOOL_FORMATS
from dynamo.frontend.requests.content import response_body
from dynamo.frontend.requests.redaction import cleaned_answer, cleaned_body
from dynamo.llm.model_download import HubModel
from dynamo.operations.pull import find_on_hub
from dynamo.serve.graph.graph import MAX_TEXT_BYTES, parse_yaml
from dynamo.serve.state.entries import read_services
from dynamo.serve.state.statefile import Statefile
from dynamo.serve.supervision.output import (
    both_ends,
    cause_in,
    last_line_in,
    refusal_in,
    telling_line,
)
from dynamo.setup.llama_swap import convert
from dynamo.status.logs import EventReader, LogReader, last_line, progress_in

sre: Any = importlib.import_module("re._constants")
sre_parser: Any = importlib.import_module("re._parser")
ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "dynamo").rglob("*.py"))
CHARACTERS = 4096
SLOW_S = 0.4e-6
"""For each character; a linear search takes a fraction of it."""
HANGS_S = 1.0
RATIO = 9.0
ROUNDS = 5
"""A busy machine spoils a measurement: only what is too slow in each of so many counts."""
TICK_S = 0.004
TOKEN = 8
CASES: Any = importlib.import_module("unit.frontend.answer_cases")
CALLS = {"compile", "match", "search", "fullmatch", "sub", "subn", "findall", "finditer", "split"}
REPEATS = (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT)
REPEATED = {"sub", "subn", "findall", "finditer", "split"}


class Used(NamedTuple):
    """A pattern, where it is, and by which methods it is used."""

    place: str
    pattern: re.Pattern[Any]
    methods: frozenset[str]


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def methods_by_name() -> dict[str, set[str]]:
    """Return, by the name of a pattern, the methods that any module calls on it."""
    found: dict[str, set[str]] = {}
    for path in SOURCES:
        for name, method in re.findall(r"\b(\w+)\.(\w+)\b", path.read_text()):
            if method in CALLS:
                found.setdefault(name, set()).add(method)
    return found


def patterns() -> Iterator[Used]:
    """Yield every pattern of the package that is known without running a function."""
    for path in SOURCES:
        text = path.read_text()
        if not re.search(r"^(import re|from re import)\b", text, re.MULTILINE):
            continue
        tree = ast.parse(text)
        where = str(path.relative_to(ROOT))
        named = {
            target.id: node.lineno
            for node in tree.body
            if isinstance(node, ast.Assign | ast.AnnAssign) and "re.compile" in ast.unparse(node)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        }
        try:
            module = importlib.import_module(module_of(path)) if named else None
        except ModuleNotFoundError:  # of an engine that is not installed: literal patterns alone
            named, module = {}, None
        for name, line in named.items():
            value = getattr(module, name)
            methods = frozenset(methods_by_name().get(name, ())) or frozenset(("search",))
            for pattern in value.values() if isinstance(value, dict) else [value]:
                yield Used(f"{where}:{line} {name}", pattern, methods)
        inside = {
            id(one)
            for node in (tree.body if module is not None else ())
            if isinstance(node, ast.Assign | ast.AnnAssign)
            for one in ast.walk(node)
        }
        for node in ast.walk(tree):
            if id(node) not in inside and (used := in_function(node, where)) is not None:
                yield used


def in_function(node: ast.AST, where: str) -> Used | None:
    """Return the pattern of a call within a function; escaped parts of it are one letter."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return None
    if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "re"):
        return None
    if node.func.attr not in CALLS:
        return None
    method = "finditer" if node.func.attr == "compile" else node.func.attr
    text = literal(node.args[0])
    flags = re.MULTILINE if "re.M" in ast.unparse(node) else 0
    pattern: Any = re.compile(text, flags)
    return Used(f"{where}:{node.lineno} {node.func.attr}", pattern, frozenset((method,)))


def literal(node: ast.expr) -> Any:
    """Return the pattern of an expression, with "x" for what only a run knows."""
    match node:
        case ast.Constant():
            return node.value
        case ast.BinOp(op=ast.Add()):
            return literal(node.left) + literal(node.right)
        case ast.JoinedStr():
            return "".join(map(literal, node.values))
        case ast.BinOp(op=ast.Mod()):
            return literal(node.left).replace(b"%b", b"x")
    return "x"


def shortest(items: Any, least: int = 0) -> str:
    """Return a text that matches parsed ``items``, as far as that is easy.

    Of what may be left out there are ``least``.
    """
    made = ""
    for operator, argument in items:
        if operator is sre.LITERAL:
            made += chr(argument)
        elif operator in (sre.NOT_LITERAL, sre.ANY):
            made += "a" if argument != ord("a") else "b"
        elif operator is sre.IN:
            made += next(iter(members(argument)), "a")
        elif operator in REPEATS:
            made += shortest(argument[2], least) * max(argument[0], least)
        elif operator is sre.SUBPATTERN:
            made += shortest(argument[3], least)
        elif operator is sre.BRANCH:
            made += shortest(argument[1][0], least)
        elif operator is sre.ATOMIC_GROUP:
            made += shortest(argument, least)
    return made


def members(argument: Any) -> Iterator[str]:
    """Yield some members of a character class."""
    if argument[0][0] is sre.NEGATE:
        refused = set(members(argument[1:]))
        yield from (one for one in "a 0-=\"'\\.{<" if one not in refused)
        return
    for operator, value in sorted(argument, key=lambda one: one[0] is not sre.LITERAL):
        match operator:
            case sre.LITERAL:
                yield chr(value)
            case sre.RANGE:
                yield chr(value[1])
            case sre.CATEGORY:
                yield {
                    sre.CATEGORY_DIGIT: "0",
                    sre.CATEGORY_SPACE: " ",
                    sre.CATEGORY_WORD: "a",
                    sre.CATEGORY_NOT_SPACE: "a",
                    sre.CATEGORY_NOT_WORD: " ",
                    sre.CATEGORY_NOT_DIGIT: "a",
                }.get(value, "a")


def parts(items: Any) -> Iterator[str]:
    """Yield texts that the parts of a parsed pattern match: each part, branch and character."""
    for operator, argument in items:
        if (one := shortest([(operator, argument)])) != "":
            yield one
        match operator:
            case sre.IN:
                yield from itertools.islice(members(argument), 6)
            case sre.MAX_REPEAT | sre.MIN_REPEAT | sre.POSSESSIVE_REPEAT:
                yield from parts(argument[2])
            case sre.SUBPATTERN:
                yield from parts(argument[3])
            case sre.BRANCH:
                for branch in argument[1]:
                    yield shortest(branch)
                    yield from parts(branch)
            case sre.ATOMIC_GROUP:
                yield from parts(argument)
            case sre.ASSERT | sre.ASSERT_NOT:
                yield from parts(argument[1])


def hostile(pattern: re.Pattern[Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (beginning, piece, end) of texts on which the pattern may work hardest."""
    text: Any = pattern.pattern
    source = text if isinstance(text, str) else text.decode("latin1")
    items = list(sre_parser.parse(source, pattern.flags & ~re.DEBUG))
    small = list(dict.fromkeys(one for one in parts(items) if one))[:24]
    single = [one for one in small if len(one) == 1][:8]
    whole, longer = shortest(items), shortest(items, 1)
    begins = {"", whole, longer}
    for number, (operator, _) in enumerate(items):
        if operator is not sre.LITERAL:
            begins |= {shortest(items[:number]), shortest(items[:number], 1)}
    begins |= {longer[:size] for size in range(1, min(len(longer), 8))}
    apart = [one for one in single if not one.isalnum()] + ["\n"]
    large = [a + b for a, b in itertools.permutations(single, 2)]
    large += [a + b for a in ("", *apart) for b in begins]
    large.append(whole[:-1])
    for begin, piece in itertools.chain(
        itertools.product(begins, small), itertools.product(("", whole), large)
    ):
        if piece:
            yield begin, piece, "\0"
    yield from (("", piece, "") for piece in (*small, *large) if piece)


def seconds(call: Callable[[], object], clock: Callable[[], float]) -> float:
    """Return the time of a call, which is interrupted when it takes too long."""

    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, HANGS_S)
    gc.disable()
    begin = clock()
    try:
        call()
    except TimeoutError:
        return HANGS_S
    finally:
        gc.enable()
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    return clock() - begin


def grows_too_fast(call: Callable[[int], object], most: int = CHARACTERS) -> bool:
    """Whether ``call(n)`` takes far more than four times as long for four times as much.

    The first of several rounds that looks linear is enough; CPU time confirms what none does.
    """
    large = small = HANGS_S
    for _ in range(ROUNDS):
        large = min(large, seconds(lambda: call(most), time.perf_counter))
        if large < most * SLOW_S:
            return False
        small = min(small, seconds(lambda: call(most // 4), time.perf_counter))
        if large <= RATIO * small:
            return False
    return grows_in_cpu_time(call, most)


def grows_in_cpu_time(call: Callable[[int], object], most: int) -> bool:
    """The same by CPU time, whose clock has coarse ticks: with larger texts until it has many."""
    for size in (most, most * 4, most * 16):
        large = min(seconds(functools.partial(call, size), time.process_time) for _ in range(2))
        if large >= TICK_S * 2 * RATIO:
            small = seconds(functools.partial(call, size // 4), time.process_time)
            return large > RATIO * (small + TICK_S)
    return False


def work(pattern: re.Pattern[Any], method: str, parts: tuple[str, str, str], size: int) -> None:
    """Use ``pattern`` on a text of about ``size`` characters."""
    begin, piece, end = parts
    text: Any = begin + piece * (size // len(piece)) + end
    if isinstance(pattern.pattern, bytes):
        text = text.encode("latin1", "replace")
    if method in REPEATED:
        for _ in pattern.finditer(text):
            pass
    else:
        getattr(pattern, method)(text)


def too_fast_for(used: Used) -> str | None:
    """Return how the pattern is superlinear, as the parts of a text; None if it is not."""
    for method in used.methods - {"compile"}:
        for parts in hostile(used.pattern):
            # As many pieces as a short one has: what grows is work for each.
            size = min(CHARACTERS * 8, CHARACTERS * (len(parts[1]) + 15) // 16)
            if grows_too_fast(functools.partial(work, used.pattern, method, parts), size):
                return "{}({!r} + {!r} * n + {!r})".format(method, *parts)
    return None


def test_no_pattern_takes_more_than_linear_time() -> None:
    slow = []
    for used in patterns():
        if (text := too_fast_for(used)) is not None:
            slow.append(f"{used.place}: {text}")
    assert not slow, "\n".join(slow)


@pytest.mark.parametrize(
    "pattern",
    [
        rb"^(up)(?:\{((?:[^\"}]|\"(?:[^\"\\]|\\.)*\")*)\})?[ \t]+(\S+)",
        rb"(?<![A-Za-z0-9])eyJ[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_.-]{16,}",
        rb"\S+: error: (.+)",
        r'^silent_workers\{[^}]*\bmodel="((?:[^"\\]|\\.)*)"[^}]*\} (\d+)',
        r"\s*name\s*=\s*\"?([^\">]+?)\"?\s*>",
    ],
)
def test_the_check_finds_what_was_wrong_once(pattern: Any) -> None:
    used = Used("", re.compile(pattern, re.MULTILINE), frozenset(("finditer",)))
    assert too_fast_for(used) is not None


def _profile(page: str) -> object:
    return prometheus_load(page.encode(), LOAD_NAMES, 10)


def _causes(text: str) -> object:
    lines = [both_ends(line).decode(errors="replace") for line in [text.encode()] * 200]
    return cause_in(lines), telling_line(lines), refusal_in(lines)


def _yaml(text: str) -> object:
    with contextlib.suppress(ConfigError):
        return parse_yaml(text[:MAX_TEXT_BYTES], "graph")
    return None


def _statefile(text: str) -> object:
    """Read a statefile of this text, and its services."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "ns.json").write_text(text)
        with contextlib.suppress(StatefileError):
            document = Statefile(Path(directory), "ns").read()
            return document and read_services(document)
    return None


def _entries(text: str) -> object:
    """Read a statefile with this text in each place of free text."""
    entry = {"service_name": text, "watcher_name": "a", "cmd": text, "args": [text, "--a"]}
    config = json.dumps({text: {"ServiceArgs": {"min": 1}}, "a": text})
    environment = {"DYNAMO_SERVICE_CONFIG": config, "SYSTEM_RESOURCES": {"total_gpus": 1}}
    written = {"version": 1, "namespace": "ns", "circus_endpoint": "e", "environment": environment}
    return _statefile(json.dumps({**written, "components": {text: entry, "ns_a": entry}}))


def _logs(text: str) -> object:
    """Read a log of this text as ``ps``, ``logs`` and ``events`` do."""
    with tempfile.TemporaryDirectory() as directory:
        logs = Path(directory, "logs")
        logs.mkdir()
        for name in ("ns_a.log", "events.log"):
            (logs / name).write_text(text)
        reader, events = LogReader(logs, "ns", "a"), EventReader(Path(directory))
        shown = last_line(logs / "ns_a.log"), reader.last(20), list(reader.read()), events.all()
        reader.close()
        events.close()
        return shown, [progress_in(line) for line in text.split("\n")[:5]]


def _hub(text: str) -> object:
    """Search a hub, and list the files of a model, with answers that have this text."""
    answers: list[object] = []
    for body in (text, f"[{text}]", f'[{{"id":"a","tags":[{text}],"path":"{text}"}}]'):
        with answering(lambda _, body=body: (body, {})):  # type: ignore[misc]
            with contextlib.suppress(DynamoError):
                answers.append(find_on_hub("a"))
            with contextlib.suppress(DynamoError):
                answers.append(HubModel("a/b", None, "a/b").files())
    return answers


LOAD_NAMES = LoadNames(("up",), ("waiting",), ("usage",), "engine")
PARSERS: dict[str, tuple[Callable[[str], object], tuple[str, ...]]] = {
    "a server's metrics": (
        _profile,
        ("up{", 'up{a="', 'up{a="\\', "up a", 'up{a="b"} 1\n', "up{\n", "a", 'a="', "up{a=b,"),
    ),
    "a frontend's metrics": (
        lambda text: parse_counts(text.encode(), "own", 7),
        ("own_requests_total{\n", 'own_requests_total{model="a"} 1\n', 'own_requests_total{a="'),
    ),
    "the end of a log": (_causes, ("a", "a.", "Error", "a: error: ", "\x1b[0", " fail", "\r")),
    "a line of a log": (
        lambda text: (last_line_in([text]), cause_in([text]), refusal_in([text])),
        ("a", "a.", "Error", "ValueError: ", "a: error: ", "\x1b[0", "\x1b[", " fail", "\r"),
    ),
    "a recorded body": (
        lambda text: cleaned_body(text.encode()),
        (
            "-eyJ",
            "sk-",
            "token",
            "password: ",
            '"password": "',
            "\\",
            '\\"',
            "://",
            "bearer ",
            "{",
            "-----BEGIN PRIVATE KEY-----",
            "'",
            '{"a":',
            "[",
            "secret=\\",
            "\\u0041",
        ),
    ),
    "a recorded answer": (
        lambda text: cleaned_answer(f"data: {text}".encode()),
        ('{"a":"b"}\n\ndata: ', "\n", "data: {\n", "data:", '{"id":"sk-"}\ndata: '),
    ),
    "a hub's answer": (
        _hub,
        ("a", "[", '{"id":"a"},', '{"id":"', '"a",', "\\u0041", "{", '{"type":"file","path":"a"},'),
    ),
    "a framed response": (
        lambda text: response_body(text.encode()),
        ("1\r\na\r\n", "0", "\r\n", "HTTP/"),
    ),
    "a statefile": (_statefile, ("[", '{"a":', '"', "1", "\\", "a", '{"components":', " ")),
    "texts of a statefile": (_entries, ("a", " ", "_1", ",", "=", "--a=", "/", '"', "\\", "{")),
    "log files": (_logs, ("a", "\n", "\r", " \n", "9", "9%", "a: Error: ", "\x1b[", "{", "[" * 9)),
    "a graph": (
        _yaml,
        (
            "a: ",
            "- ",
            "[",
            "{",
            "? ",
            "&a ",
            "*a ",
            '"',
            "'",
            "a\n",
            "|\n",
            "# ",
            "a: b\n",
            "!",
            "%",
        ),
    ),
}


def parsed(parse: Callable[[str], object], piece: str, end: str, size: int) -> None:
    parse(piece * (size // len(piece)) + end)


@pytest.mark.parametrize("name", PARSERS)
def test_no_parser_of_foreign_bytes_takes_more_than_linear_time(name: str) -> None:
    parse, pieces = PARSERS[name]
    slow = [
        repr(piece)
        for piece in pieces
        for end in ("", "\0")
        if grows_too_fast(functools.partial(parsed, parse, piece, end), CHARACTERS)
    ]
    assert not slow, f"{name}: {slow}"


def model_answer(name: str, parts: tuple[str, str], thinks: bool, size: int) -> None:
    """Parse an answer in the tool-call format ``name`` that comes in pieces, as tokens do."""
    begin, piece = parts
    tool, tools = TOOL_FORMATS[name], RequestTools.of(CASES.TOOLS)
    message = AnswerMessage(lambda: "id")
    parser = tool.make(message, tools)
    if thinks and (shape := REASONING_FORMATS["qwen3"]) is not None:
        probe = functools.partial(CallProbe, lambda message: tool.make(message, tools), tools.names)
        shape = shape._replace(calls=tool.begins)
        parser = ReasoningParser(message, shape, True, parser, probe=probe)
    text = begin + piece * (size // len(piece))
    for start in range(0, len(text), TOKEN):
        parser.push(text[start : start + TOKEN])
        message.deltas()
    parser.finish()


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_no_answer_of_a_model_takes_more_than_linear_time(name: str) -> None:
    cases = [case.text for case in CASES.CASES if case.format == name and case.calls]
    begins = {text[: len(text) * cut // 6] for text in cases[:1] for cut in range(6)}
    pieces = (" ", "<", "</", '"', "\\", "{", "[", "a", "a b=", "<a>", *TOOL_FORMATS[name].begins)
    slow = [
        f"{begin!r} + {piece!r} * n"
        for begin, piece in itertools.product(sorted(begins), pieces)
        for thinks in (False, True)
        if grows_too_fast(
            functools.partial(model_answer, name, (begin, piece), thinks), CHARACTERS // 4
        )
    ]
    assert not slow, "\n".join(slow)


def test_macros_of_macros_are_bounded_as_aliases_are() -> None:
    macros = {"m0": "x" * 9, **{f"m{n}": f"${{m{n - 1}}}" * 4 for n in range(1, 19)}}
    text = json.dumps({"macros": macros, "models": {"a": {"cmd": "run ${m18} ${PORT}"}}})
    with pytest.raises(ConfigError, match="with all macros expanded"):
        convert(text, "swap.yaml", {}, {"namespace": "a", "http-host": "b", "http-port": 1})
