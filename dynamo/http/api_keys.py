"""API keys: a file of names, roles and digests, and the check of the key of a request.

The file holds SHA-256 digests, never keys. A plain digest is enough, because keys are random: 256
bits can't be guessed, so a slow hash would only make requests slow.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from dynamo.errors import ConfigError
from dynamo.http.errors import KeyRefused
from dynamo.http.tls import FileWatch

ROLES = ("user", "operator")
KEY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_LINE = re.compile(rf"({KEY_NAME.pattern}):({'|'.join(ROLES)}):([0-9a-f]{{64}})(?::([^:]*))?")
_MAX_PRIORITY = 2**31 - 1
_MAX_FILE_BYTES = 1 << 20
_MAX_KEYS = 4096  # each is a label of a metric
_REMEMBERED = 1024
_REMEMBERED_CHARACTERS = 256
_LOCAL_NAME = "this deployment"  # no name that a file can have
_CREDENTIALS = ("authorization", "x-api-key")


class Grants(NamedTuple):
    """What a user's key may ask of the router: priorities up to a number, the choice of workers,
    ranks, taints and weights (``routing``), and of classes of the queue."""

    priority: int = 0
    strict_priority: int = 0
    routing: bool = False
    classes: bool = False

    def __str__(self) -> str:
        """The text that :func:`parse_grants` reads."""
        numbers = {"priority": self.priority, "strict-priority": self.strict_priority}
        parts = [f"{name}={value}" for name, value in numbers.items() if value]
        flags = {"routing": self.routing, "classes": self.classes}
        return ",".join([*parts, *(name for name, granted in flags.items() if granted)])


def parse_grants(text: str) -> Grants:
    """Return the grants in ``text``, such as ``priority=10,routing``. Raises ConfigError."""
    grants: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if part in ("routing", "classes"):
            grants[part] = True
        elif (
            name in ("priority", "strict-priority")
            and re.fullmatch(r"[0-9]{1,10}", value)
            and int(value) <= _MAX_PRIORITY
        ):
            grants[name.replace("-", "_")] = int(value)
        else:
            raise ConfigError(
                "grants are priority=N, strict-priority=N (at most 2147483647), routing and "
                "classes, separated by commas"
            )
    return Grants(**grants)


class ApiKey:
    """One entry of the file; ``requests`` counts the requests that were made with it.

    ``grants`` bounds what a user may ask of the router; None for operators: no bound.
    """

    __slots__ = ("digest", "grants", "name", "operator", "requests")

    def __init__(self, name: str, role: str, digest: bytes, grants: Grants | None = None) -> None:
        self.name = name
        self.operator = role == "operator"
        self.digest = digest
        self.grants = None if self.operator else grants or Grants()
        self.requests = 0


class ApiKeys:
    """The keys of ``path``, reloaded by ``watch``. Raises ConfigError if the file is wrong.

    ``local`` is one more key of an operator, for programs of the deployment; it is not counted.
    ``on_change`` is called with what a reload has changed.
    """

    def __init__(
        self,
        path: str,
        local: str | None = None,
        on_change: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._path = path
        self._local = None
        if local:
            self._local = ApiKey(_LOCAL_NAME, "operator", hashlib.sha256(local.encode()).digest())
        self.watch = FileWatch((path,), self._load)
        self.entries: dict[bytes, ApiKey] = {}
        self._on_change = on_change
        self._remembered: dict[tuple[str, bool], ApiKey] = {}
        self._load()

    def take(self, headers: dict[str, str]) -> ApiKey | None:
        """Remove the credentials from ``headers`` and return their key; None without credentials.

        Removed, because nothing behind this may log them or send them to another server.
        ``Authorization`` counts before ``X-Api-Key``. Raises KeyRefused.
        """
        authorization, x_api_key = (headers.pop(name, None) for name in _CREDENTIALS)
        credentials = x_api_key if authorization is None else authorization
        if credentials is None:
            return None
        has_scheme = authorization is not None
        key = self._remembered.get((credentials, has_scheme))
        return self._find(credentials, has_scheme) if key is None else key

    def is_withdrawn(self, key: ApiKey) -> bool:
        """Return whether ``key`` was removed from the file, or lost its operator role."""
        if key is self._local:
            return False
        current = self.entries.get(key.digest)
        return current is None or (key.operator and not current.operator)

    def _find(self, credentials: str, has_scheme: bool) -> ApiKey:
        key = credentials
        if has_scheme:
            scheme, _, key = credentials.partition(" ")
            if scheme.lower() != "bearer":
                raise KeyRefused("Send the API key as 'Authorization: Bearer KEY'", given=True)
        digest = hashlib.sha256(key.strip().encode()).digest()
        # The lookup hashes with a secret of the process, and the digest of a guess can't be
        # steered: neither it nor the comparison takes longer for a key that is almost right.
        entry = self.entries.get(digest) or self._local
        if entry is None or not hmac.compare_digest(entry.digest, digest):
            raise KeyRefused("Incorrect API key provided", given=True)
        if len(credentials) <= _REMEMBERED_CHARACTERS:
            # Guesses do not come this far, so only accepted credentials fill the memory.
            if len(self._remembered) >= _REMEMBERED:
                self._remembered.clear()
            self._remembered[credentials, has_scheme] = entry
        return entry

    def _load(self) -> None:
        entries = read_keys(self._path)
        if not entries:
            raise ConfigError(
                f"--api-key-file {self._path} has no key; add one with 'dynamo key add NAME'"
            )
        # A reload keeps the counts: a counter must not fall.
        request_counts = {key.name: key.requests for key in self.entries.values()}
        for key in entries.values():
            key.requests = request_counts.get(key.name, 0)
        old_entries, self.entries = self.entries, entries
        self._remembered.clear()
        if old_entries and (difference := _difference(old_entries, entries)):
            self._on_change(difference)


def _difference(before: dict[bytes, ApiKey], after: dict[bytes, ApiKey]) -> str:
    """Return which names were added, removed, or got another key, role or grants; "" without."""
    old, new = ({key.name: key for key in keys.values()} for keys in (before, after))
    changed = {name for name in old.keys() & new.keys() if _facts(old[name]) != _facts(new[name])}
    groups = {
        "added": new.keys() - old.keys(),
        "removed": old.keys() - new.keys(),
        "changed": changed,
    }
    return "; ".join(
        f"{what} {', '.join(sorted(names))}" for what, names in groups.items() if names
    )


def _facts(key: ApiKey) -> tuple[bytes, bool, Grants | None]:
    return key.digest, key.operator, key.grants


def new_key() -> str:
    """Return a random key of 256 bits."""
    return f"dyn-{secrets.token_urlsafe(32)}"


def key_line(name: str, role: str, key: str, grants: str = "") -> str:
    """Return the line of the file for ``key``, with its line end."""
    line = f"{name}:{role}:{hashlib.sha256(key.encode()).hexdigest()}"
    return f"{line}:{grants}\n" if grants else f"{line}\n"


def read_keys(path: str) -> dict[bytes, ApiKey]:
    """Return the keys in the file ``path`` by digest. Raises ConfigError."""
    return parse_keys(_read(path), f"--api-key-file {path}")


def parse_keys(text: str, source: str) -> dict[bytes, ApiKey]:
    """Return the keys in ``text`` by digest. Raises ConfigError naming ``source`` and the line.

    The error quotes nothing of the line, which may be a key that was pasted as it is.
    """
    entries: dict[bytes, ApiKey] = {}
    names: set[str] = set()
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise ConfigError(
                f"{source}, line {number}: must be NAME:ROLE:DIGEST or NAME:ROLE:DIGEST:GRANTS "
                f"with a role of {' or '.join(ROLES)} and 64 hex digits; make one with "
                "'dynamo key add NAME'"
            )
        grants = None
        if match[4] is not None:
            grants = _grants(match[4], match[2], f"{source}, line {number}")
        key = ApiKey(match[1], match[2], bytes.fromhex(match[3]), grants)
        if key.name in names or key.digest in entries:
            what = f"the name {key.name}" if key.name in names else "this key"
            raise ConfigError(f"{source}, line {number}: {what} is in the file twice; remove one")
        names.add(key.name)
        entries[key.digest] = key
    if len(entries) > _MAX_KEYS:
        raise ConfigError(f"{source} has {len(entries)} keys, at most {_MAX_KEYS} are allowed")
    return entries


def _grants(text: str, role: str, where: str) -> Grants:
    if role == "operator":
        raise ConfigError(f"{where}: grants are for users, operators may ask for all: remove them")
    try:
        return parse_grants(text)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}") from None


def _read(path: str) -> str:
    """The text of the key file, if other users can neither read nor replace it."""
    try:
        with Path(path).open("rb") as file:
            # Of the open file: the one at the path may be replaced between check and read.
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"--api-key-file {path}: not a regular file")
            if status.st_uid not in (os.geteuid(), 0):
                raise ConfigError(
                    f"--api-key-file {path} belongs to user {status.st_uid}; "
                    f"run: chown {os.geteuid()} {path}"
                )
            if status.st_mode & 0o077:
                mode = stat.S_IMODE(status.st_mode)
                raise ConfigError(
                    f"--api-key-file {path} has mode {mode:04o}, so other users can use it; "
                    f"run: chmod 600 {path}"
                )
            # One byte above the limit shows that the file is too large.
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"--api-key-file {path}: {error.strerror}") from None
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigError(f"--api-key-file {path} exceeds {_MAX_FILE_BYTES} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"--api-key-file {path} is not UTF-8 text: {error.reason}") from None
