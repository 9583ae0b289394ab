"""Every flag of NVIDIA Dynamo's router, by flag and by variable."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from dynamo.config import deprecations, load
from dynamo.config.frontend import FrontendSettings
from dynamo.config.parser import option_of
from dynamo.config.router import RouterProcessSettings, RouterSettings
from dynamo.config.runtime import RuntimeSettings

GROUPS = (FrontendSettings, RouterSettings, RuntimeSettings)

# flag, variable, default, a value as text, what it means
VALUES: list[tuple[str, str, Any, str, Any]] = [
    ("--router-mode", "DYN_ROUTER_MODE", "round-robin", "kv", "kv"),
    ("--router-mode", "DYN_ROUTER_MODE", "round-robin", "least_loaded", "least-loaded"),
    ("--router-temperature", "DYN_ROUTER_TEMPERATURE", 0.0, "0.5", 0.5),
    ("--kv-cache-block-size", "DYN_KV_CACHE_BLOCK_SIZE", None, "64", 64),
    ("--router-kv-overlap-score-weight", "DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT", None, "0", 0.0),
    ("--router-kv-overlap-score-credit", "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT", 1.0, "2", 2.0),
    (
        "--router-kv-overlap-score-credit-decay",
        "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY",
        0.0,
        "1",
        1.0,
    ),
    ("--router-prefill-load-scale", "DYN_ROUTER_PREFILL_LOAD_SCALE", 1.0, "3", 3.0),
    ("--router-prefill-load-model", "DYN_ROUTER_PREFILL_LOAD_MODEL", "none", "aic", "aic"),
    ("--router-queue-threshold", "DYN_ROUTER_QUEUE_THRESHOLD", None, "0.5", 0.5),
    ("--router-ttl-secs", "DYN_ROUTER_TTL_SECS", 120.0, "60", 60.0),
    ("--router-max-tree-size", "DYN_ROUTER_MAX_TREE_SIZE", 1_048_576, "1024", 1024),
    ("--router-prune-target-ratio", "DYN_ROUTER_PRUNE_TARGET_RATIO", 0.8, "0.5", 0.5),
    ("--router-event-threads", "DYN_ROUTER_EVENT_THREADS", 1, "4", 4),
    ("--router-snapshot-threshold", "DYN_ROUTER_SNAPSHOT_THRESHOLD", 1_000_000, "5", 5),
    (
        "--router-session-affinity-ttl-secs",
        "DYN_ROUTER_SESSION_AFFINITY_TTL_SECS",
        None,
        "60",
        60.0,
    ),
    (
        "--router-session-affinity-mode",
        "DYN_ROUTER_SESSION_AFFINITY_MODE",
        "hard",
        "soft",
        "soft",
    ),
    ("--admission-control", "DYN_ADMISSION_CONTROL", "none", "token-capacity", "token-capacity"),
    (
        "--active-decode-blocks-threshold",
        "DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD",
        None,
        "0.85",
        0.85,
    ),
    (
        "--active-prefill-tokens-threshold",
        "DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD",
        None,
        "10000",
        10_000,
    ),
    (
        "--active-prefill-tokens-threshold-frac",
        "DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC",
        None,
        "64",
        64.0,
    ),
    ("--http-port", "DYN_HTTP_PORT", 8000, "9000", 9000),
    ("--request-plane", "DYN_REQUEST_PLANE", "uds", "tcp", "tcp"),
]

# flag, variable, default
SWITCHES = [
    ("--router-kv-events", "DYN_ROUTER_USE_KV_EVENTS", True),
    ("--router-replica-sync", "DYN_ROUTER_REPLICA_SYNC", False),
    ("--router-track-active-blocks", "DYN_ROUTER_TRACK_ACTIVE_BLOCKS", True),
    ("--router-track-output-blocks", "DYN_ROUTER_TRACK_OUTPUT_BLOCKS", False),
    ("--router-assume-kv-reuse", "DYN_ROUTER_ASSUME_KV_REUSE", True),
    ("--router-track-prefill-tokens", "DYN_ROUTER_TRACK_PREFILL_TOKENS", True),
    ("--router-durable-kv-events", "DYN_ROUTER_DURABLE_KV_EVENTS", False),
    ("--router-reset-states", "DYN_ROUTER_RESET_STATES", False),
    ("--enforce-disagg", "DYN_ENFORCE_DISAGG", False),
]


def field(flag: str) -> tuple[int, str]:
    """Return the group and the field that ``flag`` sets."""
    for number, group in enumerate(GROUPS):
        for one in dataclasses.fields(group):
            if "option" in one.metadata and flag in option_of(one).flags:
                return number, one.name
    raise AssertionError(f"no option {flag}")


def value(flag: str, argv: list[str], env: dict[str, str]) -> Any:
    number, name = field(flag)
    return getattr(load("frontend", "", GROUPS, argv, env)[number], name)


@pytest.mark.parametrize(("flag", "variable", "default", "text", "meaning"), VALUES)
def test_values(flag: str, variable: str, default: Any, text: str, meaning: Any) -> None:
    assert value(flag, [], {}) == default
    assert value(flag, [flag, text], {}) == meaning
    assert value(flag, [], {variable: text}) == meaning
    assert value(flag, [flag, text], {variable: "nonsense"}) == meaning


@pytest.mark.parametrize(("flag", "variable", "default"), SWITCHES)
def test_switches(flag: str, variable: str, default: bool) -> None:
    assert value(flag, [], {}) is default
    assert value(flag, [flag], {}) is True
    assert value(flag, [flag.replace("--", "--no-", 1)], {}) is False
    for text in ("true", "1", "YES", "on"):
        assert value(flag, [], {variable: text}) is True
    for text in ("false", "0", "no", ""):
        assert value(flag, [], {variable: text}) is False


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--active-decode-blocks-threshold", "1.5"],
            "--active-decode-blocks-threshold must be between 0.0 and 1.0",
        ),
        (
            ["--active-prefill-tokens-threshold", "-1"],
            "--active-prefill-tokens-threshold must be >= 0",
        ),
        (
            ["--active-prefill-tokens-threshold-frac", "-1"],
            "--active-prefill-tokens-threshold-frac must be a finite value >= 0",
        ),
        (
            ["--router-temperature", "nan"],
            "--router-temperature must be a finite value >= 0",
        ),
        (
            ["--router-kv-overlap-score-credit", "-1"],
            "--router-kv-overlap-score-credit must be a finite value >= 0",
        ),
        (
            ["--router-kv-overlap-score-credit-decay", "-1"],
            "--router-kv-overlap-score-credit-decay must be a finite value >= 0",
        ),
        (["--router-queue-threshold", "-1"], "--router-queue-threshold must be"),
        (
            ["--router-host-cache-hit-weight", "1.5"],
            "--router-host-cache-hit-weight must be between 0.0 and 1.0",
        ),
        (
            ["--router-session-affinity-ttl-secs", "31536001"],
            "--router-session-affinity-ttl-secs must be between 1 and 31536000",
        ),
        (["--router-event-threads", "0"], "--router-event-threads must be between 1 and 64"),
        (["--router-mode", "best"], "--router-mode must be one of round-robin"),
        (["--router-prefill-load-model", "gpt"], "must be one of none, fitted, aic, ais"),
    ],
)
def test_what_is_out_of_range(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        load("frontend", "", GROUPS, argv, {})
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_nullable_numbers_may_be_unset_again() -> None:
    for text in ("", "None"):
        variables = {
            "DYN_ROUTER_QUEUE_THRESHOLD": text,
            "DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD": text,
        }
        assert value("--router-queue-threshold", [], variables) is None
        assert value("--active-prefill-tokens-threshold", [], variables) is None


def test_older_names() -> None:
    number, name = field("--kv-overlap-score-weight")
    settings = load("frontend", "", GROUPS, [], {"DYN_OVERLAP_SCORE_WEIGHT": "2"})
    assert getattr(settings[number], name) == 2.0
    process, _ = load(
        "router", "", (RouterProcessSettings, RouterSettings), ["--router-block-size", "64"], {}
    )
    assert process.block_size == 64


def test_jetstream_flags_are_accepted_and_named() -> None:
    argv = ["--router-durable-kv-events", "--router-snapshot-threshold", "10"]
    _, router, _ = load("frontend", "", GROUPS, argv, {"DYN_ROUTER_RESET_STATES": "1"})
    lines = deprecations(router)
    assert [line.split(" ")[0] for line in lines] == [
        "--router-durable-kv-events",
        "--router-reset-states",
        "--router-snapshot-threshold",
    ]
    assert all("is deprecated: there is no JetStream mode" in line for line in lines)
    assert deprecations(RouterSettings()) == []
