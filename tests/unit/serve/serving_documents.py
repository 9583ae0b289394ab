"""A statefile for tests."""

from __future__ import annotations

from dynamo.serve.state.document import Document, Entry

__all__ = ["document"]


def document(namespace: str) -> Document:
    """The smallest statefile of ``namespace`` with one component ``A``."""
    name = f"{namespace}_A"
    entry = Entry(name=name, argv=("sleep", "1000"))
    return Document(namespace=namespace, circus_endpoint="ipc:///nowhere", components={name: entry})
