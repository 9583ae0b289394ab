"""Ctrl-C in ``dynamo run`` beside a running deployment."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo.cli import models
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import ConfigError
from dynamo.llm.model_source import named_model
from dynamo.operations import reload
from dynamo.operations.steps.circus import CircusEndpoint
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

    monkeypatch.setattr(models, "reload_graph", call)
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


@pytest.mark.parametrize(("second", "listed"), [(["m", "n"], True), (["n"], False), (None, False)])
def test_a_model_is_listed_when_every_frontend_serves_it(
    monkeypatch: pytest.MonkeyPatch, second: list[str] | None, listed: bool
) -> None:
    """One that does not answer yet would give its clients a 404."""
    answers: dict[str, Any] = {
        "one": SimpleNamespace(models=["m"]),
        "two": None if second is None else SimpleNamespace(models=second),
    }

    async def probe(address: str) -> Any:
        return answers[address]

    frontends = [
        SimpleNamespace(listens=SimpleNamespace(address=address))
        for address in ("one", None, "two")
    ]
    monkeypatch.setattr(models, "frontends_in", lambda document: frontends)
    monkeypatch.setattr(models, "probe", probe)
    assert asyncio.run(models._are_listed(Document(), ["m"])) is listed


def test_a_request_waits_for_the_command_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = {"status": "error", "reason": "arbiter is already running arbiter_reload command"}
    replies: list[dict[str, Any]] = [busy, busy, {"status": "ok", "added": []}]

    async def exchange(*_: Any) -> dict[str, Any]:
        return replies.pop(0)

    monkeypatch.setattr(reload, "check_answers", lambda document: None)
    monkeypatch.setattr(CircusEndpoint, "_exchange", exchange)
    assert reload.reload_graph(Document(), {})["added"] == []
    assert replies == []
    replies += [{"status": "error", "reason": "no such service", "graph_is_wrong": True}]
    with pytest.raises(ConfigError, match="no such service"):
        reload.reload_graph(Document(), {})
