"""The validator accepts right histories and rejects each kind of wrong one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from history import Answer, Event, Fault, History, Life, Record, Request, read
from validator import TWO_LOST, WORKERS_LOST, Spans, check_request, validate

ANSWER = Answer("one two three", "length", 7, 3)
WORDS = ("one", " two", " three")


def stream(**changes: object) -> Request:
    """A complete stream with one text for each token."""
    texts = [Event(1.0 + number / 10, "text", word) for number, word in enumerate(WORDS)]
    events = [
        *texts,
        Event(1.3, "finish", "length"),
        Event(1.3, "usage", usage=(7, 3)),
        Event(1.3, "done"),
    ]
    made = Request("r1", "chat", True, 1, ANSWER, 0.5, "", 1.4, 200, "complete", events)
    return msgspec.structs.replace(made, **changes)


def unary(**changes: object) -> Request:
    events = [
        Event(1.3, "text", "one two three"),
        Event(1.3, "finish", "length"),
        Event(1.3, "usage", usage=(7, 3)),
    ]
    made = Request("r1", "completions", False, 1, ANSWER, 0.5, "", 1.4, 200, "complete", events)
    return msgspec.structs.replace(made, **changes)


def changed(change: Callable[[list[Event]], object]) -> Request:
    """A complete stream whose events were changed."""
    request = stream()
    change(request.events)
    return request


def rules(request: Request, frontend_alive: bool = True) -> set[str]:
    return {violation.rule for violation in check_request(request, frontend_alive)}


def swap(events: list[Event]) -> None:
    events[0], events[1] = (
        msgspec.structs.replace(events[1], at_s=events[0].at_s),
        msgspec.structs.replace(events[0], at_s=events[1].at_s),
    )


REJECTED: dict[str, tuple[Request, str]] = {
    "a token is dropped": (changed(lambda events: events.pop(1)), "wrong text"),
    "the first token is dropped": (changed(lambda events: events.pop(0)), "wrong text"),
    "the last token is dropped": (changed(lambda events: events.pop(2)), "lost text"),
    "a token is repeated": (changed(lambda events: events.insert(1, events[1])), "wrong text"),
    "the last token is repeated": (changed(lambda events: events.insert(2, events[2])), "wrong"),
    "two tokens are swapped": (changed(swap), "wrong text"),
    "the whole text is repeated": (changed(lambda events: events.__setitem__(
        slice(3, 3), [Event(1.25, "text", "one two three")])), "wrong text"),
    "a foreign token": (
        changed(lambda events: events.insert(1, Event(1.05, "text", "x"))), "wrong text"
    ),
    "text after the finish reason": (
        changed(lambda events: events.insert(4, Event(1.3, "text", " four"))),
        "after the end",
    ),
    "a second finish reason": (changed(lambda events: events.insert(4, events[3])), "ended twice"),
    "no finish reason": (changed(lambda events: events.pop(3)), "finish reason"),
    "another finish reason": (
        changed(lambda events: events.__setitem__(3, Event(1.3, "finish", "stop"))),
        "finish reason",
    ),
    "no usage": (changed(lambda events: events.pop(4)), "usage"),
    "a second usage": (changed(lambda events: events.insert(4, events[4])), "ended twice"),
    "the usage of a shorter answer": (
        changed(lambda events: events.__setitem__(4, Event(1.3, "usage", usage=(7, 2)))),
        "usage",
    ),
    "the usage of a migrated prompt": (
        changed(lambda events: events.__setitem__(4, Event(1.3, "usage", usage=(9, 3)))),
        "usage",
    ),
    "no [DONE]": (changed(lambda events: events.pop()), "no end"),
    "two [DONE]": (changed(lambda events: events.append(events[-1])), "after the end"),
    "text after [DONE]": (
        changed(lambda events: events.append(Event(1.4, "text", "one"))), "after the end"
    ),
    "an error after [DONE]": (
        changed(lambda events: events.append(Event(1.4, "error", "late"))), "after the end"
    ),
    "text after an error": (
        changed(lambda events: events.insert(1, Event(1.0, "error", "early"))), "after the end"
    ),
    "an error without [DONE]": (
        stream(events=[Event(1.0, "text", "one"), Event(1.1, "error", "gone")]), "no end"
    ),
    "closed in the middle": (stream(ending="closed", events=stream().events[:2]), "cut"),
    "closed before the head": (stream(ending="closed", status=0, events=[]), "cut"),
    "closed before [DONE]": (stream(ending="closed", events=stream().events[:-1]), "cut"),
    "no answer": (stream(ending="timeout", ended_s=60.0, events=[]), "no end"),
    "refused": (stream(ending="refused", status=0, events=[]), "refused"),
    "status 500": (unary(status=500, events=[Event(1.0, "error", "oops")]), "status"),
    "status 400": (unary(status=400, events=[Event(1.0, "error", "too long")]), "status"),
    "status 503 without a text": (unary(status=503, events=[]), "status"),
    "an empty stream": (stream(events=[]), "no end"),
    "an empty unary answer": (unary(events=[]), "lost text"),
    "a unary answer without its end": (
        unary(events=[Event(1.3, "text", "one two"), *unary().events[1:]]), "lost text"
    ),
    "a third choice": (
        changed(lambda events: events.insert(0, Event(1.0, "text", "one", index=2))), "foreign"
    ),
    "one choice of two": (stream(choices=2), "lost text"),
    "times that go backwards": (
        changed(lambda events: events.__setitem__(0, Event(1.2, "text", "one"))), "history"
    ),
    "wrong text before the client left": (
        stream(ending="cancelled", events=[Event(1.0, "text", "two")]), "wrong text"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REJECTED)
def test_a_wrong_history_is_rejected(name: str) -> None:
    request, rule = REJECTED[name]
    assert any(found.startswith(rule) for found in rules(request)), rules(request)


@pytest.mark.parametrize(
    "request_",
    [
        stream(),
        unary(),
        stream(choices=2, events=[
            Event(1.0, "text", "one two three", 0), Event(1.0, "text", "one two", 1),
            Event(1.1, "finish", "length", 0), Event(1.1, "text", " three", 1),
            Event(1.2, "finish", "length", 1), Event(1.2, "usage", usage=(7, 6)),
            Event(1.2, "done"),
        ]),
        stream(ending="cancelled", events=stream().events[:2]),
        stream(ending="cancelled", status=0, events=[]),
        stream(events=[Event(1.0, "text", "one"), Event(1.1, "error", "no"), Event(1.1, "done")]),
        unary(status=503, events=[Event(1.0, "error", "not ready")]),
    ],
)  # fmt: skip
def test_a_right_history_is_accepted(request_: Request) -> None:
    assert rules(request_) == set()


def test_a_dead_frontend_excuses_a_cut_but_no_wrong_text() -> None:
    cut = stream(ending="closed", events=stream().events[:2])
    assert rules(cut, frontend_alive=False) == set()
    assert rules(stream(ending="refused", status=0, events=[]), frontend_alive=False) == set()
    wrong = stream(ending="closed", events=stream().events[1:2])
    assert rules(wrong, frontend_alive=False) == {"wrong text"}
    assert rules(stream(ending="timeout", events=[]), frontend_alive=False) == {"no end"}


def test_spans_that_overlap_are_joined() -> None:
    coverage = Spans([(4, float("inf")), (0, 2), (1.5, 3)])
    assert coverage.meet(2.9, 3.5)
    assert not coverage.meet(3.1, 3.9)
    assert coverage.covers(0.5, 2.9)
    assert not coverage.covers(2.9, 3.1)
    assert not coverage.covers(3.5, 4.5)
    assert coverage.covers(4, 1e9)
    assert not coverage.covers(-1, 1)
    assert not Spans([]).covers(1, 2)


def test_the_rate_counts_requests_with_a_worker_and_a_frontend_throughout() -> None:
    lives = [Life("frontend", "f", 0, 10), Life("frontend", "g", 12), Life("worker", "a", 0, 5)]
    failed = [Event(1.0, "error", "gone")]
    records: list[Record] = [
        stream(id="good"),
        unary(id="failed", status=503, events=failed),
        unary(id="no worker", status=503, started_s=4.0, ended_s=6.0, events=failed),
        stream(id="killed", ending="closed", started_s=9.0, ended_s=10.5, events=[]),
        stream(id="left", ending="cancelled", cancel="decode", events=stream().events[:1]),
        Fault("kill worker", "a", 5.0),
        *lives,
    ]
    verdict = validate(records, lives)
    assert verdict.violations == []
    assert (verdict.requests, verdict.counted, verdict.succeeded) == (5, 2, 1)
    assert (verdict.cancelled, verdict.no_worker, verdict.frontend_lost) == (1, 1, 1)
    assert verdict.success_rate == 0.5
    assert verdict.failed == ["failed"]
    assert verdict.faults == {"kill worker": 1}
    assert verdict.failures == {"status 503": 2, "closed": 1}
    assert verdict.tokens == 3
    assert verdict.longest_gap_s == 0.5


@pytest.mark.parametrize("text", WORKERS_LOST)
def test_a_request_that_lost_more_workers_than_promised_is_not_counted(text: str) -> None:
    lives = [Life("frontend", "f", 0), Life("worker", "a", 0, 1.0), Life("worker", "b", 0)]
    error = [Event(1.3, "error", f"{text} in this request")]
    status = 500 if text == TWO_LOST else 503
    records: list[Record] = [unary(status=status, events=error)]
    assert [one.rule for one in validate(records, lives).violations] == ["no loss"]
    verdict = validate([*records, Fault("requests cut", "b", 1.2)], lives)
    assert verdict.violations == []
    assert (verdict.workers_lost, verdict.counted) == (1, 0)


def test_two_histories_of_one_request_are_rejected() -> None:
    lives = [Life("frontend", "f", 0), Life("worker", "a", 0)]
    assert [one.rule for one in validate([stream(), stream()], lives).violations] == ["ended twice"]


def test_a_history_survives_its_file(tmp_path: Path) -> None:
    records: list[Record] = [
        stream(),
        unary(),
        Fault("kill worker", "a", 1.0),
        Life("worker", "a", 0),
    ]
    history = History(tmp_path / "history.jsonl")
    for record in records:
        history.add(record)
    history.close()
    assert list(read(history.path)) == records
