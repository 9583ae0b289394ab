"""What the command of a service says about it: its facts, as the arbiter writes them. Pure.

Only the plan of a graph reads commands, and a reader of a statefile that our arbiter did not write.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dynamo.config.programs import ATTACH, module_of
from dynamo.errors import ConfigError
from dynamo.prometheus_names import name_prefix
from dynamo.runtime.process.paths import expanded
from dynamo.serve.graph.engine_gpus import engine_flags, flag_values
from dynamo.serve.graph.facts import DECODE, PREFILL, ListenFacts, ServiceFacts
from dynamo.serve.graph.service import MODEL_KEYS, declares_model, serves_model

_NAME_FLAGS = ("served-model-name", "model-name")
_MODEL_FLAGS = ("model", "model-path")
_ADAPTER_FLAGS = {"lora-modules", "lora-dir", "enable-lora"}


def service_args(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return ``ServiceArgs`` of a service in a graph as it is written; {} without them."""
    service = config.get(name)
    args = service.get("ServiceArgs") if isinstance(service, Mapping) else None
    return args if isinstance(args, Mapping) else {}


def service_facts(argv: Sequence[str], args: Mapping[str, Any], directory: Path) -> ServiceFacts:
    """Return the facts of a service with this command and ``ServiceArgs``, run in ``directory``.

    Values of wrong types, which a graph that was checked does not have, do not count.
    """
    program = module_of(argv)
    registers_model = serves_model(program, declares_model(args))
    facts = ServiceFacts(
        program=program,
        registers_model=registers_model,
        gpus=_graph_gpus(args),
        workers=1 if (workers := _integer(args.get("workers"))) is None else workers,
        minimum=_minimum(args),
        maximum=_integer(args.get("max")),
        priority=_integer(args.get("priority")) or 0,
        model_keys={key: args[key] for key in MODEL_KEYS if args.get(key) is not None},
    )
    if registers_model:
        flags = _flags(argv)
        facts.model = model_name(argv, directory)
        several = "," in flags.get("served-model-name", "")
        adapters = flag_values(argv).keys() & _ADAPTER_FLAGS
        facts.further_models = several or not facts.model or bool(adapters)
        facts.pool = PREFILL if flags.get("disaggregation-mode") == PREFILL else DECODE
        facts.memory_share = _memory_share(argv, program, directory)
    return facts


def model_name(argv: Sequence[str], directory: Path) -> str:
    """Return the name under which a worker of this command registers its model, "" if unknown.

    A model in a directory has that directory's name; a relative path begins at ``directory``.
    """
    flags = _flags(argv)
    name = next((flags[flag] for flag in _NAME_FLAGS if flag in flags), "")
    if module_of(argv) == ATTACH:  # NAME=SERVER_NAME,...
        name = name.partition(",")[0].partition("=")[0].strip()
    source = next((flags[flag] for flag in _MODEL_FLAGS if flag in flags), "")
    if name or not source:
        return name
    path = expanded(source)
    is_local = path.is_absolute() or source.startswith(".") or (directory / path).is_dir()
    return (directory / path).resolve().name if is_local else source


def listen_facts(argv: Sequence[str], env: Mapping[str, str], directory: str) -> ListenFacts:
    """Return where a frontend with this command and environment listens, run in ``directory``."""
    flags = _flags(argv)

    def path(flag: str, variable: str) -> str:
        value = flags.get(flag) or env.get(variable)
        return str(Path(directory) / value) if value else ""

    number = flags.get("http-port") or env.get("DYN_HTTP_PORT") or "8000"
    facts = ListenFacts(
        host=flags.get("http-host") or env.get("DYN_HTTP_HOST") or "127.0.0.1",
        tls_cert_path=path("tls-cert-path", "DYN_TLS_CERT_PATH"),
        api_key_file=path("api-key-file", "DYN_API_KEY_FILE"),
        metrics_prefix=flags.get("metrics-prefix")
        or env.get("DYN_METRICS_PREFIX")
        or name_prefix.FRONTEND,
    )
    if number.isdecimal() and 0 < int(number) < 65536:
        facts.port = int(number)
    else:
        facts.problem = f"the frontend's http-port must be between 1 and 65535, got {number}"
    return facts


def _flags(argv: Sequence[str]) -> dict[str, str]:
    """Return the flags of ``argv`` that have a value."""
    return {name: value for name, value in flag_values(argv).items() if isinstance(value, str)}


def _memory_share(argv: Sequence[str], program: str, directory: Path) -> float:
    try:
        return engine_flags(argv, directory).memory_share(program)
    except ConfigError:  # the file of --config; the engine reports it
        return 0.0


def _graph_gpus(args: Mapping[str, Any]) -> float | None:
    resources = args.get("resources")
    try:
        return float(resources["gpu"]) if isinstance(resources, Mapping) else None
    except (KeyError, TypeError, ValueError):
        return None


def _minimum(args: Mapping[str, Any]) -> int | None:
    """Return the workers that the planner keeps: none of a model with an idle timeout."""
    stated = _integer(args.get("min"))
    return 0 if stated is None and args.get("idle_timeout") is not None else stated


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
