"""Checks the services of a graph before any of them is started: programs, options, models.

Every problem of every service is reported at once. In a service whose program is ours, each key
must be an option with a valid value; of other programs only the existence is checked.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dynamo.config import environ
from dynamo.config.check import check_options, did_you_mean
from dynamo.config.modules import passes_unknown, settings_groups, variable_groups
from dynamo.config.option import fields_of
from dynamo.errors import ConfigError, DynamoError
from dynamo.serve.graph.graph import Graph
from dynamo.serve.graph.service import MODEL_PROGRAMS, PYTHON, Service

_ENGINES = {"dynamo.vllm": ("vllm", "pip install 'dynamo-appliance[vllm]'")}
_TOKENIZER_FILES = ("config.json", "tokenizer.json")


def check_services(graph: Graph, directory: Path, env: Mapping[str, str]) -> None:
    """Raise ConfigError with every problem of ``graph``, whose services run in ``directory``.

    ``env`` is what the services get besides the environment of this process.
    """
    problems: list[str] = []
    with contextlib.chdir(directory):  # relative paths are relative to where a service runs
        for service in graph.services:
            problems += _problems(service, {**environ(), **env, **service.envs})
        if sum(service.program in MODEL_PROGRAMS for service in graph.services) > 1:
            problems += _other_models(graph, env)
    problems += _second_planners(graph)
    _raise(graph, problems)


def override_hint(graph: Graph, flag: str) -> str:
    """Return how to give ``flag``, an option of services of ``graph``; "" if none has it."""
    owners = [
        service.name
        for service in graph.services
        for group in settings_groups(service.program or "") or ()
        if any(flag in field.metadata["option"].flags for field in fields_of(group))
    ]
    name = flag.lstrip("-")
    return f"for a service: {' or '.join(f'--{one}.{name}=VALUE' for one in owners)}" * bool(owners)


def check_engines(graph: Graph) -> None:
    """Raise ConfigError with every service whose engine is not installed."""
    _raise(graph, [problem for service in graph.services for problem in _missing_engine(service)])


def _missing_engine(service: Service) -> Iterator[str]:
    where = f"{service.origin}: {service.name}"
    package, remedy = _ENGINES.get(service.program or "", ("", ""))
    if package and "PYTHONPATH" not in service.envs and not _exists(package):
        yield f"{where}.run: {service.program} needs {package}, which is not installed: {remedy}"
    if service.program == "dynamo.attach":
        command = service.options.get("exec")
        words = command.split() if isinstance(command, str) else []
        if words and shutil.which(words[0], path={**environ(), **service.envs}.get("PATH")) is None:
            yield f"{where}.exec: no program {words[0]}: install it, or give its path"


def check_engine_flags(graph: Graph, directory: Path) -> None:
    """Raise ConfigError with the flags that vLLM's own parser refuses, if vLLM is installed.

    Takes about ten seconds, as long as importing vLLM does.
    """
    services = {s.name: s for s in graph.services if s.program == "dynamo.vllm"}
    if not services or not _exists("vllm"):
        return
    print("checking vLLM's flags (imports vLLM)", file=sys.stderr)
    done = subprocess.run(
        [sys.executable, "-m", "dynamo.vllm.check"],
        input=json.dumps({name: service.all_words for name, service in services.items()}),
        capture_output=True,
        text=True,
        cwd=directory,
        check=False,
    )
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise ConfigError(f"vLLM cannot be imported, so no worker of it can start: {last}")
    problems = json.loads(done.stdout.strip().rpartition("\n")[2])
    lines = [f"{services[name].origin}: {name}: vLLM: {text}" for name, text in problems.items()]
    _raise(graph, lines)


def _raise(graph: Graph, problems: Sequence[str]) -> None:
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise ConfigError(f"{len(problems)} problems in {graph.source}:{lines}")


def _problems(service: Service, env: Mapping[str, str]) -> list[str]:
    where = f"{service.origin}: {service.name}"
    program = service.program
    problems = [f"{where}.run: {text}" for text in _missing(service, env)]
    groups = settings_groups(program) if program is not None else None
    if program is None or groups is None:
        return problems
    found = check_options((*groups, *variable_groups(program)), service.words, env)
    if not passes_unknown(program):
        for key, flag in found.unknown:
            subject = f"{_place(service, key)}" + ("" if key == flag else f": --{flag}")
            hint = did_you_mean(flag, groups)
            problems.append(f"{subject} is not an option of {program}{hint}")
    for problem in found.problems:
        place = f"{_place(service, problem.key)} " if problem.key else f"{where}: "
        problems.append(place + problem.text)
    if not problems and found.settings is not None:
        settings = {type(group).__name__: group for group in found.settings}
        problems += [f"{where}: {text}" for text in _refused(service, settings, env)]
    return problems


def _place(service: Service, key: str) -> str:
    return f"{service.origins.get(key, service.origin)}: {service.name}.{key}"


def _missing(service: Service, env: Mapping[str, str]) -> Iterator[str]:
    """Find out whether the program of ``service`` is installed."""
    name = service.command[0] if service.command else ""
    is_searched = name and "/" not in name and name not in PYTHON
    if is_searched and shutil.which(name, path=env.get("PATH")) is None:
        yield f"no program {name}"
    module = service.program
    # Only our own modules: others may lie beside the graph or need a PYTHONPATH of the service.
    if module is not None and module.startswith("dynamo.") and not _exists(module):
        yield (
            f"no Python module {module}; "
            "a program is written as a list, e.g. run: [my-program, --flag]"
        )


def _second_planners(graph: Graph) -> Iterator[str]:
    """Find planners beside the first one, which would undo its decisions."""
    planners = [
        service
        for service in graph.services
        if service.program == "dynamo.planner"
        and service.options.get("no-operation") is not True
        and "--no-operation" not in service.command
    ]
    for service in planners:
        if service.workers > 1:
            yield f"{service.origin}: {service.name}: one process scales all; set workers: 1"
    for service in planners[1:]:
        yield (
            f"{service.origin}: {service.name} and {planners[0].name} would scale the same "
            "services; remove one, or set no-operation: true"
        )


def _other_models(graph: Graph, env: Mapping[str, str]) -> Iterator[str]:
    """Find local models that differ but have one name: a frontend gives requests to one of them."""
    first: dict[str, tuple[Service, Any]] = {}
    for service in graph.services:
        worker = _worker_settings(service, {**environ(), **env, **service.envs})
        if worker is None or not worker.model_path or not Path(worker.model_path).is_dir():
            continue
        name = worker.model_name or Path(worker.model_path).resolve().name
        other, theirs = first.setdefault(name, (service, worker))
        if _prompt_files(worker, theirs) != _prompt_files(theirs, worker):
            yield (
                f"{service.origin}: {service.name} and {other.name} have different models of one "
                f"name, {name!r}: {worker.model_path} and {theirs.model_path}; give one of them "
                "another served-model-name"
            )


def _prompt_files(worker: Any, other: Any) -> str:
    """Return the checksum of the files that make prompts; "" if ``other`` has the same ones."""
    path, template = worker.model_path, worker.custom_jinja_template
    if (path, template) == (other.model_path, other.custom_jinja_template):
        return ""
    # Imported here: it takes 0.1 s, and most graphs have one directory for each name.
    from dynamo.llm.model_directory import ModelDirectory

    try:
        return ModelDirectory(Path(path)).checksum(Path(template).read_text() if template else None)
    except OSError:
        return ""  # reported with the service


def _worker_settings(service: Service, env: Mapping[str, str]) -> Any:
    """Return the WorkerSettings of ``service``; None for other programs and wrong options."""
    groups = settings_groups(service.program or "") or ()
    names = [group.__name__ for group in groups]
    if "WorkerSettings" not in names:
        return None
    settings = check_options(groups, service.words, env).settings
    return settings[names.index("WorkerSettings")] if settings else None


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def _refused(
    service: Service, settings: Mapping[str, Any], env: Mapping[str, str]
) -> Iterator[str]:
    """Find what a program of ours refuses in options that are valid one by one."""
    for check in (
        *(_check_frontend, _check_router, _check_router_process),
        *(_check_mocker, _check_attach, _check_worker),
    ):
        try:
            check(service, settings, env)
        except DynamoError as error:
            yield error.message


def _check_frontend(
    _service: Service, settings: Mapping[str, Any], _env: Mapping[str, str]
) -> None:
    """Read the key file and the certificate."""
    frontend = settings.get("FrontendSettings")
    if frontend is not None and (frontend.api_key_file or frontend.tls_cert_path):
        from dynamo.frontend.access import frontend_access

        frontend_access(frontend)


def _check_router(_service: Service, settings: Mapping[str, Any], _env: Mapping[str, str]) -> None:
    router = settings.get("RouterSettings")
    if router is not None and router.prefill_load_model == "fitted":
        from dynamo.router.load.prefill_model import prefill_model

        prefill_model(router)


def _check_router_process(
    _service: Service, settings: Mapping[str, Any], _env: Mapping[str, str]
) -> None:
    process = settings.get("RouterProcessSettings")
    if process is None:
        return
    from dynamo.runtime.endpoints.component import parse_endpoint

    if process.endpoint is None:
        raise ConfigError("endpoint is missing; give that of the workers: dynamo.backend.generate")
    parse_endpoint(process.endpoint)


def _check_mocker(_service: Service, settings: Mapping[str, Any], _env: Mapping[str, str]) -> None:
    mocker = settings.get("MockerSettings")
    if mocker is not None:
        from dynamo.mocker.arguments import engine_shape, with_extra_arguments

        engine_shape(with_extra_arguments(mocker))


def _check_attach(_service: Service, settings: Mapping[str, Any], _env: Mapping[str, str]) -> None:
    attach = settings.get("AttachSettings")
    if attach is not None:
        from dynamo.attach.worker import check_settings

        check_settings(attach)


def _check_worker(service: Service, settings: Mapping[str, Any], env: Mapping[str, str]) -> None:
    worker = settings.get("WorkerSettings") or settings.get("AttachSettings")
    if worker is None:
        return
    if worker.endpoint is not None:
        from dynamo.runtime.endpoints.component import parse_endpoint

        parse_endpoint(worker.endpoint)
    if "endpoint-types" in service.words or "dyn-endpoint-types" in service.words:
        from dynamo.llm.types import api_types  # takes 0.1 s, and few graphs have the key

        api_types(worker.endpoint_types)
    template = getattr(worker, "custom_jinja_template", None)  # attach has none
    if template is not None and not Path(template).is_file():
        raise ConfigError(f"custom-jinja-template {template}: no such file in {Path.cwd()}")
    if worker.model_path is None:
        if service.program != "dynamo.attach":
            raise ConfigError("model-path is missing; give a directory or an id on Hugging Face")
    elif not all((Path(worker.model_path) / name).is_file() for name in _TOKENIZER_FILES):
        _check_model(worker.model_path, service, env)


def _check_model(source: str, service: Service, env: Mapping[str, str]) -> None:
    """Raise ConfigError if no worker can find the model ``source``; uses no network."""
    # Imported here: it takes 0.1 s, and most graphs name a complete local directory.
    from dynamo.llm.model_source import is_hub_id, resolve_model

    other_cache = any(name.startswith("HF_") for name in service.envs)
    offline = env.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")
    if is_hub_id(source) and (other_cache or not offline):
        return  # the worker downloads it, or reports that it cannot
    try:
        model = resolve_model(source, download=False)
        if not (model.is_gguf and "tokenizer" in service.options):
            model.directory().require_worker_files()
    except ConfigError as error:
        raise ConfigError(f"model-path: {error.message} (looked from {Path.cwd()})") from None
