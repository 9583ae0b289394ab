"""The programs of this package that a graph may run, and the engines that ``dynamo run`` chooses.

A new engine is a folder with its options and its ``__main__``, and a row of each table here.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

FRONTEND, PLANNER, ATTACH = "dynamo.frontend", "dynamo.planner", "dynamo.attach"


@dataclass(frozen=True)
class OptionGroup:
    """A class of settings and the function that refuses what is valid option by option.

    Both are paths below ``dynamo``, imported on use: a group takes a millisecond.
    """

    path: str
    check_path: str = ""

    def load(self) -> type[Any]:
        """Return the class."""
        group: type[Any] = _imported(self.path)
        return group

    def check(self, settings: Any) -> None:
        """Raise DynamoError for what the program refuses in ``settings``."""
        if self.check_path:
            _imported(self.check_path)(settings)


_RUNTIME = OptionGroup("config.runtime.RuntimeSettings")
_LOG = OptionGroup("config.system.LogSettings")
_SYSTEM = OptionGroup("config.system.SystemSettings")
_ROUTER = OptionGroup("config.router.RouterSettings", "setup.service_checks.check_router")
_WORKER = OptionGroup("config.worker.WorkerSettings")
_WORKER_VARIABLES = (_LOG, _SYSTEM, OptionGroup("config.system.HealthCheckSettings"))


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program that ``run: module`` starts, as ``python -m module``.

    ``options`` are in the order of its ``--help``; ``variables`` are set by variables only.
    ``registers_model``: the planner scales it. ``stops_first``: it stops before the workers do.
    It needs the Python ``package``, which ``install`` installs.

    An engine with a parser of its own gets the flags that are not ours: ``flags_check`` is the
    module that checks them, and ``known_flags`` a function that finds an unknown one much faster,
    or returns "". It reserves ``memory_share`` of each GPU by default, and its parallel sizes say
    how many GPUs a worker has.
    """

    module: str
    text: str
    options: tuple[OptionGroup, ...]
    variables: tuple[OptionGroup, ...] = _WORKER_VARIABLES
    registers_model: bool = False
    stops_first: bool = False
    package: str = ""
    install: str = ""
    flags_check: str = ""
    known_flags: str = ""
    memory_share: float = 0.0

    def groups(self) -> tuple[type[Any], ...]:
        """Return the classes of its options, in the order of its ``--help``."""
        return tuple(group.load() for group in self.options)

    def unknown_flag(self, words: Sequence[str]) -> str:
        """Return the first of ``words`` that is no flag of its engine, as text for an error."""
        return str(_imported(self.known_flags)(words)) if self.known_flags else ""

    def checked_groups(self) -> tuple[type[Any], ...]:
        """Return the same, and those that are set by variables only."""
        return tuple(group.load() for group in (*self.options, *self.variables))


PROGRAMS = {
    program.module: program
    for program in (
        Program(
            module=FRONTEND,
            text="the OpenAI frontend, with its router",
            options=(
                OptionGroup(
                    "config.frontend.FrontendSettings", "setup.service_checks.check_frontend"
                ),
                *(_ROUTER, _RUNTIME, _LOG),
            ),
            variables=(_SYSTEM,),
            stops_first=True,
        ),
        Program(
            module="dynamo.router",
            text="a router for programs that call it",
            options=(
                OptionGroup(
                    "config.router.RouterProcessSettings",
                    "setup.service_checks.check_router_process",
                ),
                *(_ROUTER, _RUNTIME, _LOG),
            ),
            variables=(_SYSTEM,),
        ),
        Program(
            module=PLANNER,
            text="adds and removes workers as their load changes",
            options=(OptionGroup("config.planner.PlannerSettings"), _RUNTIME, _LOG),
            variables=(_SYSTEM,),
            stops_first=True,
        ),
        Program(
            module="dynamo.mocker",
            text="a simulated engine",
            options=(
                *(_RUNTIME, _WORKER),
                OptionGroup("mocker.settings.MockerSettings", "mocker.arguments.check_settings"),
            ),
            registers_model=True,
        ),
        Program(
            module="dynamo.vllm",
            text="a vLLM engine",
            options=(_RUNTIME, _WORKER, OptionGroup("vllm.settings.VllmSettings")),
            registers_model=True,
            package="vllm",
            install="pip install 'dynamo-appliance[vllm]'",
            flags_check="dynamo.vllm.check",
            known_flags="vllm.known_flags.unknown_flag",
            memory_share=0.9,  # of --gpu-memory-utilization; newer versions: 0.92
        ),
        Program(
            module=ATTACH,
            text="any OpenAI-compatible server",
            options=(
                _RUNTIME,
                OptionGroup("attach.settings.AttachSettings", "attach.worker.check_settings"),
            ),
            registers_model=True,
        ),
    )
}
"""By module."""


@dataclass(frozen=True)
class Extra:
    """An optional dependency: the ``package`` that ``values`` of an option need.

    ``option`` is ``Class.field`` of settings, ``label`` its name for users.
    """

    name: str
    package: str
    option: str
    values: tuple[Any, ...]
    label: str

    def needed_by(self, settings: Any) -> str:
        """Return the option and its value if ``settings`` need the package, else ""."""
        group, _, name = self.option.partition(".")
        value = getattr(settings, name, None) if type(settings).__name__ == group else None
        if value not in self.values:
            return ""
        return self.label if value is True else f"{self.label} {value}"

    @property
    def install(self) -> str:
        """The command that installs it."""
        return f"pip install 'dynamo-appliance[{self.name}]'"


EXTRAS = (
    Extra("etcd", "aetcd", "RuntimeSettings.discovery_backend", ("etcd",), "discovery-backend"),
    Extra("nats", "nats", "RuntimeSettings.event_plane", ("nats",), "event-plane"),
    Extra("otel", "opentelemetry.sdk", "TracingSettings.enabled", (True,), "OTEL_EXPORT_ENABLED"),
    Extra(
        "kubernetes",
        "kubernetes_asyncio",
        "PlannerSettings.environment",
        ("kubernetes",),
        "environment",
    ),
    Extra(
        "aic",
        "aiconfigurator",
        "RouterSettings.prefill_load_model",
        ("aic", "ais"),
        "router-prefill-load-model",
    ),
)

MODEL_PROGRAMS = tuple(name for name, program in PROGRAMS.items() if program.registers_model)


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """An engine that ``dynamo run`` and ``dynamo init`` may choose.

    ``models`` are the kinds of models that it can serve, ``best_for`` those for which it is
    preferred. It runs in ``program`` if that has one of its own and its Python ``package`` is
    installed; else ``dynamo.attach`` starts its server: the module ``launcher`` of the package, or
    ``command``. ``keys`` are added to its service. An engine that is not ``automatic`` has to be
    asked for.
    """

    name: str
    models: tuple[str, ...]
    install: str = ""
    best_for: tuple[str, ...] = ()
    program: str = ATTACH
    package: str = ""
    launcher: str = ""
    command: tuple[str, ...] = ()
    keys: Mapping[str, Any] = field(default_factory=dict)
    automatic: bool = True


ENGINES = {
    engine.name: engine
    for engine in (
        EngineChoice(
            name="vllm",
            models=("directory", "hub", "gguf"),
            install="vLLM: pip install 'dynamo-appliance[vllm]' (from a checkout: pip install "
            "'.[vllm]')",
            program="dynamo.vllm",
            package="vllm",
            command=("vllm", "serve"),
        ),
        EngineChoice(
            name="sglang",
            models=("directory", "hub"),
            install="SGLang: pip install sglang, in this environment or with `sglang` in the PATH",
            package="sglang",
            launcher="sglang.launch_server",
            command=("sglang", "serve"),
        ),
        EngineChoice(
            name="llama.cpp",
            models=("gguf", "gguf-repository"),
            install="llama.cpp: https://github.com/ggml-org/llama.cpp/releases, with "
            "`llama-server` in the PATH",
            best_for=("gguf",),
            command=("llama-server",),
        ),
        EngineChoice(
            name="ollama",
            models=("ollama",),
            install="Ollama: https://ollama.com/download",
            command=("ollama", "serve"),
        ),
        EngineChoice(
            name="mocker",
            models=("directory", "hub"),
            program="dynamo.mocker",
            keys={"reply": "echo"},
            automatic=False,
        ),
    )
}
"""By name; of several that can serve a model the first is chosen, after one that is best for it."""


def module_of(argv: Sequence[str]) -> str:
    """Return the Python module that ``argv`` runs, ``python -m module …``; "" for others."""
    return argv[2] if len(argv) > 2 and argv[1] == "-m" else ""


def settings_groups(module: str | None) -> tuple[type[Any], ...]:
    """Return the classes of the options of ``module``; () for other programs."""
    program = PROGRAMS.get(module or "")
    return program.groups() if program is not None else ()


def memory_share(module: str | None) -> float:
    """Return the part of each GPU that the engine of ``module`` reserves; 0 without such one."""
    program = PROGRAMS.get(module or "")
    return program.memory_share if program is not None else 0.0


def engines_for(kind: str) -> tuple[EngineChoice, ...]:
    """Return the engines that can serve a ``kind`` of model, the preferred one first."""
    able = (engine for engine in ENGINES.values() if kind in engine.models)
    return tuple(sorted(able, key=lambda engine: kind not in engine.best_for))


def _imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"dynamo.{module}"), name)
