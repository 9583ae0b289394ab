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
from typing import TYPE_CHECKING, Any

from dynamo.config import environ
from dynamo.config.check import check_options, did_you_mean
from dynamo.config.option import fields_of
from dynamo.config.parser import option_of
from dynamo.config.programs import (
    ATTACH,
    EXTRAS,
    MODEL_PROGRAMS,
    PLANNER,
    PROGRAMS,
    Program,
    settings_groups,
)
from dynamo.config.runtime import RuntimeSettings
from dynamo.config.system import TracingSettings
from dynamo.config.worker import EndpointSettings, WorkerSettings
from dynamo.errors import ConfigError, DynamoError
from dynamo.serve.graph.graph import Graph
from dynamo.serve.graph.service import PYTHON, Service
from dynamo.setup.model_checks import model_problems

if TYPE_CHECKING:
    from dynamo.config.frontend import FrontendSettings
    from dynamo.config.router import RouterProcessSettings, RouterSettings

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
        problems += model_problems(graph)
    problems += _second_planners(graph)
    _raise(graph, problems)


def override_hint(graph: Graph, flag: str) -> str:
    """Return how to give ``flag``, an option of services of ``graph``; "" if none has it."""
    owners = [
        service.name
        for service in graph.services
        for group in settings_groups(service.program)
        if any(flag in option_of(field).flags for field in fields_of(group))
    ]
    options = " or ".join(f"--{owner}.{flag.lstrip('-')}=VALUE" for owner in owners)
    return f"for a service: {options}" if owners else ""


def check_engines(graph: Graph) -> None:
    """Raise ConfigError with every service whose engine, or an extra it needs, is not installed."""
    problems = [
        problem
        for service in graph.services
        for problem in (*_missing_engine(service), *_missing_extras(service))
    ]
    _raise(graph, problems)


def _missing_extras(service: Service) -> Iterator[str]:
    """Find missing packages that settings of ``service`` need: each of its starts would fail."""
    program = PROGRAMS.get(service.program or "")
    is_python = service.program is not None or {*service.command[:1]} & {*PYTHON}
    if not is_python or all(_exists(extra.package) for extra in EXTRAS):
        return
    # A worker of another program has its own flags, and the variables of the runtime.
    own = (RuntimeSettings,) if program is None else program.checked_groups()
    words = {} if program is None else service.words
    checked = check_options((*own, TracingSettings), words, {**environ(), **service.envs})
    for settings in checked.settings or ():
        for extra in EXTRAS:
            option = extra.needed_by(settings)
            if option and not _is_there(service, extra.package):
                yield (
                    f"{service.origin}: {service.name}: {option} needs {extra.package}, which is "
                    f"not installed: {extra.install}"
                )


def _missing_engine(service: Service) -> Iterator[str]:
    where = f"{service.origin}: {service.name}"
    program = PROGRAMS.get(service.program or "")
    package = program.package if program is not None else ""
    if program is not None and package and not _is_there(service, package):
        yield (
            f"{where}.run: {program.module} needs {package}, which is not installed: "
            f"{program.install}"
        )
    if service.program == ATTACH:
        command = service.options.get("exec")
        words = command.split() if isinstance(command, str) else []
        if words and shutil.which(words[0], path={**environ(), **service.envs}.get("PATH")) is None:
            yield f"{where}.exec: no program {words[0]}: install it, or give its path"


def check_engine_flags(graph: Graph, directory: Path) -> None:
    """Raise ConfigError with the flags that an engine's own parser refuses, if it is installed.

    Takes about ten seconds for vLLM, as long as its import.
    """
    for program in PROGRAMS.values():
        services = {s.name: s for s in graph.services if s.program == program.module}
        if services and program.flags_check and _exists(program.package):
            _check_engine_flags(program, graph, services, directory)


def _check_engine_flags(
    program: Program, graph: Graph, services: Mapping[str, Service], directory: Path
) -> None:
    print("checking vLLM's flags (imports vLLM)", file=sys.stderr)
    done = subprocess.run(
        [sys.executable, "-m", program.flags_check],
        input=json.dumps({name: service.all_words for name, service in services.items()}),
        capture_output=True,
        text=True,
        cwd=directory,
        check=False,
    )
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise ConfigError(f"vLLM cannot be imported, so no worker of it can start: {last}")
    # The last line: an import may print lines before it.
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
    problems = [f"{where}.run: {text}" for text in _missing(service, env)]
    program = PROGRAMS.get(service.program or "")
    if program is None:
        return problems
    checked = check_options(program.checked_groups(), service.words, env)
    if not program.flags_check:  # the flags that are not ours go to its engine
        for key, flag in checked.unknown:
            subject = f"{_place(service, key)}" + ("" if key == flag else f": --{flag}")
            hint = did_you_mean(flag, program.groups())
            problems.append(f"{subject} is not an option of {program.module}{hint}")
    elif "PYTHONPATH" not in service.envs:  # which may have another version of it
        for key, flag in checked.unknown:
            if text := program.unknown_flag([f"--{flag}"]):
                problems.append(f"{_place(service, key)}: {program.package} has no flag {text}")
    for problem in checked.problems:
        position = f"{_place(service, problem.key)} " if problem.key else f"{where}: "
        problems.append(position + problem.text)
    if not problems and checked.settings is not None:
        refused = _refused(service, program, checked.settings, env)
        problems += [f"{where}: {text}" for text in refused]
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
        if service.program == PLANNER
        and service.options.get("no-operation") is not True
        and "--no-operation" not in service.command
    ]
    for service in planners:
        if "kubernetes" in (service.options.get("environment"), *service.command):
            yield (
                f"{service.origin}: {service.name}: environment: kubernetes scales a cluster, and "
                "this graph starts workers on this machine: run the planner in the cluster "
                "(docs/kubernetes.md), or remove the key"
            )
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


def _worker_settings(service: Service, env: Mapping[str, str]) -> WorkerSettings | None:
    """Return the WorkerSettings of ``service``; None for other programs and wrong options."""
    groups = settings_groups(service.program)
    if WorkerSettings not in groups:
        return None
    settings = check_options(groups, service.words, env).settings
    return next((group for group in settings or () if isinstance(group, WorkerSettings)), None)


def _is_there(service: Service, package: str) -> bool:
    # Its own path may have the package: only its start shows that.
    return "PYTHONPATH" in service.envs or _exists(package)


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def _refused(
    service: Service, program: Program, settings: Sequence[Any], env: Mapping[str, str]
) -> Iterator[str]:
    """Yield what a program of ours refuses in options that are valid one by one."""
    for group, values in zip((*program.options, *program.variables), settings, strict=True):
        try:
            group.check(values)
            if isinstance(values, EndpointSettings):
                _check_worker(service, values, env)
        except DynamoError as error:
            yield error.message


def check_frontend(settings: FrontendSettings) -> None:
    """Read the key file and the certificate. Raises ConfigError."""
    if settings.api_key_file or settings.tls_cert_path:
        from dynamo.frontend.access import frontend_access

        frontend_access(settings)


def check_router(settings: RouterSettings) -> None:
    """Read the files of policies, and compare the settings of loads. Raises ConfigError."""
    if settings.policy_config is not None or settings.selection_policy is not None:
        from dynamo.config.router import with_policies
        from dynamo.router.modes.policy_types import check_policies

        check_policies(with_policies(settings).policies)
    if settings.prefill_load_model != "none" or settings.cost == "seconds":
        from dynamo.router.load.prefill_model import check_prefill_model

        check_prefill_model(settings)


def check_router_process(settings: RouterProcessSettings) -> None:
    """Check the endpoint of the workers. Raises ConfigError."""
    from dynamo.runtime.distributed.component import parse_endpoint

    if settings.endpoint is None:
        raise ConfigError("endpoint is missing; give that of the workers: dynamo.backend.generate")
    parse_endpoint(settings.endpoint)


def _check_worker(service: Service, worker: EndpointSettings, env: Mapping[str, str]) -> None:
    if worker.endpoint is not None:
        from dynamo.runtime.distributed.component import parse_endpoint

        parse_endpoint(worker.endpoint)
    if isinstance(worker, WorkerSettings):
        _check_apis_and_template(service, worker)
    if worker.model_path is None:
        if service.program != ATTACH:
            raise ConfigError("model-path is missing; give a directory or an id on Hugging Face")
    elif not all((Path(worker.model_path) / name).is_file() for name in _TOKENIZER_FILES):
        _check_model(worker.model_path, service, env)


def _check_apis_and_template(service: Service, worker: WorkerSettings) -> None:
    if "endpoint-types" in service.words or "dyn-endpoint-types" in service.words:
        from dynamo.llm.types import api_types  # takes 0.1 s, and few graphs have the key

        api_types(worker.endpoint_types)
    template = worker.custom_jinja_template
    if template is not None and not Path(template).is_file():
        raise ConfigError(f"custom-jinja-template {template}: no such file in {Path.cwd()}")


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
