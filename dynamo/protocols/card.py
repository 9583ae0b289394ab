"""The model deployment card: what a worker says of the model that it serves. Spec 7.2, 7.11."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["ModelCard", "RuntimeConfig"]


class RuntimeConfig(msgspec.Struct, omit_defaults=True):
    """Capacity and abilities of one worker (``ModelRuntimeConfig`` of the public API)."""

    total_kv_blocks: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    data_parallel_size: int = 1
    data_parallel_start_rank: int = 0
    enable_local_indexer: bool = True
    context_length: int | None = None
    enable_eagle: bool = False
    taints: list[str] = []
    topology_domains: dict[str, str] = {}
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    runtime_data: dict[str, Any] = {}


class ModelCard(msgspec.Struct, omit_defaults=True):
    """Stored under ``v1/mdc/<ns>/<component>/<endpoint>/<instance hex>``, JSON.

    ``source_path`` is a local model directory with tokenizer.json, tokenizer_config.json and
    config.json. ``model_type`` is e.g. ``"Chat | Completions"``. ``checksum`` must agree among all
    workers that share a ``display_name``.
    """

    display_name: str
    slug: str
    source_path: str
    namespace: str
    component: str
    endpoint: str
    instance_id: int
    model_type: str = "Chat | Completions"
    model_input: str = "Tokens"
    worker_type: str = "Aggregated"
    context_length: int | None = None
    kv_cache_block_size: int = 64
    migration_limit: int = 0
    custom_template_path: str | None = None
    user_data: dict[str, Any] | None = None
    lora_name: str | None = None
    model_aliases: list[str] = []
    needs: list[list[str]] = []
    checksum: str = ""
    runtime_config: RuntimeConfig = msgspec.field(default_factory=RuntimeConfig)
