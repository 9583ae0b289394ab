"""``dynamo key``: add, list and remove the API keys of a key file."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from dynamo.cli.options import KeySettings
from dynamo.cli.text_table import aligned
from dynamo.config import load
from dynamo.errors import ConfigError
from dynamo.http.api_keys import KEY_NAME, key_line, new_key, parse_grants, read_keys
from dynamo.runtime.process.paths import write_atomic
from dynamo.serve.state.frontends import frontends_in
from dynamo.status.deployment import chosen_runtime, running_deployment

DESCRIPTION = """Add, list and remove API keys. A new key is printed once; the key file has its
SHA-256 digest. Running frontends load the changed file within two seconds."""
EPILOG = """examples:
  dynamo key add alice
  dynamo key add admin --role operator --api-key-file keys.txt
  dynamo key add batch --grants priority=10,routing
  dynamo key list
  dynamo key remove alice
Without --api-key-file it is the file of the running deployment.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; return the exit status."""
    (settings,) = load("dynamo key", DESCRIPTION, [KeySettings], argv, epilog=EPILOG)
    if not settings.action:
        raise ConfigError("nothing to do; try: dynamo key add NAME")
    if settings.action != "list":
        _check_name(settings.name, settings.action)
    path = settings.api_key_file or _running_file(settings.namespace)
    if settings.action == "list":
        print("\n".join(aligned(_rows(path))))
        return 0
    if settings.action == "remove":
        remove_key(path, settings.name)
        print(f"dynamo key: removed {settings.name} from {path}", file=sys.stderr)
        return 0
    grants = str(parse_grants(settings.grants))
    if grants and settings.role == "operator":
        raise ConfigError("--grants is for users, operators may ask for all: leave it out")
    print(add_key(path, settings.name, settings.role, grants))
    print(
        f"dynamo key: added {settings.name} ({settings.role}) to {path}; "
        "the key is not stored, so keep it now",
        file=sys.stderr,
    )
    return 0


def _rows(path: str) -> list[tuple[str, str, str]]:
    rows = [("NAME", "ROLE", "GRANTS")]
    for key in sorted(read_keys(path).values(), key=lambda key: key.name):
        grants = "all" if key.grants is None else str(key.grants) or "-"
        rows.append((key.name, "operator" if key.operator else "user", grants))
    return rows


def _running_file(namespace: str | None) -> str:
    """Return the key file of the running deployment. Raises ConfigError."""
    document = running_deployment(chosen_runtime(namespace))
    frontends = [] if document is None else list(frontends_in(document))
    paths = {frontend.listens.api_key_file for frontend in frontends if frontend.runs}
    files = sorted(paths - {""})
    if len(files) == 1:
        return files[0]
    if files:
        raise ConfigError(f"name the file with --api-key-file: {', '.join(files)}")
    why = "the running deployment has no keys" if frontends else "no deployment runs"
    raise ConfigError(f"--api-key-file (DYN_API_KEY_FILE) is missing, and {why}: name the file")


def _check_name(name: str, action: str) -> None:
    if not KEY_NAME.fullmatch(name):
        raise ConfigError(
            "the name must be 1 to 64 letters, digits and . _ @ -, and begin with a letter or a "
            f"digit, got {name!r:.80}; try: dynamo key {action} NAME"
        )


def remove_key(path: str, name: str) -> None:
    """Remove the key of ``name`` from the file at ``path``. Raises ConfigError."""
    names = {key.name for key in read_keys(path).values()}
    if name not in names:
        raise ConfigError(f"{path} has no key of the name {name}; dynamo key list shows them")
    if len(names) == 1:
        raise ConfigError(
            f"{name} is the only key of {path}, and a frontend keeps its last: add another first"
        )
    file = Path(path).resolve()
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    others = [line for line in lines if line.strip().partition(":")[0] != name]
    try:
        write_atomic(file, "".join(others).encode(), durable=True)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def add_key(path: str, name: str, role: str, grants: str = "") -> str:
    """Add a new key to the file at ``path``, made if need be; return it. Raises ConfigError."""
    # lexists: a broken link is an error, and no place for a new file.
    if os.path.lexists(path) and any(key.name == name for key in read_keys(path).values()):
        raise ConfigError(
            f"{path} has a key of the name {name}; choose another name, or remove it first"
        )
    key = new_key()
    try:
        _append(path, key_line(name, role, key, grants))
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
