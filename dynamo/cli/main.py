"""``dynamo``: one command, one file per verb, imported only when it is used."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib import metadata

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
    if rival := rival_distribution():
        print(
            f"dynamo: {rival} is installed in this environment too, and both provide the Python "
            "package 'dynamo', so neither can be trusted to work.\n"
            "Install dynamo-appliance in an environment of its own, or: "
            f"pip uninstall {rival} && pip install --force-reinstall dynamo-appliance",
            file=sys.stderr,
        )
        return 2
    try:
        status = importlib.import_module(VERBS[verb][0]).main(words)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `… | head`: the reader has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return int(status)


def rival_distribution() -> str | None:
    """The installed distribution of NVIDIA's Dynamo, whose import package is ours too, if any."""
    for name in _RIVALS:
        try:
            metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        return name
    return None


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
