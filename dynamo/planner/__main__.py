"""``python -m dynamo.planner``: scale the workers of a deployment."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import uvloop

from dynamo.config.option import load
from dynamo.config.planner import PlannerSettings
from dynamo.config.runtime import RuntimeSettings
from dynamo.config.system import LogSettings
from dynamo.errors import DynamoError
from dynamo.observability.logs import setup_logging
from dynamo.planner.service import run_planner

log = logging.getLogger("dynamo.planner")
_DESCRIPTION = """Add and remove workers of a deployment of `dynamo serve` as their load changes.
In a graph, the service `Planner: {run: dynamo.planner}` has these options as its keys."""
_EPILOG = """examples:
  dynamo planner --namespace dynamo --no-operation
  dynamo planner --adjustment-interval 10 --max-gpu-budget 4
"""


def main(argv: Sequence[str] | None = None, prog: str = "python -m dynamo.planner") -> int:
    """Run until SIGTERM or SIGINT; return the exit status."""
    groups = [PlannerSettings, RuntimeSettings, LogSettings]
    settings, runtime, logs = load(prog, _DESCRIPTION, groups, argv, epilog=_EPILOG)
    setup_logging("planner", logs.level, logs.jsonl)
    try:
        uvloop.run(run_planner(settings, runtime))
    except DynamoError as error:
        log.error("%s", error.message)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
