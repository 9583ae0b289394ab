"""The groups of options of each verb of ``dynamo``, for shell completion: no verb is imported.

A test compares the table with what the verbs load.
"""

from __future__ import annotations

import importlib
from typing import Any

from dynamo.config.modules import settings_groups

_DEPLOYMENT = "cli.options.DeploymentSettings"
_WORKERS = ("cli.options.OperateSettings", _DEPLOYMENT)
_MODEL = ("cli.options.LoadModelSettings", _DEPLOYMENT)

# Verb, and the word behind it if there is one → module of dynamo and class.
_GROUPS: dict[str, tuple[str, ...]] = {
    "run": ("cli.options.RunSettings",),
    "init": ("cli.options.InitSettings",),
    "serve": ("config.serve.ServeSettings",),
    "reload": ("config.serve.ReloadSettings",),
    "doctor": ("cli.options.DoctorSettings",),
    "ps": ("cli.options.PsSettings",),
    "state": ("cli.options.StateSettings",),
    "top": ("cli.options.TopSettings", _DEPLOYMENT),
    "logs": ("cli.options.LogsSettings", _DEPLOYMENT),
    "restart": _WORKERS,
    "drain": _WORKERS,
    "sleep": _WORKERS,
    "wake": _WORKERS,
    "load": _MODEL,
    "unload": _MODEL,
    "bench": ("config.bench.BenchSettings",),
    "record": ("cli.options.RecordSettings", "config.client.ClientSettings"),
    "profile": ("config.bench.ProfileSettings",),
    "web": ("cli.options.WebSettings",),
    "chat": ("cli.options.ChatSettings", "config.client.ClientSettings"),
    "route": ("cli.options.RouteSettings", "config.client.FrontendClientSettings"),
    "explain": ("cli.options.RequestExplainSettings", "config.client.FrontendClientSettings"),
    "planner explain": ("config.planner.ExplainSettings", _DEPLOYMENT),
    "planner replay": ("simulation.settings.ReplaySettings", "config.planner.PlannerSettings"),
    "planner pause": (_DEPLOYMENT,),
    "planner resume": (_DEPLOYMENT,),
    "key": ("cli.options.KeySettings",),
    "install-service": ("cli.options.InstallServiceSettings",),
    "completion": ("cli.options.CompletionSettings",),
    "version": (),
}


def subverbs(verb: str) -> tuple[str, ...]:
    """Return the words that may follow ``verb`` and have options of their own."""
    return tuple(name.partition(" ")[2] for name in _GROUPS if name.startswith(f"{verb} "))


def verb_groups(verb: str, subverb: str = "") -> tuple[type[Any], ...]:
    """Return the groups of ``dynamo verb``, or of ``dynamo verb subverb`` if it has that one.

    Imports only those: a group takes a millisecond.
    """
    names = _GROUPS.get(f"{verb} {subverb}", _GROUPS.get(verb))
    if names is None:  # the verb runs a module
        return settings_groups(f"dynamo.{verb}") or ()
    return tuple(map(_group, names))


def _group(path: str) -> type[Any]:
    module, _, name = path.rpartition(".")
    group: type[Any] = getattr(importlib.import_module(f"dynamo.{module}"), name)
    return group
