"""Options of ``dynamo run``, ``init`` and ``install-service``."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.config.option import option

__all__ = [
    "ENGINES",
    "GraphChoices",
    "InitSettings",
    "InstallServiceSettings",
    "RunSettings",
]

ENGINES = ("vllm", "sglang", "llama.cpp", "ollama", "mocker")
"""Names of engines; all but the mocker run real models."""


@dataclass(frozen=True, kw_only=True)
class GraphChoices:
    """the model, its engine and where it is served"""

    model: str = option(
        "",
        "model",
        help="a directory, a GGUF file, an id on Hugging Face (Qwen/Qwen3-0.6B) or a model of "
        "Ollama (qwen3:0.6b)",
    )
    engine: str | None = option(
        None, "--engine", choices=ENGINES, help="default: the best one that is installed"
    )
    served_model_name: str | None = option(
        None, "--served-model-name", "--name", metavar="NAME", help="name of the model in the API"
    )
    workers: int = option(1, "--workers", minimum=1, maximum=1024, help="copies of the model")
    gpus_per_worker: int | None = option(
        None,
        "--gpus-per-worker",
        minimum=0,
        maximum=64,
        help="GPUs that one copy is split over; default: 1 if the box has GPUs",
    )
    http_host: str = option(
        "127.0.0.1", "--host", "--http-host", env="DYN_HTTP_HOST", help="address to listen on"
    )
    http_port: int = option(
        8000,
        "--port",
        "--http-port",
        env="DYN_HTTP_PORT",
        minimum=1,
        maximum=65535,
        help="port to listen on",
    )
    namespace: str = option(
        "dynamo", "--namespace", env="DYN_NAMESPACE", help="namespace of the deployment"
    )


@dataclass(frozen=True, kw_only=True)
class RunSettings(GraphChoices):
    """run: the model, its engine and where it is served"""

    dry_run: bool = option(False, "--dry-run", help="print the graph, check it and exit")
    write: str | None = option(
        None, "--write", metavar="FILE", help="write the graph to this new file and exit"
    )
    quiet: bool = option(
        False, "--quiet", help="show only messages of dynamo, not the output of the services"
    )


@dataclass(frozen=True, kw_only=True)
class InitSettings(GraphChoices):
    """init: answers that are not asked for, and the file"""

    workers: int | None = option(  # type: ignore[assignment]
        None, "--workers", minimum=1, maximum=1024, help="copies of the model; default: asked for"
    )
    access: str | None = option(
        None,
        "--access",
        choices=("local", "keys", "open"),
        help="who may use it: this machine, the network with API keys, the network without keys",
    )
    write: str = option("graph.yaml", "--write", metavar="FILE", help="the file to write")
    yes: bool = option(False, "--yes", help="ask nothing: take the defaults that are found")


@dataclass(frozen=True, kw_only=True)
class InstallServiceSettings:
    """install-service: the graph, and how systemd runs it"""

    graph: str = option("graph.yaml", "graph", help="YAML file to serve")
    name: str = option("dynamo", "--name", help="name of the unit, without .service")
    user: bool = option(
        False, "--user", help="a unit of your own systemd manager: needs no root, has no hardening"
    )
    run_as: str | None = option(
        None,
        "--run-as",
        metavar="USER",
        help="user that runs it; default: you, also under sudo",
    )
    graceful_timeout_s: float = option(
        30.0,
        env="DYN_SERVE_GRACEFUL_TIMEOUT_S",
        minimum=0.0,
        help="seconds a process may take to finish its work, as for dynamo serve",
    )
    print_only: bool = option(False, "--print", help="print the unit, write nothing")
    directory: str | None = option(
        None,
        "--directory",
        metavar="DIR",
        help="where to write it; default: /etc/systemd/system, with --user ~/.config/systemd/user",
    )
