"""The models on the disks of this machine: Hugging Face's cache, llama.cpp's, Ollama's store."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import re
import shlex
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dynamo.config import environ
from dynamo.errors import ConfigError, DynamoError, shorten
from dynamo.runtime.process.paths import expanded
from dynamo.serve.state.document import Document

HUB, LLAMA, OLLAMA, LOCAL = "Hugging Face", "llama.cpp", "Ollama", "path"
_FORMATS = {".safetensors": "safetensors", ".gguf": "GGUF", ".bin": "PyTorch", ".pt": "PyTorch"}
_LIBRARY = ("registry.ollama.ai", "library")
_WEIGHTS = "application/vnd.ollama.image.model"
_PIECE_BYTES = 1 << 22
_HEX = re.compile(r"[0-9a-f]+")
_UNUSED_PART = re.compile(r"\.[0-9a-f]{8}\.incomplete$")


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """A model, by the ``name`` that ``dynamo run`` takes; ``path`` is its directory or file.

    ``used_at_s`` is when a file of it was last read (Unix time), if the disk records that.
    ``is_complete`` is false after an interrupted download. ``served_by`` has services as
    ``namespace/service``, also those without a worker now.
    """

    name: str
    store: str
    path: Path
    size_bytes: int
    used_at_s: float
    formats: tuple[str, ...] = ()
    is_complete: bool = True
    served_by: tuple[str, ...] = ()


def stored_models(documents: Iterable[Document]) -> list[StoredModel]:
    """Return the models on disk, by name. ``documents`` are those of running deployments.

    Directories and files outside of the stores are found if a deployment serves them.
    """
    models = [*_hub_models(), *_llama_models(), *_ollama_models()]
    served = [(where, words) for document in documents for where, words in _services(document)]
    rows = [_with_servers(model, served) for model in models]
    paths = {model.path for model in models}
    local: dict[Path, list[str]] = {}
    for where, words in served:
        for path in _paths(words, paths):
            local.setdefault(path, []).append(where)
    rows += [_local(path, where) for path, where in local.items()]
    return sorted(rows, key=lambda row: row.name.lower())


def _hub_models() -> Iterator[StoredModel]:
    # Imported here: it takes 0.2 s.
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    root = Path(constants.HF_HUB_CACHE).resolve()
    try:
        repos = {repo.repo_path: repo for repo in scan_cache_dir(root).repos}
    except (CacheNotFound, OSError, RuntimeError):  # RuntimeError: there is no home directory
        return
    for path in sorted(root.glob("models--*--*")):
        blobs = [*(path / "blobs").glob("*")]
        is_partial = any(file.suffix == ".incomplete" for file in blobs)
        repo = repos.get(path)
        files = [file for revision in repo.revisions for file in revision.files] if repo else []
        formats = {_FORMATS.get(Path(file.file_name).suffix) for file in files} - {None}
        yield StoredModel(
            name=path.name.removeprefix("models--").replace("--", "/", 1),
            store=HUB,
            path=path,
            size_bytes=sum(map(_size, blobs)),
            used_at_s=repo.last_accessed if repo else _read_at_s(path),
            formats=tuple(sorted(map(str, formats))),
            is_complete=not is_partial and bool(files),
        )


def _llama_models() -> Iterator[StoredModel]:
    root = _root("LLAMA_CACHE", "~/.cache/llama.cpp")
    for path in sorted(root.glob("*.gguf")):
        yield StoredModel(
            name=str(path),
            store=LLAMA,
            path=path,
            size_bytes=_size(path),
            used_at_s=_read_at_s(path),
            formats=("GGUF",),
        )


def _root(variable: str, default: str) -> Path:
    directory = environ().get(variable)
    return (Path(directory) if directory else expanded(default)).resolve()


def _ollama_models() -> Iterator[StoredModel]:
    root = _root("OLLAMA_MODELS", "~/.ollama/models")
    manifests = root / "manifests"
    for path in sorted(manifests.glob("*/*/*/*")):
        host, owner, name, tag = path.relative_to(manifests).parts
        try:
            document = json.loads(path.read_bytes())
            layers = [document["config"], *document["layers"]]
            blobs = {root / "blobs" / layer["digest"].replace(":", "-") for layer in layers}
            sizes = sum(int(layer["size"]) for layer in layers)
            weights = any(layer.get("mediaType") == _WEIGHTS for layer in layers)
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
            continue  # not a manifest, or of another version
        prefix = "" if (host, owner) == _LIBRARY else f"{owner}/"
        if host != _LIBRARY[0]:
            prefix = f"{host}/{prefix}"
        yield StoredModel(
            name=f"{prefix}{name}:{tag}",
            store=OLLAMA,
            path=path,
            size_bytes=sizes,
            used_at_s=max((_read_at_s(blob) for blob in blobs), default=0.0),
            formats=("GGUF",) if weights else (),
            is_complete=all(blob.exists() for blob in blobs),
        )


def _services(document: Document) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield each service of a deployment with the words of its commands."""
    words: dict[str, set[str]] = {}
    for entry in document.components.values():
        of_service = words.setdefault(entry.service, set())
        for word in _words(entry.argv):
            of_service.add(word)
            if word.startswith(os.sep):  # models are listed by their real paths
                of_service.add(str(Path(word).resolve()))
    for service, of_service in words.items():
        yield f"{document.namespace}/{service}", frozenset(of_service)


def _words(argv: Iterable[str]) -> Iterator[str]:
    """Yield words, those inside a command that is one word, and values after ``=``."""
    for word in argv:
        yield word
        if " " in word:
            with contextlib.suppress(ValueError):
                yield from _words(shlex.split(word))
        elif "=" in word:
            yield word.partition("=")[2]


def _with_servers(model: StoredModel, served: Iterable[tuple[str, frozenset[str]]]) -> StoredModel:
    return replace(
        model, served_by=tuple(where for where, words in served if _is_named(model, words))
    )


def _is_named(model: StoredModel, words: frozenset[str]) -> bool:
    name, path = model.name, str(model.path)
    if model.store == HUB:
        begins = (f"{name}/", f"{name}:", f"hf://{name}", f"{path}/")
        return name in words or path in words or any(word.startswith(begins) for word in words)
    return name in words or path in words or name.removesuffix(":latest") in words


def _paths(words: Iterable[str], listed: Iterable[Path]) -> Iterator[Path]:
    """Yield the directories with weights and the GGUF files among ``words``, without ``listed``."""
    inside = tuple(listed)
    for word in sorted(words):
        path = Path(word)
        if not path.is_absolute() or any(
            path == directory or directory in path.parents for directory in inside
        ):
            continue
        is_model = path.suffix == ".gguf" if path.is_file() else (path / "config.json").is_file()
        if is_model:
            yield path


def _local(path: Path, served_by: Iterable[str]) -> StoredModel:
    files = [path] if path.is_file() else [child for child in path.iterdir() if child.is_file()]
    formats = {_FORMATS.get(file.suffix) for file in files} - {None}
    return StoredModel(
        name=str(path),
        store=LOCAL,
        path=path,
        size_bytes=sum(map(_size, files)),
        used_at_s=max((_read_at_s(file) for file in files), default=0.0),
        formats=tuple(sorted(map(str, formats))),
        served_by=tuple(served_by),
    )


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def _read_at_s(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_atime
    return 0.0


def deletable(name: str, documents: Iterable[Document]) -> StoredModel:
    """Return the stored model ``name``. Raises ConfigError if it is used, or not in a store."""
    names = {name, str(Path(name).resolve())}
    matches = [
        model
        for model in stored_models(documents)
        if names & {model.name, str(model.path)} or model.name == f"{name}:latest"
    ]
    if not matches:
        raise ConfigError(f"no model {name!r} on disk; see: dynamo list")
    model = matches[0]
    if model.served_by:
        raise ConfigError(
            f"{model.name} is served by {', '.join(model.served_by)}; first: dynamo remove MODEL"
        )
    if model.store == LOCAL:
        raise ConfigError(f"{model.name} is in no store of models; delete it with: rm")
    if pids := users_of(model.path):
        raise ConfigError(f"{model.name} is open in process {', '.join(map(str, pids))}")
    return model


def empty_parts(repository: str, delete: bool = False) -> None:
    """Give back the space of cut files of ``repository``, whose downloads have ended.

    Recent versions of the Hub's library never use them again. Those of earlier ones, which do, have
    another name. Unless they are deleted, their names still say that the model is incomplete.
    """
    from huggingface_hub import constants  # takes 0.2 s

    name = f"models--{repository.replace('/', '--')}"
    for path in Path(constants.HF_HUB_CACHE, name, "blobs").resolve().glob("*.incomplete"):
        if _UNUSED_PART.search(path.name) and not users_of(path):
            with contextlib.suppress(OSError):
                path.unlink() if delete else os.truncate(path, 0)


def users_of(path: Path) -> list[int]:
    """Return the processes that have ``path``, or a file in it, open, as far as we may see."""
    path = path.resolve()  # as the kernel shows it
    inside = f"{path}{os.sep}" if path.is_dir() else str(path)
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            names = [str(descriptor.readlink()) for descriptor in (process / "fd").iterdir()]
            lines = (process / "maps").read_text(errors="replace").splitlines()
            # The sixth column of maps is a path: a mapped file needs no open descriptor.
            names += [line.split(maxsplit=5)[5] for line in lines if "/" in line]
            if any(name.startswith(inside) for name in names):
                pids.append(int(process.name))
    return sorted(pids)


def delete(model: StoredModel) -> None:
    """Delete a model from its store; Ollama deletes its own. Raises DynamoError, OSError."""
    if model.store == OLLAMA:
        for _ in ask_ollama("DELETE", "/api/delete", model.name):
            pass
        return
    if model.store == HUB:
        # First what makes it a model: an interrupted deletion must not leave one without a file.
        deleted = model.path / "deleted"
        shutil.rmtree(deleted, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            (model.path / "snapshots").rename(deleted)
        shutil.rmtree(model.path, onerror=_unless_gone)
        shutil.rmtree(model.path.parent / ".locks" / model.path.name, ignore_errors=True)
        return
    for path in (model.path, *model.path.parent.glob(f"{model.path.name}.*")):
        path.unlink()


def _unless_gone(function: object, path: str, error: Any) -> None:
    """Raise the error of a removal, unless another one was faster."""
    if not isinstance(error[1], FileNotFoundError):
        raise error[1]


def check_blobs(snapshot: Path, since_s: float) -> int:
    """Compare each file that was written after ``since_s`` with the checksum in its name.

    Returns how many were compared. Each file must be in the repository's ``blobs``. A wrong one is
    deleted, a link out of the cache is left as it is; a ConfigError names it.
    """
    count = 0
    for file in sorted(snapshot.rglob("*")):
        if not file.is_symlink():  # a directory, or a file system without links
            continue
        entry, blob = Path(os.path.normpath(file.parent / file.readlink())), file.resolve()
        if not _is_in_cache(entry, blob):
            raise ConfigError(
                f"{file.name!a} is a link out of the cache, to {str(blob)!a}, where nothing was "
                "changed now; delete the model with dynamo rm, and pull it from another server"
            )
        if not blob.is_file() or blob.stat().st_mtime < since_s:
            continue
        digest = _digest(blob, entry.name)
        if digest is None:
            raise ConfigError(
                f"{file.name!a} was not compared: the server gave no checksum but {entry.name!a}; "
                "delete the model with dynamo rm, or keep it if you trust that server"
            )
        count += 1
        if digest != entry.name:
            file.unlink()
            entry.unlink()
            raise ConfigError(
                f"{file.name} differs from its checksum, and was deleted; pull the model again"
            )
    return count


def _is_in_cache(entry: Path, blob: Path) -> bool:
    """Whether a link to ``entry`` names a blob of its repository, which ``blob`` is.

    The Hub's library may make that one a link to a blob that several repositories share.
    """
    repository = entry.parent.parent
    is_blob = entry.parent.name == "blobs" and repository.name.startswith("models--")
    return is_blob and repository.parent.resolve() in blob.parents


def _digest(blob: Path, name: str) -> str | None:
    """Return the checksum of ``blob`` of the kind that ``name`` is; None if it is none.

    SHA-256 for large files; for others that of Git, SHA-1 with a header.
    """
    kinds: Mapping[int, str] = {64: "sha256", 40: "sha1"}
    kind = kinds.get(len(name))
    if kind is None or not _HEX.fullmatch(name):
        return None
    # An OpenSSL in FIPS mode refuses SHA-1 otherwise.
    checksum = hashlib.new(kind, usedforsecurity=False)
    if kind == "sha1":
        checksum.update(b"blob %d\0" % blob.stat().st_size)
    with blob.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            checksum.update(piece)
    return checksum.hexdigest()


_ADDRESS = "127.0.0.1:11434"
_CONNECT_S = 0.5
_ANSWER_S = 60.0
_LINE_BYTES = 1 << 20


def running_ollama() -> str | None:
    """Return the URL of an Ollama that answers here; None without one."""
    address = environ().get("OLLAMA_HOST") or _ADDRESS
    parts = urlsplit(address if "://" in address else f"//{address}")
    host = parts.hostname or "127.0.0.1"
    # Ollama's server reads the variable, too: there it is the address to bind.
    host = "127.0.0.1" if host == "0.0.0.0" else host
    with contextlib.suppress(OSError, ValueError):
        port = parts.port or 11434
        with socket.create_connection((host, port), _CONNECT_S):
            bracketed = f"[{host}]" if ":" in host else host
            return f"{parts.scheme or 'http'}://{bracketed}:{port}"
    return None


def ask_ollama(method: str, path: str, model: str) -> Iterator[dict[str, Any]]:
    """Yield the lines that a running Ollama answers. Raises DynamoError and OSError."""
    url = running_ollama()
    if url is None:
        raise DynamoError(
            "no Ollama answers here, which keeps its models itself; try: ollama serve"
        )
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=_ANSWER_S)
    try:
        connection.request(method, path, json.dumps({"model": model}).encode())
        with connection.getresponse() as answer:
            # One byte above the limit shows that a line is too long.
            while line := answer.readline(_LINE_BYTES + 1):
                if not line.strip():
                    continue
                reply = json.loads(line) if len(line) <= _LINE_BYTES else None
                if not isinstance(reply, dict):
                    raise ValueError(f"a line is no JSON object of at most {_LINE_BYTES} bytes")
                if "error" in reply:
                    raise DynamoError(f"Ollama at {url}: {shorten(str(reply['error']))}")
                yield reply
            if answer.status >= http.client.BAD_REQUEST:
                raise DynamoError(f"Ollama at {url} answered {answer.status} {answer.reason}")
    except (http.client.HTTPException, RecursionError, ValueError) as error:
        raise DynamoError(f"Ollama at {url}: {shorten(str(error))}") from error
    finally:
        connection.close()
