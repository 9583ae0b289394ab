"""LoRA adapters that are given at start: each is a model with a name and a card of its own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from dynamo.errors import ConfigError

__all__ = ["parse_loras"]

_CONFIG = "adapter_config.json"


class _Module(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's JSON form of an adapter; the name of its base model is not needed here."""

    name: str
    path: str
    base_model_name: str | None = None


def parse_loras(modules: Iterable[str], model_name: str) -> dict[str, str]:
    """Return the absolute directory of each adapter by its name.

    ``modules`` are ``name=path`` or JSON objects with ``name`` and ``path``, as vLLM's server takes
    them. Raises ConfigError for another form, a name used twice, or a directory without an adapter.
    """
    found: dict[str, str] = {}
    for text in modules:
        name, path = _parse(text)
        if name == model_name or name in found:
            raise ConfigError(
                f"--lora-modules: the name {name!r} is used twice; give each adapter its own"
            )
        directory = Path(path).expanduser()
        if not (directory / _CONFIG).is_file():
            raise ConfigError(
                f"--lora-modules {name}={path}: the directory has no {_CONFIG}; give the local "
                "directory of the adapter"
            )
        found[name] = str(directory.resolve())
    return found


def _parse(text: str) -> tuple[str, str]:
    if text.lstrip().startswith("{"):
        try:
            module = msgspec.json.decode(text, type=_Module)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ConfigError(f"--lora-modules {text!r:.80}: {error}") from None
        return module.name, module.path
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise ConfigError(f"--lora-modules {text!r:.80}: must be NAME=DIRECTORY")
    return name, path
