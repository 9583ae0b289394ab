"""The model deployment card: a worker's description of the model that it serves."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from dynamo.protocols.control import Id, record_decoder

DEFAULT_BLOCK_SIZE = 64
"""Tokens in a KV block of a worker whose card does not say."""

UNKNOWN_BATCH_TOKENS = 10_000_000
"""Assumed ``max_num_batched_tokens`` of a worker that does not report it."""

MAX_IMAGES_KEY = "max_images"
"""Key of ``runtime_data``: images that the model takes in a prompt; 0 for a model of text alone."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**48)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
BlockSize = Annotated[int, msgspec.Meta(ge=1, le=2**20)]
Ranks = Annotated[int, msgspec.Meta(ge=0, le=1024)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=2**20)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


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
    """Stored under ``v1/mdc/<ns>/<component>/<endpoint>/<instance hex>``, JSON.

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


decode_card = record_decoder(ModelCard)
"""Decode JSON to a ModelCard. Raises ValueError, also for values out of range."""
