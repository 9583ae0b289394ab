"""Errors keep their class, status and text between processes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from dynamo import errors
from dynamo.cli.options import LoadModelSettings
from dynamo.config import load

CLASSES = [
    kind
    for kind in (getattr(errors, name) for name in errors.__all__)
    if isinstance(kind, type) and issubclass(kind, errors.DynamoError)
]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_round_trip(kind: type[errors.DynamoError]) -> None:
    again = errors.from_code(kind.code, "text")
    assert type(again) is kind
    assert (again.message, str(again), again.status) == ("text", "text", kind.status)


def test_codes_are_unique_and_unknown_ones_survive() -> None:
    assert len({kind.code for kind in CLASSES}) == len(CLASSES)
    assert type(errors.from_code("of a later version", "x")) is errors.DynamoError


def test_only_worker_failures_are_retryable() -> None:
    assert errors.Disconnected("").retryable and errors.EngineShutdown("").retryable
    assert not errors.InvalidArgument("").retryable and not errors.Cancelled("").retryable


@pytest.mark.parametrize(
    ("given", "status", "kind"),
    [
        (418, 418, "I'm a Teapot"),
        (499, 499, "Client Closed Request"),
        (503, 503, "Service Unavailable"),
        (0, 500, "Internal Server Error"),
        (200, 500, "Internal Server Error"),
        (599, 599, "Error"),
    ],
)
def test_a_status_chosen_by_the_engine_crosses(given: int, status: int, kind: str) -> None:
    sent = errors.HttpFailure("text", given)
    again = errors.from_code(sent.wire_code(), sent.message)
    assert type(again) is errors.HttpFailure
    assert (again.status, again.kind, again.message) == (status, kind, "text")


@pytest.mark.parametrize("code", ["http.", "http.x", "http.²", "http.-4", "other.418"])
def test_an_invalid_status_is_a_plain_failure(code: str) -> None:
    assert errors.from_code(code, "x").status == 500


@pytest.mark.parametrize("name", ["m", "-name", "--", "--help", "a b", "$(id)", "it's", "-n 'x'"])
def test_names_in_commands_reach_the_verb(name: str) -> None:
    words = shlex.split(f"--namespace n {errors.as_argument(name)}")[2:]
    (settings,) = load("dynamo load", "", [LoadModelSettings], words)
    assert settings.model == name
    (path,) = shlex.split(errors.as_path(name))
    assert Path(path) == Path(name) and not path.startswith("-")


def test_every_command_with_a_name_of_a_user_quotes_it() -> None:
    package = Path(errors.__file__).parent
    verbs = re.compile(r"dynamo (?:run|pull|rm|load|unload|remove|serve|reload) \{(\w+)")
    safe = {"as_argument", "as_path", "file", "last", "shlex"}  # made by one of them
    found = [
        f"{path.relative_to(package)}:{number}: {line.strip()}"
        for path in package.rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for match in verbs.finditer(line)
        if match[1] not in safe
    ]
    assert not [one for one in found if "self._name" not in one]  # an id of the hub is a word
