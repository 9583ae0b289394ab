"""``dynamo planner``: the verbs of the planner."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dynamo.cli import planner_replay

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``dynamo planner VERB``; return its exit status."""
    words = list(sys.argv[2:] if argv is None else argv)
    if words[:1] != ["replay"]:
        print("usage: dynamo planner replay [options]", file=sys.stderr)
        return 0 if words[:1] in (["-h"], ["--help"]) else 2
    return planner_replay.main(words[1:])
