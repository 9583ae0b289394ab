"""Changes of a statefile's entries as another writer makes them, for tests."""

from __future__ import annotations

from typing import Any

from dynamo.serve.state.document import Document, Entry

__all__ = ["rewrite"]


def rewrite(document: Document, name: str, **values: Any) -> None:
    """Write ``values`` into the JSON object of the entry ``name``; None removes a key."""
    written = {**document.components[name].written(), **values}
    kept = {key: value for key, value in written.items() if value is not None}
    document.components[name] = Entry.of(kept)
