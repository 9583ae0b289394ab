"""What a package needs to add routes to the frontend, as in Dynamo's Python route extensions."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+")


@dataclass(frozen=True)
class FrontendExtensionContext:
    """The state of the frontend when a request arrived. Read it through the methods.

    ``models`` are the names of all models, and whether they are ready.
    """

    ready: bool
    draining: bool
    models: tuple[tuple[str, bool], ...]

    def is_ready(self) -> bool:
        """Return whether the frontend serves requests."""
        return self.ready

    def is_cancelled(self) -> bool:
        """Return whether the frontend shuts down."""
        return self.draining

    def has_any_ready_model(self) -> bool:
        """Return whether a model can be used."""
        return any(ready for _, ready in self.models)

    def is_model_ready_to_serve(self, model: str) -> bool:
        """Return whether ``model`` can be used."""
        return dict(self.models).get(model, False)

    def model_display_names(self) -> list[str]:
        """Return the names of all models, sorted."""
        return sorted(name for name, _ in self.models)

    def serving_ready_display_names(self) -> list[str]:
        """Return the names of the models that can be used, sorted."""
        return sorted(name for name, ready in self.models if ready)


class FrontendResponse:
    """An answer with a status other than 200; ``body`` is anything that JSON has."""

    def __init__(self, status_code: int, body: object) -> None:
        if not isinstance(status_code, int) or not 200 <= status_code <= 599:
            raise ValueError(f"status_code must be between 200 and 599, got {status_code!r}")
        self.status_code = status_code
        self.body = body


class FrontendRoute:
    """A route for GET of one ``path``. ``handler`` takes a :class:`FrontendExtensionContext`.

    It returns what JSON has, or a :class:`FrontendResponse`. It is a plain function, which runs in
    a thread. Raises ValueError or TypeError for anything else.
    """

    def __init__(
        self, method: str, path: str, handler: Callable[[FrontendExtensionContext], Any]
    ) -> None:
        if method.upper() != "GET":
            raise ValueError(f"route {path}: method must be GET, got {method}")
        if _PATH.fullmatch(path) is None:
            raise ValueError(f"route {path}: the path must be fixed, like /my/route")
        if not callable(handler):
            raise TypeError(f"route {path}: the handler must be a function, got {handler!r}")
        if inspect.iscoroutinefunction(handler):
            raise TypeError(f"route {path}: the handler must not be an async function")
        self.method = "GET"
        self.path = path
        self.handler = handler
