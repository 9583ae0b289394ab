"""Ctrl-C in ``dynamo run`` beside a running deployment."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dynamo.cli import models
from dynamo.config.runtime import RuntimeSettings
from dynamo.llm.model_source import named_model
from dynamo.serve.state.document import Document
from dynamo.setup.new_graph import InstalledEngine, NewGraph

MODEL = str(Path(__file__).resolve().parents[3] / "examples/model")


def test_ctrl_c_before_the_reply_removes_what_was_added(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The deployment may be busy with a reload for as long as its workers drain."""
    requests = []

    def call(document: Document, request: Mapping[str, Any]) -> dict[str, Any]:
        requests.append(request)
        if "add" in request:
            os.kill(os.getpid(), signal.SIGINT)
        return {"added": ["Worker3"], "warnings": [], "file": "graph.yaml"}

    monkeypatch.setattr(models, "call", call)
    source = named_model(MODEL)
    graph = NewGraph(model=source, engine=InstalledEngine("mocker", (), "dynamo"))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        runtime = RuntimeSettings(namespace="box", state_dir=str(tmp_path))
        assert models.add(Document(), runtime, [graph], dry_run=False) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert requests[1:] == [{"remove": ["Worker3"]}]
    assert "waiting until the deployment has added it" in capfd.readouterr().err
