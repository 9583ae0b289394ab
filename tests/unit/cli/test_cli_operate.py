"""What an operator's verb does while its output cannot be written."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest

from dynamo.cli.operate import print_steps
from dynamo.operations.operate import Steps


def test_an_action_is_completed_without_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """`dynamo drain NAME | true`: interrupted, the worker would be half drained."""
    done: list[str] = []

    async def steps() -> Steps:
        yield "draining"
        done.append("drained")
        yield "drained"
        done.append("closed")

    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        with pytest.raises(BrokenPipeError):
            asyncio.run(print_steps(steps()))
        assert done == ["drained", "closed"]
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)  # for what the file writes at its end
