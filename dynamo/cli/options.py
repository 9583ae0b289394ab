"""The options of the verbs of ``dynamo``, but for ``ps`` and those that other programs share."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.config.option import argument, flag, option, variable
from dynamo.config.programs import ENGINES
from dynamo.protocols.status import CONTENT_MB

_NAMESPACE = "namespace of the deployment; default: DYN_NAMESPACE, else the only one"


@dataclass(frozen=True, kw_only=True)
class DeploymentSettings:
    """deployment: which one"""

    namespace: str | None = flag(None, help=_NAMESPACE)


@dataclass(frozen=True, kw_only=True)
class WebSettings(DeploymentSettings):
    """web: which deployment, and whether to open a browser"""

    open: bool = flag(
        True, help="open a browser, if this session has a display; --no-open prints alone"
    )


@dataclass(frozen=True, kw_only=True)
class StateSettings:
    """state: what to do, and with which deployment"""

    action: str = argument(
        "",
        choices=("show", "repair"),
        help="show: print the components; repair: make statefile and processes agree",
    )
    namespace: str | None = flag(None, help=_NAMESPACE)
    json: bool = flag(False, help="with show: print JSON")
    dry_run: bool = flag(False, help="with repair: only say what it would do")


@dataclass(frozen=True, kw_only=True)
class RouteSettings:
    """route: which prompt"""

    prompt: str = argument("", help="text of a prompt")
    prompt_file: str | None = flag(
        None, help="text of a prompt, or the JSON body of a chat or completion request; - for stdin"
    )
    model: str | None = flag(None, help="default: the frontend's first")
    explain: bool = flag(False, help="show all candidates and their cost")
    json: bool = flag(False, help="print the answer as JSON")


@dataclass(frozen=True, kw_only=True)
class RecordSettings:
    """record: how long, and what"""

    file: str | None = argument(None, metavar="FILE", help="the file to write, a new one")
    seconds: float | None = flag(
        None,
        minimum=0,
        exclusive_minimum=True,
        help="stop after so many seconds; default: at Ctrl-C",
    )
    requests: int | None = flag(
        None, minimum=1, help="stop after so many requests; default: at Ctrl-C"
    )
    model: str | None = flag(None, help="record this model only; default: all")
    content: bool = flag(
        False,
        help="record the bodies of requests and answers, for dynamo replay, instead of a trace; "
        "ends after --seconds (600) or --content-mb",
    )
    content_mb: int = flag(
        64, minimum=1, maximum=CONTENT_MB, help="end a recording of content after so many MiB"
    )


@dataclass(frozen=True, kw_only=True)
class ReplayRequestSettings:
    """replay: which requests, to which model"""

    file: str | None = argument(None, metavar="FILE", help="a file of dynamo record --content")
    model: str | None = flag(None, help="send them to this model; default: the recorded one")
    request: str | None = flag(None, help="only requests with this text in their id; default: all")
    json: bool = flag(False, help="print a JSON object for each, with both answers")


@dataclass(frozen=True, kw_only=True)
class OperateSettings:
    """operate: which processes"""

    name: str = argument(
        "", help="a worker, such as dynamo_Worker_1; a service or a model for all of its workers"
    )


@dataclass(frozen=True, kw_only=True)
class LoadModelSettings:
    """load: which model"""

    model: str = argument("", help="name of a model of the graph")


@dataclass(frozen=True, kw_only=True)
class ListSettings:
    """list: how to print it"""

    json: bool = flag(False, help="print all that is known as JSON")


@dataclass(frozen=True, kw_only=True)
class PullSettings:
    """pull: which model"""

    model: str = argument(
        "",
        help="an id on Hugging Face, a GGUF file there (org/name/file.gguf, org/name:Q4_K_M), or a "
        "model of Ollama",
    )
    verify: bool = flag(False, help="compare with the checksums what was downloaded earlier, too")
    json: bool = flag(False, help="print the progress as JSON, a line a second")


@dataclass(frozen=True, kw_only=True)
class DeleteSettings:
    """rm: which model"""

    model: str = argument("", help="a name in dynamo list")
    yes: bool = flag(False, "--yes", "-y", help="ask nothing")


@dataclass(frozen=True, kw_only=True)
class LogsSettings:
    """logs: of which processes, and how many lines"""

    name: str = argument("", help="a worker or a service; default: all, with their names")
    follow: bool = flag(
        False, "-f", "--follow", help="go on with new lines, beyond restarts and rotations"
    )
    number: int = flag(
        50, "-n", "--number", minimum=0, help="last lines of each process to show first"
    )


@dataclass(frozen=True, kw_only=True)
class EventsSettings:
    """events: which ones, and how"""

    follow: bool = flag(False, "-f", "--follow", help="go on with new events")
    json: bool = flag(False, help="print each event as a JSON object in a line")
    since: str = flag("1d", metavar="TIME", help="30m, 2h, 1d, or a local time: 2026-05-04T13:00")
    model: str = flag("", help="events of this model and its workers")
    name: str = flag("", help="events of this worker, service or key file")


@dataclass(frozen=True, kw_only=True)
class TopSettings:
    """top: how often"""

    once: bool = flag(False, help="print one frame and exit")
    interval_s: float = flag(
        1.0,
        "--interval",
        minimum=0.1,
        maximum=3600.0,
        metavar="SECONDS",
        help="time between frames",
    )
    api_key: str | None = option(
        None,
        env=("DYN_API_KEY", "OPENAI_API_KEY"),
        help="an operator's key, for the figures of a frontend that needs one",
    )


@dataclass(frozen=True, kw_only=True)
class KeySettings:
    """key: the name of the key, its role, and the file"""

    action: str = argument(
        "",
        choices=("add", "list", "remove"),
        help="add: make a key and print it, once; list: print names and roles; remove: revoke one",
    )
    name: str = argument(
        "", help="name of the key in metrics: letters, digits and . _ @ -, at most 64"
    )
    role: str = flag(
        "user",
        choices=("user", "operator"),
        help="operators may also set busy thresholds, explain decisions and call engine routes",
    )
    grants: str = flag(
        "",
        help="what a user's requests may ask of the router, separated by commas: priority=N, "
        "strict-priority=N, routing (workers, ranks, taints, weights), classes; default: nothing",
    )
    api_key_file: str | None = option(
        None,
        help="the file of the frontend, made with mode 0600 if it does not exist; default: that of "
        "the running deployment",
    )
    namespace: str | None = flag(None, help=_NAMESPACE)


@dataclass(frozen=True, kw_only=True)
class RequestExplainSettings:
    """explain: which request"""

    request: str = argument(
        "last",
        help="id of a request that has ended: that of the response, the x-request-id that you "
        "sent, or its first or last digits; default: the last request",
    )
    model_fit: bool = flag(
        False, help="show instead how fast routing in seconds expects workers to compute prompts"
    )
    json: bool = flag(False, help="print the record as JSON")


@dataclass(frozen=True, kw_only=True)
class DoctorSettings:
    """doctor: what to examine"""

    graph: str = argument(
        "", help="YAML file to check too; default: the graph of the running deployment"
    )
    namespace: str | None = flag(
        None, help="namespace of the deployment; default: the one in the graph, else DYN_NAMESPACE"
    )
    json: bool = flag(False, help="print the findings as JSON")


@dataclass(frozen=True, kw_only=True)
class CompletionSettings:
    """completion: for which shell"""

    shell: str = argument("", choices=("bash", "zsh", "fish"), help="your shell")


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """chat: with which model"""

    message: str = argument("", help="one message: print its answer alone")
    model: str | None = flag(None, help="default: the only one that the frontend serves")
    system: str | None = flag(None, metavar="TEXT", help="the system prompt")
    max_tokens: int | None = flag(
        None, minimum=1, help="end an answer after so many; default: the model's end"
    )


@dataclass(frozen=True, kw_only=True)
class GraphChoices:
    """the model, its engine and where it is served"""

    model: str = argument(
        "",
        help="a directory, a GGUF file, an id on Hugging Face (Qwen/Qwen3-0.6B) or a model of "
        "Ollama (qwen3:0.6b)",
    )
    engine: str | None = flag(
        None, choices=tuple(ENGINES), help="default: the best one that is installed"
    )
    served_model_name: str | None = flag(
        None, "--served-model-name", "--name", metavar="NAME", help="name of the model in the API"
    )
    workers: int = flag(1, minimum=1, maximum=1024, help="copies of the model")
    gpus_per_worker: int | None = flag(
        None,
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
    namespace: str = option("dynamo", help="namespace of the deployment")


@dataclass(frozen=True, kw_only=True)
class RunSettings(GraphChoices):
    """run: the model, its engine and where it is served"""

    others: tuple[str, ...] = argument(
        (), repeat=True, several=True, help="more models, served at the same address"
    )
    given: frozenset[str] = frozenset()
    """The names of the options that a flag or a variable has set."""
    lora: tuple[str, ...] = flag(
        (),
        repeat=True,
        several=True,
        metavar="NAME=DIRECTORY",
        help="LoRA adapters of the model, each a model with its name in the API; vLLM alone",
    )
    idle_timeout: str | None = flag(
        None,
        metavar="TIME",
        help="a model goes after so long without requests (15m, 1h, never) and comes back with the "
        "next one; at the start, those to --keep are loaded, else the first one",
    )
    keep: tuple[str, ...] = flag(
        (),
        metavar="MODEL",
        repeat=True,
        help="with --idle-timeout: this model is loaded at the start and stays",
    )
    dry_run: bool = flag(False, help="print the graph, check it and exit")
    write: str | None = flag(None, metavar="FILE", help="write the graph to this new file and exit")
    detach: bool = flag(
        False, "-d", "--detach", help="go on in the background; return when the API is ready"
    )
    quiet: bool = flag(False, help="show only messages of dynamo, not the output of the services")


@dataclass(frozen=True, kw_only=True)
class InitSettings(GraphChoices):
    """init: answers that are not asked for, and the file"""

    workers: int | None = flag(  # type: ignore[assignment]
        None, minimum=1, maximum=1024, help="copies of the model; default: asked for"
    )
    access: str | None = flag(
        None,
        choices=("local", "keys", "open"),
        help="who may use it: this machine, the network with API keys, the network without keys",
    )
    ui: bool | None = flag(
        None, help="with --access keys: serve the web page, to operators; default: asked for"
    )
    write: str = flag("graph.yaml", metavar="FILE", help="the file to write")
    source: str | None = flag(
        None,
        "--from",
        metavar="FILE",
        help="convert this configuration of llama-swap instead of asking",
    )
    yes: bool = flag(False, help="ask nothing: take the defaults that are found")


@dataclass(frozen=True, kw_only=True)
class InstallServiceSettings:
    """install-service: the graph, and how systemd runs it"""

    graph: str = argument("graph.yaml", help="YAML file to serve")
    name: str = flag("dynamo", help="name of the unit, without .service")
    user: bool = flag(
        False, help="a unit of your own systemd manager: needs no root, has no hardening"
    )
    run_as: str | None = flag(
        None, metavar="USER", help="user that runs it; default: you, also under sudo"
    )
    graceful_timeout_s: float = variable(
        30.0,
        "DYN_SERVE_GRACEFUL_TIMEOUT_S",
        minimum=0.0,
        help="seconds a process may take to finish its work, as for dynamo serve",
    )
    print_only: bool = flag(False, "--print", help="print the unit, write nothing")
    directory: str | None = flag(
        None,
        metavar="DIR",
        help="where to write it; default: /etc/systemd/system, with --user ~/.config/systemd/user",
    )
