"""Options of verbs that call a frontend: which one, and the load of ``bench``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dynamo.config.option import flag, option

TRACE_FORMATS = ("auto", "mooncake", "azure", "aiperf", "tracelab")


@dataclass(frozen=True, kw_only=True)
class ClientSettings:
    """client: which frontend to call"""

    url: str | None = flag(None, help="the frontend; default: that of the running deployment")
    namespace: str | None = flag(
        None, help="which deployment, by its namespace; default: DYN_NAMESPACE, else the only one"
    )
    api_key: str | None = option(
        None, env=("DYN_API_KEY", "OPENAI_API_KEY"), help="the API key, if the frontend needs one"
    )
    tls_ca_cert_path: str | None = option(
        None,
        help="PEM file of the authority that signed the server's certificate; default: the "
        "system's authorities",
    )


@dataclass(frozen=True, kw_only=True)
class FrontendClientSettings(ClientSettings):
    """frontend: which one to ask, and how"""

    timeout_s: float = flag(
        30.0, "--timeout-secs", minimum=0.1, help="seconds to wait for the frontend"
    )


def trace_format_option() -> Any:
    """Return the field of ``--trace-format``."""
    return flag(
        "auto",
        choices=TRACE_FORMATS,
        help="Mooncake's or aiperf's mooncake_trace JSONL, Azure's CSV, aiperf's multi_turn or "
        "single_turn JSONL, TraceLab's JSONL; auto: by the first line",
    )


@dataclass(frozen=True, kw_only=True)
class BenchSettings(ClientSettings):
    """bench: where to send load, what load, and what to report"""

    url: str | None = option(
        None,
        env="DYN_BENCH_URL",
        help="base URL of the endpoint; default: the frontend of the running deployment",
    )
    model: str | None = flag(None, help="model name; default: the first of /v1/models")
    endpoint_type: str = flag(
        "chat", choices=("chat", "completions"), help="/v1/chat/completions or /v1/completions"
    )
    prompt_format: str = flag(
        "text",
        choices=("text", "tokens"),
        help="prompts as text, or as token ids (completions only; exact lengths)",
    )
    trace: str | None = flag(None, help="trace to replay; without it the load is synthetic")
    trace_format: str = trace_format_option()
    trace_speedup: float = flag(
        1.0,
        minimum=0.0,
        exclusive_minimum=True,
        help="replay the trace's clock this many times faster",
    )
    trace_block_tokens: int = flag(
        512,
        minimum=1,
        help="tokens per hash id; lower it to shrink the trace's prompts for a small box",
    )
    compare_routing: bool = flag(
        False,
        help="send nothing: replay --trace in virtual time with each routing mode, and compare",
    )
    workers: int = flag(8, minimum=1, maximum=1024, help="workers of --compare-routing")
    worker_blocks: int = flag(
        8000, minimum=1, help="blocks of --trace-block-tokens that each of them caches"
    )
    prefill_rate: float = flag(
        20_000.0,
        minimum=0.0,
        exclusive_minimum=True,
        help="prompt tokens a second that each of them computes",
    )
    output_scale: float = flag(1.0, minimum=0.0, help="multiply the trace's output lengths")
    requests: int | None = flag(
        None, minimum=1, help="stop after this many (synthetic default: 100)"
    )
    concurrency: int | None = flag(
        None,
        minimum=1,
        help="requests in flight at most; default: 8, and no cap with times (a trace with them, "
        "--rate); then the delay that this causes is reported as schedule lag, and counts",
    )
    rate: float | None = flag(
        None,
        minimum=0.0,
        exclusive_minimum=True,
        help="synthetic arrivals per second, Poisson; default: as fast as --concurrency allows",
    )
    isl: int = flag(256, minimum=1, help="synthetic prompt length in tokens")
    osl: int = flag(64, minimum=1, help="synthetic output length in tokens")
    prefix_ratio: float = flag(
        0.0,
        minimum=0.0,
        maximum=1.0,
        help="share of each synthetic prompt that all prompts have in common",
    )
    stream: bool = flag(True, help="stream the answers (TTFT and ITL need it)")
    ignore_eos: bool = flag(
        False, help="ask the engine to generate exactly the wanted length (an extension of the API)"
    )
    worker_ids: bool = flag(
        False, help="request the id of the worker that answered (nvext) and report the balance"
    )
    goodput: str | None = flag(
        None,
        metavar="ttft:MS,itl:MS,latency:MS",
        help="count the requests that meet all these limits, e.g. ttft:2000,itl:25",
    )
    timeout_s: float = flag(600.0, "--timeout", minimum=1.0, help="seconds until a request fails")
    seed: int = flag(0, minimum=0, help="seed of prompts and arrivals")
    json: bool = flag(False, help="print the result as JSON instead of a table")
    output: str | None = flag(None, help="also write the JSON result to this file")
