"""The groups of options of each verb of ``dynamo``, for shell completion: no verb is imported.

A test compares the table with what the verbs load.
"""

from __future__ import annotations

import importlib
from typing import Any

from dynamo.config.modules import settings_groups

__all__ = ["subverbs", "verb_groups"]

_DEPLOYMENT = "operate.DeploymentSettings"
_WORKERS = ("operate.OperateSettings", _DEPLOYMENT)
_MODEL = ("operate.LoadModelSettings", _DEPLOYMENT)

# Verb, and the word behind it if there is one → module of dynamo.config and class.
_GROUPS: dict[str, tuple[str, ...]] = {
    "run": ("setup.RunSettings",),
    "init": ("setup.InitSettings",),
    "serve": ("serve.ServeSettings",),
    "reload": ("serve.ReloadSettings",),
    "doctor": ("doctor.DoctorSettings",),
    "ps": ("ps.PsSettings",),
    "state": ("state.StateSettings",),
    "top": ("operate.TopSettings", _DEPLOYMENT),
    "logs": ("operate.LogsSettings", _DEPLOYMENT),
    "restart": _WORKERS,
    "drain": _WORKERS,
    "sleep": _WORKERS,
    "wake": _WORKERS,
    "load": _MODEL,
    "unload": _MODEL,
    "bench": ("bench.BenchSettings",),
    "record": ("record.RecordSettings", "client.ClientSettings"),
    "profile": ("profile.ProfileSettings",),
    "web": ("web.WebSettings",),
    "chat": ("chat.ChatSettings", "client.ClientSettings"),
    "route": ("route.RouteSettings", "frontend_client.FrontendClientSettings"),
    "explain": ("explain.RequestExplainSettings", "frontend_client.FrontendClientSettings"),
    "planner explain": ("planner.ExplainSettings", _DEPLOYMENT),
    "planner replay": ("planner_replay.ReplaySettings", "planner.PlannerSettings"),
    "planner pause": (_DEPLOYMENT,),
    "planner resume": (_DEPLOYMENT,),
    "key": ("key.KeySettings",),
    "install-service": ("setup.InstallServiceSettings",),
    "completion": ("completion.CompletionSettings",),
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
    return tuple(_group(*name.split(".")) for name in names)


def _group(module: str, name: str) -> type[Any]:
    group: type[Any] = getattr(importlib.import_module(f"dynamo.config.{module}"), name)
    return group
