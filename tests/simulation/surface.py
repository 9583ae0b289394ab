"""What the boxes of a seed configure beside their profile: each dimension has dice of its own."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scenario import Scenario, Step

__all__ = [
    "HEADERS",
    "NO_LIMITS",
    "TAIL",
    "Limits",
    "configured",
    "limited",
    "rank_of",
    "with_fields",
    "with_ranks",
]

_PLAIN_SHARE = 0.5
_VARIED_SHARE = 0.7
_ROUTER_LINES = (
    "router-queue-threshold: 0.01\n  router-queue-policy: fcfs",
    "router-queue-threshold: 0.02\n  router-queue-policy: lcfs",
    "router-queue-threshold: 0.5\n  router-queue-policy: wspt",
    "router-kv-events: false",
    "router-kv-events: false\n  router-ttl-secs: 3",
    "router-temperature: 0.7",
    "router-track-output-blocks: true",
    "router-session-affinity-ttl-secs: 5",
    "router-session-affinity-ttl-secs: 5\n  router-session-affinity-mode: soft",
)
TAIL = "the end of the answer, and a snowman"
"""Stands for a stop string that begins as the answer ends: the last characters wait for it."""
_ENGINE_LINES = (
    "data-parallel-size: 2",
    "num-host-blocks: 64",
    "data-parallel-size: 2\n  num-host-blocks: 64",
    "engine-type: sglang",
    "max-num-batched-tokens: 256",
    "enable-chunked-prefill: false",
)
_REQUEST_FIELDS: tuple[dict[str, Any], ...] = (
    {"stop": [TAIL, "@@"]},
    {"logprobs": True},
    {"n": 3},
    {"nvext": {"agent_hints": {"priority": 3}}},
    {"nvext": {"agent_hints": {"latency_sensitivity": 2.0}}},
    {"user": "a user", "min_tokens": 1},
    {"nvext": {"annotations": ["worker_id", "token_ids"]}},
    {"session": "one"},
    {"session": "another"},
)
_MODES_SHARE = 0.2
_MODES = ("random", "power-of-two", "device-aware-weighted", "least-loaded", "round-robin")
_COSTS_SHARE = 0.3
_COST_LINES = (
    "router-prefill-load-model: fitted",
    "router-decode-active-request-weight: 2",
    "router-duplicate-cost: 1",
    "router-kv-overlap-score-credit-decay: 0.5",
    "router-track-prefill-tokens: false",
    "router-track-active-blocks: false",
    "router-assume-kv-reuse: false",
    "router-predicted-ttl-secs: 3",
    "router-kv-overlap-score-weight: 0",
    "shared-cache-type: hicache\n  shared-cache-multiplier: 0.5",
    "load-aware: true",
)
_PREDICTED_LINES = (
    "router-approximate-cache-policy: lru",
    "router-max-tree-size: 32\n  router-prune-target-ratio: 0.5",
)
"""Beside ``router-kv-events: false``."""
_ENGINES_SHARE = 0.3
_MORE_ENGINE_LINES = (
    "enable-prefix-caching: false",
    "preemption-mode: fifo",
    "watermark: 0.2",
    "decode-speedup-ratio: 3",
    "device-type: cuda",
    "max-model-len: 4096",
)
_PREFILL_SHARE = 0.6
_PREFILL_LINES = (
    "router-prefill-slots: 1",
    "router-conditional-disagg: true",
    "router-conditional-disagg: true\n  router-conditional-disagg-config: "
    '\'{{"eff_isl_threshold": 40, "max_prefill_queue_size": 1}}\'',
)
_PLANNER_SHARE = 0.4
_PLANNER_MODES = ("sla", "load+sla", "auto", "load")
_PLANNER_LINES = (
    "load-predictor: constant",
    "load-predictor: kalman",
    "max-sleeping-workers: 0",
    "max-sleeping-workers: 2",
    "ttft: 100\n  itl: 5",
    "no-correction: true",
    "decode-kv-scale-up-threshold: 0.2\n  decode-kv-scale-down-threshold: 0.1",
)
_LIMITS_SHARE = 0.12
_LIMIT_KINDS = ("engine", "queue", "queue", "classes", "classes", "blocks", "prefill")
_TOGETHER_S, _AT_ONCE_S = 0.1, 0.004
_BURSTS = (6, 10, 16)
"""So many requests arrive within a tenth of a second, or, to fill a queue, some milliseconds."""
CLASS = "x-dynamo-meta-policy-class"
_RANKS = ("x-dp-rank", "x-data-parallel-rank", "x-dynamo-dp-rank")
HEADERS = (CLASS, *_RANKS)
"""Those of a request's fields that are sent as headers."""
_CLASSES = Path(__file__).with_name("classes.yaml")
_CLASS_NAMES = ("nightly", "never", "standard", "unknown")
_HOST_SHARE = 0.15
_HOST_BLOCKS = (8, 16, 64)
_FEW_BLOCKS = 96
"""So many fit on a device whose engine has host memory: it is full soon."""
_THREADS_SHARE = 0.6
"""Of the boxes whose routers follow KV events."""
_THREADS = (2, 2, 3)
_ENFORCED_SHARE = 0.3
_PREFILL_LIMIT_SHARE = 0.4
"""Of the boxes with prefill workers."""
_RANKS_SHARE = 0.6
"""Of the boxes whose engines have two ranks."""
_HEALTH_SHARE = 0.2
_HEALTH = "envs: {{DYN_HEALTH_CHECK_ENABLED: 'true', DYN_CANARY_WAIT_TIME: '1'}}"
_KV = "  router-mode: kv\n"
_ENGINE = "  run: dynamo.mocker\n"
_KV_ALONE = re.compile(r"  router-(cost|replica-sync): .*\n")


@dataclass(frozen=True)
class Limits:
    """What must be exceeded before a request is refused because of others; 0: no such limit."""

    engine: int = 0
    """--engine-request-limit: requests in the engine of a worker."""
    waiting: int = 0
    """Those that wait in the worker beside them."""
    queue: int = 0
    """DYN_ROUTER_QUEUE_LIMIT."""
    blocks: int = 0
    """KV blocks in use above which a worker is busy."""
    prefill_queue: int = 0
    """--router-prefill-queue-limit: requests that wait for a prefill slot."""
    prefill_tokens: int = 0
    """Prompt tokens being computed above which a worker is busy."""
    classes: bool = False
    """Whether the queue has the classes of classes.yaml."""
    status: int = 503
    """Of refused requests."""
    env: dict[str, str] = field(default_factory=dict)
    """Of all processes."""

    def __bool__(self) -> bool:
        return self != NO_LIMITS


NO_LIMITS = Limits()


def configured(seed: int, graph: str) -> str:
    """Configure in many boxes what the others leave at its default."""
    dice = random.Random(f"surface {seed}")
    if dice.random() >= _PLAIN_SHARE:
        router, engine = dice.choice(_ROUTER_LINES), dice.choice(_ENGINE_LINES)
        if _KV in graph and dice.random() < _VARIED_SHARE:
            graph = graph.replace(_KV, f"{_KV}  {router}\n")
        if dice.random() < _VARIED_SHARE:
            graph = graph.replace(_ENGINE, f"{_ENGINE}  {engine}\n")
    for name, configure in _DIMENSIONS.items():
        graph = configure(random.Random(f"{name} {seed}"), graph)
    return graph


def _mode(dice: random.Random, graph: str) -> str:
    """Choose workers by another mode than those of the profiles."""
    mode = dice.choice(_MODES)
    if dice.random() >= _MODES_SHARE or "router-queue" in graph or "router-kv" in graph:
        return graph
    return re.sub("router-mode: .*", f"router-mode: {mode}", _KV_ALONE.sub("", graph))


def _costs(dice: random.Random, graph: str) -> str:
    """Weigh something else in mode kv."""
    line = dice.choice(_PREDICTED_LINES if "router-kv-events: false" in graph else _COST_LINES)
    by_seconds = "router-cost: seconds" in graph and "track-prefill" in line  # it is refused
    if dice.random() >= _COSTS_SHARE or by_seconds:
        return graph
    return graph.replace(_KV, f"{_KV}  {line}\n")


def _engines(dice: random.Random, graph: str) -> str:
    line = dice.choice(_MORE_ENGINE_LINES)
    if dice.random() >= _ENGINES_SHARE or ("host-blocks" in graph and "caching" in line):
        return graph
    return graph.replace(_ENGINE, f"{_ENGINE}  {line}\n")


def _prefill(dice: random.Random, graph: str) -> str:
    """Change which prompts go to prefill workers, and how many at once."""
    line = dice.choice(_PREFILL_LINES)
    if "disaggregation-mode" not in graph or dice.random() >= _PREFILL_SHARE:
        return graph
    return re.sub("(  router-mode: .*\n)", rf"\1  {line}\n", graph)


def _enforced(dice: random.Random, graph: str) -> str:
    """Forbid decode workers to compute prompts."""
    if "disaggregation-mode" not in graph or dice.random() >= _ENFORCED_SHARE:
        return graph
    return re.sub("(  router-mode: .*\n)", r"\1  enforce-disagg: true\n", graph)


def _planner(dice: random.Random, graph: str) -> str:
    mode, line = dice.choice(_PLANNER_MODES), dice.choice(_PLANNER_LINES)
    if dice.random() >= _PLANNER_SHARE:
        return graph
    return graph.replace("  mode: load\n", f"  mode: {mode}\n  {line}\n")


def _health(dice: random.Random, graph: str) -> str:
    """Let workers send themselves a request when they have sent no token for a second."""
    if dice.random() >= _HEALTH_SHARE:
        return graph
    return graph.replace("ServiceArgs: {{workers", f"ServiceArgs: {{{{{_HEALTH}, workers")


def _host_memory(dice: random.Random, graph: str) -> str:
    """Give engines a small cache and host memory for what does not fit."""
    blocks = dice.choice(_HOST_BLOCKS)
    if dice.random() >= _HOST_SHARE or "enable-prefix-caching" in graph:
        return graph
    graph = re.sub("  num-host-blocks: .*\n", "", graph)
    graph = re.sub("num-gpu-blocks-override: .*", f"num-gpu-blocks-override: {_FEW_BLOCKS}", graph)
    return graph.replace(_ENGINE, f"{_ENGINE}  num-host-blocks: {blocks}\n")


def _event_threads(dice: random.Random, graph: str) -> str:
    """Let compiled threads apply KV events. See :mod:`event_threads`."""
    count = dice.choice(_THREADS)
    followed = _KV in graph and "router-kv-events: false" not in graph
    if dice.random() >= _THREADS_SHARE or not followed:
        return graph
    return graph.replace("router-event-threads: 1", f"router-event-threads: {count}")


_DIMENSIONS: dict[str, Callable[[random.Random, str], str]] = {
    "router mode": _mode,
    "router costs": _costs,
    "engines": _engines,
    "prefill": _prefill,
    "planner": _planner,
    "health checks": _health,
    "event threads": _event_threads,
    "host memory": _host_memory,
    "enforced": _enforced,
}
"""What each dimension changes in a graph, by the name that its dice have."""


def with_fields(seed: int, steps: list[Step]) -> list[Step]:
    """Give some requests fields that do not change their answer."""
    dice = random.Random(f"fields {seed}")
    if dice.random() < _PLAIN_SHARE:
        return steps
    return [
        replace(step, details={**step.details, "fields": dice.choice(_REQUEST_FIELDS)})
        if step.kind == "request" and dice.random() < _VARIED_SHARE
        else step
        for step in steps
    ]


def with_ranks(seed: int, graph: str, steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Let some requests name the rank that computes them, with a header or a field."""
    dice = random.Random(f"ranks {seed}")
    if "data-parallel-size: 2" not in graph or dice.random() >= _RANKS_SHARE:
        return steps
    named = []
    for step in steps:
        rank, name = dice.choice((0, 1)), dice.choice((*_RANKS, ""))
        free = step.kind == "request" and not {"fields", "call", "pin", "n"} & step.details.keys()
        if free and dice.random() < _VARIED_SHARE:
            fields = {name: rank} if name else {"nvext": {"dp_rank": rank}}
            step = replace(step, details={**step.details, "fields": fields})
        named.append(step)
    return tuple(named)


def rank_of(fields: dict[str, Any]) -> int | None:
    """Return the rank that the fields of a request name."""
    named = (fields[name] for name in _RANKS if name in fields)
    rank: int | None = next(named, fields.get("nvext", {}).get("dp_rank"))
    return rank


def limited(scenario: Scenario, ask: Callable[..., Step]) -> Scenario:
    """Limit in some scenarios what is taken at once, and let many requests arrive together.

    ``ask`` makes a request of a time. The other steps keep their numbers.
    """
    dice = random.Random(f"limits {scenario.seed}")
    kind = dice.choice(_LIMIT_KINDS)
    status = dice.choice((503, 503, 429, 529))
    prefill = random.Random(f"prefill queue {scenario.seed}").random() < _PREFILL_LIMIT_SHARE
    if prefill and "disaggregation-mode" in scenario.graph:
        kind = "prefill queue"
    elif dice.random() >= _LIMITS_SHARE:
        return scenario
    if scenario.is_calm or scenario.is_cut:
        return scenario
    limits, graph = _limits(kind, dice, scenario.graph)
    env = {**limits.env, "DYN_HTTP_OVERLOAD_STATUS_CODE": str(status)}
    steps = list(scenario.steps)
    begin_s = dice.random() * scenario.seconds
    for number in range(len(steps), len(steps) + dice.choice(_BURSTS)):
        within_s = _AT_ONCE_S if "queue" in kind or kind == "classes" else _TOGETHER_S
        step = ask(dice, at_s=round(begin_s + dice.random() * within_s, 5))
        if limits.classes:
            fields = {CLASS: dice.choice(_CLASS_NAMES)}
            step = replace(step, details={**step.details, "fields": fields})
        steps.append(replace(step, number=number))
    return replace(
        scenario,
        graph=graph,
        limits=replace(limits, status=status, env=env),
        steps=tuple(sorted(steps, key=lambda step: step.at_s)),
    )


def _limits(kind: str, dice: random.Random, graph: str) -> tuple[Limits, str]:
    """Return limits of a kind, and the graph that sets them."""
    if kind in ("queue", "classes") and _KV not in graph:
        kind = "engine"
    count = dice.choice((1, 2, 3))
    if kind == "engine":
        env = {"DYN_DYNAMO_REQUEST_QUEUE_LIMIT": "2"}
        line = f"engine-request-limit: {count}"
        return Limits(count, 2, env=env), graph.replace(_ENGINE, f"{_ENGINE}  {line}\n")
    if kind == "prefill queue":
        graph = re.sub("  router-(prefill-slots|conditional-disagg).*\n", "", graph)
        line = f"router-prefill-slots: 1\n  router-prefill-queue-limit: {count}"
        return Limits(prefill_queue=count), re.sub("(  router-mode: .*\n)", rf"\1  {line}\n", graph)
    if kind == "queue":
        graph = re.sub("  router-queue-.*\n", "", graph)
        line = "router-queue-threshold: 0.005"
        limits = Limits(queue=count, env={"DYN_ROUTER_QUEUE_LIMIT": str(count)})
        return limits, graph.replace(_KV, f"{_KV}  {line}\n")
    if kind == "classes":
        line = f"router-policy-config: {_CLASSES}"
        graph = re.sub("  router-queue-.*\n", "", graph)
        return Limits(classes=True), graph.replace(_KV, f"{_KV}  {line}\n")
    if kind == "blocks":
        share = dice.choice((0.02, 0.1, 0.3))
        total = min(map(int, re.findall(r"num-gpu-blocks-override: (\d+)", graph)))
        limits, line = Limits(blocks=int(share * total)), f"active-decode-blocks-threshold: {share}"
    else:
        tokens = dice.choice((20, 100, 400))
        limits = Limits(prefill_tokens=tokens)
        line = f"active-prefill-tokens-threshold: {tokens}"
    control = f"  admission-control: token-capacity\n  {line}\n"
    return limits, re.sub("(  router-mode: .*\n)", rf"\1{control}", graph)
