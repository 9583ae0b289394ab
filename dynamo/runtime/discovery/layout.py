"""The files of file discovery: names, contents, atomic writes, removal that keeps newer records.

``v1/<bucket>/<percent-encoded rest of the key>`` holds a first line ``<lease hex> <size>`` and then
the value; ``leases/<id hex>`` holds a LeaseRecord as JSON. Names that start with a dot are
temporary files of writers.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote

from dynamo.errors import InvalidArgument
from dynamo.protocols.control import LeaseRecord, record_decoder
from dynamo.runtime.process.paths import temporary_beside

BUCKETS = ("instances", "mdc", "event_channels", "on_demand")
LARGEST_VALUE_BYTES = 1 << 20
"""The largest value in any store; etcd itself refuses more than 1.5 MiB."""

_NAME_MAX_BYTES = 255
_HEADER_MAX_BYTES = 64
_ABANDONED_AFTER_S = 60.0
_CREATE_TRIES = 20
"""More than a removal has directories."""
_decode_lease = record_decoder(LeaseRecord)
# O_NONBLOCK: opening a FIFO that someone put into the store must not block the loop.
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LARGEST_ID = 2**63 - 1


class BadRecord(ValueError):
    """A file in the store is incomplete or foreign."""


class StoredRecord(NamedTuple):
    """The content of a key file."""

    lease_id: int
    value: bytes


def split_key(key: str) -> tuple[str, str]:
    """Split ``v1/<bucket>/<rest>`` into (bucket, file name). Raises InvalidArgument."""
    version, _, rest = key.partition("/")
    bucket, _, tail = rest.partition("/")
    name = quote(tail, safe="")
    if name.startswith("."):  # a leading dot marks temporary files
        name = "%2E" + name[1:]
    if version != "v1" or bucket not in BUCKETS or not tail:
        raise InvalidArgument(f"{key!r} is not a key of the form v1/<{'|'.join(BUCKETS)}>/…")
    if len(name) > _NAME_MAX_BYTES:
        raise InvalidArgument(f"key {key!r} is longer than {_NAME_MAX_BYTES} encoded bytes")
    return bucket, name


def check_value(key: str, value: bytes) -> None:
    """Raise InvalidArgument for a value that is too large for the store."""
    if len(value) > LARGEST_VALUE_BYTES:
        raise InvalidArgument(
            f"{len(value)} bytes under the key {key!r} are more than the {LARGEST_VALUE_BYTES} "
            "that a record may have"
        )


def join_key(bucket: str, name: str) -> str:
    """Reverse :func:`split_key`. Raises BadRecord."""
    try:
        key = f"v1/{bucket}/{unquote(name, errors='strict')}"
        if split_key(key) == (bucket, name):
            return key
    except (UnicodeError, InvalidArgument) as error:
        raise BadRecord("its name is not a key") from error
    raise BadRecord("its name is not a key")


def key_path(root: Path, key: str) -> Path:
    """Return the file of ``key``."""
    return root.joinpath("v1", *split_key(key))


def lease_path(root: Path, lease_id: int) -> Path:
    """Return the file of a lease."""
    return root / "leases" / f"{lease_id:x}"


def touch(path: Path) -> None:
    """Renew the lease in the file ``path``. Raises OSError.

    Its modification time becomes the time of day, for other hosts. Its access time becomes that of
    the monotonic clock of this host, which does not change when the time of day is set.
    """
    os.utime(path, ns=(time.monotonic_ns(), time.time_ns()))


def untouched_s(status: os.stat_result, same_host: bool) -> float:
    """Return how long ago a lease of this host, or of another, was renewed, in seconds."""
    if same_host:
        age_s = (time.monotonic_ns() - status.st_atime_ns) / 1e9
        if age_s >= 0:
            return age_s
        # A program that reads the file sets its access time to the time of day, which is far above.
    return max(0.0, time.time() - status.st_mtime_ns / 1e9)


def ensure_directories(root: Path) -> None:
    """Create the directories of the store, each with mode 0700.

    A deployment that ends may be removing them: then they are created again. Raises OSError.
    """
    for _ in range(_CREATE_TRIES):
        with contextlib.suppress(FileNotFoundError):
            _create(root)
            return
    _create(root)


def _create(root: Path) -> None:
    for name in (".", "leases", "v1", *(f"v1/{bucket}" for bucket in BUCKETS)):
        (root / name).mkdir(mode=0o700, exist_ok=True)


def names(directory: Path) -> list[str]:
    """Return the names of complete files in ``directory``."""
    return [path.name for path in directory.iterdir() if not path.name.startswith(".")]


def sweep(directory: Path) -> None:
    """Remove temporary files that are at least a minute old: their writers have died."""
    for path in list(directory.iterdir()):
        with contextlib.suppress(OSError):
            if (
                path.name.startswith(".")
                and time.time() - path.stat().st_ctime > _ABANDONED_AFTER_S
            ):
                path.unlink()


def encode_stored(lease_id: int, value: bytes) -> bytes:
    """Return the content of a key file."""
    return b"%x %d\n%s" % (lease_id, len(value), value)


def decode_stored(data: bytes) -> StoredRecord:
    """Reverse :func:`encode_stored`. Raises BadRecord."""
    end = data.find(b"\n", 0, _HEADER_MAX_BYTES)
    try:
        # Without a line end ``end`` is -1: split nothing, which is no header.
        lease, size = data[: max(end, 0)].split(b" ")
        lease_id, size_bytes = int(lease, 16), int(size)
    except ValueError:
        raise BadRecord("it has no lease header") from None
    if not 0 <= lease_id <= _LARGEST_ID:
        raise BadRecord("its lease is no lease id")
    value = data[end + 1 :]
    if len(value) != size_bytes:
        raise BadRecord(f"it has {len(value)} bytes of {size_bytes}")
    return StoredRecord(lease_id, value)


def decode_lease(name: str, data: bytes) -> LeaseRecord:
    """Decode the lease in the file ``name``. Raises BadRecord."""
    try:
        record = _decode_lease(data)
    except ValueError as error:
        raise BadRecord(f"it is not a lease: {error}") from None
    if f"{record.lease_id:x}" != name:
        raise BadRecord("it is not the lease of its name")
    return record


def read_file(path: Path) -> bytes | None:
    """Return the content, None for a missing file. Never blocks, and keeps the access time.

    BadRecord: it is not a regular file of at most the largest size.
    """
    try:
        descriptor = _open(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BadRecord(f"it cannot be read: {error.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise BadRecord("it is not a regular file")
        limit = LARGEST_VALUE_BYTES + _HEADER_MAX_BYTES
        if status.st_size > limit:
            raise BadRecord(f"its {status.st_size} bytes are more than {limit}")
        # One call is enough: of a regular file it returns all up to the limit.
        return os.read(descriptor, limit)
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    try:
        return os.open(path, _READ_FLAGS | os.O_NOATIME)  # see touch()
    except PermissionError:  # it is another user's
        return os.open(path, _READ_FLAGS)


def shown(path: Path) -> str:
    """Return the path for a log line, in ASCII whatever bytes its name has."""
    return ascii(str(path))[1:-1]


def remove_if_lease(path: Path, lease_id: int) -> bool:
    """Unlink the key file unless another lease owns it by now. Return whether it was removed.

    A put between the check and an unlink would lose the new record. So the file is renamed aside,
    checked again, and linked back if it is a newer record, unless a still newer one replaced it.
    """
    if not _is_under(path, lease_id):
        return False
    renamed = temporary_beside(path)
    try:
        path.rename(renamed)
    except FileNotFoundError:
        return False
    if _is_under(renamed, lease_id):
        renamed.unlink(missing_ok=True)
        return True
    with contextlib.suppress(FileExistsError):
        path.hardlink_to(renamed)
    renamed.unlink(missing_ok=True)
    return False


def _is_under(path: Path, lease_id: int) -> bool:
    try:
        data = read_file(path)
        return data is not None and decode_stored(data).lease_id == lease_id
    except BadRecord:
        return False
