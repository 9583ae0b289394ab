"""The flags of Dynamo 1.6.1 that are refused here, with the reason and what to do instead.

A flag that asks for Dynamo's default asks for nothing, so it is accepted with that value.
docs/dynamo-flags.md lists all flags; a test compares it with this table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from dynamo.errors import ConfigError

_OFF = frozenset(("", "false", "0", "no", "off", "none"))


class AbsentFlag(NamedTuple):
    """A flag that is refused unless it has its ``default``; True and False are switches."""

    flag: str
    reason: str
    remedy: str
    default: str | bool | None = None
    aliases: tuple[str, ...] = ()
    by_variable: bool = True
    """Whether its variable is refused, too; those of a deployment are not all meant for it."""

    @property
    def text(self) -> str:
        """Return what follows the flag in an error."""
        return f"is not supported: {self.reason}; {self.remedy}"

    @property
    def variable(self) -> str:
        """Return the variable of Dynamo that sets it."""
        name = self.flag[2:].removeprefix("dyn-")
        return f"DYN_{name.upper().replace('-', '_')}"

    def asks(self, flag: str, value: str | None) -> bool:
        """Return whether ``flag``, given with ``value``, asks for more than the default."""
        if isinstance(self.default, bool):
            # --x asks for True, --no-x for False: more than the default if that is the other.
            return flag.startswith("--no-") is self.default
        return value is None or value != self.default


_PRICE = "prefill times come from measurements or from AIConfigurator by GPU, engine and TP size"
_FITTED = "use --router-prefill-load-model fitted"
_HASHES = "the load of requests is counted by hashes that only routers of this box exchange"
_EVENTS = "each router follows the workers' KV events itself"
_ONE_PROCESSOR = "prompts are prepared by this package's own compiled preprocessor"
_OTHERS = "it prepares prompts in threads of the frontend"
_SIZES = "a mock worker has the size that its flags say, not that of a GPU"
_BLOCKS = "use --num-gpu-blocks-override"
_SPEED = "a mock worker's speed is a fixed curve or a profile"
_PROFILE = "use --planner-profile-data, --speedup-ratio and --decode-speedup-ratio"
_SGLANG = "the mock worker has one scheduler for all engine types"
_LIMITS = "use --max-num-batched-tokens and --max-num-seqs"
_ROUTES = "the frontend chooses workers"
_FRONTEND = "give the flag to python -m dynamo.frontend"

RUNTIME = (
    AbsentFlag(
        "--response-plane",
        "responses use the connection of their request",
        "leave it out; --request-plane chooses both",
        "tcp",
    ),
)
FRONTEND = (
    AbsentFlag(
        "--interactive",
        "the frontend has no chat of its own",
        "run `dynamo chat` beside it",
        False,
        ("-i",),
    ),
    AbsentFlag(
        "--serve-indexer", _EVENTS, "ask get_overlap_scores of python -m dynamo.router", False
    ),
    AbsentFlag("--kserve-grpc-server", "there is no gRPC server", "use the HTTP API", False),
    AbsentFlag("--grpc-metrics-port", "there is no gRPC server", "scrape /metrics", "8788"),
    AbsentFlag(
        "--enable-streaming-tool-dispatch",
        "tool calls are streamed as OpenAI streams them, without events of their own",
        "read delta.tool_calls",
        False,
    ),
    AbsentFlag(
        "--enable-streaming-reasoning-dispatch",
        "reasoning is streamed in deltas, without events of its own",
        "read delta.reasoning_content",
        False,
    ),
    AbsentFlag("--dyn-chat-processor", _ONE_PROCESSOR, "leave it out", "dynamo"),
    AbsentFlag("--dyn-debug-perf", _ONE_PROCESSOR, "read the stage metrics on /metrics", False),
    AbsentFlag("--dyn-preprocess-workers", _ONE_PROCESSOR, f"leave it out: {_OTHERS}", "0"),
    AbsentFlag(
        "--tokenizer-fallback",
        "a tokenizer that the fast one cannot reproduce is loaded by the other",
        "leave it out",
        True,
    ),
    AbsentFlag(
        "--trust-remote-code",
        "no code of a model's repository is ever executed",
        "give the worker a directory with tokenizer.json, which needs none",
        False,
    ),
)
ROUTER = (
    AbsentFlag("--router-tracking-hash", _HASHES, "leave it out", "public-xxh3-v1"),
    AbsentFlag("--router-tracking-key-file", _HASHES, "leave it out"),
    AbsentFlag("--router-tracking-key-id", _HASHES, "leave it out"),
    AbsentFlag("--use-remote-indexer", _EVENTS, "leave it out", False),
    AbsentFlag(
        "--enable-session-prefix-index",
        "there is no index of sessions",
        "use --router-session-affinity-ttl-secs",
        False,
    ),
    AbsentFlag("--ais-perf-config", _PRICE, _FITTED, aliases=("--aic-perf-config",)),
    AbsentFlag("--ais-moe-tp-size", _PRICE, _FITTED, aliases=("--aic-moe-tp-size",)),
    AbsentFlag("--ais-moe-ep-size", _PRICE, _FITTED, aliases=("--aic-moe-ep-size",)),
    AbsentFlag("--ais-attention-dp-size", _PRICE, _FITTED, aliases=("--aic-attention-dp-size",)),
    AbsentFlag("--ais-nextn", _PRICE, _FITTED, aliases=("--aic-nextn",)),
    AbsentFlag("--ais-nextn-accept-rates", _PRICE, _FITTED, aliases=("--aic-nextn-accept-rates",)),
    AbsentFlag("--ais-mtp-seed", _PRICE, _FITTED, "42", ("--aic-mtp-seed",)),
)
ROUTER_PROCESS = (
    AbsentFlag("--serve-indexer", _EVENTS, "ask its endpoint get_overlap_scores", False),
)
_ROUTED_ELSEWHERE: dict[str, str | bool | None] = {
    "--router-mode": None,
    "--router-session-affinity-ttl-secs": None,
    "--router-session-affinity-mode": "hard",
    "--active-decode-blocks-threshold": None,
    "--active-prefill-tokens-threshold": None,
    "--active-prefill-tokens-threshold-frac": None,
    "--load-aware": False,
    "--router-kv-overlap-score-credit": "1.0",
    "--router-kv-overlap-score-credit-decay": "0.0",
    "--router-prefill-load-scale": "1.0",
    "--router-decode-active-request-weight": "0.0",
    "--router-host-cache-hit-weight": "0.75",
    "--router-disk-cache-hit-weight": "0.25",
    "--router-temperature": "0.0",
    "--router-kv-events": True,
    "--router-replica-sync": False,
    "--router-track-active-blocks": True,
    "--router-track-output-blocks": False,
    "--router-assume-kv-reuse": True,
    "--router-track-prefill-tokens": True,
    "--router-tracking-hash": "public-xxh3-v1",
    "--router-tracking-key-file": None,
    "--router-tracking-key-id": None,
    "--router-prefill-load-model": "none",
    "--router-ttl-secs": "120.0",
    "--router-approximate-cache-policy": "ttl",
    "--router-queue-threshold": None,
    "--router-policy-config": None,
    "--router-conditional-disagg": False,
    "--router-conditional-disagg-config": None,
    "--router-prefill-policy": None,
    "--router-decode-policy": None,
    "--router-event-threads": "4",
    "--router-queue-policy": "fcfs",
    "--use-remote-indexer": False,
    "--enable-session-prefix-index": False,
    "--shared-cache-multiplier": None,
    "--shared-cache-type": "none",
    "--router-predicted-ttl-secs": None,
}
_SIMULATED = (
    ("--ais-perf-model", _SPEED, _PROFILE, False),
    ("--ais-system", _SPEED, _PROFILE, None),
    ("--ais-backend", _SPEED, _PROFILE, None),
    ("--ais-backend-version", _SPEED, _PROFILE, None),
    ("--ais-tp-size", _SPEED, _PROFILE, None),
    ("--ais-moe-tp-size", _SPEED, _PROFILE, None),
    ("--ais-moe-ep-size", _SPEED, _PROFILE, None),
    ("--ais-attention-dp-size", _SPEED, _PROFILE, None),
    ("--ais-nextn", _SPEED, "use --decode-speedup-ratio", None),
    ("--ais-nextn-accept-rates", _SPEED, "use --decode-speedup-ratio", None),
    ("--ais-mtp-seed", _SPEED, "use --decode-speedup-ratio", "42"),
)
_MOCKER = (
    *(
        AbsentFlag(flag, reason, remedy, default, (flag.replace("--ais-", "--aic-"),))
        for flag, reason, remedy, default in _SIMULATED
    ),
    AbsentFlag("--ais-perf-config", _SPEED, _PROFILE),
    AbsentFlag("--gpu-memory-utilization", _SIZES, _BLOCKS),
    AbsentFlag("--mem-fraction-static", _SIZES, _BLOCKS),
    AbsentFlag("--free-gpu-memory-fraction", _SIZES, _BLOCKS),
    AbsentFlag(
        "--reasoning",
        "replies are random, scripted or echoed tokens",
        "use --reply script with the markers of the model's reasoning in the text",
    ),
    AbsentFlag(
        "--response-replay-trace-path",
        "no reply is looked up by annotation",
        "use --reply script, or `dynamo bench --trace` to send the trace",
    ),
    AbsentFlag("--sglang-schedule-policy", _SGLANG, "leave it out", "fifo"),
    AbsentFlag("--sglang-page-size", _SGLANG, "use --block-size"),
    AbsentFlag("--sglang-max-prefill-tokens", _SGLANG, _LIMITS),
    AbsentFlag("--sglang-chunked-prefill-size", _SGLANG, _LIMITS),
    AbsentFlag("--sglang-clip-max-new-tokens", _SGLANG, _LIMITS),
    AbsentFlag("--sglang-schedule-conservativeness", _SGLANG, _LIMITS),
    AbsentFlag(
        "--sglang-generate",
        "mock workers serve tokens to a frontend",
        "use /v1/completions of the frontend",
        False,
    ),
    AbsentFlag(
        "--trtllm-capacity-scheduler-policy", _SGLANG, "leave it out", "guaranteed_no_evict"
    ),
    AbsentFlag(
        "--zmq-replay-ports",
        "missed KV events are requested over the request plane",
        "leave it out",
    ),
    AbsentFlag(
        "--bootstrap-ports",
        "a decode worker gets what it needs with its request, without a meeting point",
        "leave it out",
    ),
    AbsentFlag(
        "--kv-transfer-timing-mode",
        "a transfer takes the time of the whole prompt's KV",
        "leave it out",
        "full_prompt",
    ),
    AbsentFlag(
        "--host-offload-d2h-bandwidth-gbps", "copies to host memory take no time", "leave it out"
    ),
    AbsentFlag(
        "--host-offload-h2d-bandwidth-gbps", "copies from host memory take no time", "leave it out"
    ),
    *(AbsentFlag(flag, _ROUTES, _FRONTEND, default) for flag, default in _ROUTED_ELSEWHERE.items()),
)
MOCKER = tuple(row._replace(by_variable=False) for row in _MOCKER)


class AskedFor(NamedTuple):
    """A flag on a command line that is refused."""

    flag: str
    absent: AbsentFlag


def sort_words(
    words: Sequence[str], absent: Sequence[AbsentFlag]
) -> tuple[list[str], AskedFor | None]:
    """Return the words of no absent flag, and the first absent flag that asks for something."""
    rows = {name: row for row in absent for name in (row.flag, *row.aliases)}
    rows |= {
        name.replace("--", "--no-", 1): row
        for name, row in rows.items()
        if isinstance(row.default, bool)
    }
    others: list[str] = []
    todo = list(reversed(words))
    while todo:
        word = todo.pop()
        flag, equals, value = word.partition("=")
        row = rows.get(flag)
        if row is None:
            others.append(word)
            continue
        takes_value = not isinstance(row.default, bool) and not equals
        # Its value may be the next word. Without a value it asks for something in any case.
        if takes_value and todo and not todo[-1].startswith("-"):
            equals, value = "=", todo.pop()
        if row.asks(flag, value if equals else None):
            return others, AskedFor(flag, row)
    return others, None


def check_variables(absent: Sequence[AbsentFlag], env: Mapping[str, str]) -> Iterator[ConfigError]:
    """Find the variables of absent flags that ask for something."""
    for row in absent:
        value = env.get(row.variable)
        if value is None or not row.by_variable:
            continue
        is_on = value.strip().lower() not in _OFF
        is_switch = isinstance(row.default, bool)
        if (is_on is not row.default) if is_switch else (is_on and row.asks(row.flag, value)):
            yield ConfigError(f"{row.variable}={value} {row.text}")
