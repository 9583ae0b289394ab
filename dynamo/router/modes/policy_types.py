"""Policies that choose workers: what they are given, how they are found, and one built in.

A policy is an object of any class with one or more of three methods. A lower cost is better.

* ``filter(request, worker)``: whether the worker may take the request
* ``score(request, workers)``: a cost for each worker; without it, the built-in cost
* ``pick(request, workers, costs)``: the index of the chosen worker; without it, the cheapest

A classifier has one: ``classify(request)``, the name of a class or family of the queue, or None for
that of the client.

Its class gets the ``parameters`` of its instance in the policy file as keyword arguments.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from dynamo.config.router_policy import WEIGHTED, PolicyInstance, RouterPolicies
from dynamo.errors import ConfigError
from dynamo.protocols.engine import Routing

P = TypeVar("P")
GROUP = "dynamo.router.policies"
"""The group of entry points whose names may be the type of a policy."""


class PolicyRequest(NamedTuple):
    """A request. ``priority``, ``session_id`` and ``policy_class`` are the client's."""

    tokens: int
    blocks: int
    block_size: int
    session_id: str | None = None
    priority: int | None = None
    expected_output_tokens: int | None = None
    lora_name: str | None = None
    policy_class: str | None = None


def policy_request(
    tokens: int, blocks: int, block_size: int, routing: Routing | None
) -> PolicyRequest:
    """Return what a policy gets of a prompt and its ``routing``."""
    if routing is None:
        return PolicyRequest(tokens, blocks, block_size)
    return PolicyRequest(
        tokens,
        blocks,
        block_size,
        routing.session_id,
        routing.priority,
        routing.expected_output_tokens,
        routing.lora_name,
        routing.policy_class,
    )


class PolicyWorker(NamedTuple):
    """A rank that may take the request, with the load that it would have and what it has cached.

    ``cost`` is the built-in cost. ``prefill_tokens`` wait for their first token, ``decode_blocks``
    include those of this request. Cached blocks are those of the prompt.
    """

    worker_id: int
    dp_rank: int
    cost: float
    requests: int
    prefill_tokens: int
    decode_blocks: int
    device_blocks: int
    host_blocks: int = 0
    disk_blocks: int = 0
    shared_blocks: int = 0


class PolicyChoice(NamedTuple):
    """What a policy decided: the indexes that may be taken, their costs, and which it picked."""

    indexes: list[int]
    costs: list[float]
    picked: int | None


class WorkerPolicy:
    """A policy under the ``name`` of its instance."""

    def __init__(self, name: str, policy: Any) -> None:
        self.name = name
        methods = [getattr(policy, method, None) for method in ("filter", "score", "pick")]
        self._filter, self._score, self._pick = methods
        if not any(map(callable, methods)):
            raise ConfigError(f"policy {name}: its class has no method filter, score or pick")

    def choose(self, request: PolicyRequest, workers: list[PolicyWorker]) -> PolicyChoice:
        """Ask the policy. Raises whatever it raises, and ValueError for an answer that is none."""
        indexes = list(range(len(workers)))
        if self._filter is not None:
            indexes = [index for index in indexes if self._filter(request, workers[index])]
            workers = [workers[index] for index in indexes]
        if not workers:
            return PolicyChoice([], [], None)
        costs = [worker.cost for worker in workers]
        if self._score is not None:
            costs = _costs(self._score(request, workers), len(workers))
        picked = None
        if self._pick is not None:
            picked = self._pick(request, workers, costs)
            if not isinstance(picked, int) or not 0 <= picked < len(workers):
                raise ValueError(
                    f"pick returned {picked!r}, not an index of {len(workers)} workers"
                )
        return PolicyChoice(indexes, costs, picked)


class ClassPolicy:
    """A policy that names classes of the queue."""

    def __init__(self, name: str, policy: Any) -> None:
        self.name = name
        self._classify = getattr(policy, "classify", None)
        if not callable(self._classify):
            raise ConfigError(f"policy {name}: its class has no method classify")

    def classify(self, request: PolicyRequest) -> str | None:
        """Ask the policy. Raises whatever it raises, and ValueError for an answer that is none."""
        assert self._classify is not None
        name = self._classify(request)
        if name is not None and not isinstance(name, str):
            raise ValueError(f"classify returned {name!r:.100}, neither a name nor None")
        return name


def make_policy(instance: PolicyInstance, directory: Path) -> WorkerPolicy:
    """Make the policy of ``instance`` and try it. Raises ConfigError."""
    return _made(instance, directory, WorkerPolicy, lambda policy: policy.choose(*_SAMPLE))


def make_classifier(instance: PolicyInstance, directory: Path) -> ClassPolicy:
    """Make the classifier of ``instance`` and try it. Raises ConfigError."""
    return _made(instance, directory, ClassPolicy, lambda policy: policy.classify(_SAMPLE[0]))


def _made(
    instance: PolicyInstance,
    directory: Path,
    wrapper: Callable[[str, Any], P],
    attempt: Callable[[P], object],
) -> P:
    where = f"policy {instance.name} (type {instance.type})"
    kind = _policy_class(instance.type, directory, where)
    try:
        policy = wrapper(instance.name, kind(**instance.parameters))
        attempt(policy)
    except ConfigError:
        raise
    # SystemExit: the code of a policy may call sys.exit(), which must not end the router.
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{where}: {type(error).__name__}: {error}") from error
    return policy


def check_policies(policies: RouterPolicies | None) -> None:
    """Try all policies of a file. Raises ConfigError."""
    if policies is None:
        return
    for instance in policies.selection.instances:
        if instance.type == WEIGHTED:
            instance.weights()
        else:
            make_policy(instance, policies.directory)
    if policies.classifier is not None:
        make_classifier(policies.classifier, policies.directory)


class TwoTier:
    """Load first, if it is far out of balance; else the most cached blocks, if they are many.

    As Dynamo's page on worker selection describes its policy of this name.
    """

    def __init__(
        self,
        cache_threshold: float = 0.5,
        balance_abs_threshold: int = 32,
        balance_rel_threshold: float = 1.1,
    ) -> None:
        if not 0 <= cache_threshold <= 1:
            raise ValueError(f"cache_threshold must be between 0 and 1, got {cache_threshold}")
        if balance_abs_threshold < 0:
            raise ValueError(f"balance_abs_threshold must be >= 0, got {balance_abs_threshold}")
        if balance_rel_threshold < 1:
            raise ValueError(f"balance_rel_threshold must be >= 1, got {balance_rel_threshold}")
        self._cached = cache_threshold
        self._spread = balance_abs_threshold
        self._ratio = balance_rel_threshold

    def pick(
        self, request: PolicyRequest, workers: Sequence[PolicyWorker], costs: Sequence[float]
    ) -> int:
        """Return the index of the least loaded worker, or of the one that has cached most."""
        loads = [worker.requests for worker in workers]
        least, most = min(loads), max(loads)
        best = max(worker.device_blocks for worker in workers)
        unbalanced = most - least > self._spread and most > self._ratio * least
        if not unbalanced and best > self._cached * request.blocks:
            holders = [
                index for index, worker in enumerate(workers) if worker.device_blocks == best
            ]
            return min(holders, key=loads.__getitem__)
        return loads.index(least)


_BUILT_IN: dict[str, Callable[..., Any]] = {"dynamo-two-tier-cost-fn": TwoTier}
_SAMPLE = (
    PolicyRequest(tokens=100, blocks=6, block_size=16),
    [
        PolicyWorker(1, 0, 7.0, 0, 0, 7, 0),
        PolicyWorker(2, 0, 12.5, 3, 40, 16, 4, 1, 1, 0),
    ],
)


def _policy_class(kind: str, directory: Path, where: str) -> Callable[..., Any]:
    if kind in _BUILT_IN:
        return _BUILT_IN[kind]
    source, colon, name = kind.rpartition(":")
    policy_class: Callable[..., Any]
    try:
        if colon:
            is_file = source.endswith(".py")
            module = _from_file(directory / source) if is_file else importlib.import_module(source)
            policy_class = getattr(module, name)
        else:
            from importlib.metadata import entry_points  # takes 25 ms

            entries = {entry.name: entry for entry in entry_points(group=GROUP)}
            if kind not in entries:
                raise ConfigError(
                    f"{where}: unknown type; give FILE.py:CLASS, MODULE:CLASS, or one of "
                    f"{', '.join([WEIGHTED, *_BUILT_IN, *entries])}"
                )
            policy_class = entries[kind].load()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{where}: can't be loaded: {type(error).__name__}: {error}") from error
    if not callable(policy_class):
        raise ConfigError(f"{where}: {name} is no class")
    return policy_class


def _from_file(path: Path) -> Any:
    """Import the file at ``path``."""
    # By path: two files of the same name must not share a module.
    name = f"dynamo_router_policy_{abs(hash(str(path)))}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    # Before it runs: dataclasses look up the module of a class there.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _costs(scores: Any, count: int) -> list[float]:
    costs = [float(cost) for cost in scores]
    if len(costs) != count:
        raise ValueError(f"score returned {len(costs)} costs for {count} workers")
    if not all(map(math.isfinite, costs)):
        raise ValueError(f"score returned a cost that is not finite: {costs}")
    return costs
