"""The paths of a deployment: statefiles, run directories, the discovery store, sockets.

Directories are created with mode 0700. An existing one keeps its mode, and is an error if other
users own it or may write to it. Two namespaces never share a run directory.

Sockets whose usual path is too long are in a shared directory. Each user holds a shared lock on it,
which the kernel drops even after SIGKILL. Removal needs an exclusive lock, so it never happens
between the check and the bind of another user.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import glob
import itertools
import os
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

from dynamo.config import environ
from dynamo.config.runtime import RuntimeSettings, check_namespace
from dynamo.errors import ConfigError
from dynamo.runtime.process import os_process

SOCKET_PATH_MAX_BYTES = 107
"""Longest AF_UNIX path on Linux: sun_path is 108 bytes with its terminating zero (unix(7))."""
_FALLBACK_RECORD = "sockets.path"
_OPEN_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_counter = itertools.count()
_held: dict[Path, int] = {}
"""The open descriptor of each directory that this process uses."""


def hold(directory: Path) -> os.stat_result:
    """Create ``directory`` (mode 0700) if need be, protect it from removal, return its status.

    Its parent may be writable by other users, so a symbolic link in its place is an OSError.
    Idempotent; O(1).
    """
    before = _held.pop(directory, None)
    if before is not None:
        if _is_same(before, directory):
            _held[directory] = before
            return os.fstat(before)
        os.close(before)
    while True:
        directory.mkdir(mode=0o700, exist_ok=True)
        try:
            descriptor = os.open(directory, _OPEN_FLAGS)
        except FileNotFoundError:
            # Its last user has removed it between both calls.
            continue
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        # Another user may have removed and recreated it before we had the lock: try again then.
        if _is_same(descriptor, directory):
            _held[directory] = descriptor
            return os.fstat(descriptor)
        os.close(descriptor)


def release(directory: Path, record: Path) -> None:
    """Stop using ``directory``; remove it, and the file ``record`` that names it, if it is empty
    and has no other user. Idempotent."""
    before = _held.pop(directory, None)
    if before is not None:
        os.close(before)
    try:
        descriptor = os.open(directory, _OPEN_FLAGS)
    except OSError:
        return  # removed already, or not ours
    try:
        # Fails while another user of the directory holds its shared lock.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not any(directory.iterdir()):
            record.unlink(missing_ok=True)
            directory.rmdir()
    except OSError:
        return  # the last of its other users removes it
    finally:
        os.close(descriptor)


def _is_same(descriptor: int, directory: Path) -> bool:
    try:
        status = directory.lstat()
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), status)


@contextlib.contextmanager
def owner_only() -> Iterator[None]:
    """Create files, directories and sockets without access for other users, whatever the umask.

    The umask belongs to the whole process: keep the block short.
    """
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def private_dir(path: Path) -> Path:
    """Return ``path`` as a directory that no other user can write to.

    Created with mode 0700, missing parents too; the mode of an existing directory is not changed.
    Raises ConfigError if it is not a directory, belongs to another user or is writable by others.
    """
    try:
        with owner_only():
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"cannot use {path} as a directory: {error.strerror}") from error
    _refuse_shared(path, status)
    return path


def expanded(path: str | Path) -> Path:
    """Return ``path`` with the home directory for ``~``; unchanged if there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def state_dir(settings: RuntimeSettings) -> Path:
    """Return the root of statefiles and run directories, created if need be."""
    try:
        return private_dir(state_path(settings))
    except ConfigError as error:
        raise ConfigError(f"{error.message}; DYN_LOCAL_STATE_DIR names another one") from error


def state_path(settings: RuntimeSettings) -> Path:
    """Return ``DYN_LOCAL_STATE_DIR``, else ~/.dynamo/state; create nothing."""
    return _absolute(settings.state_dir or "~/.dynamo/state")


def _absolute(path: str) -> Path:
    """Return ``path`` with the home directory for ``~``. Raises ConfigError if there is none."""
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError:
        raise ConfigError(
            f"{path}: there is no such home directory; set HOME, or DYN_LOCAL_STATE_DIR to a "
            "directory of this user"
        ) from None


def run_dir(settings: RuntimeSettings, namespace: str | None = None) -> Path:
    """Return the run directory of ``namespace`` (default: that of the settings)."""
    path = _run_path(settings, namespace)
    state_dir(settings)
    return private_dir(path)


def store_dir(settings: RuntimeSettings) -> Path:
    """Return the store of file discovery: ``DYN_FILE_KV``, else ``store/`` in the run directory."""
    if not settings.file_kv:
        run_dir(settings)
    return private_dir(store_path(settings))


def store_path(settings: RuntimeSettings) -> Path:
    """Return the path of :func:`store_dir`; create nothing."""
    if settings.file_kv:
        return _absolute(settings.file_kv)
    return _run_path(settings) / "store"


def planned_socket_path(settings: RuntimeSettings, name: str) -> str:
    """Return the path that :func:`socket_path` would return; create nothing. Raises ConfigError."""
    home = _run_path(settings)
    path = str(home / name)
    if not _fits(path):
        path = str(_short(home) / name)
        if not _fits(path):
            raise ConfigError(
                f"socket path {path} is longer than {SOCKET_PATH_MAX_BYTES} bytes; "
                "set XDG_RUNTIME_DIR to a shorter directory"
            )
    return path


def socket_path(settings: RuntimeSettings, name: str) -> str:
    """A path for the UNIX socket ``name`` that fits into 107 bytes.

    In the run directory if it fits, else in a private directory under ``XDG_RUNTIME_DIR`` or the
    temp directory, which the run directory's ``sockets.path`` then names, until every process that
    called this has ended or called :func:`release_sockets`. ConfigError: even that is too long.
    """
    home = run_dir(settings)
    path = planned_socket_path(settings, name)
    if path == str(home / name):
        return path
    short = _short(home)
    try:
        _refuse_shared(short, hold(short))
        write_atomic(home / _FALLBACK_RECORD, os.fsencode(f"{short}\n"))
    except OSError as error:
        raise ConfigError(
            f"cannot use {short} as a directory for sockets: {error.strerror}; "
            "remove it, or set XDG_RUNTIME_DIR to another directory"
        ) from error
    return path


def release_sockets(settings: RuntimeSettings) -> None:
    """Stop using the fallback directory of :func:`socket_path`; its last user removes it."""
    home = state_path(settings) / settings.namespace
    release(_short(home), home / _FALLBACK_RECORD)


def socket_dirs(settings: RuntimeSettings) -> list[Path]:
    """Return the directories of :func:`socket_path`: the run directory and its fallback, if any."""
    home = run_dir(settings)
    fallback = fallback_dir(home)
    return [home] if fallback is None else [home, fallback]


def fallback_dir(home: Path) -> Path | None:
    """Return the directory for the sockets of the run directory ``home`` whose path is too long.

    None without a record of it, or if the record names a directory that is not made for ``home``.
    """
    try:
        recorded = Path(os.fsdecode((home / _FALLBACK_RECORD).read_bytes().strip()))
    except (OSError, ValueError):
        return None
    return recorded if recorded.is_absolute() and recorded.name == _short(home).name else None


def _run_path(settings: RuntimeSettings, namespace: str | None = None) -> Path:
    name = settings.namespace if namespace is None else namespace
    check_namespace(name)
    return state_path(settings) / name


def _short(home: Path) -> Path:
    import hashlib  # both are slow to import, and rarely needed
    import tempfile

    digest = hashlib.sha256(os.fsencode(home)).hexdigest()[:12]
    base = environ().get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(base).absolute() / f"dynamo-{os.geteuid()}-{digest}"


def _refuse_shared(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise ConfigError(f"{path} belongs to user {status.st_uid}, not to {os.geteuid()}")
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o022:
        raise ConfigError(
            f"other users can write to {path} (mode {mode:04o}); use a subdirectory of it, such as "
            f"{path / 'dynamo'}, or run: chmod go-w {shlex.quote(str(path))}"
        )


def _fits(path: str) -> bool:
    return len(os.fsencode(path)) <= SOCKET_PATH_MAX_BYTES


def open_private(path: str, flags: int) -> int:
    """Open a file for its owner alone if it is new, whatever the umask: an opener of ``open``."""
    return os.open(path, flags, 0o600)


def write_atomic(path: Path, data: bytes, durable: bool = False, mode: int = 0o600) -> None:
    """Replace ``path`` in one step: readers see the old or the new content, never a part.

    Its ``mode``, less the umask, is for a file that others may read, such as a graph.
    ``durable``, for a file of the user's: owner and mode stay, and the disk has it on return. What
    is left of a writer that is killed: :func:`remove_unfinished`.
    """
    temporary = _unfinished(path, str(os.getpid())) if durable else temporary_beside(path)
    try:
        with open(temporary, "wb", opener=functools.partial(os.open, mode=mode)) as file:
            file.write(data)
        if durable:
            with temporary.open("rb+") as file:
                before = path.stat()
                with contextlib.suppress(PermissionError):  # only root gives files away
                    os.fchown(file.fileno(), before.st_uid, before.st_gid)
                os.fchmod(file.fileno(), stat.S_IMODE(before.st_mode))
                # Before the rename: a power loss could leave an empty file under the new name.
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def remove_unfinished(path: Path) -> None:
    """Remove what killed writers of a user's file have left beside it."""
    for leftover in path.parent.glob(glob.escape(_unfinished(path, "").name) + "*"):
        pid = leftover.suffix[1:]
        if pid.isdecimal() and os_process.start_ticks(int(pid)) is None:
            with contextlib.suppress(OSError):  # it is of another owner
                leftover.unlink()


def _unfinished(path: Path, pid: str) -> Path:
    return path.with_name(f".{path.name}.{pid}")


def write_new(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a file that is not there yet, whole or not at all. Raises FileExistsError, OSError."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb", 0) as file:
        try:
            # Unbuffered: a disk that becomes full may take a part.
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            path.unlink()
            raise


def temporary_beside(path: Path) -> Path:
    """Return an unused name in the directory of ``path``, which watchers ignore."""
    return path.with_name(f".{os.getpid()}.{next(_counter)}")
