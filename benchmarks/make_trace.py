"""Write a synthetic trace in the Mooncake format.

    python benchmarks/make_trace.py > benchmarks/traces/sample.jsonl
    python benchmarks/make_trace.py hot-prefix --load 0.35 > hot.jsonl
    python benchmarks/make_trace.py agents > agents.jsonl

conversations: dialogues that grow, one system prompt for all; the sample in the repository is this
with its defaults. hot-prefix: one long document, then thousands of questions about it. agents:
sessions whose next turn starts after the last answer (replay them with --closed-loop).
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

from dynamo_lab.routing.simulated_worker import WorkerSpeed

__all__ = ["agents", "conversations", "hot_prefix", "main"]

Row = dict[str, Any]
BLOCK_TOKENS = 512


def conversations(count: int = 60, seconds: float = 60.0, seed: int = 1) -> list[Row]:
    """``count`` conversations that begin within 60 % of ``seconds``, one to five turns each."""
    rng = random.Random(seed)
    rows: list[Row] = []
    next_id = 1
    for _ in range(count):
        at_ms, history = rng.uniform(0, seconds * 600), [0]
        for _ in range(rng.choice((1, 1, 2, 3, 5))):
            new = rng.choice((1, 2, 4, 8))
            history = history + list(range(next_id, next_id + new))
            next_id += new
            row = {
                "timestamp": round(at_ms),
                "input_length": 512 * len(history) - rng.randrange(512),
                "output_length": rng.randrange(8, 200),
                "hash_ids": history,
            }
            rows.append(row)
            at_ms += rng.uniform(2000, 9000)
    return sorted(rows, key=itemgetter("timestamp"))


def hot_prefix(
    requests: int = 6000,
    workers: int = 16,
    load: float = 0.35,
    document_blocks: int = 200,
    question_blocks: int = 8,
    cold: bool = False,
    seed: int = 1,
) -> Iterator[Row]:
    """Poisson arrivals of ``requests`` questions about one document.

    ``load`` is the share of all workers' time that the questions' own blocks take at the default
    speed of the replay. Unless ``cold``, one worker has computed the document before.
    """
    rng = random.Random(seed)
    document = list(range(document_blocks))
    question_s = WorkerSpeed().prefill_s(question_blocks * BLOCK_TOKENS)
    at_s, next_id = 0.0, document_blocks
    if not cold:
        yield _row(at_s, document, 1)
        at_s = 2 * WorkerSpeed().prefill_s(document_blocks * BLOCK_TOKENS)
    for _ in range(requests):
        at_s += rng.expovariate(workers * load / question_s)
        yield _row(at_s, [*document, *range(next_id, next_id + question_blocks)], 50)
        next_id += question_blocks


def agents(
    sessions: int = 64, turns: int = 20, system_blocks: int = 8, seed: int = 1
) -> Iterator[Row]:
    """Agent sessions: a shared system prompt, a task, and 2 to 8 more blocks with every turn.

    The next turn starts 0.5 to 3 s (the tool's run) after the last answer.
    """
    rng = random.Random(seed)
    next_id = system_blocks
    for number in range(sessions):
        history = list(range(system_blocks))
        at_s = rng.uniform(0, 10)
        for turn in range(turns):
            new = rng.randrange(2, 9) if turn else 16
            history = [*history, *range(next_id, next_id + new)]
            next_id += new
            yield _row(at_s, history, rng.randrange(50, 250)) | {
                "session_id": f"agent-{number}",
                "delay": rng.uniform(500, 3000) if turn else 0.0,
            }


def main(argv: list[str] | None = None) -> None:
    """Print the trace."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    kinds = parser.add_subparsers(dest="kind")
    parser.add_argument("--conversations", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    hot = kinds.add_parser("hot-prefix")
    hot.add_argument("--requests", type=int, default=6000)
    hot.add_argument("--workers", type=int, default=16)
    hot.add_argument("--load", type=float, default=0.35)
    hot.add_argument("--document-blocks", type=int, default=200)
    hot.add_argument("--question-blocks", type=int, default=8)
    hot.add_argument("--cold", action="store_true", help="no worker has the document at the start")
    agent = kinds.add_parser("agents")
    agent.add_argument("--sessions", type=int, default=64)
    agent.add_argument("--turns", type=int, default=20)
    options = vars(parser.parse_args(argv))
    kind = options.pop("kind")
    count, seconds = options.pop("conversations"), options.pop("seconds")
    if kind == "hot-prefix":
        rows = list(hot_prefix(**options))
    elif kind == "agents":
        rows = list(agents(**options))
    else:
        rows = conversations(count, seconds, options["seed"])
    for row in rows:
        print(json.dumps(row))


def _row(at_s: float, blocks: list[int], output_tokens: int) -> Row:
    return {
        "timestamp": round(at_s * 1e3, 3),
        "input_length": BLOCK_TOKENS * len(blocks),
        "output_length": output_tokens,
        "hash_ids": blocks,
    }


if __name__ == "__main__":
    main()
