"""vLLM's engine arguments, read with vLLM's own parser, and the engine's configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import ConfigError
from dynamo.runtime.process.paths import socket_path
from dynamo.runtime.process.sockets import engine_socket_name
from dynamo.vllm.arguments import PROG, VllmArguments

_UNSET_ENDPOINT = "ipc://to-be-set"
"""Until the id of the worker is known; see :func:`set_event_socket`."""


def engine_help() -> str:
    """Return the help of vLLM's arguments."""
    return str(_parser().format_help())


def engine_config(arguments: VllmArguments, model_path: str, name: str) -> Any:
    """Return vLLM's configuration of the engine.

    Exits with status 2 for an unknown flag. Raises ConfigError for what vLLM refuses.
    """
    argv: Sequence[str] = ("--model", model_path, "--served-model-name", name)
    parsed = _parser().parse_args([*argv, *arguments.engine_argv])
    try:
        args = AsyncEngineArgs.from_cli_args(parsed)
        _set_defaults(args, arguments.vllm.disaggregation_mode)
        adapters = arguments.vllm.lora_modules or arguments.vllm.lora_dir
        args.enable_lora = args.enable_lora or bool(adapters)
        # The context chooses the defaults of max-num-seqs: the same as in `vllm serve`.
        return args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    except (ValueError, TypeError, OSError, NotImplementedError) as error:
        raise ConfigError(f"vLLM refuses this configuration: {error}") from error


def read_engine_args(arguments: VllmArguments, model_path: str, name: str) -> Any:
    """Return vLLM's engine arguments; exits with status 2 for an unknown flag or a bad value."""
    argv: Sequence[str] = ("--model", model_path, "--served-model-name", name)
    return AsyncEngineArgs.from_cli_args(_parser().parse_args([*argv, *arguments.engine_argv]))


def set_event_socket(config: Any, runtime: RuntimeSettings, worker_id: int) -> None:
    """Let the engine publish its KV events on private sockets, unless flags name an endpoint."""
    events = config.kv_events_config
    if events is not None and events.endpoint == _UNSET_ENDPOINT:
        events.endpoint = f"ipc://{socket_path(runtime, engine_socket_name(worker_id))}"
        replay = socket_path(runtime, engine_socket_name(worker_id, "replay"))
        events.replay_endpoint = f"ipc://{replay}"


def _set_defaults(args: Any, mode: str) -> None:
    """Turn on KV events, and the connector of a disaggregated worker, unless flags say otherwise.

    A decode worker publishes no events: no request is routed by its cache.
    """
    caching = args.enable_prefix_caching is not False and mode != "decode"
    if caching and args.kv_events_config is None:
        args.kv_events_config = KVEventsConfig(
            enable_kv_cache_events=True, publisher="zmq", endpoint=_UNSET_ENDPOINT
        )
    if mode != "agg" and args.kv_transfer_config is None:
        args.kv_transfer_config = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both")
    args.disable_log_stats = False  # routers need the scheduler's statistics


def _parser() -> Any:
    parser = FlexibleArgumentParser(prog=PROG, add_help=False, allow_abbrev=False)
    return AsyncEngineArgs.add_cli_args(parser)
