"""The options of ``dynamo ps`` without argparse and dataclasses, which take 20 ms to import.

Only for the usual flags; all others go the way of :class:`~dynamo.cli.options.PsSettings`. A test
compares both.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence


class QuickPs:
    """What ``argv`` and ``env`` ask for; ``socket`` is that of the arbiter in its run directory."""

    def __init__(self, as_json: bool, api_key: str | None, socket: str) -> None:
        self.json = as_json
        self.api_key = api_key
        self.socket = socket

    @classmethod
    def of(
        cls, argv: Sequence[str], socket: str, env: Mapping[str, str] = os.environ
    ) -> QuickPs | None:
        """Return the options; None if ``argv`` or the path needs a closer look."""
        given = {word for word in argv if word != "--json"}
        namespace = env.get("DYN_NAMESPACE", "dynamo")
        home = env.get("HOME", "")
        state_dir = env.get("DYN_LOCAL_STATE_DIR") or (home and f"{home}/.dynamo/state")
        if "DYN_NAMESPACE" not in env:
            namespace = _only(state_dir, namespace)
        path = f"{state_dir}/{namespace}/{socket}"
        plain = namespace.replace("-", "").replace("_", "").isalnum() and namespace.isascii()
        if (
            given
            or not plain
            or not state_dir
            or not path.startswith("/")
            or len(os.fsencode(path)) > _PATH_BYTES
        ):
            return None
        return cls("--json" in argv, env.get("DYN_API_KEY") or env.get("OPENAI_API_KEY"), path)


def _only(directory: str, default: str) -> str:
    """The namespace of the only statefile; ``default`` if there are others, or none."""
    try:
        found = [name for name in os.listdir(directory or "/") if name.endswith(".json")]  # noqa: PTH208 - pathlib is slow to import
    except OSError:
        return default
    return found[0].removesuffix(".json") if len(found) == 1 else default


_PATH_BYTES = 107
