"""Whatever fails and when: the client receives what it would have received without the fault."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Any

import pytest
from migration_kit import BROKEN, LIMIT, UNSENT, MigratingFleet, Worker, next_token

from dynamo.errors import EngineShutdown

ROUNDS = 8
REFUSALS = 4
WORKERS = LIMIT + REFUSALS + 1


async def run(body: dict[str, Any], dice: random.Random, faults: bool) -> Any:
    """Return what the client of one request received, without ids, times and chunk borders."""
    site = MigratingFleet(WORKERS)
    site.post(body, "/v1/chat/completions" if "messages" in body else "/v1/completions")
    workers: list[Worker] = []
    broken, refused, lost = Counter[int](), Counter[int](), Counter[int]()
    vocabulary = site.preprocessor.tokenizer.vocab_size
    for _ in range(10_000):
        while len(workers) < len(site.streams):
            workers.append(Worker(site.streams[len(workers)], vocabulary, dice))
        active = [one for one in workers if one.active]
        if active:
            worker = dice.choice(active)
            _, _, number = worker.stream.engine_id.rpartition("-")
            choice = int(number) if number.isdigit() and len(number) < 2 else 0
            unseen = not worker.sent and refused[choice] < REFUSALS
            if faults and unseen and dice.random() < 0.1:
                refused[choice] += 1
                worker.fail(dice.choice(UNSENT)("no"))
            elif faults and broken[choice] < LIMIT and dice.random() < 0.15:
                broken[choice] += 1
                # Two lost before a token end the request; one that drains is no loss.
                kinds = (EngineShutdown,) if not worker.sent and lost[choice] else BROKEN
                lost[choice] += not worker.sent
                worker.fail(dice.choice(kinds)("gone"))
            else:
                worker.step()
            await asyncio.sleep(0)
        elif not site.active.admitted:
            break
        else:
            await asyncio.sleep(0.001)  # a migration waits for its turn
    assert not site.active.admitted
    await asyncio.sleep(0)
    assert site.status == 200, site.body
    site.settled()
    moved = site.migrated()
    assert moved == sum(broken.values()) or not faults
    return merged(site) if body.get("stream") else without_ids(site.answer), moved


def without_ids(answer: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in answer.items() if key not in ("id", "created")}


def merged(site: MigratingFleet) -> dict[str, Any]:
    """The chunks of a stream as one answer for each choice."""
    assert site.events[-1] == "[DONE]"
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for event in site.events[:-1]:
        assert "error" not in event, event
        usage = event.get("usage") or usage
        for part in event["choices"]:
            text = part["delta"].get("content") or "" if "delta" in part else part["text"]
            found = choices.setdefault(part["index"], {"text": "", "logprobs": [], "reason": None})
            assert found["reason"] is None, "nothing follows the finish reason"
            found["text"] += text
            found["logprobs"] += flat(part.get("logprobs"))
            found["reason"] = part["finish_reason"]
    return {"choices": choices, "usage": usage}


def flat(logprobs: dict[str, Any] | None) -> list[Any]:
    if logprobs is None:
        return []
    if "content" in logprobs:
        return list(logprobs["content"])
    return [list(row) for row in zip(*logprobs.values(), strict=True)]


def body_of(dice: random.Random, site: MigratingFleet) -> dict[str, Any]:
    """A random request; its stop strings and ids occur in the answer."""
    chat = dice.random() < 0.5
    prompt = " ".join(dice.choices(["tea", "river", "glass", "old"], k=dice.randint(1, 30)))
    body: dict[str, Any] = {"model": "tiny", "max_tokens": dice.randint(1, 60), "seed": 5}
    if chat:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    if dice.random() < 0.5:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if dice.random() < 0.4:
        body["n"] = dice.randint(2, 3)
    if dice.random() < 0.3:
        body["min_tokens"] = dice.randint(1, body["max_tokens"])
    if dice.random() < 0.4:
        body |= {"logprobs": True, "top_logprobs": 1} if chat else {"logprobs": 1}
    if dice.random() < 0.2 and not body.get("stream"):
        body["prompt_logprobs"] = 1
        if not chat:
            body["echo"] = dice.random() < 0.5
    if dice.random() < 0.5 and not chat:
        body |= stops_of(dice, site, prompt)
    return body


def stops_of(dice: random.Random, site: MigratingFleet, prompt: str) -> dict[str, Any]:
    """A stop string or id that ends the answer to ``prompt``."""
    tokenizer = site.preprocessor.tokenizer
    ids = tokenizer.encode(prompt, True).tolist()
    answer = list(ids)
    for _ in range(40):
        answer.append(next_token(answer, 5, tokenizer.vocab_size))
    at = dice.randrange(len(ids), len(answer))
    if dice.random() < 0.5:
        return {"stop_token_ids": [answer[at]]}
    text = tokenizer.decode(answer[at : at + 2]).replace("\ufffd", "")
    return {"stop": [text[:8] or "never", "xyz"]}


@pytest.mark.parametrize("number", range(ROUNDS))
async def test_random_faults_change_nothing(number: int) -> None:
    dice = random.Random(number)
    moved = 0.0
    for _ in range(6):
        body = body_of(dice, MigratingFleet())
        expected, _ = await run(body, random.Random(dice.random()), faults=False)
        for _ in range(2):
            found, count = await run(body, random.Random(dice.random()), faults=True)
            assert found == expected, json.dumps(body)
            moved += count
    assert moved > 5, "the faults come in between"
