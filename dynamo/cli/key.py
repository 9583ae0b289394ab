"""``dynamo key``: add an API key to a key file."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from dynamo.cli.options import KeySettings
from dynamo.config import load
from dynamo.errors import ConfigError
from dynamo.http.api_keys import KEY_NAME, key_line, new_key, read_keys

DESCRIPTION = """Make an API key: print it once, and store its SHA-256 digest in the key file.
To revoke a key, delete its line. Running frontends load the changed file within two seconds."""
EPILOG = """examples:
  dynamo key add alice --api-key-file keys.txt
  dynamo key add admin --role operator --api-key-file keys.txt
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; return the exit status."""
    (settings,) = load("dynamo key", DESCRIPTION, [KeySettings], argv, epilog=EPILOG)
    key = _add(settings)
    print(key)
    print(
        f"dynamo key: added {settings.name} ({settings.role}) to {settings.api_key_file}; "
        "the key is not stored, so keep it now",
        file=sys.stderr,
    )
    return 0


def _add(settings: KeySettings) -> str:
    path, name = settings.api_key_file, settings.name
    if settings.action != "add":
        raise ConfigError("nothing to do; try: dynamo key add NAME")
    if path is None and KEY_NAME.fullmatch(name):
        raise ConfigError("--api-key-file (DYN_API_KEY_FILE) is missing: which file gets the key?")
    return add_key(path or "", name, settings.role)


def add_key(path: str, name: str, role: str) -> str:
    """Add a new key to the file at ``path``, made if need be; return it. Raises ConfigError."""
    if not KEY_NAME.fullmatch(name):
        raise ConfigError(
            f"the name must be 1 to 64 letters, digits and . _ @ -, got {name!r:.80}; "
            "try: dynamo key add NAME"
        )
    if os.path.lexists(path) and any(one.name == name for one in read_keys(path).values()):
        raise ConfigError(
            f"{path} has a key of the name {name}; choose another name, or delete its line"
        )
    key = new_key()
    try:
        _append(path, key_line(name, role, key))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    return key


def _append(path: str, line: str) -> None:
    """Add ``line`` in one write: a frontend never reads a part of it."""
    before = Path(path).read_bytes() if os.path.lexists(path) else b""
    start = "" if not before or before.endswith(b"\n") else "\n"
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "w") as file:
        file.write(start + line)
