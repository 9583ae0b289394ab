"""The load of the attached server, read from its own metrics. No I/O."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from dynamo.attach.profiles import LoadNames
from dynamo.protocols.load import KvMetrics

__all__ = ["json_load", "prometheus_load", "samples"]

_LABELS = rb'(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?'
_LABEL = re.compile(rb'(\w+)="((?:[^"\\]|\\.)*)"')
_MAX_RANKS = 1024


def samples(page: bytes, *names: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield (name, labels, value) of each sample of ``names`` on a Prometheus page."""
    wanted = b"|".join(re.escape(name).encode() for name in names)
    for match in re.finditer(rb"^(%b)%b[ \t]+(\S+)" % (wanted, _LABELS), page, re.MULTILINE):
        labels = {key.decode(): value.decode() for key, value in _LABEL.findall(match[2] or b"")}
        try:
            value = float(match[3])
        except ValueError:
            continue
        yield match[1].decode(), labels, value


def prometheus_load(page: bytes, names: LoadNames, total_blocks: int | None) -> list[KvMetrics]:
    """Return the load of each rank on the page, rank 0 first; empty if it has none of ``names``.

    ``total_blocks`` is that of one rank. Of several series of a rank (tensor-parallel ranks repeat
    the same number) the largest counts.
    """
    ranks: dict[int, dict[str, float]] = {}
    for name, labels, value in samples(page, *names.running, *names.waiting, *names.usage):
        number = labels.get(names.rank_label or "", "0")
        rank = int(number) if number.isdigit() else 0
        if rank < _MAX_RANKS and value == value and value >= 0:
            found = ranks.setdefault(rank, {})
            found[name] = max(value, found.get(name, 0.0))
    return [_rank_load(rank, ranks[rank], names, total_blocks) for rank in sorted(ranks)]


def _rank_load(
    rank: int, found: dict[str, float], names: LoadNames, total_blocks: int | None
) -> KvMetrics:
    running, waiting, usage = (
        next((found[name] for name in each if name in found), None)
        for each in (names.running, names.waiting, names.usage)
    )
    used = None if usage is None or not total_blocks else round(min(usage, 1.0) * total_blocks)
    return KvMetrics(
        worker_id=0,
        dp_rank=rank,
        active_decode_blocks=used,
        kv_used_blocks=used,
        kv_total_blocks=total_blocks,
        num_requests_running=None if running is None else int(running),
        num_requests_waiting=None if waiting is None else int(waiting),
    )


def json_load(page: Any) -> list[KvMetrics]:
    """Return the load in TensorRT-LLM's list of iterations, the newest last; empty without one."""
    newest = page[-1] if isinstance(page, list) and page else None
    if not isinstance(newest, dict):
        return []
    cache = newest.get("kvCacheStats")
    cache = cache if isinstance(cache, dict) else {}
    used = _count(cache.get("usedNumBlocks"))
    return [
        KvMetrics(
            worker_id=0,
            active_decode_blocks=used,
            kv_used_blocks=used,
            kv_total_blocks=_count(cache.get("maxNumBlocks")),
            num_requests_running=_count(newest.get("numActiveRequests")),
            num_requests_waiting=_count(newest.get("numQueuedRequests")),
        )
    ]


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None
