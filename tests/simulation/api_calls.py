"""The requests to models of :mod:`api_worker`, each with its one right answer, and their boxes."""

from __future__ import annotations

import base64
import random
import re
import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from api_tokens import decoded, encoded
from call import LISTING, TEAPOT, Call
from history import Answer
from machine import START_S
from presence import API
from written_calls import MODELS, written_calls

if TYPE_CHECKING:
    from box import Box
    from history import Request
    from scenario import Scenario, Step

__all__ = [
    "ABSENT",
    "FORGOTTEN",
    "NOT_FOUND",
    "SPOKEN_TOKENS",
    "api_calls",
    "calls_of",
    "certain_of_api",
    "lost_api",
    "never_known",
    "with_api",
]

ABSENT, FORGOTTEN = "absent", "forgotten"
"""The kinds of requests for an adapter that was unloaded just now, or is not known any more."""
NOT_FOUND = "Model not found"
_FORGOTTEN_S = 2.5
_SHARE = 0.25
"""Of the boxes without limits and keys that are not calm."""
_COUNTS = (10, 20, 30)
_WRITTEN = (0, 3, 5)
"""How many models of :mod:`written_models` there are."""
_FAULTS = ("", "", "", "kill api", "stop api")
_SERVICE = """Api:
  run: api_worker
"""
_CHAT, _COMPLETIONS, _EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
_LATE = "late"
_FELT_S = 6.0
"""A worker that was stopped or died may be felt so long, until it is asked again."""
_NOTICE_S = 0.5
"""So late a frontend may notice an adapter, and so long it may keep one that was unloaded."""
_KNOWN_S = 0.05
"""So late a frontend may see a new card."""
SPOKEN_TOKENS = 900
"""What each prompt of texts has, as its model says: a frontend may count another number."""
_IDS = [1200 + number for number in range(70)]


def api_calls() -> Iterator[Call]:
    yield from _counted_calls()
    yield from _spoken_calls()
    yield from _vector_calls()
    for model in MODELS:
        yield from written_calls(model)


def calls_of(graph: str) -> list[Call]:
    """Return the calls to lasting models of the worker of ``graph`` that it does not refuse."""
    written = re.findall(r"  written: (\S+)", graph)
    calls = [*_counted_calls(), *_spoken_calls(), *_vector_calls()]
    calls += [call for names in written for model in names.split(",")
              for call in written_calls(model)]  # fmt: skip
    return [call for call in calls if not call.adapter and call.status != TEAPOT]


def _words(count: int, what: str) -> str:
    return f"api {what}: " + " ".join(f"word {number}" for number in range(count))


def _of_prompt(prompt: tuple[int, ...], most: int = 400, adapter: str = "") -> Answer:
    """Return what the model that counts answers to ``prompt``."""
    import api_worker

    tokens = encoded(api_worker.reply_of(prompt, adapter))
    if len(tokens) > most:
        return Answer(decoded(tokens[:most]), "length", len(prompt), most)
    return Answer(decoded(tokens), "stop", len(prompt), len(tokens))


def _counted_calls() -> Iterator[Call]:
    import api_worker

    def completion(model: str, name: str, prompt: Any, most: int = 400, by: str = "") -> Call:
        ids = encoded(prompt) if isinstance(prompt, str) else tuple(prompt)
        body = {"model": model, "prompt": prompt, "max_tokens": most}
        answer = _of_prompt(ids, most, by)
        return Call(f"{model} {name}", "completions", _COMPLETIONS, body, answer=answer)

    def chat(model: str, text: str) -> Call:
        rendered = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 400}
        answer = _of_prompt(encoded(rendered))
        return Call(f"{model} chat", "chat", _CHAT, body, answer=answer)

    for words in (4, 30, 90):
        yield completion("counted", f"{words} words", _words(words, "counted"))
        yield completion("asking", f"{words} words", _words(words, "counted"))
        yield completion("engine", f"{words} words", _words(words, "engine"))
    yield completion("counted", "ids", _IDS)
    yield completion("counted", "one id", _IDS[:1])
    yield completion("engine", "one id", _IDS[:1])
    yield completion("counted", "cut", _words(9, "cut"), most=3)
    yield chat("counted", _words(12, "chat"))
    yield chat("whole", _words(5, "whole"))
    for adapter in api_worker.ADAPTERS:
        call = completion(adapter, "words", _words(30, "counted"), by=adapter)
        yield replace(call, adapter=adapter if adapter == _LATE else "")


def _spoken_calls() -> Iterator[Call]:
    import answer_cases

    def spoken(name: str, text: str, **fields: Any) -> Call:
        words = text.split()
        said = "".join(word.upper() + " " for word in words)
        body = {"model": "spoken", "messages": [{"role": "user", "content": text}]}
        answer = Answer(said, "stop", SPOKEN_TOKENS, len(words))
        return replace(Call(f"spoken {name}", "chat", _CHAT, body, answer=answer), **fields)

    for words in (2, 30):
        yield spoken(f"{words} words", _words(words, "spoken"))
        prompt = _words(words, "spoken")
        body = {"model": "spoken", "prompt": prompt}
        yield spoken(f"prompt of {words} words", prompt, api="completions", path=_COMPLETIONS,
                     body=body)  # fmt: skip
    weather = answer_cases.Case("text", "", (answer_cases.PARIS,))
    called = Answer("", "tool_calls", SPOKEN_TOKENS, 1)
    yield spoken("weather", "weather", case=weather, answer=called)
    yield spoken("teapot", "teapot please", api="refusal", status=418, says="short and stout",
                 answer=Answer("", "", SPOKEN_TOKENS, 0))  # fmt: skip
    given: dict[str, Any] = {"model": "spoken", "input": ["abc", "defg"]}
    says = '"embedding":[4.0,0.5]'
    answer = Answer("", "", 3, 0)  # as long as both texts, as the frontend estimates them
    yield Call("spoken embedding", "read", _EMBEDDINGS, given, says=says, answer=answer)


def _vector_calls() -> Iterator[Call]:
    import api_worker

    def embedding(
        name: str, given: Any, ids: tuple[int, ...], count: int = 0, **fields: Any
    ) -> Call:
        count = count or len(ids)
        body = {"model": "vectors", "input": given, **fields}
        numbers = api_worker.vector_of(ids)
        shown = "[" + ",".join(str(one) for one in numbers) + "]"
        if fields.get("encoding_format") == "base64":
            shown = '"' + base64.b64encode(struct.pack("<3f", *numbers)).decode() + '"'
        answer = Answer("", "", count, 0)
        return Call(f"embedding {name}", "read", _EMBEDDINGS, body, answer=answer,
                    says=f'"embedding":{shown}')  # fmt: skip

    def refused(name: str, says: str, given: Any, **fields: Any) -> Call:
        call = embedding(name, given, (1, 2), **fields)
        return replace(call, api="refusal", status=400, says=says, answer=None)

    text, more = _words(7, "embedded"), _words(40, "embedded")
    yield embedding("of a text", text, encoded(text))
    yield embedding("of ids", _IDS, tuple(_IDS))
    yield embedding("of texts", [text, more], encoded(more),
                    sum(len(encoded(one)) for one in (text, more)))  # fmt: skip
    yield embedding("of lists of ids", [[5, 6], _IDS], tuple(_IDS), len(_IDS) + 2)
    yield embedding("in base64", text, encoded(text), encoding_format="base64")
    large = [_words(90, str(number)) for number in range(180)]
    yield embedding("large", large, encoded(large[-1]),
                    sum(len(encoded(one)) for one in large))  # fmt: skip
    yield refused("of nothing", "cannot be empty", [])
    yield refused("of a mixture", "mixture", ["a", 5])
    yield refused("out of range", "out of range", [99_999_999])
    yield Call("card of an adapter", "read", "/v1/models/tuned", {}, method="GET", needs=LISTING,
               says='"id":"tuned"')  # fmt: skip


def with_api(scenario: Scenario, step: type[Step]) -> Scenario:
    """Add the worker to some scenarios, and send it requests. The other steps keep their numbers.

    ``step`` makes a step.
    """
    dice = random.Random(f"api {scenario.seed}")
    fault = dice.choice(_FAULTS)
    others = scenario.limits or "{keys}" in scenario.graph or "dynamo.attach" in scenario.graph
    others = others or "enforce-disagg" in scenario.graph  # its models have no prefill workers
    if dice.random() >= _SHARE or others or scenario.is_calm or not scenario.seed:
        return scenario
    written = dice.sample(MODELS, dice.choice(_WRITTEN))
    calls = [*_counted_calls(), *_spoken_calls(), *_vector_calls()]
    if written:
        more = [call for model in written for call in written_calls(model)]
        calls += dice.choices(more, k=len(calls))
    steps = list(scenario.steps)
    until_s = max(scenario.seconds, 2.0)
    first = max((one.number for one in steps), default=-1) + 1
    count = dice.choice(_COUNTS)
    for number in range(first, first + count):
        call = dice.choice(calls)
        details: dict[str, Any] = {"call": call.name}
        details["stream"] = call.generates and dice.random() < 0.6
        if call.generates and dice.random() < 0.15:
            stage = dice.choice(("head", "queued", "first token", "mid-stream"))
            details |= {"cancel": stage, "after": dice.randrange(1, 12)}
            details["stream"] = details["stream"] or stage in ("first token", "mid-stream")
        if scenario.profile == "replicas":
            details["frontend"] = dice.randrange(2)
        at_s = round(dice.random() * until_s, 4)
        steps.append(step(number, at_s, "request", API, 0, details))
    if fault:
        at_s, seconds = round(1 + dice.random() * until_s, 4), dice.choice((0.5, 1.5, 4.0))
        steps.append(step(first + count, at_s, "fault", fault, 0, {"seconds": seconds}))
    service = _SERVICE + (f"  written: {','.join(written)}\n" if written else "")
    ordered = tuple(sorted(steps, key=lambda one: one.at_s))
    if scenario.is_cut:
        ordered = tuple(one for one in ordered if one.at_s <= scenario.seconds)
    return replace(scenario, graph=scenario.graph + service, steps=ordered)


def certain_of_api(box: Box, request: Request) -> str:
    """Return what had to happen to a request for a model of the worker; "either": uncertain."""
    if _is_disturbed(box, request):
        return "either: api worker"
    return _of_adapter(box, request) if box.adapters.get(request.id) else "complete"


def _is_disturbed(box: Box, request: Request) -> bool:
    """Whether a fault or an operation that may be felt by the worker's clients happened then."""
    since_s = request.started_s - _FELT_S
    known_s = request.started_s - _KNOWN_S
    cards = [at_s for at_s, service in box.presence.cards if service == "Api"]
    if not cards or cards[0] > known_s or any(known_s <= at_s <= request.ended_s for at_s in cards):
        return True  # it has several models, which are known one after the other
    for cause in box.causes.found:
        hit = cause.names("box_Api") and (cause.whom or not cause.verb)
        hit = hit and "serve[" not in cause.why  # it lives on without the arbiter
        if hit and cause.span.meets(since_s, request.ended_s):
            return True
    if any(at_s for model, at_s in box.causes.losses
           if model == API and since_s <= at_s <= request.ended_s):  # fmt: skip
        return True
    for process in box.machine.lived:
        if process.program in ("dynamo.frontend", "api_worker"):
            times = (process.started_s - START_S, process.ended_s - START_S)
            spans = [(at_s, at_s) for at_s in times if at_s > box.ready_s]
            spans += [(one.since_s, one.until_s) for one in box.stops.get(process.pid, ())]
            if any(begin_s <= request.ended_s and since_s <= end_s for begin_s, end_s in spans):
                return True
    return False


def lost_api(box: Box, request: Request) -> bool:
    """Whether the worker ended, or was silent or cut off, while ``request`` waited."""
    since_s = request.started_s - _FELT_S
    lost = [at_s for model, at_s in box.causes.losses if model == API]
    lost += [one.ended_s - START_S for one in box.machine.lived if one.program == "api_worker"]
    return any(since_s <= at_s <= request.ended_s for at_s in lost)


def never_known(box: Box, request: Request) -> bool:
    """Whether its frontend began while the worker was away, and has not seen it since.

    The worker's models are in no graph.
    """
    port, gaps = box.ports[request.id], list(box.presence.gaps(("Api",), box.clock()))
    return any(
        gap.meets(life.from_s, life.from_s) and gap.until_s + _NOTICE_S >= request.started_s
        for life in box.frontend_lives
        if box.life_ports[id(life)] == port and life.from_s <= request.started_s
        for gap in gaps
    )


def _of_adapter(box: Box, request: Request) -> str:
    """Whether the adapter that comes and goes was loaded all the time, or away."""
    loaded, changed_s = False, 0.0
    for at_s, is_loaded in box.machine.adapter_changes:
        if at_s - START_S > request.ended_s + _NOTICE_S:
            break
        loaded, changed_s = is_loaded, at_s - START_S
    if changed_s > request.started_s - _NOTICE_S:
        return "either: adapter"
    away_s = request.started_s - changed_s
    return "complete" if loaded else FORGOTTEN if away_s > _FORGOTTEN_S else ABSENT
