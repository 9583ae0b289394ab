"""Options of workers of attached servers."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.config.option import flag, option
from dynamo.config.worker import EndpointSettings, check_model_name

PROFILES = ("auto", "vllm", "sglang", "trtllm", "llama.cpp", "ollama", "openai")
"""Choices of ``--profile``; openai is any other server."""


@dataclass(frozen=True, kw_only=True)
class AttachSettings(EndpointSettings):
    """attach: the server, its profile, its load"""

    model_path: str | None = flag(
        None,
        "--model-path",
        "--model",
        metavar="MODEL",
        help="directory with the model's tokenizer.json and config.json, or its id on Hugging "
        "Face, for routing by exact tokens; default: routing by the text of the prompt",
    )
    model_name: str | None = flag(
        None,
        "--served-model-name",
        "--model-name",
        metavar="NAME[=SERVER_NAME],...",
        help="models to offer: names that the server lists, or name=server_name to rename one; "
        "one new name is enough if the server has one model; default: every model it lists",
    )
    url: str | None = flag(None, metavar="URL", help="running server, e.g. http://127.0.0.1:30000")
    command: str | None = flag(
        None,
        "--exec",
        metavar="COMMAND",
        help="start this server and end it with the worker; {port} becomes a free port: "
        '"llama-server -m x.gguf --port {port}"',
    )
    profile: str = flag("auto", choices=PROFILES, help="kind of server; auto asks the server")
    api_key: str | None = option(
        None,
        env="DYN_ATTACH_API_KEY",
        metavar="KEY",
        help="key that the server requires; it replaces the client's",
    )
    block_size: int | None = flag(
        None, minimum=1, maximum=4096, help="tokens in a KV block; default: the server's, else 64"
    )
    kv_events_endpoint: tuple[str, ...] = flag(
        (),
        metavar="tcp://HOST:PORT",
        repeat=True,
        help="ZMQ publisher of the server's KV events, once per data-parallel rank, in order; "
        "needs --model-path",
    )
    kv_replay_endpoint: tuple[str, ...] = flag(
        (),
        metavar="tcp://HOST:PORT",
        repeat=True,
        help="replay endpoint of the server's KV events, which sends lost ones again, once per "
        "--kv-events-endpoint; default: a loss clears the server's blocks",
    )
    taints: tuple[str, ...] = flag(
        (), "--taint", repeat=True, help="taint that requests may require or avoid; may be repeated"
    )
    poll_interval_s: float = flag(
        1.0,
        "--poll-interval-secs",
        minimum=0.05,
        help="seconds between two reads of the server's health and load",
    )
    startup_timeout_s: float = flag(
        1800.0,
        "--startup-timeout-secs",
        minimum=1,
        help="seconds that a server started with --exec may take until it answers",
    )
    connect_timeout_s: float = flag(
        5.0, "--connect-timeout-secs", minimum=0.1, help="seconds a connection may take"
    )
    response_timeout_s: float = flag(
        600.0,
        "--response-timeout-secs",
        minimum=0,
        help="seconds the server may send nothing within a request; 0: no limit",
    )

    def __post_init__(self) -> None:
        check_model_name(self.model_name)
