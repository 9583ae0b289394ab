"""What each worker receives of a request, over its migrations, and what becomes of it there.

The first worker gets what the client asked for. Each later one has to get the same, with the
tokens so far behind the prompt and as many less to generate, up to the limit of migrations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import fake_os
import msgspec
from presence import service_of

if TYPE_CHECKING:
    from machine import Machine, Process

    from dynamo.protocols.engine import PreprocessedRequest

__all__ = ["MIGRATIONS", "Attempts", "received", "unwanted"]

MIGRATIONS = 3
"""What ``dynamo serve`` gives each request."""
_ENDS_S = 0.5
"""So long a worker may compute a request that its frontend has ended."""


class Attempts:
    """The attempts of a run. ``decided`` has the ranks that routers chose for each request."""

    def __init__(self) -> None:
        self.decided: dict[str, set[tuple[int, int]]] = {}
        self.released_s: dict[str, float] = {}
        """When frontends were done with a request."""
        self.ranks: dict[str, int] = {}
        """The rank that a request names."""
        self.on_accept: Callable[[Process], None] = lambda process: None
        """Called when a worker has accepted a request."""
        self._first: dict[tuple[str, bool], PreprocessedRequest] = {}
        self._accepted: dict[tuple[str, bool], int] = {}

    def look(self, process: Process, name: str, request: PreprocessedRequest) -> Iterator[str]:
        """Yield what is wrong with a request that a worker received."""
        prefill = service_of(process) == "Prefill"
        first = self._first.setdefault((name, prefill), request)
        yield from _rank(process, request, self.decided.get(name))
        if first is not request:
            yield from _continued(first, request, prefill)
        elif name in self.ranks and not prefill:
            yield from _named(process, request, self.ranks[name])

    def first(self, name: str) -> PreprocessedRequest | None:
        """Return the request that its first worker, of decoding if there is one, received."""
        return self._first.get((name, False)) or self._first.get((name, True))

    def accepted(self, process: Process, name: str) -> Iterator[str]:
        """Count an attempt; yield if there are more than a request may have."""
        key = name, service_of(process) == "Prefill"
        self._accepted[key] = self._accepted.get(key, 0) + 1
        if self._accepted[key] > 1 + MIGRATIONS:
            yield f"{self._accepted[key]} workers accepted it"


def received(handle: Any) -> Any:
    """Check each request that a worker receives."""

    def handled(self: Any, stream: Any, payload: bytes) -> None:
        from dynamo.protocols.codec import decoder
        from dynamo.protocols.engine import PreprocessedRequest

        machine = fake_os.machine()
        process, name = machine.current, request_of(stream)
        assert process is not None
        problems: list[str] = []
        if name:
            request = decoder(PreprocessedRequest).decode(payload)
            problems += machine.attempts.look(process, name, request)
        rejected = len(machine.rejections)
        handle(self, stream, payload)
        if name and len(machine.rejections) == rejected:
            problems += machine.attempts.accepted(process, name)
            machine.attempts.on_accept(process)
        machine.failures += [f"{process} received {name}: {one}" for one in problems]

    return handled


def request_of(stream: Any) -> str:
    """Return the id of the request of a stream at a worker; '' if it has none."""
    from dynamo.runtime.requests.stream import REQUEST_ID

    return str(stream.headers.get(REQUEST_ID, ""))


def unwanted(machine: Machine, process: Process) -> Iterator[str]:
    """Yield the requests that a worker computes although their frontend has ended them."""
    for part in process.parts:
        for rank in getattr(part, "ranks", ()):
            for sequence in (*rank.scheduler.running, *rank.scheduler.waiting):
                name = request_of(sequence.output.stream)
                ended_s = machine.attempts.released_s.get(name, machine.now_s)
                if machine.now_s - ended_s > _ENDS_S:
                    ago_s = machine.now_s - ended_s
                    yield f"{process} computes {name}, which ended {ago_s:.2f} s ago"


class _Limits(NamedTuple):
    most: int | None
    least: int | None


def _rank(
    process: Process, request: PreprocessedRequest, decided: set[tuple[int, int]] | None
) -> Iterator[str]:
    """The rank is the one that a router chose."""
    rank = None if request.routing is None else request.routing.dp_rank
    worker = next(
        part.endpoint.runtime.instance_id for part in process.parts if hasattr(part, "ranks")
        if hasattr(part, "endpoint")
    )  # fmt: skip
    if decided is None:
        return  # of a health check
    if rank is None:
        yield "no rank was sent"
    elif (worker, rank) not in decided:
        yield f"rank {rank} was sent, chosen were {sorted(decided)}"


def _named(process: Process, request: PreprocessedRequest, rank: int) -> Iterator[str]:
    """Its first worker computes it with the rank that the request named, if it has one."""
    sent = None if request.routing is None else request.routing.dp_rank
    ranks = next(len(part.ranks) for part in process.parts if hasattr(part, "ranks"))
    if rank < ranks and sent != rank:
        yield f"rank {sent} was sent, the request named {rank}"


def _continued(
    first: PreprocessedRequest, request: PreprocessedRequest, prefill: bool
) -> Iterator[str]:
    """It is the first one, with tokens behind the prompt that are no longer to be generated."""
    before, count = first.token_ids, len(request.token_ids) - len(first.token_ids)
    if count < 0 or request.token_ids[: len(before)] != before:
        yield "another prompt than that of the first worker"
    counted = [(one.extra_args or {}).get("generated_tokens", 0) for one in (first, request)]
    if counted[1] != counted[0] + count:  # a prefill worker may come in after a migration
        yield f"{counted[1]} generated tokens for {counted[0]} and {count} more"
    asked, stop = first.stop_conditions, request.stop_conditions
    wanted = _Limits(_less(asked.max_tokens, count), _less(asked.min_tokens, count))
    if not prefill and _Limits(stop.max_tokens, stop.min_tokens) != wanted:
        yield f"to generate are {stop.max_tokens} and {stop.min_tokens} tokens, not {wanted}"
    for name in ("model", "sampling_options", "eos_token_ids", "multi_modal_data"):
        if getattr(first, name) != getattr(request, name):
            yield f"another {name} than the first worker got"
    same = msgspec.structs.replace(stop, max_tokens=asked.max_tokens, min_tokens=asked.min_tokens)
    if not prefill and same != asked:
        yield f"{stop} after {asked}"


def _less(limit: int | None, count: int) -> int | None:
    return None if limit is None else max(limit - count, 0)
