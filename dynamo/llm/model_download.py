"""Reads a model from the Hugging Face cache, and downloads what is missing.

Imports huggingface_hub, which takes 0.2 s: imported only for a model that is no local directory.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from http import HTTPStatus
from pathlib import Path
from typing import Any

from huggingface_hub import (
    HfApi,
    constants,
    file_download,
    hf_hub_download,
    set_client_factory,
    snapshot_download,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils._http import default_client_factory
from tqdm.std import tqdm

from dynamo.errors import ConfigError, ModelUnreachable

_OTHER_FORMATS = (
    *("*.gguf", "*.onnx", "*.msgpack", "*.h5", "*.ot", "*.tflite", "*.mlmodel"),
    *("original/*", "onnx/*", "coreml/*", "openvino/*"),
)
_SAFETENSORS = ".safetensors"
_PICKLED = ("*.bin", "*.pt", "*.pth")
_LINE_EVERY_S = 5.0
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)
_PASSING = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)
# What a server may choose of a name in the cache: no separator, and nothing that is hidden.
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
MAX_ANSWER_BYTES = 4 << 20
"""Of one answer of a hub's API: some 13,000 files of a repository."""
_MAX_PAGES = 100
_SILENCE_S = 30.0
_ANSWER_S = 120.0
log = logging.getLogger(__name__)


class _BadAnswer(ValueError):
    """An answer of a hub is too large, too slow, one of too many, or names a path."""


def _check_name(what: str, name: str | None) -> None:
    if name is not None and _SAFE_NAME.fullmatch(name) is None:
        raise _BadAnswer(f"it gives {name[:80]!a} as {what}, which would be a path here")


def _refuse_paths() -> None:
    """Let the Hub's library refuse a server's names before it makes a file or a directory of them.

    It takes an ETag for the name of a blob, and a commit for that of a directory.
    """
    get_metadata = file_download._get_metadata_or_catch_error
    repo_info = HfApi.repo_info

    def checked_metadata(*args: Any, **kwargs: Any) -> Any:
        metadata = get_metadata(*args, **kwargs)
        _check_name("the ETag of a file", metadata[1])
        _check_name("the commit of a file", metadata[2])
        return metadata

    def checked_info(self: HfApi, *args: Any, **kwargs: Any) -> Any:
        info = repo_info(self, *args, **kwargs)
        _check_name("a commit", info.sha)
        return info

    file_download._get_metadata_or_catch_error = checked_metadata
    HfApi.repo_info = checked_info  # type: ignore[method-assign]


_refuse_paths()


class _Pages(threading.local):
    """How many pages of a list this thread has received, and the address of the next."""

    count = 0
    next_url = ""


# By thread: the Hub's library asks in several at once.
_pages = _Pages()


def _ask_plainly(request: Any) -> None:
    """Bound the silence of the API's answer, and accept none that is larger unpacked."""
    if not _is_api(request):
        return
    request.headers["accept-encoding"] = "identity"
    request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), _SILENCE_S)
    _pages.count = _pages.count + 1 if str(request.url) == _pages.next_url else 1
    if _pages.count > _MAX_PAGES:
        raise _BadAnswer(f"it gives more than {_MAX_PAGES} pages of a list")


def _read_bounded(response: Any) -> None:
    """Read an answer of the API to its end, unless it is too long or too slow."""
    if not _is_api(response.request):
        return
    _pages.next_url = str(response.request.url.join(response.links.get("next", {}).get("url", "")))
    if response.headers.get("content-encoding", "identity") != "identity":
        raise _BadAnswer("its answer is compressed, though that was not asked for")
    end_s, size_bytes, parts = time.monotonic() + _ANSWER_S, 0, []
    for part in response.iter_raw():
        parts.append(part)
        size_bytes += len(part)
        if size_bytes > MAX_ANSWER_BYTES:
            raise _BadAnswer(f"its answer has more than {MAX_ANSWER_BYTES} bytes")
        if time.monotonic() > end_s:
            raise _BadAnswer(f"its answer took more than {_ANSWER_S:g} s")
    response._content = b"".join(parts)  # as its own read() does, which has no bound


def _is_api(request: Any) -> bool:
    """Whether the answer is about a model: files are not read into memory."""
    path = request.url.path
    return "/api/" in path and "/resolve" not in path


def bounded(client: Any) -> Any:
    """Return ``client`` with bounds on the answers of a hub's API."""
    hooks = client.event_hooks
    client.event_hooks = {
        "request": [*hooks["request"], _ask_plainly],
        "response": [*hooks["response"], _read_bounded],
    }
    return client


def bounded_client() -> Any:
    """Return a client as the Hub's library makes it, with these bounds."""
    return bounded(default_client_factory())


set_client_factory(bounded_client)


def search_hub(words: str, limit: int) -> list[Any]:
    """Return the Hub's records of the most downloaded models whose names have ``words``.

    Raises what the Hub's library does, and ValueError for an answer beyond the bounds.
    """
    return list(HfApi().list_models(search=words, sort="downloads", limit=limit))


class HubModel:
    """The repository ``name`` on Hugging Face; ``given`` is what the user wrote, for errors."""

    def __init__(
        self,
        name: str,
        revision: str | None,
        given: str,
        on_progress: Callable[[int, int], object] | None = None,
    ) -> None:
        self._name = name
        self._revision = revision
        self._given = given
        self._on_progress = on_progress

    def fetch(self, patterns: Sequence[str] | None, download: bool) -> Path:
        """Return the directory with the files that match ``patterns``; None: with the weights.

        The Hub is asked for changes; if it cannot be reached, the cached files are used.
        Raises ConfigError; ModelUnreachable: a later try may succeed.
        """
        local = not download or constants.HF_HUB_OFFLINE
        try:
            path = self._weights(local) if patterns is None else self._snapshot(patterns, (), local)
        except Exception as error:  # of the Hub's library and of its HTTP library
            raise self._error(error, local) from error
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"the model {self._given!r} on Hugging Face has no config.json: "
                "give the id of a model for transformers, or a GGUF file as org/name/file.gguf"
            )
        return path

    def files(self) -> list[str]:
        """Return the names of the files in the repository. Raises as :meth:`fetch`."""
        try:
            return sorted(HfApi().list_repo_files(self._name, revision=self._revision))
        except Exception as error:  # of the Hub's library and of its HTTP library
            raise self._error(error, bool(constants.HF_HUB_OFFLINE)) from error

    def fetch_file(self, file: str, download: bool) -> Path:
        """Return the path of one file of the repository. Raises as :meth:`fetch`."""
        local = not download or constants.HF_HUB_OFFLINE
        try:
            if not local:
                self._check_file(file)
            path = hf_hub_download(
                self._name,
                file,
                revision=self._revision,
                local_files_only=local,
                tqdm_class=self._progress(f"{self._name}/{file}"),
            )
        except Exception as error:  # of the Hub's library and of its HTTP library
            raise self._error(error, local) from error
        return Path(path)

    def _snapshot(
        self, patterns: Sequence[str] | None, ignored: Sequence[str], local: bool
    ) -> Path:
        path = snapshot_download(
            self._name,
            revision=self._revision,
            allow_patterns=None if patterns is None else list(patterns),
            ignore_patterns=list(ignored),
            local_files_only=local,
            tqdm_class=self._progress(self._name),
        )
        return Path(path)

    def _weights(self, local: bool) -> Path:
        """Return the directory with the weights in one format, safetensors if there are any."""
        unreachable: Exception | None = None
        if not local:
            try:
                info = HfApi().model_info(self._name, revision=self._revision, files_metadata=True)
                files = info.siblings or []
                has_safetensors = any(file.rfilename.endswith(_SAFETENSORS) for file in files)
                ignored = (*_OTHER_FORMATS, *(_PICKLED if has_safetensors else ()))
                self._check_space(files, ignored)
                with self._visible():
                    return self._snapshot(None, ignored, local)
            except (HfHubHTTPError, ValueError):
                raise
            # Here the Hub's errors of connections are those of its HTTP library, no OSError.
            except Exception as error:
                if _is_of_disk(error):
                    raise
                log.warning("Hugging Face cannot be reached (%s); looking in the cache", error)
                unreachable = error
        try:
            path = self._snapshot(None, (*_OTHER_FORMATS, *_PICKLED), True)
        except LocalEntryNotFoundError as absent:
            raise absent from unreachable or absent.__cause__
        # Without safetensors the pickled weights count, which the first look has ignored.
        if not any(path.glob(f"*{_SAFETENSORS}")):
            path = self._snapshot(None, _OTHER_FORMATS, True)
        return path

    def _check_file(self, file: str) -> None:
        """Raise OSError if the disk has no room for ``file``; its download says what else fails."""
        try:
            info = HfApi().model_info(self._name, revision=self._revision, files_metadata=True)
        except (HfHubHTTPError, ValueError):
            return
        # Here the Hub's errors of connections are those of its HTTP library, no OSError.
        except Exception as error:
            if _is_of_disk(error):
                raise
            return
        self._check_space([entry for entry in info.siblings or [] if entry.rfilename == file], ())

    def _progress(self, name: str) -> Any:
        """Return the progress bar of a download; None, the Hub's own bar, on a terminal."""
        if self._on_progress is not None:
            return type("_Told", (_Reported,), {"report": staticmethod(self._on_progress)})
        if sys.stderr.isatty():
            return None
        return type("_NamedPercentLines", (_PercentLines,), {"model": name})

    def _check_space(self, files: Sequence[Any], ignored: Sequence[str]) -> None:
        """Raise OSError if the disk has no room for what is to be downloaded."""
        blobs = self._blobs()
        missing = [
            file
            for file in files
            if not any(fnmatch(file.rfilename, pattern) for pattern in ignored)
            and not any((blobs / key).exists() for key in _keys(file))
        ]
        # The download continues the parts of an earlier try.
        begun = sum(path.stat().st_size for path in blobs.glob("*.incomplete"))
        needed = sum(file.size or 0 for file in missing) - begun
        # disk_usage() needs a path that exists.
        existing = next(path for path in (blobs, *blobs.parents) if path.exists())
        if needed > (free := shutil.disk_usage(existing).free):
            text = f"it needs {needed / 1e9:.1f} GB more, and {free / 1e9:.1f} GB are free"
            raise OSError(errno.ENOSPC, text)

    def _blobs(self) -> Path:
        return Path(constants.HF_HUB_CACHE, f"models--{self._name.replace('/', '--')}", "blobs")

    @contextlib.contextmanager
    def _visible(self) -> Iterator[None]:
        """Keep a directory open, also between files: ``dynamo rm`` refuses what is in use."""
        self._blobs().mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._blobs(), os.O_RDONLY)
        try:
            yield
        finally:
            os.close(descriptor)

    def _error(self, error: Exception, local: bool) -> ConfigError:
        where = f"the model {self._given!r}"
        if _is_of_disk(error):
            return ConfigError(
                f"{where} cannot be stored in {constants.HF_HUB_CACHE}: {error}; "
                "free space there, or set HF_HOME to a directory on another disk"
            )
        if isinstance(error, GatedRepoError):
            return ConfigError(
                f"{where} is gated on Hugging Face: accept its licence there, then set HF_TOKEN"
            )
        if isinstance(error, RevisionNotFoundError):
            return ConfigError(f"{where} has no revision {self._revision!r} on Hugging Face")
        if isinstance(error, RepositoryNotFoundError):
            return ConfigError(
                f"no such directory, and not on Hugging Face: {where}; correct the name, or set "
                "HF_TOKEN if it is private"
            )
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            return ConfigError(f"no such file on Hugging Face: {where}; correct its name")
        cache = "not (complete) in the Hugging Face cache"
        if local:
            return ConfigError(
                f"no such directory, and {cache}: {where} ({constants.HF_HUB_CACHE}); "
                f"download it with 'dynamo pull {self._name}' or unset HF_HUB_OFFLINE"
            )
        kind = ModelUnreachable if _may_pass(error) else ConfigError
        return kind(
            f"{where} cannot be downloaded from {constants.ENDPOINT}: {_reason(error):.200}; "
            f"it is no directory here, and {cache} ({constants.HF_HUB_CACHE}): "
            f"download it with 'dynamo pull {self._name}' while the network is reachable; with "
            "HF_HUB_OFFLINE=1 only models on disk are looked for"
        )


def _keys(file: Any) -> Sequence[str]:
    """Return the names that a file may have in the cache: its checksums."""
    return [key for key in (file.lfs and file.lfs.sha256, file.blob_id) if key]


def _is_of_disk(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in _DISK_ERRORS


def _may_pass(error: Exception) -> bool:
    """Whether the same download may succeed later."""
    status = _status(error)
    if status is not None:
        return status in _PASSING or status >= HTTPStatus.INTERNAL_SERVER_ERROR
    return isinstance(error, OSError) or not isinstance(error, ValueError)


def _reason(error: BaseException) -> str:
    """Return the status of the response that caused ``error``; without one, its first line."""
    status = _status(error)
    if status is not None:
        return f"the server replied with status {status}"
    return str(error.__cause__ or error).partition("\n")[0]


def _status(error: BaseException) -> int | None:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, HfHubHTTPError) and cause.response is not None:
            return int(cause.response.status_code)
        cause = cause.__cause__ or cause.__context__
    return None


class _Hidden(tqdm):  # type: ignore[misc]
    """A progress bar that is not shown."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options.pop("name", None)  # of the Hub's own class
        super().__init__(*args, **{**options, "file": io.StringIO()})  # for its line end


class _Reported(_Hidden):
    """Reports its numbers to a function."""

    report: Callable[[int, int], object]

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Report the progress in place of a redrawn bar."""
        if self.unit == "B" and self.total:
            self.report(int(self.n), int(self.total))


class _PercentLines(_Hidden):
    """A progress bar for logs: a line every few seconds."""

    model = ""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._next_s = time.monotonic() + _LINE_EVERY_S
        super().__init__(*args, **options)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Log the progress in place of a redrawn bar."""
        counts_bytes = self.unit == "B" and self.total
        if counts_bytes and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _LINE_EVERY_S
            done = f"{100 * self.n / self.total:.0f} % of {self.total / 1e9:.2f} GB"
            log.info("downloading %s: %s", self.model, done)
