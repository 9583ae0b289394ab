"""``dynamo route``: ask a running frontend which worker a prompt would go to, and why."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from dynamo.cli.frontend_client import ask
from dynamo.cli.options import RouteSettings
from dynamo.config import load
from dynamo.config.client import FrontendClientSettings
from dynamo.errors import ConfigError, DynamoError, Unavailable
from dynamo.protocols.openai import ModelList
from dynamo.router.explanation import Explanation, table

DESCRIPTION = """Show which worker a prompt would go to. Nothing is sent to a worker."""
EPILOG = """examples:
  dynamo route --prompt-file prompt.txt --explain
  cat chat-request.json | dynamo route --prompt-file -
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; return the exit status: 1 when no worker can be chosen."""
    groups = [RouteSettings, FrontendClientSettings]
    settings, frontend = load("dynamo route", DESCRIPTION, groups, argv, epilog=EPILOG)
    try:
        body = _body(settings, frontend)
        found = ask(frontend, "/v1/route", Explanation, json.dumps(body).encode())
    except DynamoError as error:
        print(f"dynamo route: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    if settings.json:
        print(msgspec.json.encode(found).decode())
    elif settings.explain:
        print(table(found))
    else:
        print(_choice(found))
    return 1 if found.error else 0


def _choice(found: Explanation) -> str:
    if found.prefill is None:
        return _chosen(found)
    return f"prefill: {_chosen(found.prefill)}\ndecode: {_chosen(found)}"


def _chosen(found: Explanation) -> str:
    for row in found.candidates:
        if row.chosen:
            return (
                f"worker {row.worker_id:x} dp_rank {row.dp_rank}: holds {row.overlap_blocks} of "
                f"{found.prompt_blocks} blocks, cost {row.cost:.3f}"
            )
    return f"no worker: {found.error or 'none has a free slot'}"


def _body(settings: RouteSettings, frontend: FrontendClientSettings) -> dict[str, Any]:
    """Build the request: the JSON body in the file, or its text as a completion."""
    if settings.prompt_file is None:
        raise ConfigError("--prompt-file is needed")
    try:
        text = (
            sys.stdin.read()
            if settings.prompt_file == "-"
            else Path(settings.prompt_file).read_text()
        )
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read {settings.prompt_file}: {error}") from None
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict) or not ({"messages", "prompt"} & set(body)):
        body = {"prompt": text}
    if settings.model is not None or "model" not in body:
        body["model"] = settings.model or _first_model(frontend)
    return body


def _first_model(frontend: FrontendClientSettings) -> str:
    rows = ask(frontend, "/v1/models", ModelList).data
    if not rows:
        raise Unavailable("the frontend has no model")
    return rows[0].id
