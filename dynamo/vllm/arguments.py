"""The command line of ``python -m dynamo.vllm``: our own options, and all of vLLM's.

:func:`parse` needs no vLLM: it returns the arguments that are not ours as they are.
:mod:`dynamo.vllm.engine_args` reads those with vLLM's own parser.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynamo.config import load_known
from dynamo.config.runtime import RuntimeSettings
from dynamo.config.vllm import VllmSettings
from dynamo.config.worker import WorkerSettings
from dynamo.errors import ConfigError

__all__ = ["GROUPS", "INSTALL", "PROG", "VllmArguments", "check", "parse"]

PROG = "python -m dynamo.vllm"
GROUPS = (RuntimeSettings, WorkerSettings, VllmSettings)
INSTALL = "vLLM is not installed; install it with: pip install 'dynamo-appliance[vllm]'"
_DESCRIPTION = "Serve a model with vLLM behind the router. Flags not listed here are vLLM's own."


@dataclass(frozen=True)
class VllmArguments:
    """Our settings, and the arguments for vLLM in ``engine_argv``."""

    runtime: RuntimeSettings
    worker: WorkerSettings
    vllm: VllmSettings
    engine_argv: tuple[str, ...]


def parse(argv: Sequence[str] | None = None, epilog: str | None = None) -> VllmArguments:
    """Parse the command line; exit with status 2 for a bad option of ours, 0 after ``--help``."""
    (runtime, worker, vllm), rest = load_known(PROG, _DESCRIPTION, GROUPS, argv, epilog)
    return VllmArguments(runtime, worker, vllm, tuple(rest))


def check(arguments: VllmArguments) -> None:
    """Raise ConfigError for options of ours that contradict each other."""
    addresses = arguments.vllm.core_addresses
    if addresses and len(addresses) != 2:
        raise ConfigError(
            f"DYN_VLLM_CORE_ADDRESSES must be two addresses, INPUT and OUTPUT, got {addresses}"
        )
