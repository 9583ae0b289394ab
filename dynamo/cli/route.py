"""``dynamo route``: ask a running frontend which worker a prompt would go to, and why."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dynamo.cli.frontend_client import Names, ask, known_names, name_of
from dynamo.cli.options import RouteSettings
from dynamo.cli.text_table import figures
from dynamo.config import load
from dynamo.config.client import FrontendClientSettings
from dynamo.errors import ConfigError, Unavailable
from dynamo.observability.logs import counted
from dynamo.protocols.openai import ModelList
from dynamo.protocols.status import RouteCandidate
from dynamo.router.decision.explanation import Candidate, Explanation

DESCRIPTION = """Show which worker a prompt would go to. Nothing is sent to a worker."""
EPILOG = """examples:
  dynamo route "What is a KV cache?" --explain
  dynamo route --prompt-file prompt.txt --explain
  cat chat-request.json | dynamo route --prompt-file -
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; return the exit status: 1 when no worker can be chosen."""
    groups = [RouteSettings, FrontendClientSettings]
    settings, frontend = load("dynamo route", DESCRIPTION, groups, argv, epilog=EPILOG)
    body = _body(settings, frontend)
    decision = ask(frontend, "/v1/route", Explanation, json.dumps(body).encode())
    if settings.json:
        print(msgspec.json.encode(decision).decode())
    else:
        show = table if settings.explain else _choice
        print(show(decision, known_names(frontend)))
    return 1 if decision.error else 0


def _choice(decision: Explanation, names: Names) -> str:
    if decision.prefill is None:
        return _chosen(decision, names)
    return f"prefill: {_chosen(decision.prefill, names)}\ndecode: {_chosen(decision, names)}"


def _chosen(decision: Explanation, names: Names) -> str:
    for row in decision.candidates:
        if row.chosen:
            return (
                f"worker {name_of(f'{row.worker_id:x}', names)} dp_rank {row.dp_rank}: holds "
                f"{row.overlap_blocks} of {decision.prompt_blocks} blocks, cost {row.cost:.3f}"
            )
    return f"no worker: {decision.error or 'none has a free slot'}"


def _body(settings: RouteSettings, frontend: FrontendClientSettings) -> dict[str, Any]:
    """Build the request: the JSON body in the file, or its text as a completion."""
    if settings.prompt and settings.prompt_file is not None:
        raise ConfigError("give a prompt or --prompt-file, not both")
    if settings.prompt:
        model = settings.model or _first_model(frontend)
        return {"prompt": settings.prompt, "model": model}
    if settings.prompt_file is None:
        raise ConfigError('a prompt is needed: dynamo route "Hello", or --prompt-file FILE')
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
    # JSON that is no body of a request is a prompt like any other text.
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


def table(decision: Explanation, names: Names | None = None) -> str:
    """Return the rows as text; columns of ranks and lower tiers only where they differ from 0.

    With prefill workers, their rows precede those of the decode workers.
    """
    lines = _lines(decision, names or {})
    if decision.prefill is not None:
        prefill = _lines(decision.prefill, names or {})
        lines = ["prefill workers", *prefill, "decode workers", *lines]
    return "\n".join(lines)


def marked(
    candidates: Sequence[Candidate | RouteCandidate],
    lines: Sequence[str],
    indent: str = "",
    width: int = 0,
) -> Iterator[str]:
    """Yield the line of each candidate: an arrow before the chosen one, the note behind it.

    ``width`` is that of a terminal.
    """
    for row, line in zip(candidates, lines, strict=True):
        note = ", ".join(filter(None, ["chosen" if row.chosen else "", row.excluded]))
        text = f"{indent}{'->' if row.chosen else '':2} {line}"
        # The arrow says it, too: a terminal that is too narrow would break the line.
        is_redundant = row.chosen and 0 < width < len(text) + 2 + len(note)
        yield (text if is_redundant else f"{text}  {note}").rstrip()


def _lines(decision: Explanation, names: Names) -> list[str]:
    columns = [
        column
        for column in _columns(decision)
        if column.always or any(map(column.of, decision.candidates))
    ]
    rows = [
        (name_of(f"{row.worker_id:x}", names), *(column.text(row) for column in columns))
        for row in decision.candidates
    ]
    titles, *cells = figures([("worker", *(column.title for column in columns)), *rows])
    lines = [
        f"prompt: {counted(decision.isl_tokens, 'token')}, "
        f"{counted(decision.prompt_blocks, 'full block')} of "
        f"{decision.block_size}; {_formula(decision)}",
        f"   {titles}  note",
    ]
    lines += marked(decision.candidates, cells)
    if decision.queued_requests:
        lines.append(f"{counted(decision.queued_requests, 'request is', 'requests are')} queued")
    if decision.stays:
        lines.append(f"no prefill worker: {_STAYS.get(decision.stays, decision.stays)}")
    if decision.error:
        lines.append(f"no worker: {decision.error}")
    return lines


_STAYS = {
    "short": "the prompt is short",
    "cached": "the decode worker has most of it cached",
    "queue": "too many requests are queued for one",
}


class _Column(NamedTuple):
    title: str
    of: Callable[[Candidate], float | None]
    form: str = "d"
    always: bool = True

    def text(self, row: Candidate) -> str:
        value = self.of(row)
        return "-" if value is None else format(value, self.form)


def _ms(name: str) -> _Column:
    return _Column(f"{name} ms", lambda row: row.seconds.get(name, 0.0) * 1e3, ".1f")


_SECONDS = tuple(map(_ms, ("wait", "compute", "others", "running")))
_COLUMNS = (
    _Column("rank", attrgetter("dp_rank"), always=False),
    _Column("overlap", attrgetter("overlap_blocks")),
    _Column("host", attrgetter("host_pinned_blocks"), always=False),
    _Column("disk", attrgetter("disk_blocks"), always=False),
    _Column("shared", attrgetter("shared_blocks"), always=False),
    _Column("credit", attrgetter("credit_blocks"), ".2f"),
    _Column("active prefill", attrgetter("active_prefill_tokens")),
    _Column("active decode", attrgetter("active_decode_blocks")),
    _Column("requests", attrgetter("active_requests")),
    _Column("prefill", attrgetter("prefill_blocks"), ".3f"),
    _Column("decode", attrgetter("decode_blocks")),
    _Column("cost", attrgetter("cost"), ".3f"),
)
_IN_BLOCKS = {"credit", "prefill", "decode", "cost"}


def _columns(decision: Explanation) -> tuple[_Column, ...]:
    if decision.router_cost != "seconds":
        return _COLUMNS
    facts = tuple(column for column in _COLUMNS if column.title not in _IN_BLOCKS)
    cost = _Column("cost ms", lambda row: None if row.cost is None else row.cost * 1e3, ".1f")
    return (*facts, *_SECONDS, cost)


def _formula(decision: Explanation) -> str:
    if decision.router_cost == "seconds":
        return "cost = wait + compute + what it costs others + what it costs running requests"
    text = f"cost = {decision.prefill_load_scale:g} * prefill blocks + decode blocks"
    if decision.decode_active_request_weight:
        text += f" + {decision.decode_active_request_weight:g} * requests"
    if decision.duplicate_cost:
        text += (
            f"; a block that another worker has cached counts as {decision.duplicate_cost:g} more, "
            "times the cached share"
        )
    return text
