"""``dynamo explain``: why a request went to its worker, and where its time went."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any
from urllib.parse import quote

import msgspec

from dynamo.cli.frontend_client import Names, ask, known_names, name_of
from dynamo.cli.options import RequestExplainSettings
from dynamo.cli.route import marked
from dynamo.cli.text_table import cell_len, figures, printable, wrap
from dynamo.config import load
from dynamo.config.client import FrontendClientSettings
from dynamo.observability.logs import counted
from dynamo.protocols.openai import ModelList
from dynamo.protocols.status import RequestRecord, RouteCandidate, RouteReceipt
from dynamo.router.decision.explanation import Explanation

DESCRIPTION = """Show why a request went to its worker, with the costs of all workers at that
moment, and where its time went. The frontend keeps the last 1,000 requests."""
EPILOG = """examples:
  dynamo explain
  dynamo explain chatcmpl-0a1b2c3d
  dynamo explain --model-fit
"""

_BAR = 40
_LEAST_NAME = 12
_MARK_WIDTH = 5  # before each row: the indent, the arrow and a space
_INDEX = {
    "exact": "the index has all events of these workers",
    "recovering": "the index was recovering missed events of one of them",
    "predicted": "caches are predicted from requests, without events",
}
_COST = "cost"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; return the exit status: 1 without such a request."""
    groups = [RequestExplainSettings, FrontendClientSettings]
    settings, frontend = load("dynamo explain", DESCRIPTION, groups, argv, epilog=EPILOG)
    if settings.model_fit:
        return _show_fits(frontend, settings.json)
    path = f"/v1/requests/{quote(settings.request, safe='')}"
    record = ask(frontend, path, RequestRecord)
    if settings.json:
        print(msgspec.json.format(msgspec.json.encode(record)).decode())
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
        print("\n".join(explanation(record, width, known_names(frontend))))
    return 0


def _show_fits(frontend: FrontendClientSettings, as_json: bool) -> int:
    """Print what routing has learned of each model's workers; 1 where no cost is in seconds."""
    pools: dict[str, Explanation] = {}
    for model in ask(frontend, "/v1/models", ModelList).data:
        body = msgspec.json.encode({"model": model.id, "prompt": "x"})
        pools[model.id] = ask(frontend, "/v1/route", Explanation, body)
    if as_json:
        fits = {name: _fit(pool) for name, pool in pools.items()}
        print(msgspec.json.format(msgspec.json.encode(fits)).decode())
    else:
        names = known_names(frontend)
        for name, pool in pools.items():
            if pool.prefill is not None:
                print("\n".join(_fit_lines(f"{name}, prefill workers", pool.prefill, names)))
            if pool.prefill is None or pool.speed is not None:
                print("\n".join(_fit_lines(name, pool, names)))
    return 0 if any(_learns(pool) for pool in pools.values()) else 1


def _learns(pool: Explanation) -> bool:
    return pool.speed is not None or (pool.prefill is not None and _learns(pool.prefill))


def _fit(pool: Explanation) -> dict[str, Any]:
    workers = [
        {"worker": f"{row.worker_id:x}", "dp_rank": row.dp_rank, "slowness": row.slowness}
        for row in pool.candidates
    ]
    prefill = None if pool.prefill is None else _fit(pool.prefill)
    return {"speed": pool.speed, "workers": workers, "prefill": prefill}


def _fit_lines(title: str, pool: Explanation, names: Names) -> Iterator[str]:
    speed = pool.speed
    if speed is None:
        yield f"{title}: no cost in seconds; start the frontend with --router-cost seconds"
        return
    times = counted(speed.samples, "time")
    origin = f"measured {times}" if speed.samples else "a guess until the first one"
    yield (
        f"{title}: a prompt takes {_ms(speed.fixed_s)} + {speed.token_s * 1e3:.4g} ms a token"
        f" + {speed.attention_s * 1e9:.4g} ns a pair of tokens, {origin}"
    )
    several = {row.worker_id for row in pool.candidates if row.dp_rank > 0}
    for row in sorted(pool.candidates, key=lambda row: (row.worker_id, row.dp_rank)):
        rank = f" rank {row.dp_rank}" if row.worker_id in several else ""
        worker = name_of(f"{row.worker_id:x}", names)
        yield f"  worker {worker}{rank}: {row.slowness:.2f} times as long"


def explanation(record: RequestRecord, width: int = 0, names: Names | None = None) -> Iterator[str]:
    """Yield the lines: the conclusion, the times, the tokens, and a table for each choice.

    ``width`` is that of a terminal.
    """
    names = names or {}
    conclusion = printable(_conclusion(record, names))
    yield from wrap(conclusion, width) if width else [conclusion]
    yield ""
    yield from _times(record)
    yield ""
    yield from _facts(record)
    if record.prefill_route is not None:
        yield from ("", "prefill worker", *_route(record.prefill_route, width, names))
    if record.route is not None:
        title = "worker" if record.prefill_route is None else "decode worker"
        yield from ("", title, *_route(record.route, width, names))


def _conclusion(record: RequestRecord, names: Names) -> str:
    request = f"{record.request_id} ({record.model}, {record.endpoint})"
    took = _ms(record.duration_s)
    if not record.worker:
        return f"{request}: no worker got it; it ended with {record.outcome} after {took}"
    end = "" if record.outcome == "ok" else f" and ended with {record.outcome}"
    why = f", {record.route.reason}" if record.route is not None and record.route.reason else ""
    prefill = ""
    if record.prefill_worker:
        prefill = f"prefilled by {name_of(record.prefill_worker, names)}, "
    worker = name_of(record.worker, names) + _rank(record)
    stage, spent_s = max(_stages(record), key=itemgetter(1))
    return (
        f"{request}: {prefill}worker {worker}{why}; it took {took}{end}, most of it {stage} "
        f"({_ms(spent_s)})"
    )


def _end(name: str, width: int) -> str:
    """Return the end of ``name``, which has the number of the worker, in ``width`` cells."""
    cut = name
    while cell_len(cut) > width - (cut != name):
        cut = cut[1:]
    return cut if cut == name else "…" + cut


def _rank(record: RequestRecord) -> str:
    """Return the rank of the worker, rank 0 where it has others."""
    rows = () if record.route is None else record.route.candidates
    several = any(row.dp_rank > 0 for row in rows if row.worker == record.worker)
    return f" rank {record.dp_rank}" if several or record.dp_rank > 0 else ""


def _stages(record: RequestRecord) -> list[tuple[str, float]]:
    """The stages that the request reached and the rest, which is spent on the client's side."""
    reached = [
        (name, spent_s)
        for name, spent_s in (
            ("waiting for a worker", record.worker_wait_s),
            ("prepare", record.prepare_s),
            ("queue", record.queue_s),
            ("prefill", record.prefill_s),
            ("decode", record.decode_s),
        )
        if spent_s is not None
    ]
    client_s = record.duration_s - sum(spent_s for _, spent_s in reached)
    return [*reached, ("network", max(client_s, 0.0))]


def _times(record: RequestRecord) -> Iterator[str]:
    total_s = record.duration_s or 1.0
    begun = 0.0
    stages = _stages(record)
    width = max(len(name) for name, _ in stages) + 1
    for name, spent_s in stages:
        # The ends are rounded, not the length: bars that follow each other meet.
        first, last = round(begun / total_s * _BAR), round((begun + spent_s) / total_s * _BAR)
        begun += spent_s
        bar = " " * min(first, _BAR - 1) + "#" * max(last - first, 1)
        yield f"  {name:{width}}{_ms(spent_s):>12}  |{bar:{_BAR}}|"
    ttft = "" if record.ttft_s is None else f"; first token after {_ms(record.ttft_s)}"
    yield f"  {'total':{width}}{_ms(record.duration_s):>12}{ttft}"


def _facts(record: RequestRecord) -> Iterator[str]:
    cached = (
        "" if record.cached_tokens is None else f", {record.cached_tokens} of them cached there"
    )
    yield f"  {record.prompt_tokens} prompt tokens{cached}; {record.completion_tokens} generated"
    if record.prompt_blocks:
        yield f"  the router expected {record.overlap_blocks} of {record.prompt_blocks} blocks"
    if (expected := _expected(record)) and record.prefill_s is not None:
        yield f"  first token: expected after {expected}, came after {_ms(record.prefill_s)}"
    if record.migrations:
        yield f"  workers that failed with it: {record.migrations}"


def _expected(record: RequestRecord) -> str:
    """The time from the choice to the first token, as a cost in seconds expected it."""
    # With a prefill worker the prompt was computed there, at the cost of another choice.
    if record.route is None or record.route.unit != "seconds" or record.prefill_worker:
        return ""
    # The chosen worker is the first candidate.
    terms = record.route.candidates[0].terms if record.route.candidates else {}
    if not {"wait", "compute"} <= terms.keys():
        return ""
    wait_s, compute_s = terms["wait"], terms["compute"]
    return f"{_ms(wait_s + compute_s)} (wait {_ms(wait_s)}, compute {_ms(compute_s)})"


def _route(route: RouteReceipt, width: int, names: Names) -> Iterator[str]:
    yield f"  {route.reason} (mode {route.mode})"
    if route.index in _INDEX:
        yield f"  index {route.index}: {_INDEX[route.index]}"
    in_seconds = route.unit == "seconds"
    scale = 1e3 if in_seconds else 1.0
    titles = list(dict.fromkeys(name for row in route.candidates for name in row.terms))
    if any(row.cost is not None for row in route.candidates):
        titles.append(_COST)
    ranks = any(row.dp_rank for row in route.candidates)
    captions = (title.replace("_", " ") for title in titles)
    head = ("worker", *(["rank"] if ranks else []), "overlap", *captions)
    rows = [
        (
            name_of(row.worker, names),
            *([str(row.dp_rank)] if ranks else []),
            f"{row.overlap_blocks:g}",
            *(_cell(row, title, scale) for title in titles),
        )
        for row in route.candidates
    ]
    first, *lines = figures([head, *rows])
    if width and (excess := _MARK_WIDTH + cell_len(first) - width) > 0:
        room = max(_LEAST_NAME, max(cell_len(row[0]) for row in rows) - excess)
        first, *lines = figures([head, *((_end(name, room), *cells) for name, *cells in rows)])
    yield f"     {first}"
    yield from marked(route.candidates, lines, "  ", width)
    if route.omitted:
        yield f"    and {route.omitted} more"
    if _COST in titles:
        unit = "milliseconds" if in_seconds else "blocks"
        yield f"  in {unit}; the cost is the sum of the columns before it"


def _cell(row: RouteCandidate, title: str, scale: float) -> str:
    value = row.cost if title == _COST else row.terms.get(title)
    return "-" if value is None else f"{value * scale:.2f}".removesuffix(".00")


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 10 else f"{seconds * 1e3:.1f} ms"
