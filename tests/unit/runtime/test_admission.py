"""Admission: exactly N + Q requests; the next one is rejected at once."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest

from dynamo.errors import Overloaded
from dynamo.observability.metrics import Registry
from dynamo.runtime.requests.admission import AdmissionQueue
from dynamo.runtime.requests.context import Context
from dynamo.runtime.requests.stream import ServerStream


def test_exactly_n_plus_q_are_admitted() -> None:
    registry = Registry()
    admission = AdmissionQueue(2, 2, registry)
    started: list[int] = []
    starts = [partial(started.append, n) for n in range(5)]
    for start in starts[:4]:
        admission.submit(start)
    with pytest.raises(Overloaded, match="worker at capacity"):
        admission.submit(starts[4])
    assert started == [0, 1]
    text = registry.render().decode().replace(".0\n", "\n")
    for line in (
        "dynamo_engine_request 2",
        "dynamo_request_queue 2",
        "dynamo_work_handler_queue_capacity 1",
        "dynamo_work_handler_pool_capacity 2",
        "dynamo_rejection_request_total 1",
        "dynamo_work_handler_enqueue_rejected_total 1",
        "dynamo_work_handler_pool_active_tasks 2",
        "dynamo_work_handler_queue_depth 1",
        "dynamo_work_handler_permit_wait_seconds_count 2",
    ):
        assert line in text
    admission.release()
    assert started == [0, 1, 2] and (admission.running, admission.waiting) == (2, 1)


def test_a_withdrawn_request_is_never_started() -> None:
    admission = AdmissionQueue(1, 2, Registry())
    started: list[str] = []
    first, second = (lambda: started.append("first")), (lambda: started.append("second"))
    admission.submit(first)
    admission.submit(second)
    assert admission.withdraw(second) and not admission.withdraw(first)
    admission.release()
    assert started == ["first"] and admission.running == 0


def test_a_request_that_ends_while_starting_starts_the_next() -> None:
    admission = AdmissionQueue(1, 4, Registry())
    seen: list[int] = []

    def start(number: int) -> None:
        seen.append(number)
        admission.release()

    admission.submit(lambda: None)
    for number in range(3):
        admission.submit(partial(start, number))
    admission.release()
    assert seen == [0, 1, 2] and (admission.running, admission.waiting) == (0, 0)


def test_a_stream_that_closed_in_the_queue_gives_its_place_to_the_next() -> None:
    admission = AdmissionQueue(1, 4, Registry())
    started: list[str] = []
    streams = {}
    for name in ("first", "closed", "next"):
        streams[name] = SimpleNamespace(closed=False, context=Context())
        admission.enter(cast(ServerStream, streams[name]), partial(started.append, name))
    streams["closed"].closed = True  # its connection broke
    admission.release()
    assert started == ["first", "next"] and (admission.running, admission.waiting) == (1, 0)
