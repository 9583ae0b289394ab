"""Requests that name their worker, and those of web pages, in boxes of mock workers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from call import WORKER, Call
from presence import Span, decoders, service_of
from wire_calls import ORIGIN, wire_calls

if TYPE_CHECKING:
    from box import Box
    from history import Request
    from machine import Process
    from scenario import Scenario, Step

__all__ = ["UNKNOWN_WORKER", "Pin", "pin_calls", "pinned", "with_pins", "worker_of"]

UNKNOWN_WORKER = "does not identify a known worker"
_SHARE = 0.3
_COUNTS = (4, 8, 16)
_WAYS = ("backend_instance_id", "header", "decode_worker_id", "allowed_worker_ids")
_NOTICE_S = 0.5
_OVERRIDES = (
    {"overlap_score_weight": 0.0},
    {"router_temperature": 0.5},
    {"overlap_score_weight": 2.0, "router_temperature": 0.0},
)


class Pin:
    """The worker that a request names: its process, and its instance id."""

    def __init__(self, process: Process, worker_id: int) -> None:
        self.process = process
        self.worker_id = worker_id


def pin_calls() -> Iterator[Call]:
    """Yield the requests that name no worker, or one that there is not."""
    user = [{"role": "user", "content": "Which worker?"}]

    def chat(name: str, nvext: dict[str, Any], status: int, says: str, **fields: Any) -> Call:
        body = {"messages": user, "max_tokens": 4, "nvext": nvext, **fields}
        api = "read" if status == 200 else "refusal"
        return Call(f"pin {name}", api, "/v1/chat/completions", body, needs=WORKER, status=status,
                    says=says)  # fmt: skip

    yield chat("unknown", {"backend_instance_id": 12345}, 400, UNKNOWN_WORKER)
    yield chat("unknown decoder", {"decode_worker_id": 12345}, 400, UNKNOWN_WORKER)
    taints = {"routing_constraints": {"required_taints": ["zone=none"]}}
    yield chat("taints", taints, 400, "zone=none")


def with_pins(scenario: Scenario, ask: Callable[..., Step], step: type[Step]) -> Scenario:
    """Let some requests of some scenarios name their worker. The other steps keep their numbers.

    ``ask`` makes a request of a time, ``step`` a step.
    """
    dice = random.Random(f"pins {scenario.seed}")
    others = scenario.limits or "{keys}" in scenario.graph or "dynamo.attach" in scenario.graph
    if dice.random() >= _SHARE or others or scenario.is_calm or not scenario.seed:
        return scenario
    steps, calls = list(scenario.steps), [*pin_calls(), *wire_calls()]
    if (
        "Prefill" in scenario.graph
    ):  # the prompt of an unknown decode worker is computed, and counts
        calls = [one for one in calls if UNKNOWN_WORKER not in one.says]
    until_s = scenario.seconds if scenario.is_cut else max(scenario.seconds, 2.0)
    first = max((one.number for one in steps), default=-1) + 1
    for number in range(first, first + dice.choice(_COUNTS)):
        made = ask(dice, at_s=round(dice.random() * until_s, 4))
        if dice.random() < 0.4:
            details = {"call": dice.choice(calls).name, "stream": False}
            if "frontend" in made.details:
                details["frontend"] = made.details["frontend"]
            made = step(0, made.at_s, "request", made.what, 0, details)
        else:
            more: dict[str, Any] = {"pin": dice.choice(_WAYS), "worker": dice.randrange(4)}
            if dice.random() < 0.3:
                more = {"fields": {"nvext": {"router_config_override": dice.choice(_OVERRIDES)}}}
            made = replace(made, details={**made.details, **more})
        steps.append(replace(made, number=number))
    run = "  run: dynamo.frontend\n"
    graph = scenario.graph.replace(run, f"{run}  cors-origins: {ORIGIN}\n")
    return replace(scenario, graph=graph, steps=tuple(sorted(steps, key=lambda one: one.at_s)))


def pinned(box: Box, step: Step, request_id: str, body: dict[str, Any]) -> str:
    """Let the request name a live worker of its model, if there is one; return its header."""
    services = decoders(step.what)
    live = [one for service in services for one in box.presence.live(service)]
    found = sorted((lease, one) for lease, one in box.presence.owners.items() if one in live)
    if not found:
        return ""
    lease, process = found[step.details["worker"] % len(found)]
    worker_id = int(lease, 16)
    box.pins[request_id] = Pin(process, worker_id)
    way = step.details["pin"]
    nvext: dict[str, Any] = {"extra_fields": ["worker_id"]}
    body["nvext"] = nvext
    if way == "header":
        return f"x-worker-instance-id: {worker_id}\r\n"
    nvext[way] = [worker_id] if way.startswith("allowed") else worker_id
    return ""


def worker_of(box: Box, request: Request) -> Process | None:
    """Return the process that ``request`` named; None if it may have had to go to another one."""
    pin = box.pins.get(request.id)
    if pin is None:
        return None
    since_s = request.started_s - _NOTICE_S
    name, service = pin.process.name, service_of(pin.process)
    causes = [one for one in box.causes.found if one.names(name)]
    spans = [one.span for one in causes]
    spans += [Span(at_s, at_s) for model, at_s in box.causes.losses
              if service in decoders(model)]  # fmt: skip
    spans += box.presence.gaps((name,), box.clock())
    away = any(span.meets(since_s, request.ended_s) for span in spans)
    known = any(
        one.from_s < since_s and (one.closing_s is None or request.ended_s < one.closing_s)
        for one in box.frontend_lives
    )
    return pin.process if known and not away else None
