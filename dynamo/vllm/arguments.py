"""The command line of ``python -m dynamo.vllm``: our options, vLLM's, model, adapters.

:func:`parse` needs no vLLM: it returns the arguments that are not ours as they are.
:mod:`dynamo.vllm.engine_args` reads those with vLLM's own parser.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec

from dynamo.config import load_known
from dynamo.config.programs import PROGRAMS, settings_groups
from dynamo.config.runtime import RuntimeSettings
from dynamo.config.worker import NO_PARSER, REASONING_ALIASES, REASONING_PARSERS, WorkerSettings
from dynamo.errors import ConfigError, name_problem
from dynamo.llm.model_directory import ModelDirectory
from dynamo.llm.model_source import resolve_model
from dynamo.runtime.process.paths import expanded
from dynamo.vllm.settings import VllmSettings

PROG = "python -m dynamo.vllm"
INSTALL = f"vLLM is not installed; install it with: {PROGRAMS['dynamo.vllm'].install}"
log = logging.getLogger(__name__)
_DESCRIPTION = "Serve a model with vLLM behind the router. Flags not listed here are vLLM's own."
_CONFIG = "adapter_config.json"


class _Module(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's JSON form of an adapter; the name of its base model is not needed here."""

    name: str
    path: str
    base_model_name: str | None = None


def parse_loras(
    modules: Iterable[str], model_name: str, flag: str = "--lora-modules"
) -> dict[str, str]:
    """Return the absolute directory of each adapter by its name.

    ``modules``, the values of ``flag``, are ``name=path`` or JSON objects with ``name`` and
    ``path``, as vLLM's server takes them. Raises ConfigError for another form, a name used twice,
    or a directory without an adapter.
    """
    loras: dict[str, str] = {}
    for text in modules:
        name, path = _parse(text, flag)
        if problem := name_problem(name):
            raise ConfigError(f"{flag}: the name {name!r} {problem}")
        if name == model_name or name in loras:
            raise ConfigError(f"{flag}: the name {name!r} is used twice; give each adapter its own")
        directory = expanded(path)
        if not (directory / _CONFIG).is_file():
            raise ConfigError(
                f"{flag} {name}={path}: the directory has no {_CONFIG}; give the local "
                "directory of the adapter"
            )
        loras[name] = str(directory.resolve())
    return loras


def _parse(text: str, flag: str) -> tuple[str, str]:
    if text.lstrip().startswith("{"):
        try:
            module = msgspec.json.decode(text, type=_Module)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ConfigError(f"{flag} {text!r:.80}: {error}") from None
        return module.name, module.path
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise ConfigError(f"{flag} {text!r:.80}: must be NAME=DIRECTORY")
    return name, path


def find_model(source: str, engine_argv: Sequence[str]) -> tuple[str, ModelDirectory, str]:
    """Return what the engine loads, the directory for the frontend, and the model's default name.

    Downloads what is missing. ``--tokenizer`` names the frontend's directory, which a GGUF file
    without a tokenizer.json beside it needs. Raises ConfigError.
    """
    revision = flag_value(engine_argv, "--revision")
    weights = flag_value(engine_argv, "--load-format") != "dummy"
    model = resolve_model(source, weights=weights, revision=revision)
    tokenizer = flag_value(engine_argv, "--tokenizer")
    if tokenizer is None:
        directory = model.directory()
    else:
        tokenizer_revision = flag_value(engine_argv, "--tokenizer-revision")
        directory = resolve_model(tokenizer, revision=tokenizer_revision).directory()
    directory.require_worker_files()
    return str(model.path), directory, model.name


def flag_value(argv: Sequence[str], flag: str) -> str | None:
    """Return the last value of ``flag``, which vLLM also takes with underscores."""
    last = None
    for index, word in enumerate(argv):
        name, joined, value = word.partition("=")
        if name.replace("_", "-") == flag:
            # As argparse: the last one counts, its value behind "=" or in the next word.
            last = value if joined else "".join(argv[index + 1 : index + 2])
    return last


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
    (runtime, worker, vllm), rest = load_known(
        PROG, _DESCRIPTION, settings_groups("dynamo.vllm"), argv, epilog
    )
    tool = worker.tool_call_parser or vllm.serve_tool_call_parser
    reasoning = worker.reasoning_parser or _reasoning_parser(rest)
    worker = replace(worker, tool_call_parser=tool, reasoning_parser=reasoning)
    return VllmArguments(runtime, worker, vllm, tuple(rest))


def _reasoning_parser(argv: Sequence[str]) -> str | None:
    """Our name of the format that ``--reasoning-parser`` gives to vLLM, whose grammars need it."""
    engine_name = flag_value(argv, "--reasoning-parser")
    name = REASONING_ALIASES.get(engine_name, engine_name) if engine_name else None
    if name is None or name in REASONING_PARSERS:
        return name
    log.warning(
        "--reasoning-parser %s: the frontend has no format of this name, so it does not tell "
        "reasoning from content; --dyn-reasoning-parser names one of %s",
        engine_name,
        ", ".join(REASONING_PARSERS),
    )
    return NO_PARSER


def check(arguments: VllmArguments) -> None:
    """Raise ConfigError for options of ours that contradict each other."""
    directory = arguments.vllm.lora_dir
    if directory is not None and not expanded(directory).is_dir():
        raise ConfigError(f"--lora-dir {directory}: no such directory; create it first")
    addresses = arguments.vllm.core_addresses
    if addresses and len(addresses) != 2:
        raise ConfigError(
            f"DYN_VLLM_CORE_ADDRESSES must be two addresses, INPUT and OUTPUT, got {addresses}"
        )
