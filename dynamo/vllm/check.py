"""``python -m dynamo.vllm.check``: check vLLM's flags of several services at once.

Reads a JSON object of command lines by service from stdin. Writes one of errors by service as the
last line of stdout, on which vLLM logs too. One process, since importing vLLM takes ten seconds;
a process of its own, so that ``dynamo serve`` needs no vLLM.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Sequence

from dynamo.errors import DynamoError
from dynamo.vllm.arguments import parse


def problem(argv: Sequence[str]) -> str:
    """Return what vLLM refuses in the command line of a worker; "" if nothing."""
    from dynamo.vllm.engine_args import read_engine_args  # needs vLLM

    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            arguments = parse(argv)
            read_engine_args(arguments, arguments.worker.model_path or "", "")
    except SystemExit:
        lines = output.getvalue().strip().splitlines()
        refusal = next((line for line in lines if ": error: " in line), "".join(lines[-1:]))
        return refusal.rpartition(": error: ")[2]
    except DynamoError as error:
        return error.message
    return ""


def main() -> int:
    """Return the exit status, 0."""
    commands: dict[str, list[str]] = json.load(sys.stdin)
    problems = {name: text for name, argv in commands.items() if (text := problem(argv))}
    sys.stdout.write(json.dumps(problems) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
