"""Records in the discovery store: leases, endpoint instances, event channels, model cards.

Also the commands to engines and to the planner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec

from dynamo.errors import name_problem

ENGINE_CONTROL = "engine_control"
"""Endpoint, of the workers' component, that takes :class:`EngineCommand`."""

CLEAR_KV_BLOCKS = "clear_kv_blocks"
"""Endpoint, of the workers' component, that drops a prefix cache; Dynamo's name."""

LORA_ADAPTERS = "lora_adapters"
"""Endpoint, of the workers' component, that loads and unloads adapters: :class:`EngineCommand`."""

PLANNER = "planner"
"""Component of a running planner, in its namespace."""

PLANNER_PAUSE = "pause"
"""Endpoint of the planner that takes :class:`PlannerChange` and sends :class:`PlannerState`."""

INSTANCES = "v1/instances/"
MODEL_CARDS = "v1/mdc/"
EVENT_CHANNELS = "v1/event_channels/"
ON_DEMAND = "v1/on_demand/"
"""Prefixes of the keys in the discovery store; cards and instances end in :func:`instance_key`."""

T = TypeVar("T")
Id = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Pid = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Ticks = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
PositiveSeconds = Annotated[float, msgspec.Meta(gt=0, le=1e8)]

DEFAULT_BLOCK_SIZE = 64
"""Tokens in a KV block of a worker whose card does not say."""

UNKNOWN_BATCH_TOKENS = 10_000_000
"""Assumed ``max_num_batched_tokens`` of a worker that does not report it."""

MAX_IMAGES_KEY = "max_images"
"""Key of ``runtime_data``: images that the model takes in a prompt; 0 for a model of text alone."""

STRUCTURAL_TAGS_KEY = "structural_tags"
"""Key of ``runtime_data``: the engine takes xgrammar's structural tags, so that calls can be forced
in the model's own format."""

ROOT_KEY = "root"
"""Key of ``runtime_data``: the directory or id of what the engine loaded, as it was given."""

AdapterName = Annotated[str, msgspec.Meta(max_length=256)]
"""Logs, metrics and errors repeat it."""
AdapterPath = Annotated[str, msgspec.Meta(max_length=4096)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**48)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
BlockSize = Annotated[int, msgspec.Meta(ge=1, le=2**20)]
Ranks = Annotated[int, msgspec.Meta(ge=0, le=1024)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=2**20)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class LeaseRecord(msgspec.Struct):
    """``leases/<id hex>``: the process that holds the lease. Its death is detected by its pid.

    ``pid_start`` is the process start time in clock ticks since boot (field 22 of /proc/pid/stat),
    ``host`` the boot id of the machine, ``ttl_s`` seconds.
    """

    lease_id: Id
    pid: Pid
    pid_start: Ticks
    ttl_s: PositiveSeconds
    host: str


class EndpointRecord(msgspec.Struct, tag_field="type", tag="Endpoint", kw_only=True):
    """``v1/instances/<ns>/<component>/<endpoint>/<instance hex>``: one live instance.

    ``transport`` is ``{"uds": path}`` or ``{"tcp": "host:port"}``. ``unhealthy`` says why the
    worker's own health checks fail; clients avoid the instance then. ``stalled``: its engine has
    stopped computing, so clients move its running requests, too.
    """

    namespace: str
    component: str
    endpoint: str
    instance_id: Id
    lease_id: Id
    transport: dict[str, str]
    device_type: str = "cpu"
    request_plane_codec: str = "msgpack"
    unhealthy: str | msgspec.UnsetType = msgspec.UNSET
    stalled: bool | msgspec.UnsetType = msgspec.UNSET


class EventChannelRecord(msgspec.Struct, tag_field="type", tag="EventChannel", kw_only=True):
    """``v1/event_channels/namespace/<ns>/component/<c>/topic/<topic>/<publisher hex>``.

    ``transport`` is ``{"kind": "Zmq", "endpoint": "ipc://… or tcp://…"}``, or ``{"kind": "Nats",
    "endpoint": subject}``.
    """

    namespace: str
    component: str
    topic: str
    instance_id: Id
    lease_id: Id
    transport: dict[str, str]


class OnDemandModel(msgspec.Struct, omit_defaults=True):
    """``v1/on_demand/<ns>/<service>/<planner hex>``: a model whose workers start on demand.

    Under the lease of the planner that starts them. Frontends list ``model``, hold its requests
    while it has no worker, and publish their number (:data:`ON_DEMAND_STATE`). ``model_input`` is
    that of its card. ``load_s``: what its last load took. ``loading_since``: when the load that is
    in progress began, in Unix time. ``waits_for``: why requests wait and nothing is started.
    ``stopped``: an operator has stopped it, so its requests do not wait.
    """

    namespace: str
    model: str
    aliases: list[str] = []
    model_input: str = "Tokens"
    context_length: int | None = None
    load_s: PositiveSeconds | None = None
    loading_since: float | None = None
    waits_for: str = ""
    stopped: bool = False


class EngineCommand(msgspec.Struct, omit_defaults=True):
    """A command: ``route`` and ``body`` are those of ``/engine/…``."""

    route: str
    body: dict[str, Any] | None = None


class PlannerChange(msgspec.Struct, omit_defaults=True, kw_only=True, forbid_unknown_fields=True):
    """What a running planner is to change; None leaves a setting as it is, nothing at all asks.

    ``paused``: whether it leaves the workers alone. Targets are in ms. ``minima`` has the workers
    that services keep, by their names; None is what the graph says.
    """

    paused: bool | None = None
    ttft_ms: float | None = None
    itl_ms: float | None = None
    max_gpu_budget: int | None = None
    min_gpu_budget: int | None = None
    minima: dict[str, int | None] | None = None


class PlannerState(msgspec.Struct, kw_only=True):
    """A running planner. ``models`` are those that it scales, ``on_demand`` those of them whose
    workers start with the first request. ``acts`` is false with --no-operation. ``minima`` has the
    workers that each service keeps; the targets are None in mode load."""

    paused: bool
    acts: bool = True
    models: list[str] = []
    on_demand: list[str] = []
    mode: str = ""
    ttft_ms: float | None = None
    itl_ms: float | None = None
    max_gpu_budget: int = 0
    min_gpu_budget: int = 0
    minima: dict[str, int] = {}


def instance_key(namespace: str, component: str, endpoint: str, instance_id: int) -> str:
    """``<ns>/<component>/<endpoint>/<instance hex>``, the tail of instance and card keys."""
    return f"{namespace}/{component}/{endpoint}/{instance_id:x}"


def record_decoder(kind: type[T]) -> Callable[[bytes], T]:
    """Return a decoder of JSON records of ``kind``.

    It raises ValueError for any other input: bad JSON, deep nesting, values out of range.
    """
    decode = msgspec.json.Decoder(kind).decode

    def checked(data: bytes) -> T:
        try:
            return decode(data)
        except RecursionError:
            raise ValueError("JSON nested too deeply") from None

    return checked


class RuntimeConfig(msgspec.Struct, omit_defaults=True):
    """Capacity and abilities of one worker (``ModelRuntimeConfig`` of the public API).

    ``kv_event_publishing_enabled`` False: routers predict its cache instead of asking for it.
    """

    total_kv_blocks: Count | None = None
    max_num_seqs: Count | None = None
    max_num_batched_tokens: Count | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    data_parallel_size: Ranks = 1
    data_parallel_start_rank: Rank = 0
    enable_local_indexer: bool = True
    kv_event_publishing_enabled: bool | None = None
    context_length: Tokens | None = None
    enable_eagle: bool = False
    taints: list[str] = []
    topology_domains: dict[str, str] = {}
    bootstrap_host: str | None = None
    bootstrap_port: Port | None = None
    runtime_data: dict[str, Any] = {}


class ModelCard(msgspec.Struct, omit_defaults=True):
    """A worker's description of the model that it serves (Dynamo's model deployment card).

    Stored under ``v1/mdc/<ns>/<component>/<endpoint>/<instance hex>``, JSON.

    ``source_path`` is a local model directory with tokenizer.json, tokenizer_config.json and
    config.json. ``model_type`` is e.g. ``"Chat | Completions"``. ``checksum`` must agree among all
    workers that share a ``display_name``. ``router_config`` has fields of ``RouterSettings`` that
    replace those of the frontend; the first worker of a model decides.
    """

    display_name: str
    slug: str
    source_path: str
    namespace: str
    component: str
    endpoint: str
    instance_id: Id
    model_type: str = "Chat | Completions"
    model_input: str = "Tokens"
    worker_type: str = "Aggregated"
    context_length: Tokens | None = None
    kv_cache_block_size: BlockSize = DEFAULT_BLOCK_SIZE
    migration_limit: Count = 0
    custom_template_path: str | None = None
    user_data: dict[str, Any] | None = None
    lora_name: str | None = None
    model_aliases: list[str] = []
    needs: list[list[str]] = []
    router_config: dict[str, Any] = {}
    checksum: str = ""
    runtime_config: RuntimeConfig = msgspec.field(default_factory=RuntimeConfig)

    def __post_init__(self) -> None:
        for name in (self.display_name, self.lora_name or "", *self.model_aliases):
            if problem := name_problem(name):
                raise ValueError(f"the name {name!r} {problem}")


decode_card = record_decoder(ModelCard)
"""Decode JSON to a ModelCard. Raises ValueError, also for values out of range."""
