"""Checks what a graph says about its models: aliases, groups, and fields of requests. Pure, but for
the directories that name models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dynamo.config.programs import ATTACH, MODEL_PROGRAMS, PLANNER
from dynamo.errors import ConfigError
from dynamo.serve.graph.command import model_name
from dynamo.serve.graph.graph import Graph
from dynamo.serve.graph.service import MODEL_KEYS, SCALING_KEYS, Service


def model_problems(graph: Graph) -> Iterator[str]:
    """Yield what is wrong with ``ServiceArgs`` of models, one text for each problem."""
    services = [service for service in graph.services if service.declares_model]
    if not services:
        return
    for service in services:
        if not service.serves_model:
            keys = ", ".join((*SCALING_KEYS, *MODEL_KEYS))
            yield (
                f"{_place(service)}: {keys} are for services that serve a model, not "
                f"{service.program}"
            )
        elif not _model(service) and service.model_args.aliases:
            yield (
                f"{_place(service)}.aliases needs served-model-name: without it, the name of the "
                "model is known only when its server runs"
            )
        elif service.program != ATTACH and service.program in MODEL_PROGRAMS:
            yield from _wrong_fields(service)
    models = _models(graph)
    yield from _wrong_aliases(models)
    yield from _wrong_groups(models)


def model_warnings(graph: Graph) -> Iterator[str]:
    """Yield what has no effect, because no planner of the graph does it."""
    if any(service.program == PLANNER for service in graph.services):
        return
    for service in graph.services:
        args = service.model_args
        keys = [key for key in ("idle_timeout", "group") if getattr(args, key) not in (None, ())]
        if keys:
            have = "have" if len(keys) > 1 else "has"
            yield (
                f"{service.name}: {' and '.join(keys)} {have} no effect without a planner: add a "
                "service Planner: {run: dynamo.planner}"
            )


def _models(graph: Graph) -> Mapping[str, Sequence[Service]]:
    """Return the services of each model, by its name."""
    models: dict[str, list[Service]] = {}
    for service in graph.services:
        if service.serves_model:
            models.setdefault(_model(service) or service.name, []).append(service)
    return models


def _model(service: Service) -> str:
    argv = ("python", "-m", service.program or "", *service.command, *service.flags)
    return model_name(argv, Path())


def _place(service: Service) -> str:
    return f"{service.origin}: {service.name}.ServiceArgs"


def _wrong_fields(service: Service) -> Iterator[str]:
    args = service.model_args
    if not args.defaults and not args.forbid:
        return
    from dynamo.frontend.prompt.field_rules import check_rules  # 0.1 s, and few graphs have them

    try:
        check_rules(args.defaults, args.forbid)
    except ConfigError as error:
        yield f"{_place(service)}.{error.message.removeprefix('ServiceArgs.')}"


def _wrong_aliases(models: Mapping[str, Sequence[Service]]) -> Iterator[str]:
    owners: dict[str, str] = {}
    for model, services in models.items():
        for service in services:
            for alias in service.model_args.aliases:
                where = f"{_place(service)}.aliases: {alias!r}"
                if alias == model:
                    yield f"{where} is the model's own name; leave it out"
                elif alias in models:
                    yield f"{where} is another model, of {models[alias][0].name}; choose another"
                elif owners.setdefault(alias, model) != model:
                    other = models[owners[alias]][0].name
                    yield f"{where} is an alias of {other} already; an alias has one model"


def _wrong_groups(models: Mapping[str, Sequence[Service]]) -> Iterator[str]:
    members: dict[str, list[str]] = {}
    for model, services in models.items():
        for group in sorted({name for service in services for name in service.model_args.group}):
            members.setdefault(group, []).append(model)
    for group, names in members.items():
        if len(names) < 2:
            continue
        served = [service for name in names for service in models[name]]
        for service in served:
            if service.scaling.minimum is None:
                yield (
                    f"{_place(service)}.group: models of {group!r} take turns, so each needs "
                    "idle_timeout, or min: 0"
                )
            elif service.scaling.minimum:
                yield (
                    f"{_place(service)}.min: is {service.scaling.minimum}, so no other model of "
                    f"group {group!r} would ever start; take the model out of the group"
                )
        # One service of each model: those of one model may be awake together.
        awake = {name: s for name in names for s in models[name] if s.workers}
        for service in list(awake.values())[1:]:
            first = next(iter(awake.values())).name
            yield (
                f"{_place(service)}.workers: {first} is awake at the start, and of group {group!r} "
                "one model is awake at a time; set workers: 0"
            )
