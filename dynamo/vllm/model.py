"""The files of the model: its weights for the engine, its tokenizer for the frontend."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo.llm.model_directory import ModelDirectory
from dynamo.llm.model_source import resolve_model

__all__ = ["find_model", "flag_value"]


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
    found = None
    for index, word in enumerate(argv):
        name, joined, value = word.partition("=")
        if name.replace("_", "-") == flag:
            found = value if joined else "".join(argv[index + 1 : index + 2])
    return found
