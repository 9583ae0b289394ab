"""Operators at a shell: they read a deployment with the verbs of ``dynamo`` while things happen.

Each verb is a process that runs ``dynamo.cli.main`` with its words; what it prints and its exit
status are judged by :mod:`shown` at the end of the run.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import fake_os
from exact_verbs import MODEL, STATE, files_of, statefile
from machine import Process
from process_end import ProcessKilled

if TYPE_CHECKING:
    from box import Box
    from scenario import Profile, Scenario, Step

__all__ = ["Shown", "connect_streams", "run_verb", "with_shells"]

_SHARE = 0.4
"""Of all boxes."""
_MOST = 8
_NEAR_SHARE = 0.5
"""Of the verbs: they begin at or soon after another step."""
_OFFSETS_S = (0.0, 0.01, 0.05, 0.2, 0.5, 1.0, 2.0)
_LATER_S = (0.0, 3.0, 6.0, 12.0)
"""So long after a fault or an operation nothing of it is felt any more."""


@dataclass
class Shown:
    """A verb that ran: its words, its time, and what it printed. ``status`` None: still running."""

    number: int
    words: tuple[str, ...]
    since_s: float
    until_s: float = 0.0
    status: int | None = None
    out: str = ""
    err: str = ""
    is_exact: bool = False
    """Whether it runs where all is quiet. See :mod:`exact_verbs`."""
    later: dict[str, Any] = field(default_factory=dict)
    """What the judge needs of the moment at which it ended."""

    def __str__(self) -> str:
        return f"dynamo {' '.join(self.words)}"


# -- the choice of a seed


def _service(dice: random.Random, profile: Profile) -> str:
    return dice.choice(profile.services)


def _last_words(dice: random.Random, profile: Profile) -> tuple[str, ...]:
    name = dice.choice(("", "", _service(dice, profile), "Frontend", "box_Frontend"))
    return ("logs", "-n", str(dice.choice((0, 3, 20))), *([name] if name else []))


def _asked(dice: random.Random, profile: Profile) -> tuple[str, ...]:
    words: tuple[str, ...] = ("explain", "--url", _url(dice, profile))
    words += dice.choice(((), ("request-2",), ("request-6",), ("nothing",)))
    return (*words, *dice.choice(((), ("--json",), ("--json",))))


def _fits(dice: random.Random, profile: Profile) -> tuple[str, ...]:
    url = _url(dice, profile)
    return ("explain", "--model-fit", "--url", url, *dice.choice(((), ("--json",))))


def _route(dice: random.Random, profile: Profile) -> tuple[str, ...]:
    words: tuple[str, ...] = ("route", "where does it go", "--url", _url(dice, profile))
    words += ("--model", dice.choice(profile.models)) if dice.random() < 0.7 else ()
    return (*words, *dice.choice((("--json",), ("--explain",), ())))


def _recording(dice: random.Random, profile: Profile) -> tuple[str, ...]:
    name = f"recorded-{dice.getrandbits(32):x}.jsonl"
    words = ("record", name, "--seconds", dice.choice(("2", "6")), "--url", _url(dice, profile))
    return (*words, *dice.choice(((), ("--content",))))


def _url(dice: random.Random, profile: Profile) -> str:
    return f"http://127.0.0.1:{8000 + dice.randrange(profile.frontends)}"


def _events(dice: random.Random, profile: Profile) -> tuple[str, ...]:
    of = dice.choice(((), (), ("--name", _service(dice, profile)), ("--model", profile.models[0])))
    return ("events", "--json", *of) if dice.random() < 0.7 else ("events", *of)


def _completed(dice: random.Random, profile: Profile) -> tuple[str, ...]:
    shell = dice.choice(("zsh", "fish"))
    words = dice.choice(
        (("restart", ""), ("logs", ""), ("load", ""), ("",), ("ps", "-"), ("planner", ""),
         ("serve", "--"), ("events", "--since", ""), ("key", ""), ("ps", "--namespace", ""))
    )  # fmt: skip
    if dice.random() < 0.3:
        return ("__complete", "bash", f"dynamo {' '.join(words)}")
    return ("__complete", shell, *words)


_HELPED = (
    *("run", "remove", "init", "serve", "reload", "doctor", "ps", "web", "state", "top", "logs"),
    *("events", "stop", "restart", "drain", "sleep", "wake", "load", "unload", "list", "pull"),
    *("rm", "bench", "record", "replay", "profile", "chat", "route", "explain", "planner", "key"),
    *("install-service", "completion", "version", "planner explain", "planner set"),
)


def _help(dice: random.Random, profile: Profile) -> tuple[str, ...]:
    return (*dice.choice(_HELPED).split(), "--help")


def _one_of(*verbs: tuple[str, ...]) -> Callable[[random.Random, Profile], tuple[str, ...]]:
    return lambda dice, profile: dice.choice(verbs)


_VERBS: dict[str, tuple[float, Callable[[random.Random, Profile], tuple[str, ...]]]] = {
    "ps": (4, _one_of(("ps", "--json"), ("ps", "--json"), ("ps",))),
    "top": (3, _one_of(("top", "--once"), ("top",))),
    "state": (3, _one_of(("state", "show", "--json"), ("state", "show"))),
    "planner": (1.5, _one_of(("planner", "explain", "--json"), ("planner", "explain"))),
    "logs": (2, _last_words),
    "events": (2, _events),
    "explain": (3, _asked),
    "fits": (1, _fits),
    "route": (2, _route),
    "record": (2, _recording),
    "web": (1, _one_of(("web", "--no-open"))),
    "completion": (
        1.5,
        lambda dice, profile: (
            _completed(dice, profile)
            if dice.random() < 0.8
            else ("completion", dice.choice(("bash", "zsh", "fish")))
        ),
    ),
    "help": (1.5, _help),
    "wrong": (
        0.7,
        _one_of(("pss",), ("ps", "--wrong"), ("logs", "Nothing"), ("state",), ("events", "--since",
                "never"), ("ps", "--namespace", "other"), ("explain", "--url", "nonsense")),
    ),
}  # fmt: skip
"""How often each kind of verb is drawn, and its words."""


def with_shells(scenario: Scenario, profile: Profile, make: Callable[..., Step]) -> Scenario:
    """Let operators read some boxes. The other steps keep their numbers.

    ``make`` makes a step of a number, a time and the words.
    """
    dice = random.Random(f"shell {scenario.seed}")
    if not scenario.seed or dice.random() >= _SHARE:
        return scenario
    kinds = {kind: weight for kind, (weight, _) in _VERBS.items() if dice.random() < 0.6}
    kinds = kinds or {"ps": 1.0}
    steps = list(scenario.steps)
    for number in range(len(steps), len(steps) + dice.randrange(2, _MOST + 1)):
        at_s = dice.random() * scenario.seconds + dice.choice(_LATER_S)
        if dice.random() < _NEAR_SHARE and scenario.steps:
            at_s = dice.choice(scenario.steps).at_s + dice.choice(_OFFSETS_S)
        kind = dice.choices(list(kinds), list(kinds.values()))[0]
        steps.append(make(number, round(at_s, 4), _VERBS[kind][1](dice, profile)))
    ordered = tuple(sorted(steps, key=lambda step: step.at_s))
    return replace(scenario, steps=ordered, has_shells=True)


# -- the run of a verb


def run_verb(box: Box, step: Step) -> None:
    """Run ``dynamo`` with the words of ``step`` in a process of its own."""
    shown = Shown(step.number, tuple(step.details["words"]), box.clock())
    shown.is_exact = "visit" in step.details
    box.shown.append(shown)
    box.open_operations += 1
    box.machine.note(f"shell {step.number}: {shown}")

    async def main(process: Process) -> int:
        ended = process.loop.create_future()
        printed: dict[str, list[str]] = {"out": [], "err": []}
        process.printed = printed
        process.loop.call_soon(_run, box, printed, shown, ended)
        await ended
        return int(ended.result())

    process = box.machine.spawn(f"shell {step.number}", dict(box.env), main)
    process.on_death[partial(_ended, box, shown)] = None


def _run(box: Box, printed: dict[str, list[str]], shown: Shown, ended: Any) -> None:
    from dynamo.cli.main import main

    machine = box.machine
    machine.in_job = True
    try:
        names = {STATE: str(box.state), MODEL: str(box.model_path)}
        words = [_filled(word, names) for word in shown.words]
        if words[:1] == ["record"] and "--help" not in words:
            words[1] = f"{box.state}/{words[1]}"
        with statefile(box.state, words):
            status = main(words)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except ProcessKilled:
        raise
    except BaseException as error:  # noqa: BLE001 - no verb may show a traceback
        machine.failures.append(f"{shown} failed: {error!r}")
        _note_traceback(machine, error)
        status = 1
    finally:
        machine.in_job = False
    shown.status, shown.until_s = status, box.clock()
    if shown.is_exact:
        shown.later["files"] = files_of(box.state)
    shown.out, shown.err = ("".join(printed[name]) for name in ("out", "err"))
    box.machine.note(f"{shown}: status {status} {shown.out[-200:]!r} {shown.err[:200]!r}")
    ended.set_result(0)


def _filled(word: str, names: dict[str, str]) -> str:
    for name, value in names.items():
        word = word.replace(name, value)
    return word


def _note_traceback(machine: Any, error: BaseException) -> None:
    import traceback

    for line in traceback.format_exception(error):
        machine.note(line.rstrip())


def _ended(box: Box, shown: Shown) -> None:
    box.open_operations -= 1
    shown.until_s = shown.until_s or box.clock()


class Stream:
    """Standard output or error: that of the current process in a verb, else the real one."""

    encoding = "utf-8"
    errors = "strict"

    def __init__(self, real: Any, name: str) -> None:
        self._real = real
        self._name = name

    @property
    def buffer(self) -> Any:
        """For bytes."""
        return _Bytes(self)

    def write(self, text: str) -> int:
        lines = self._lines()
        if lines is None:
            return int(self._real.write(text))
        lines.append(text)
        return len(text)

    def writelines(self, texts: Any) -> None:
        for text in texts:
            self.write(text)

    def flush(self) -> None:
        if self._lines() is None:
            self._real.flush()

    def isatty(self) -> bool:
        return self._lines() is None and bool(self._real.isatty())

    def fileno(self) -> int:
        return int(self._real.fileno())

    def _lines(self) -> list[str] | None:
        machine = fake_os.current_machine()
        process = None if machine is None else machine.current
        printed = None if process is None else process.printed
        return None if printed is None else printed[self._name]


class _Bytes:
    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def write(self, data: bytes) -> int:
        self._stream.write(data.decode(errors="surrogateescape"))
        return len(data)

    def flush(self) -> None:
        """What is written is there."""


def connect_streams() -> None:
    """Let each verb print to streams of its own."""
    sys.stdout = Stream(sys.stdout, "out")
    sys.stderr = Stream(sys.stderr, "err")
