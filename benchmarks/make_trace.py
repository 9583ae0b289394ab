"""Writes a small trace of the Mooncake format: conversations that grow, one system prompt for all.

    python benchmarks/make_trace.py > benchmarks/traces/sample.jsonl

The sample in the repository is this script's output with its defaults; it is synthetic.
"""

from __future__ import annotations

import argparse
import json
import random


def main() -> None:
    """Print the trace."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    rows, next_id = [], 1
    for _ in range(options.conversations):
        at_ms, history = rng.uniform(0, options.seconds * 600), [0]
        for _ in range(rng.choice((1, 1, 2, 3, 5))):
            new = rng.choice((1, 2, 4, 8))
            history = history + list(range(next_id, next_id + new))
            next_id += new
            rows.append(
                {
                    "timestamp": round(at_ms),
                    "input_length": 512 * len(history) - rng.randrange(512),
                    "output_length": rng.randrange(8, 200),
                    "hash_ids": history,
                }
            )
            at_ms += rng.uniform(2000, 9000)
    for row in sorted(rows, key=lambda row: row["timestamp"]):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
