"""The payload of a worker's health checks, at the path from which Dynamo's workers import it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from dynamo.config import environ

__all__ = ["HEALTH_CHECK_KEY", "HealthCheckPayload", "load_health_check_from_env"]

HEALTH_CHECK_KEY = "_HEALTH_CHECK"
"""Key in a request that marks it as a health check."""

log = logging.getLogger(__name__)


def load_health_check_from_env(env_var: str = "DYN_HEALTH_CHECK_PAYLOAD") -> dict[str, Any] | None:
    """Return the payload in ``env_var``: a JSON object, or ``@`` and the path of a file with one.

    None without the variable; also, with a warning, for any other content.
    """
    text = environ().get(env_var)
    if not text:
        return None
    try:
        payload = json.loads(Path(text[1:]).read_text() if text.startswith("@") else text)
    except (OSError, ValueError) as error:
        log.warning("%s=%.80s is ignored: %s", env_var, text, error)
        return None
    if not isinstance(payload, dict):
        log.warning("%s=%.80s is ignored: it must be a JSON object", env_var, text)
        return None
    return payload


class HealthCheckPayload:
    """The payload in ``DYN_HEALTH_CHECK_PAYLOAD``, else ``default_payload``.

    A subclass sets ``default_payload`` and then calls ``super().__init__()``; without it that call
    raises NotImplementedError.
    """

    default_payload: dict[str, Any]

    def __init__(self) -> None:
        if not hasattr(self, "default_payload"):
            raise NotImplementedError(
                f"{type(self).__name__} must set default_payload before super().__init__()"
            )
        payload = load_health_check_from_env()
        self._payload = self.default_payload if payload is None else payload

    def to_dict(self) -> dict[str, Any]:
        """Return the payload."""
        return self._payload

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._payload!r})"
