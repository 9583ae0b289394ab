"""Options of ``dynamo key``."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.config.option import option

__all__ = ["KeySettings"]


@dataclass(frozen=True, kw_only=True)
class KeySettings:
    """key: the name of the key, its role, and the file"""

    action: str = option("", "action", choices=("add",), help="add: make a key and print it, once")
    name: str = option(
        "", "name", help="name of the key in metrics: letters, digits and . _ @ -, at most 64"
    )
    role: str = option(
        "user",
        "--role",
        choices=("user", "operator"),
        help="operators may also set busy thresholds, explain decisions and call engine routes",
    )
    api_key_file: str | None = option(
        None,
        "--api-key-file",
        env="DYN_API_KEY_FILE",
        help="the file of the frontend; made with mode 0600 if it does not exist",
    )
