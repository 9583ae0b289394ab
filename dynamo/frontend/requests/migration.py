"""Continue a request on another worker after its own has failed, token for token.

The tokens that the client may have seen are never generated again: they follow the prompt in the
request for the next worker, and the limits on the output shrink by their number. The state of the
answer (text, stop strings, parsers, log probabilities) stays in the frontend and goes on.

Pure, except for the counters and their clock.
"""

from __future__ import annotations

import sys
import time
from typing import Literal, NamedTuple

import msgspec

from dynamo.errors import (
    ConnectionTimeout,
    Disconnected,
    DynamoError,
    EngineDied,
    EngineKilled,
    Overloaded,
    WorkersLost,
)
from dynamo.frontend.requests.metrics import FrontendMetrics
from dynamo.observability.metrics import counter, histogram
from dynamo.protocols.codec import Tokens, tokens
from dynamo.protocols.engine import GENERATED_TOKENS, PreprocessedRequest, Routing
from dynamo.router.worker_pool import WorkerPool

MigrationOutcome = Literal["success", "failure", "cancelled"]

_TOTAL = counter(
    "dynamo_frontend_model_migration_total",
    "Requests sent to another worker: before theirs received them, or after it failed",
    "migration_type model",
)
_SECONDS = histogram(
    "dynamo_frontend_model_migration_duration_seconds",
    "From the failure of a worker to the next worker's first tokens",
    (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
    "migration_type model outcome",
)
_TOO_LONG = counter(
    "dynamo_frontend_model_migration_max_seq_len_exceeded_total",
    "Requests that became too long to migrate",
    "model",
)
_UNBOUNDED = sys.maxsize
_NEVER_KEPT = -1
LAST_WORKER = (
    "The engine died before the first token of this request, which may be the cause; it is not "
    "sent to the last worker of its model. The worker's log has the engine's error"
)
_DEATHS = (ConnectionTimeout, Disconnected, EngineDied)


class Migration(NamedTuple):
    """One change of workers: ``new_request`` if the first never received the request, else
    ``ongoing_request``; when it began (monotonic seconds)."""

    kind: str
    since_s: float


class LostWorker(NamedTuple):
    """A worker that died, or stopped answering, before its first token of a request: the request
    may be the cause. ``pool`` is None if it stopped answering, else where it was registered."""

    worker_id: int
    pool: WorkerPool | None

    @classmethod
    def of(cls, worker_id: int, pool: WorkerPool, error: DynamoError) -> LostWorker | None:
        """The worker that failed with ``error``, None if that is no death."""
        if not isinstance(error, _DEATHS) or error.unsent:
            return None
        return cls(worker_id, None if isinstance(error, ConnectionTimeout) else pool)

    def leaves_one(self, error: DynamoError) -> bool:
        """Whether its engine died by its own ``error``, and at most one other worker serves."""
        pool = self.pool
        if pool is None or not isinstance(error, EngineDied) or isinstance(error, EngineKilled):
            return False
        return len(pool.members.keys() - pool.avoided - {self.worker_id}) <= 1

    @property
    def is_dead(self) -> bool:
        """Whether it is not back: one whose connection alone was cut answers again."""
        pool = self.pool
        return pool is None or self.worker_id not in pool.members or self.worker_id in pool.avoided


class MigrationMetrics:
    """The counters of one model."""

    def __init__(self, metrics: FrontendMetrics, model: str) -> None:
        self._model = model
        self._total = metrics.family(_TOTAL)
        self._seconds = metrics.family(_SECONDS)
        self._too_long = metrics.family(_TOO_LONG)

    def begun(self, kind: str) -> None:
        """Count a migration."""
        self._total[kind, self._model].value += 1

    def ended(self, kind: str, outcome: MigrationOutcome, seconds: float) -> None:
        """Observe how long a migration took."""
        self._seconds[kind, self._model, outcome].observe(seconds)

    def too_long(self) -> None:
        """Count a request whose tokens exceed the length up to which requests migrate."""
        self._too_long.labels(self._model).value += 1


class Migrations:
    """How often an engine request of one model may migrate after a worker received it.

    With a ``limit`` the frontend keeps the generated tokens of running requests, up to
    ``max_seq_len`` tokens with the prompt; a longer one cannot be continued.
    """

    def __init__(
        self,
        limit: int = 0,
        max_seq_len: int | None = None,
        metrics: MigrationMetrics | None = None,
    ) -> None:
        self.limit = limit
        self._max_seq_len = max_seq_len
        self._metrics = metrics

    def kept_tokens(self, request: PreprocessedRequest) -> int:
        """Return how many tokens of the output of ``request`` are kept; -1: it never continues."""
        # An engine checks a grammar from the first token of the output: it would take the rest of a
        # constrained output for the beginning of another one.
        if not self.limit or request.sampling_options.guided_decoding is not None:
            return _NEVER_KEPT
        if self._max_seq_len is None:
            return _UNBOUNDED
        return max(self._max_seq_len - len(request.token_ids), 0)

    def begun(self, received: bool, now_s: float) -> Migration:
        """Count a migration; ``received``: the failed worker may have received the request."""
        migration = Migration("ongoing_request" if received else "new_request", now_s)
        if self._metrics is not None:
            self._metrics.begun(migration.kind)
        return migration

    def ended(self, migration: Migration, outcome: MigrationOutcome, now_s: float) -> None:
        """Observe the end of a migration: first tokens, or the end of the request."""
        if self._metrics is not None:
            self._metrics.ended(migration.kind, outcome, now_s - migration.since_s)

    def too_long(self) -> None:
        """Count a request whose tokens are no longer kept."""
        if self._metrics is not None:
            self._metrics.too_long()


class Retries:
    """What one engine request remembers of the workers that failed with it, to go on with another.

    ``tried`` are workers that could not be reached or have failed, ``last_error`` is the error of
    the last of them, and ``lost`` are those lost before its first token. ``migrations`` counts the
    workers that received it and failed, up to ``limit``; ``migration`` is the one that has not
    ended. ``generated`` is its output so far, None if that is not kept: it gets ``kept_tokens``
    tokens, then :meth:`outgrown`.
    """

    __slots__ = (
        "_has_bare_text",
        "_model",
        "generated",
        "kept_tokens",
        "last_error",
        "limit",
        "lost",
        "migration",
        "migrations",
        "tried",
    )

    def __init__(self, model: Migrations, request: PreprocessedRequest, least: int = 0) -> None:
        self._model = model
        self.limit = model.limit or least
        self.tried: frozenset[int] = frozenset()
        self.last_error: DynamoError | None = None
        self.lost: tuple[LostWorker, ...] = ()
        self.migrations = 0
        self.migration: Migration | None = None
        self.kept_tokens = model.kept_tokens(request)
        self.generated = tokens(()) if self.kept_tokens >= 0 else None
        self._has_bare_text = False

    def can_continue(self, count: int) -> bool:
        """Whether another worker can go on exactly after ``count`` tokens, ignoring the limit."""
        return self.generated is not None or not (count or self._has_bare_text)

    def bare_text(self) -> None:
        """Note a text without its tokens: nothing can follow it."""
        self.generated, self._has_bare_text = None, True

    def outgrown(self) -> None:
        """Keep the output no longer: it has more than ``kept_tokens`` tokens."""
        self.generated = None
        self._model.too_long()

    def count(self) -> bool:
        """Count one more migration; False if the limit is reached."""
        if self.migrations >= self.limit:
            return False
        self.migrations += 1
        return True

    def count_prefill(self, error: DynamoError) -> bool:
        """Count the failure of a prefill worker; False if the limit allows no other one.

        Without a limit, prefill workers have their own.
        """
        received = not error.unsent
        if received and self.limit and not self.count():
            return False
        self._model.begun(received, time.monotonic())
        return True

    def lose(self, worker_id: int, pool: WorkerPool, error: DynamoError) -> WorkersLost | None:
        """Note the loss of a worker before its first token; return what then ends the request.

        A request that two workers did not survive must not reach a third. One whose prompt an
        engine did not survive may be the cause: it must not take the last engine with it.
        """
        lost = LostWorker.of(worker_id, pool, error)
        if lost is None:
            return None
        dead = tuple(other for other in self.lost if other.is_dead and other.worker_id != worker_id)
        self.lost = (*dead, lost)
        if dead:
            return WorkersLost()
        return WorkersLost(LAST_WORKER) if lost.leaves_one(error) else None

    def leave(self, worker_id: int, error: DynamoError) -> None:
        """Note the failure of a worker; a migration begins, if none is in progress."""
        # A full worker says more than one that cannot be reached: it will have room again.
        if not (error.unsent and isinstance(self.last_error, Overloaded)):
            self.last_error = error
        begun = self._model.begun(not error.unsent, time.monotonic())
        self.migration = self.migration or begun
        self.tried |= {worker_id}

    def retry_all(self) -> None:
        """Let any worker have it again, those that failed too."""
        self.tried = frozenset()

    def end(self, outcome: MigrationOutcome) -> None:
        """End the migration in progress, if any."""
        migration, self.migration = self.migration, None
        if migration is not None:
            self._model.ended(migration, outcome, time.monotonic())


def continued(
    request: PreprocessedRequest, generated: Tokens | None, failed_worker: int
) -> PreprocessedRequest:
    """Return ``request`` with its ``generated`` tokens behind the prompt, and limits on the rest.

    ``request`` is the original one; ``max_tokens`` must exceed the generated tokens. Log
    probabilities of the prompt are not asked for again: they came with the first token.
    """
    if request.backend_instance_id == failed_worker:
        request = msgspec.structs.replace(request, backend_instance_id=None)
    if not generated:
        return request
    count, stop, output = len(generated), request.stop_conditions, request.output_options
    stop = msgspec.structs.replace(
        stop,
        max_tokens=None if stop.max_tokens is None else stop.max_tokens - count,
        min_tokens=None if stop.min_tokens is None else max(stop.min_tokens - count, 0),
    )
    if output.prompt_logprobs is not None:
        output = msgspec.structs.replace(output, prompt_logprobs=None)
    return msgspec.structs.replace(
        request,
        token_ids=request.token_ids + generated,
        stop_conditions=stop,
        output_options=output,
        extra_args={**(request.extra_args or {}), GENERATED_TOKENS: count},
    )


def without_pin(routing: Routing | None, worker_id: int, generated: int) -> Routing | None:
    """Return ``routing`` for the rest of a request after ``worker_id`` failed.

    A pin to that worker is dropped, with its rank. Other constraints stay. The expected output
    shrinks by the tokens that the worker ``generated``.
    """
    if routing is None:
        return None
    if worker_id in (routing.backend_instance_id, routing.decode_worker_id):
        routing = msgspec.structs.replace(
            routing, backend_instance_id=None, decode_worker_id=None, dp_rank=None
        )
    expected = routing.expected_output_tokens
    if expected is None or not generated:
        return routing
    return msgspec.structs.replace(routing, expected_output_tokens=max(expected - generated, 1))


def without_prefill_pin(routing: Routing | None) -> Routing | None:
    """Return ``routing`` without the prefill worker that the client chose."""
    if routing is None or routing.prefill_worker_id is None:
        return routing
    return msgspec.structs.replace(routing, prefill_worker_id=None, prefill_dp_rank=None)
