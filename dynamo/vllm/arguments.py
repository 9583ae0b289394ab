"""The command line of ``python -m dynamo.vllm``: our own options, and all of vLLM's.

:func:`parse` needs no vLLM: it returns the arguments that are not ours as they are.
:mod:`dynamo.vllm.engine_args` reads those with vLLM's own parser.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dynamo.config import load_known
from dynamo.config.runtime import RuntimeSettings
from dynamo.config.vllm import VllmSettings
from dynamo.config.worker import REASONING_ALIASES, REASONING_PARSERS, WorkerSettings
from dynamo.errors import ConfigError
from dynamo.vllm.model import flag_value

__all__ = ["GROUPS", "INSTALL", "PROG", "VllmArguments", "check", "parse"]

PROG = "python -m dynamo.vllm"
GROUPS = (RuntimeSettings, WorkerSettings, VllmSettings)
INSTALL = "vLLM is not installed; install it with: pip install 'dynamo-appliance[vllm]'"
log = logging.getLogger(__name__)
_DESCRIPTION = "Serve a model with vLLM behind the router. Flags not listed here are vLLM's own."


@dataclass(frozen=True)
class VllmArguments:
    """Our settings, and the arguments for vLLM in ``engine_argv``."""

    runtime: RuntimeSettings
    worker: WorkerSettings
    vllm: VllmSettings
    engine_argv: tuple[str, ...]


def parse(argv: Sequence[str] | None = None, epilog: str | None = None) -> VllmArguments:
    """Parse the command line; exit with status 2 for a bad option of ours, 0 after ``--help``.

    The flags of ``vllm serve`` for its parsers choose ours, too.
    """
    (runtime, worker, vllm), rest = load_known(PROG, _DESCRIPTION, GROUPS, argv, epilog)
    tool = worker.tool_call_parser or vllm.serve_tool_call_parser
    reasoning = worker.reasoning_parser or _reasoning_parser(rest)
    worker = replace(worker, tool_call_parser=tool, reasoning_parser=reasoning)
    return VllmArguments(runtime, worker, vllm, tuple(rest))


def _reasoning_parser(argv: Sequence[str]) -> str | None:
    """Our name of the format that ``--reasoning-parser`` gives to vLLM, whose grammars need it."""
    given = flag_value(argv, "--reasoning-parser")
    name = REASONING_ALIASES.get(given, given) if given else None
    if name is None or name in REASONING_PARSERS:
        return name
    log.warning(
        "--reasoning-parser %s: the frontend has no format of this name, so it does not tell "
        "reasoning from content; --dyn-reasoning-parser names one of %s",
        given,
        ", ".join(REASONING_PARSERS),
    )
    return None


def check(arguments: VllmArguments) -> None:
    """Raise ConfigError for options of ours that contradict each other."""
    addresses = arguments.vllm.core_addresses
    if addresses and len(addresses) != 2:
        raise ConfigError(
            f"DYN_VLLM_CORE_ADDRESSES must be two addresses, INPUT and OUTPUT, got {addresses}"
        )
