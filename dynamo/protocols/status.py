"""What a frontend and a deployment report: ``/v1/status``, ``/v1/requests``, ``/v1/record``.

``dynamo ps``, ``top``, ``web`` and ``explain`` show these types alone. Ids of workers are in
hexadecimal, times are seconds, ``*_at_s`` is Unix time. A figure that is not known is None.
"""

from __future__ import annotations

import msgspec

TRACE_BLOCK_TOKENS = 512
"""Tokens per block id, as in Mooncake's traces."""
CONTENT_SECONDS = 3600
CONTENT_MB = 1024
"""The most that one recording of content may take."""


class RecordedRequest(msgspec.Struct, frozen=True, kw_only=True, tag="request", omit_defaults=True):
    """One prompt that was sent to a worker, or waited for one: a line of ``GET /v1/record``.

    Each line is one JSON object; ``type`` distinguishes them. Times are milliseconds since the
    recording began. ``blocks`` has one id for each ``TRACE_BLOCK_TOKENS`` of the prompt, the last,
    partial one included; an id stands for the whole prompt up to there. Ids of blocks and sessions
    depend on a key that only this recording has. ``session`` is None if the client named none.
    """

    model: str
    arrived_ms: float
    ended_ms: float
    input_length: int
    output_length: int
    blocks: list[int]
    session: int | None = None


class RecordingCount(msgspec.Struct, frozen=True, kw_only=True, tag="count"):
    """Sent every second: records so far, those lost because the client reads too slowly, and the
    requests that are running now."""

    recorded: int
    lost: int
    running: int


class RecordedContent(msgspec.Struct, frozen=True, kw_only=True, tag="content", omit_defaults=True):
    """One request with its bodies: a line of ``GET /v1/record?content=true``.

    ``path`` is that of the API. ``body`` and ``response`` are texts as they were sent; keys in them
    are replaced by ``[redacted]``. ``note`` says what is missing.
    """

    request_id: str
    model: str
    path: str
    received_at_s: float
    duration_s: float
    outcome: str
    body: str
    response: str = ""
    note: str = ""


class RecordingEnd(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """The last line of a recording of content, which ends by itself: why."""

    reason: str


RecordingLine = RecordedRequest | RecordingCount | RecordedContent | RecordingEnd


class RouteCandidate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One worker rank that a request could have gone to.

    ``cost`` is the sum of ``terms`` (name of the term in the router's formula → value), None if the
    worker was ``excluded`` (why). ``overlap_blocks`` of the prompt are cached there.
    """

    worker: str
    dp_rank: int = 0
    chosen: bool = False
    overlap_blocks: float = 0.0
    cost: float | None = None
    terms: dict[str, float] = {}
    excluded: str = ""


class RouteReceipt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a request went to its worker.

    ``mode`` is the router's. ``index`` says how far the knowledge of caches can be trusted:
    ``exact`` (all events of the candidates were applied), ``recovering`` (a gap is being filled),
    ``predicted`` (from requests, without events) or ``none``. ``candidates`` begin with the chosen
    one; at most 64 of them, ``omitted`` more. Their costs are in ``unit``, ``blocks`` or
    ``seconds``.
    """

    mode: str
    index: str = "none"
    reason: str = ""
    unit: str = ""
    candidates: tuple[RouteCandidate, ...] = ()
    omitted: int = 0


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request that has ended. ``outcome`` is ``ok`` or its error type.

    ``client_id`` is the ``x-request-id`` that the client sent, if any.

    ``duration_s`` is the sum of ``worker_wait_s`` (its model had no worker), ``prepare_s`` (parse,
    template, tokenize), ``queue_s`` (until a worker was chosen), ``prefill_s`` (from there to the
    first token), ``decode_s`` (first to last token) and the rest, on the way to the client.
    ``ttft_s`` counts from arrival. ``prefill_route`` is the choice of its prefill worker. Lists
    leave out both routes. ``key`` is the name of the client's API key, if it had one.
    """

    request_id: str
    model: str
    endpoint: str
    received_at_s: float
    duration_s: float
    outcome: str
    client_id: str = ""
    key: str = ""
    worker: str = ""
    dp_rank: int = 0
    prefill_worker: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    overlap_blocks: int = 0
    prompt_blocks: int = 0
    migrations: int = 0
    ttft_s: float | None = None
    worker_wait_s: float | None = None
    prepare_s: float | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    route: RouteReceipt | None = None
    prefill_route: RouteReceipt | None = None


class RecentList(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of ``GET /v1/requests``, newest first.

    ``cursor`` is what the next question sends as ``after`` to get what ended since; ``left_out``
    are those that the limit excludes. ``problems`` are frontends whose requests are missing.
    """

    requests: tuple[RequestRecord, ...]
    cursor: float = 0.0
    left_out: int = 0
    problems: tuple[str, ...] = ()


class WorkerFigures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One worker, as a frontend sees it. ``kv_use`` is 0 to 1; ``busy`` takes no requests."""

    worker: str
    in_flight: int = 0
    kv_use: float | None = None
    busy: bool = False


class ModelFigures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Requests of one model at a frontend; rates and quantiles over the last ``window_s``.

    ``hit_rate`` is the share of prompt tokens that workers had cached. ``idle_s`` is the time since
    its last request ended or began, None if it never had one. The parsers name the formats of its
    answers.
    """

    model: str
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    in_flight: int = 0
    queued: int = 0
    window_s: float = 0.0
    output_tokens_per_s: float = 0.0
    requests_per_s: float = 0.0
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    hit_rate: float | None = None
    idle_s: float | None = None
    workers: tuple[WorkerFigures, ...] = ()


class FrontendStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of ``GET /v1/status``. ``requests`` are the newest records, newest first.

    The times to the first token are of all requests that ended in the last minute. ``rejected``
    says by worker id, in hexadecimal, why a registered one gets no requests. ``records_content``:
    an operator records the bodies of requests.
    """

    draining: bool = False
    uptime_s: float = 0.0
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    models: tuple[ModelFigures, ...] = ()
    requests: tuple[RequestRecord, ...] = ()
    rejected: dict[str, str] = {}
    records_content: bool = False


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One process of a deployment that is not a frontend or a planner, or will be one.

    ``name`` is its component and watcher, as in the statefile (``dynamo_Worker_1``). ``state`` is
    one of loading, ready, draining, asleep, failed, stopped. ``progress`` is 0 to 1 while it loads.
    ``cause`` says why it is not ready, ``remedy`` is a command. ``in_flight`` and ``kv_use`` come
    from frontends. ``can_sleep``: it is ready and ``dynamo sleep`` can free its GPU memory.
    """

    name: str
    service: str
    state: str
    worker: str = ""
    model: str = ""
    pool: str = ""
    pids: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()
    vram_bytes: int | None = None
    progress: float | None = None
    restarts: int = 0
    last_exit: str = ""
    cause: str = ""
    remedy: str = ""
    can_sleep: bool = False
    in_flight: int | None = None
    kv_use: float | None = None
    uptime_s: float | None = None


class LoadEffect(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a load of a service without a worker would do now: ``text`` has no subject.

    It takes ``gpus``. Sleeping workers that hold memory it needs are those it ``removes``; others
    on these GPUs it ``keeps_asleep``. It fails if it is ``blocked_by`` workers that hold the GPUs.
    """

    text: str
    gpus: tuple[str, ...] = ()
    removes: tuple[str, ...] = ()
    keeps_asleep: tuple[str, ...] = ()
    blocked_by: tuple[str, ...] = ()


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One model of a deployment. ``state`` is that of :class:`WorkerStatus` which says most: ready
    if a worker is, else loading, draining, asleep, failed, stopped; ``zero`` without workers.

    ``idle_until_s`` is the time until an idle model gives up its GPUs. ``figures`` are summed over
    the frontends; None if none answers. ``load`` has an effect for each service that has no worker.
    """

    model: str
    state: str
    ready: int = 0
    wanted: int = 0
    progress: float | None = None
    cause: str = ""
    remedy: str = ""
    gpus: tuple[str, ...] = ()
    vram_bytes: int | None = None
    idle_until_s: float | None = None
    figures: ModelFigures | None = None
    workers: tuple[str, ...] = ()
    load: tuple[LoadEffect, ...] = ()


class GpuHolder(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A process with memory on a GPU. ``worker`` is its name here, "" for a foreign process."""

    pid: int
    used_bytes: int
    name: str = ""
    worker: str = ""


class GpuStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One GPU of the box; ``gpu`` alone without a driver. ``workers`` hold it in the statefile."""

    gpu: str
    name: str = ""
    utilization: float | None = None
    used_bytes: int | None = None
    total_bytes: int | None = None
    watts: float | None = None
    limit_watts: float | None = None
    celsius: int | None = None
    workers: tuple[str, ...] = ()
    holders: tuple[GpuHolder, ...] = ()


class PlannerSummary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The planner of a deployment: its last decision for each model as a line of text."""

    state: str
    mode: str = ""
    next_s: float | None = None
    decisions: tuple[str, ...] = ()


class PlannedModel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The last decision for one model: ``text`` has each pool, its target and why.

    ``wanted`` is the number of workers by pool; the next decision is due at ``next_at_s``.
    ``waits_for``: why requests wait without a worker and nothing is started. ``problem``: why its
    policy does not decide.
    """

    model: str
    at_s: float
    text: str
    wanted: dict[str, int] = {}
    next_at_s: float | None = None
    waits_for: str = ""
    problem: str = ""


class PlannerReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``planner.json`` in the run directory, which a running planner rewrites at each change.

    ``pid`` and ``start_ticks`` identify it. ``state`` is running, paused or observing (with
    --no-operation). An idle model gives up its GPUs after ``idle_timeout_s`` if it is one of
    ``on_demand``.
    """

    pid: int
    start_ticks: int
    state: str
    mode: str
    idle_timeout_s: float | None = None
    on_demand: tuple[str, ...] = ()
    models: tuple[PlannedModel, ...] = ()


class BoxEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that happened to a deployment: a line of ``events.log`` in its run directory.

    ``kind`` is one of EVENT_KINDS, ``name`` the worker, service, model or key, ``by`` the operator
    or program that asked for it, "" if it happened by itself. Of an alert, ``alert`` is its name
    and ``name`` what it is about.
    """

    kind: str
    at_s: float
    name: str = ""
    model: str = ""
    text: str = ""
    by: str = ""
    alert: str = ""


OPERATOR_EVENTS = (
    *("restart", "drain", "sleep", "wake", "load", "unload", "pause", "resume"),
    "error",  # one of these failed after it had begun
)
EVENT_KINDS = (
    "start", "stop", "started", "serving", "died", "failed", "drained",
    *OPERATOR_EVENTS, "planner", "scaled", "reload", "added", "removed", "keys", "alert", "cleared",
)  # fmt: skip
"""Of the deployment; of processes; of operators; of the planner, the graph and API keys; the begin
and the end of alerts."""
BAD_EVENTS = frozenset({"died", "failed", "error", "alert"})


class BoxStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A deployment and its machine at ``at_s``. ``state`` is running or stopped (no deployment).

    ``frontend`` is ``ready``, ``draining``, ``loading``, ``down`` or ``none`` (not in the graph),
    ``url`` its address; figures are missing while it is down. Times to the first token are of all
    models; of several frontends, those of the slowest. ``problems`` are sentences that name
    a cause and a command; anything failed has one. ``records_content``: a frontend records bodies.
    ``hung``: the arbiter does not act, as the first of the problems says.
    """

    namespace: str
    state: str
    at_s: float
    frontend: str
    url: str = ""
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    models: tuple[ModelStatus, ...] = ()
    workers: tuple[WorkerStatus, ...] = ()
    others: tuple[WorkerStatus, ...] = ()
    gpus: tuple[GpuStatus, ...] = ()
    planner: PlannerSummary | None = None
    requests: tuple[RequestRecord, ...] = ()
    problems: tuple[str, ...] = ()
    records_content: bool = False
    hung: bool = False
