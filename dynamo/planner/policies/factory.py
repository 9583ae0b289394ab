"""Construct a policy by its name: ``load``, ``fixed:4``, ``hpa:12``, ``my_module:my_policy``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import cast

from dynamo.config.planner import PlannerSettings
from dynamo.errors import ConfigError
from dynamo.planner.policies.base import Policy
from dynamo.planner.policies.combined import CombinedPolicy
from dynamo.planner.policies.hpa import FixedPolicy, HpaPolicy
from dynamo.planner.policies.load import LoadPolicy
from dynamo.planner.policies.sla import SlaPolicy

Factory = Callable[[PlannerSettings, bool], Policy]
"""Makes a policy; the second argument is True in disaggregated serving."""

POLICIES: dict[str, Factory] = {
    "load": lambda settings, prefill: LoadPolicy(settings),
    "sla": SlaPolicy,
    "load+sla": CombinedPolicy,
}
"""Policies without an argument. Those of --mode must be here."""

_WITH_ARGUMENT: dict[str, Callable[[PlannerSettings, bool, str], Policy]] = {
    "fixed": FixedPolicy,
    "hpa": HpaPolicy,
}


def make_policy(settings: PlannerSettings, prefill: bool) -> Policy:
    """Return the policy of ``settings.mode``; ``prefill``: serving is disaggregated."""
    return named_policy(settings.mode, settings, prefill)


def named_policy(name: str, settings: PlannerSettings, prefill: bool) -> Policy:
    """Return the policy ``name``.

    ``module:attribute`` names a class or function of the signature of :data:`Factory`. Raises
    ConfigError if there is none.
    """
    if name in POLICIES:
        return POLICIES[name](settings, prefill)
    kind, _, argument = name.partition(":")
    if argument and kind in _WITH_ARGUMENT:
        return _WITH_ARGUMENT[kind](settings, prefill, argument)
    if argument:
        return _imported(name, kind, argument)(settings, prefill)
    arguments = ", ".join(f"{kind}:…" for kind in _WITH_ARGUMENT)
    raise ConfigError(
        f"policy {name!r}: unknown; there are {', '.join(POLICIES)}, {arguments}, and "
        "module:attribute for your own"
    )


def _imported(name: str, module: str, attribute: str) -> Factory:
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"policy {name!r}: {error}; is it importable from here?") from error
    if not callable(found):
        raise ConfigError(f"policy {name!r}: it is no class or function that makes a policy")
    return cast(Factory, found)
