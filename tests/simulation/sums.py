"""Sums that must agree: what clients received, and what frontends and routers counted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from api_calls import SPOKEN_TOKENS
from presence import API
from relay import is_attached

if TYPE_CHECKING:
    from box import Box
    from history import Request
    from machine import Process

__all__ = ["check_labels", "check_sums", "page_of"]

Page = defaultdict[str, list[tuple[dict[str, str], float]]]
_UNKNOWN_KEY = 401
"""Of requests that are refused before they are read: they have a counter of their own."""
_COUNTS = ("anthropic_count_tokens", "responses_input_tokens")
"""Endpoints that count the tokens of a prompt."""
_LATE_S = 0.5
"""So much later a frontend may see that a client has left."""


class Bounds(NamedTuple):
    """A figure lies between ``least``, by complete answers, and ``most``, by all requests."""

    least: float
    most: float


class _Asked(NamedTuple):
    """The requests of one frontend, which lived all the time, and those with a whole answer.

    ``others`` are requests that no model answers: bad ones, and those that read something. They
    took ``others_s``, for they may wait for a first worker. ``embedded`` requests have no first
    token. ``at_once`` is how many tokens may have come with the first one: a worker of the public
    API sends what it likes.
    """

    all: Sequence[Request]
    whole: Sequence[Request]
    others: int
    others_s: float
    embedded: int
    at_once: int

    @property
    def tokens(self) -> Bounds:
        """Output tokens. Answers that were not complete are counted as far as they came."""
        return Bounds(sum(map(_tokens, self.whole)), sum(map(_tokens, self.all)))

    @property
    def prompts(self) -> Bounds:
        """Prompt tokens, once for all choices of a request."""
        counted = [one for one in self.whole if one.expected.prompt_tokens != SPOKEN_TOKENS]
        least, most = (
            sum(one.expected.prompt_tokens for one in some) for some in (counted, self.all)
        )
        return Bounds(least, most)

    @property
    def requests(self) -> Bounds:
        """How many there are."""
        return Bounds(len(self.whole), len(self.all))

    @property
    def streams(self) -> Bounds:
        """How many have a first token."""
        return Bounds(len(self.whole) - self.embedded, len(self.all))

    @property
    def gaps(self) -> Bounds:
        """Gaps between tokens."""
        least = sum(max(_tokens(one) - one.choices, 0) for one in self.whole)
        return Bounds(least - self.at_once, sum(map(_tokens, self.all)))

    def seconds(self, choices: bool = False) -> float:
        """Return the time of all requests, or of all their choices."""
        return self.others_s + sum(
            _seconds(one) * (one.choices if choices else 1) for one in self.all
        )


def _seconds(request: Request) -> float:
    return request.ended_s - request.started_s + _LATE_S


def _tokens(request: Request) -> int:
    return request.expected.completion_tokens * request.choices


def check_sums(box: Box) -> Iterator[str]:
    """Yield the figures of frontends that differ from what their clients know."""
    for process, asked in _frontends(box):
        page = page_of(process)
        lasting = [one for one in asked.whole if not _has_left(box, one)]
        yield from _figures(process, page, asked._replace(whole=lasting))
        yield from _ends(process, page, asked)
    for process in (*box.processes("frontend"), *box.processes("mocker")):
        page = page_of(process)
        yield from _histograms(process, page)
        yield from _router(process, page, box.machine.routed.get(process.pid))
    machine = box.machine
    died = any(not one.alive and one.program == "dynamo.frontend" for one in machine.lived)
    for engine_id, routed in machine.routed_tokens.items():
        if engine_id not in machine.received_tokens and died:
            continue  # its frontend may have died before it was counted
        tokens, migrations = machine.received_tokens.get(engine_id, (0, 0))
        lost = migrations or engine_id in machine.uncounted
        if routed > tokens or (routed < tokens and not lost):
            yield f"a router counted {routed} tokens of {engine_id}, whose workers sent {tokens}"


def _frontends(box: Box) -> Iterator[tuple[Process, _Asked]]:
    """Yield the frontends that have served all requests of their port."""
    if is_attached(box) or box.has_asking_verbs:
        return  # one frontend has requests of the other, whose tokens are the server's
    for process in box.processes("frontend"):
        lives = [one for one in box.frontend_lives if one.pid == process.pid]
        port = box.life_ports[id(lives[0])] if lives else 0
        if sum(one == port for one in box.life_ports.values()) == 1:
            here = [
                one
                for one in box.requests
                if box.ports[one.id] == port and one.status != _UNKNOWN_KEY
            ]
            asked = [one for one in here if one.choices]  # of a model, not of the frontend
            others = [one for one in here if not one.choices]
            whole = [one for one in asked if _is_whole(one)]
            embedded = sum(one.api == "read" for one in asked)
            at_once = sum(_tokens(one) for one in whole if box.models[one.id] == API)
            waited_s = sum(map(_seconds, others))
            yield process, _Asked(asked, whole, len(others), waited_s, embedded, at_once)


def _has_left(box: Box, request: Request) -> bool:
    """Whether the histograms of its model may have left with the model: of an adapter, or of a
    worker of the public API that ended.
    """
    ended = any(one.program == "api_worker" and not one.alive for one in box.machine.lived)
    return box.models[request.id] == API and (ended or bool(box.adapters.get(request.id)))


def _is_whole(request: Request) -> bool:
    failed = any(event.kind == "error" for event in request.events)
    whole = request.ending == "complete" and request.status == 200 and not failed
    return whole and request.api != "refusal"


def _figures(process: Process, page: Page, asked: _Asked) -> Iterator[str]:
    of = "dynamo_frontend_"
    for name, bounds in (
        (f"{of}output_tokens_total", asked.tokens),
        (f"{of}output_sequence_tokens_sum", asked.tokens),
        (f"{of}input_sequence_tokens_sum", asked.prompts),
        (f"{of}input_sequence_tokens_count", asked.requests),
        (f"{of}cached_tokens_sum", Bounds(0, asked.prompts.most)),
        (f"{of}time_to_first_token_seconds_count", asked.streams),
        (f"{of}time_to_first_token_seconds_sum", Bounds(0, asked.seconds())),
        (f"{of}request_duration_seconds_sum", Bounds(0, asked.seconds())),
        (f"{of}inter_token_latency_seconds_count", asked.gaps),
        (f"{of}inter_token_latency_seconds_sum", Bounds(0, asked.seconds(choices=True))),
        (f"{of}detokenize_token_count", asked.tokens),
    ):
        figure = sum(value for _, value in page[name])
        if not bounds.least <= figure <= bounds.most:
            yield (
                f"{process.name}: {name} is {figure:g}, by its clients it is "
                f"{bounds.least:g} to {bounds.most:g}"
            )


def _ends(process: Process, page: Page, asked: _Asked) -> Iterator[str]:
    """Requests by their end: success, error or cancelled; a client that leaves may be late."""
    left = sum(one.ending in ("cancelled", "closed", "timeout") for one in asked.all)
    failed = sum(one.ending == "complete" for one in asked.all) - len(asked.whole)
    counted = {"success": 0.0, "error": 0.0}
    for labels, value in page["dynamo_frontend_requests_total"]:
        if labels["endpoint"] not in _COUNTS:
            counted[labels["status"]] += value
    for status, least, others in (
        ("success", len(asked.whole), 0),
        ("error", failed, asked.others),
    ):
        if not least <= counted[status] <= least + left + others:
            yield (
                f"{process.name}: {counted[status]:g} requests ended as {status}, by its clients "
                f"{least} to {least + left + others}"
            )


def _router(process: Process, page: Page, routed: Counter[str] | None) -> Iterator[str]:
    """The page of a router has what its requests were."""
    for name, figure in (routed or {}).items():
        shown = sum(value for _, value in page[f"dynamo_component_router_{name}"])
        if shown != figure:
            yield f"{process.name}: dynamo_component_router_{name} is {shown:g}, not {figure}"


def _histograms(process: Process, page: Page) -> Iterator[str]:
    """The buckets of a histogram grow up to its count; no counter is below zero."""
    highest: dict[tuple[str, ...], float] = {}
    for name, samples in page.items():
        for labels, value in samples:
            if value < 0 and name.endswith(("_total", "_count", "_bucket")):
                yield f"{process.name}: {name} {labels} is {value:g}"
            if name.endswith("_bucket"):
                key = (name, *(f"{key}={one}" for key, one in labels.items() if key != "le"))
                before = highest.get(key, 0.0)
                highest[key] = value
                if value < before:
                    yield f"{process.name}: {name} {labels} is {value:g}, the one before {before:g}"
        for labels, value in samples if name.endswith("_count") else ():
            key = (
                name.removesuffix("_count") + "_bucket",
                *(f"{key}={one}" for key, one in labels.items()),
            )
            if highest.get(key, value) != value:
                yield f"{process.name}: {name} {labels} is {value:g}, its buckets {highest[key]:g}"


def check_labels(process: Process) -> Iterator[str]:
    """A page keeps no labels of what it does not show any more."""
    for part in process.parts:
        if hasattr(part, "metrics") and hasattr(part, "serving"):
            for name, family in part.metrics._families.items():
                gone = family._labels.keys() - family.keys()
                if gone:
                    yield f"{process}: {name} keeps the labels {sorted(gone)[:3]}"


def page_of(process: Process) -> Page:
    """Return labels and value of each sample on the page of a process, by name."""
    found: Page = defaultdict(list)
    for part in process.parts:
        if hasattr(part, "metrics") and hasattr(part, "serving"):  # the runtime
            for bring_up_to_date in part.metrics.before_render:
                bring_up_to_date()
            for family in part.metrics._families.values():
                for metric in family.metrics():
                    for sample in metric.samples:
                        found[sample.name].append((dict(sample.labels), sample.value))
    return found
