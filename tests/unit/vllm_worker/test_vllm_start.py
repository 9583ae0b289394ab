"""The ports of an engine and the directory of its sockets."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import EngineFailure
from dynamo.vllm.worker import free_ports, preset_nixl_port, rpc_directory


def test_ports_in_a_row() -> None:
    first = free_ports(4)
    with ExitStack() as stack:
        for port in range(first, first + 4):
            stack.enter_context(socket.socket()).bind(("", port))


def test_too_many_ports() -> None:
    with pytest.raises(EngineFailure, match="no 70000 consecutive free TCP ports"):
        free_ports(70000)


def test_a_port_of_the_user_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600")
    preset_nixl_port(2)
    assert os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5600"
    monkeypatch.delenv("VLLM_NIXL_SIDE_CHANNEL_PORT")
    preset_nixl_port(2)
    assert int(os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"]) > 1024
    monkeypatch.delenv("VLLM_NIXL_SIDE_CHANNEL_PORT")


def test_sockets_have_a_private_directory_while_the_engine_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    settings = RuntimeSettings(state_dir=str(tmp_path))
    with socket.socket(socket.AF_UNIX) as left, rpc_directory(settings, 0xAB) as directory:
        assert os.environ["VLLM_RPC_BASE_PATH"] == str(directory)
        assert directory.name == "ab.engine" and directory.stat().st_mode & 0o77 == 0
        left.bind(str(directory / ("0" * 36)))
    assert not directory.exists()
    monkeypatch.delenv("VLLM_RPC_BASE_PATH")
