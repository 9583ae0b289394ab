"""Run the replay of NVIDIA Dynamo 1.6 on a trace; a child of simulation_calibration.py.

It needs the Python of an environment with ``ai-dynamo-runtime``, not that of this repository: both
packages are named ``dynamo``. Arguments: the trace, the report to write, and the options as JSON.
With ``tick_s``, each tick's snapshot is printed as a line, and a line with the workers is read.
"""

from __future__ import annotations

import json
import sys
from typing import Any


class Ticks:
    """Asks the parent process for the workers, every ``tick_s`` of virtual time."""

    def __init__(self, tick_s: float) -> None:
        self._tick_ms = 1000 * tick_s

    def initial_tick_ms(self) -> float:
        return self._tick_ms

    def on_tick(self, snapshot: dict[str, Any]) -> dict[str, Any]:
        print(json.dumps(snapshot), flush=True)
        return {
            "target_prefill": None,
            "target_decode": json.loads(sys.stdin.readline()),
            "next_tick_ms": snapshot["now_ms"] + self._tick_ms,
        }


def main() -> None:
    # Not at the top: only the other environment has it.
    from dynamo._core import run_mocker_trace_replay

    trace, report, given = sys.argv[1:]
    options = json.loads(given)
    engine = {
        "block_size": options["block_size"],
        "num_gpu_blocks": options["kv_tokens"] // options["block_size"],
    }
    run_mocker_trace_replay(
        [trace],
        {"engine": engine, "startup_time": options["start_up_s"]},
        num_workers=options["workers"],
        router_mode="kv_router",
        trace_block_size=512,
        report_jsonl_path=report,
        scaling_policy=Ticks(options["tick_s"]) if options["tick_s"] else None,
    )


if __name__ == "__main__":
    main()
