"""``dynamo``: one command, one file per verb, imported only when it is used."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence

from dynamo import __version__

__all__ = ["VERBS", "main", "rival_distribution"]

VERBS = {
    "serve": ("dynamo.cli.serve", "start a graph and keep it running"),
    "bench": ("dynamo.cli.bench", "load an OpenAI endpoint and measure it"),
    "route": ("dynamo.cli.route", "say where a prompt would go, and why"),
    "version": ("dynamo.cli.version", "print versions"),
}
"""Verb → (module with ``main(argv) -> exit status``, one line of help)."""

_RIVALS = ("ai-dynamo", "ai-dynamo-runtime")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb in ``argv`` (default: the command line); its exit status."""
    _open_standard_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    verb = words.pop(0) if words else "--help"
    if verb in ("-V", "--version"):
        verb = "version"
    if verb in ("-h", "--help", "help"):
        print(_help())
        return 0
    if verb not in VERBS:
        print(f"dynamo: unknown verb {verb!r}\n\n{_help()}", file=sys.stderr)
        return 2
    with _quiet_interrupt():
        run = importlib.import_module(VERBS[verb][0]).main
        rival = rival_distribution()
    if rival:
        print(
            f"dynamo: {rival} is installed in this environment too, and both provide the Python "
            "package 'dynamo', so neither can be trusted to work.\n"
            "Install dynamo-appliance in an environment of its own, or: "
            f"pip uninstall {rival} && pip install --force-reinstall dynamo-appliance",
            file=sys.stderr,
        )
        return 2
    try:
        status = run(words)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `… | head`: the reader has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return int(status)


def rival_distribution() -> str | None:
    """The installed distribution of NVIDIA's Dynamo, whose import package is ours too, if any."""
    from importlib import metadata  # slow: not before Ctrl-C is taken care of

    for name in _RIVALS:
        try:
            metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        return name
    return None


@contextlib.contextmanager
def _quiet_interrupt() -> Iterator[None]:
    """Let Ctrl-C end the process at once, without a traceback: there is nothing to clean up yet.

    KeyboardInterrupt inside the import of a compiled module has also crashed the interpreter.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _open_standard_streams() -> None:
    """Open the null device for each of stdin, stdout and stderr that we were started without.

    Else the first socket or file would get its number, and with it what is printed.
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
            "'dynamo VERB --help' tells more.",
        )
    )
