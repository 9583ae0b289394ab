"""``dynamo list``, ``pull``, ``rm``: the models on disk."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict

from dynamo.cli.options import DeleteSettings, ListSettings, PullSettings
from dynamo.cli.text_table import aligned
from dynamo.config import from_env, load
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import ConfigError, as_path
from dynamo.llm.model_source import OnProgress, named_model
from dynamo.observability.logs import counted, terminal_text
from dynamo.operations.pull import pull as pull_model
from dynamo.operations.stored_models import StoredModel, deletable, delete, stored_models
from dynamo.serve.state.document import Document
from dynamo.status.deployment import running_documents

_COLUMNS = ("MODEL", "STORE", "FORMAT", "SIZE", "LAST USED", "SERVED BY")
_DAY_S = 86_400
_LINE_EVERY_S = 2.0
_JSON_EVERY_S = 1.0


def list_models(argv: Sequence[str] | None = None) -> int:
    """Run ``dynamo list``; return the exit status."""
    text = "List the models on disk: Hugging Face's cache, GGUF files of llama.cpp, Ollama's store."
    (settings,) = load("dynamo list", text, [ListSettings], argv)
    models = stored_models(_documents())
    if settings.json:
        rows = [{**asdict(model), "path": str(model.path)} for model in models]
        print(json.dumps(rows, indent=2))
        return 0
    table = terminal_text("\n".join(aligned([_COLUMNS, *map(_row, models)])))
    print(table if models else "no model on disk; try: dynamo pull MODEL")
    return 0


def pull(argv: Sequence[str] | None = None) -> int:
    """Run ``dynamo pull``; return the exit status."""
    text = "Download a model, with its weights. An interruption keeps the files that are complete."
    (settings,) = load("dynamo pull", text, [PullSettings], argv)
    if not settings.model:
        raise ConfigError("no model given; try: dynamo pull Qwen/Qwen3-0.6B")
    model = named_model(settings.model)

    def stop(*_: object) -> None:
        """End at once: the Hub's threads would end only with their files."""
        os.write(2, f"\nstopped; to go on: dynamo pull {as_path(settings.model)}\n".encode())
        os._exit(130)

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, stop)
    if settings.json:
        lines = _JsonLines()
        try:
            message = pull_model(model, settings.verify, lines.on_progress)
        finally:
            lines.close()
        print(json.dumps({"message": message}))
        return 0
    on_progress = _on_lines(model.name) if model.kind == "ollama" else None
    print(terminal_text(pull_model(model, settings.verify, on_progress)))
    return 0


def remove(argv: Sequence[str] | None = None) -> int:
    """Run ``dynamo rm``; return the exit status."""
    text = "Delete a model from disk. One that a deployment or another process uses is refused."
    (settings,) = load("dynamo rm", text, [DeleteSettings], argv)
    model = deletable(settings.model, _documents())
    size = _size(model.size_bytes)
    if not settings.yes and not _agrees(f"delete {model.name}, {size}, from {model.path}?"):
        print("nothing was deleted")
        return 1
    if not settings.yes:  # it may have come into use during the question
        model = deletable(str(model.path), _documents())
    delete(model)
    print(f"deleted {model.name}; {size} are free")
    return 0


def _documents() -> list[Document]:
    return running_documents(from_env(RuntimeSettings))


def _row(model: StoredModel) -> tuple[str, ...]:
    formats = ", ".join(model.formats) or "no weights"
    return (
        model.name,
        model.store,
        formats if model.is_complete else f"{formats}, incomplete",
        _size(model.size_bytes),
        _ago(time.time() - model.used_at_s) if model.used_at_s else "-",
        ", ".join(model.served_by) or "-",
    )


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def _ago(seconds: float) -> str:
    if seconds < _DAY_S:
        return "today"
    days = int(seconds // _DAY_S)
    return f"{counted(days, 'day')} ago"


def _on_lines(name: str) -> OnProgress:
    """Return what prints the progress of Ollama, which the Hub's library does itself."""
    due_s = 0.0

    def on_progress(done: int, total: int) -> None:
        nonlocal due_s
        if time.monotonic() > due_s:
            due_s = time.monotonic() + _LINE_EVERY_S
            print(f"downloading {name}: {done / total:.0%} of {_size(total)}")

    return on_progress


class _JsonLines:
    """Prints the progress as JSON, a line a second, until it is closed.

    It ends the process if its reader has exited, also while no byte arrives.
    """

    def __init__(self) -> None:
        self._done = self._total = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._print, daemon=True)
        self._thread.start()

    def on_progress(self, done: int, total: int) -> None:
        """Remember the numbers. The Hub's library has several bars: the longest one counts."""
        if total >= self._total:
            self._done, self._total = max(done, self._done), total

    def close(self) -> None:
        """Print the last line."""
        self._closed.set()
        self._thread.join()

    def _print(self) -> None:
        ended = False
        while not ended:
            ended = self._closed.wait(_JSON_EVERY_S)
            line = {"done_bytes": self._done, "total_bytes": self._total}
            try:
                print(json.dumps(line), flush=True)
            except BrokenPipeError:
                # An exception would end only this thread, and not the download.
                os._exit(128 + signal.SIGPIPE)


def _agrees(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("give --yes to delete without a question")
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:  # Ctrl-D
        print()
        return False
