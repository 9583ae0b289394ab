"""A service of a graph: one command, its options, and what each of its processes needs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dynamo.serve.flags import as_flags
from dynamo.serve.scaling import Scaling

__all__ = ["PYTHON", "Service"]

PYTHON = ("python", "python3")
"""Programs that stand for the interpreter of ``dynamo serve``."""


@dataclass(frozen=True, kw_only=True)
class Service:
    """One service: ``workers`` processes of one command.

    ``module`` is set for a Python module, else ``command`` holds the words of the command.
    ``flags`` are the words that follow. ``gpu`` is per worker: None if the graph does not say,
    ``gpu_is_derived`` if it follows from the flags of the engine.
    ``envs`` overrides our variables. ``origins`` has the place of each key of ``options``.
    """

    name: str
    module: str | None
    command: tuple[str, ...]
    flags: tuple[str, ...]
    options: Mapping[str, Any]
    workers: int = 1
    scaling: Scaling = field(default_factory=Scaling)
    gpu: float | None = None
    gpu_is_derived: bool = False
    cpu: str | None = None
    memory: str | None = None
    envs: Mapping[str, str] = field(default_factory=dict)
    graceful_timeout_s: float | None = None
    origin: str = ""
    origins: Mapping[str, str] = field(default_factory=dict)

    @property
    def program(self) -> str | None:
        """The Python module that runs, also if ``run`` is ``[python, -m, module, …]``."""
        if self.module is None and self.command[0] in PYTHON and self.command[1:2] == ("-m",):
            return self.command[2] if len(self.command) > 2 else None
        return self.module

    @property
    def words(self) -> Mapping[str, tuple[str, ...]]:
        """The words of the command line that belong to the program, by the key they come from."""
        words = {key: tuple(as_flags(key, value)) for key, value in self.options.items()}
        own = self.command[3:] if self.module is None and self.program is not None else ()
        return {"run": own, **words} if own else words

    @property
    def all_words(self) -> tuple[str, ...]:
        """The words of :attr:`words`, in order."""
        return tuple(word for words in self.words.values() for word in words)

    @property
    def is_frontend(self) -> bool:
        """Whether this service is the OpenAI frontend."""
        return self.module == "dynamo.frontend"
