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

from dynamo import __version__
from dynamo.errors import ConfigError, DynamoError, InvalidArgument

VERBS = {
    "run": ("dynamo.cli.run", "serve a model: an id on Hugging Face, a directory, a GGUF file"),
    "remove": ("dynamo.cli.models", "take a model out of the running deployment"),
    "init": ("dynamo.cli.init", "write the graph of a model: asks four questions"),
    "serve": ("dynamo.cli.serve", "start the services of a graph and keep them running"),
    "reload": ("dynamo.cli.reload", "apply a changed graph to a running deployment"),
    "doctor": ("dynamo.cli.doctor", "find what disturbs a deployment on this machine"),
    "ps": ("dynamo.cli.ps", "show the models, their workers, and what is wrong"),
    "web": ("dynamo.cli.frontend_client:web", "print and open the web page of a deployment"),
    "state": ("dynamo.cli.state", "show or repair the statefile of a deployment"),
    "top": ("dynamo.cli.top", "show GPUs, models, workers and requests live, with keys to act"),
    "logs": ("dynamo.cli.logs", "show the output of processes"),
    "events": (
        "dynamo.cli.logs:events",
        "list deaths, starts, decisions and operations with their users",
    ),
    "stop": ("dynamo.cli.background", "end the running deployment; requests in flight finish"),
    "restart": ("dynamo.cli.operate:restart", "replace the processes of a worker or a service"),
    "drain": ("dynamo.cli.operate:drain", "let workers finish their requests and exit"),
    "sleep": ("dynamo.cli.operate:sleep", "let workers free their GPU memory"),
    "wake": ("dynamo.cli.operate:wake", "let workers that sleep serve again"),
    "load": ("dynamo.cli.operate:load", "start a worker of a model that has none"),
    "unload": ("dynamo.cli.operate:unload", "free the GPUs of a model"),
    "list": ("dynamo.cli.disk:list_models", "list the models on disk: size, use, who serves them"),
    "pull": ("dynamo.cli.disk:pull", "download a model"),
    "rm": ("dynamo.cli.disk:remove", "delete a model from disk"),
    "bench": ("dynamo.cli.bench", "load an OpenAI endpoint and measure it"),
    "record": ("dynamo.cli.record", "record live traffic: a trace, or with --content its bodies"),
    "replay": ("dynamo.cli.replay", "send recorded requests again, to another model"),
    "profile": ("dynamo.cli.lab:profile", "measure a worker for the planner"),
    "chat": ("dynamo.cli.chat", "chat with a model of the running deployment"),
    "route": ("dynamo.cli.route", "show which worker a prompt would go to, and why"),
    "explain": ("dynamo.cli.explain", "show why a request went to its worker, and its times"),
    "planner": ("dynamo.cli.planner", "add and remove workers as their load changes"),
    "key": ("dynamo.cli.key", "add, list and remove the API keys of a deployment"),
    "install-service": ("dynamo.cli.install_service", "write a systemd unit for a graph"),
    "completion": ("dynamo.cli.completion", "print a script that completes commands by Tab"),
    "version": ("dynamo.cli.main:version", "print versions"),
}
"""Verb → (module with ``main(argv) -> exit status``, or ``module:function``; one line of help).

Each raises DynamoError and OSError, which are printed here.
"""

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
        return int(importlib.import_module("dynamo.cli.completion").answer(VERBS, words))
    if verb not in VERBS:
        close = difflib.get_close_matches(verb, VERBS, 3)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        print(f"dynamo: unknown verb {verb!r}{hint}\n\n{_help()}", file=sys.stderr)
        return 2
    module, _, function = VERBS[verb][0].partition(":")
    run = getattr(importlib.import_module(module), function or "main")
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
    lines = [f"  {verb:<{width}}  {text}" for verb, (_, text) in VERBS.items()]
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
