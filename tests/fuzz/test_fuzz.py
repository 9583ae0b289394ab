"""Every input of the corpora keeps its promise. `scripts/fuzz` searches for others."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "unit/frontend")]

from targets import TARGETS  # noqa: E402 - finds its kits by the line above


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_keeps_its_promise(name: str) -> None:
    check = TARGETS[name]()
    inputs = sorted((HERE / "corpus" / name).iterdir())
    assert inputs
    for path in inputs:
        check(path.read_bytes())


def test_a_broken_promise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference that splits in another way than the compiled module."""
    monkeypatch.setattr("oracle.frames._HEADER", struct.Struct("<IBH"))
    with pytest.raises(AssertionError):
        TARGETS["frames"]()((HERE / "corpus/frames/two").read_bytes())
