"""``dynamo``: one command, one module per verb, imported on use."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import io
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dynamo import __version__
from dynamo.errors import ConfigError, DynamoError, InvalidArgument


class Verb(NamedTuple):
    """A verb of ``dynamo``.

    ``run`` is a module of ``dynamo.cli`` with ``main(argv)``, which returns the exit status, or
    ``module:function``; ``text`` is one line of help. ``options`` are the classes of its options
    without ``Settings``, for completions: those of ``cli.options``, others with their module. None:
    as the program ``dynamo.VERB``.
    """

    run: str
    text: str
    options: str | None = ""


VERBS = {
    "run": Verb("run", "serve a model: an id on Hugging Face, a directory, a GGUF file", "Run"),
    "remove": Verb("models", "take a model out of the running deployment", "LoadModel Deployment"),
    "init": Verb("init", "write the graph of a model: asks four questions", "Init"),
    "serve": Verb(
        "serve", "start the services of a graph and keep them running", "config.serve.Serve"
    ),
    "reload": Verb(
        "reload", "apply a changed graph to a running deployment", "config.serve.Reload"
    ),
    "doctor": Verb("doctor", "find what disturbs a deployment on this machine", "Doctor"),
    "ps": Verb("ps", "show the models, their workers, and what is wrong", "cli.ps.Ps"),
    "web": Verb("frontend_client:web", "print and open the web page of a deployment", "Web"),
    "state": Verb("state", "show or repair the statefile of a deployment", "State"),
    "top": Verb(
        "top", "show GPUs, models, workers and requests live, with keys to act", "Top Deployment"
    ),
    "logs": Verb("logs", "show the output of processes", "Logs Deployment"),
    "events": Verb(
        "logs:events",
        "list deaths, starts, decisions and operations with their users",
        "Events Deployment",
    ),
    "stop": Verb(
        "background", "end the running deployment; requests in flight finish", "Deployment"
    ),
    "restart": Verb(
        "operate:restart", "replace the processes of a worker or a service", "Operate Deployment"
    ),
    "drain": Verb(
        "operate:drain", "let workers finish their requests and exit", "Operate Deployment"
    ),
    "sleep": Verb("operate:sleep", "let workers free their GPU memory", "Operate Deployment"),
    "wake": Verb("operate:wake", "let workers that sleep serve again", "Operate Deployment"),
    "load": Verb("operate:load", "start a worker of a model that has none", "LoadModel Deployment"),
    "unload": Verb("operate:unload", "free the GPUs of a model", "LoadModel Deployment"),
    "list": Verb("disk:list_models", "list the models on disk: size, use, who serves them", "List"),
    "pull": Verb("disk:pull", "download a model", "Pull"),
    "rm": Verb("disk:remove", "delete a model from disk", "Delete"),
    "bench": Verb("bench", "load an OpenAI endpoint and measure it", "config.client.Bench"),
    "record": Verb(
        "record",
        "record live traffic: a trace, or with --content its bodies",
        "Record config.client.Client",
    ),
    "replay": Verb(
        "replay",
        "send recorded requests again, to another model",
        "ReplayRequest config.client.FrontendClient",
    ),
    "profile": Verb(
        "lab:profile", "measure a worker for the planner", "dynamo_lab.profiler.settings.Profile"
    ),
    "chat": Verb(
        "chat", "chat with a model of the running deployment", "Chat config.client.Client"
    ),
    "route": Verb(
        "route",
        "show which worker a prompt would go to, and why",
        "Route config.client.FrontendClient",
    ),
    "explain": Verb(
        "explain",
        "show why a request went to its worker, and its times",
        "RequestExplain config.client.FrontendClient",
    ),
    "planner": Verb("planner", "add and remove workers as their load changes", None),
    "key": Verb("key", "add, list and remove the API keys of a deployment", "Key"),
    "install-service": Verb(
        "install_service", "write a systemd unit for a graph", "InstallService"
    ),
    "completion": Verb("completion", "print a script that completes commands by Tab", "Completion"),
    "version": Verb("main:version", "print versions"),
}
"""Each raises DynamoError and OSError, which are printed here."""
SUBVERBS = {
    "planner": {
        "explain": "config.planner.Explain Deployment",
        "replay": "dynamo_lab.simulation.settings.Replay config.planner.Planner",
        "set": "config.planner.Set Deployment",
        "pause": "Deployment",
        "resume": "Deployment",
    }
}
"""Verb → the words that may follow it and have options of their own → these."""

_PARTS = ("uvloop", "httptools", "pyzmq", "circus", "tokenizers", "fastokens")
_RIVALS = ("ai-dynamo", "ai-dynamo-runtime")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb in ``argv`` (default: the command line); return its exit status."""
    _open_standard_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    verb = words.pop(0) if words else "--help"
    if verb in ("-V", "--version"):
        verb = "version"
    try:
        try:
            status = _run(verb, words)
        except SystemExit:  # of argparse, after --help
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `… | head`: the reader closed the pipe
        # The interpreter flushes stdout once more at its exit, and would print a second error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (DynamoError, OSError) as error:
        # Here, because it imports logging: each Tab of a shell imports this module.
        from dynamo.observability.logs import terminal_text

        print(f"dynamo {verb}: {terminal_text(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | InvalidArgument) else 1
    return status


def version(argv: Sequence[str] | None = None) -> int:
    """Print versions, for a bug report; return 0."""
    # Imported here: completions at each Tab need none of it.
    import platform
    from importlib import metadata

    from dynamo.config import load
    from dynamo.revision import revision

    load("dynamo version", "Print versions.", [], argv)
    print(f"dynamo-appliance {__version__} ({revision()})")
    print(f"python {platform.python_version()} on {platform.platform()}")
    for name in _PARTS:
        try:
            print(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            print(f"{name} is missing")
    return 0


def rival_distribution() -> str | None:
    """Return the installed distribution of NVIDIA's Dynamo, if any: it uses the same package."""
    # By the names of directories: importlib.metadata takes longer to import than `dynamo ps` runs.
    for directory in sys.path:
        try:
            names = os.listdir(directory or os.curdir)  # noqa: PTH208 - pathlib is slower
        except OSError:
            continue
        for name in names:
            distribution = name.partition("-")[0].lower().replace("_", "-")
            if distribution in _RIVALS and name.endswith((".dist-info", ".egg-info")):
                return distribution
    return None


def _run(verb: str, words: list[str]) -> int:
    if verb in ("-h", "--help", "help"):
        print(_help())
        return 0
    if verb == "__complete":  # asked by the shell at each Tab: before anything that takes time
        return int(importlib.import_module("dynamo.cli.completion").answer(words))
    if verb not in VERBS:
        close = difflib.get_close_matches(verb, VERBS, 3)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        print(f"dynamo: unknown verb {verb!r}{hint}\n\n{_help()}", file=sys.stderr)
        return 2
    module, _, function = VERBS[verb].run.partition(":")
    run = getattr(importlib.import_module(f"dynamo.cli.{module}"), function or "main")
    rival = rival_distribution()
    if rival:
        print(
            f"dynamo: {rival} is also installed in this environment, and both provide the Python "
            "package 'dynamo', so neither works reliably.\n"
            "Install dynamo-appliance in a separate environment, or: "
            f"pip uninstall {rival} && pip install --force-reinstall dynamo-appliance",
            file=sys.stderr,
        )
        return 2
    with _interruptible():
        return int(run(words))


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt in the block, which cleans up; see ``dynamo.__main__``."""
    before = signal.getsignal(signal.SIGINT)
    # Ignored with nohup or &, the signal stays ignored.
    if before is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _open_standard_streams() -> None:
    """Make the standard streams usable: open, and without errors for what cannot be encoded.

    The null device is opened for each that is closed. Otherwise the first socket or file gets its
    descriptor number, and receives printed text. A locale of ASCII alone shows ``?`` for others.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() != "utf-8":
            stream.reconfigure(errors="replace")


def _help() -> str:
    width = max(map(len, VERBS))
    lines = [f"  {verb:<{width}}  {text}" for verb, (_, text, _) in VERBS.items()]
    return "\n".join(
        (
            f"dynamo {__version__}: an LLM-serving appliance for one GPU box",
            "",
            "usage: dynamo VERB [arguments]",
            *lines,
            "",
            "'dynamo VERB --help' shows its options.",
        )
    )
