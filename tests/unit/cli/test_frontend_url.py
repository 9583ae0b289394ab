"""Which frontend a command calls: the one that is named, the only one that runs, the default."""

from __future__ import annotations

import getpass
import json
import socket
import ssl
from pathlib import Path

import pytest

from dynamo.bench.client import refusal
from dynamo.cli import bench, frontend_client
from dynamo.cli.frontend_client import find_target, listener_owner
from dynamo.config.client import ClientSettings
from dynamo.errors import ConfigError
from dynamo.http.client import remedy


@pytest.fixture
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("DYN_NAMESPACE", "box")
    tmp_path.chmod(0o700)
    return tmp_path


def running(state_dir: Path, *ports: int, namespace: str = "box") -> None:
    """Write the statefile of a deployment with frontends on these ports."""
    components = {
        f"{namespace}_Frontend{port}": {
            "watcher": f"{namespace}_Frontend{port}",
            "argv": ["python", "-m", "dynamo.frontend", "--http-port", str(port)],
            "processes": [],
        }
        for port in ports
    }
    document = {
        "namespace": namespace,
        "circus_endpoint": "ipc://x",
        "components": components,
        "environment": {},
    }
    (state_dir / f"{namespace}.json").write_text(json.dumps(document))


def test_the_only_frontend_is_found(state_dir: Path) -> None:
    assert find_target(ClientSettings()).url == "http://127.0.0.1:8000"
    running(state_dir, 8123)
    assert find_target(ClientSettings()).url == "http://127.0.0.1:8123"
    named = ClientSettings(url="http://elsewhere:1/v1", api_key="k")
    assert find_target(named).url == "http://elsewhere:1" and find_target(named).api_key == "k"
    running(state_dir, 8200, namespace="other")
    assert find_target(ClientSettings(namespace="other")).port == 8200


def test_bench_finds_the_running_deployment(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DYN_NAMESPACE")
    running(state_dir, 9)
    assert bench.main([]) == 1
    assert "cannot connect to 127.0.0.1:9 " in capsys.readouterr().err
    assert bench.main(["--namespace", "none"]) == 2
    assert "no frontend runs in namespace 'none'" in capsys.readouterr().err


def test_several_or_none_are_an_error_with_a_remedy(state_dir: Path) -> None:
    running(state_dir, 8123, 8124)
    with pytest.raises(ConfigError, match=r"name one with --url: http://127\.0\.0\.1:8123, http"):
        find_target(ClientSettings())
    with pytest.raises(ConfigError, match="no frontend runs in namespace 'none'"):
        find_target(ClientSettings(namespace="none"))
    (state_dir / "box.json").write_text("{")
    with pytest.raises(ConfigError, match="name the frontend with --url"):
        find_target(ClientSettings())


@pytest.mark.parametrize(
    ("error", "remedy_text"),
    [
        (ConnectionRefusedError(111, "x"), "start it"),
        (TimeoutError(), "dynamo ps"),
        (ssl.SSLCertVerificationError("x"), "--tls-ca-cert-path"),
    ],
)
def test_the_remedy_fits_the_cause(error: Exception, remedy_text: str) -> None:
    assert remedy_text in remedy(error, "start it")


def test_the_key_of_the_deployment_is_used_where_one_is_needed(state_dir: Path) -> None:
    """As `dynamo ps` does: chat, bench, route, explain, record and replay of its own user."""
    (state_dir / "box").mkdir()
    (state_dir / "box" / "local.key").write_text("local")
    running(state_dir, 8123)
    assert find_target(ClientSettings()).api_key is None
    path = state_dir / "box.json"
    path.write_text(
        path.read_text().replace('"--http-port"', '"--api-key-file", "k", "--http-port"')
    )
    assert find_target(ClientSettings()).api_key == "local"
    assert find_target(ClientSettings(api_key="mine")).api_key == "mine"
    assert find_target(ClientSettings(url="http://127.0.0.1:8123")).api_key is None
    hint = "401: no; give a key with --api-key or OPENAI_API_KEY"
    assert refusal(401, b'{"message": "no"}') == hint
    assert refusal(404, b'{"message": "no"}') == "404: no"


def test_whose_deployment_answers_is_said(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With another home directory the default address may be another deployment's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(frontend_client, "_DEFAULT_PORT", port)
        find_target(ClientSettings())
        said = capsys.readouterr().err
        assert f"{state_dir} has no running deployment; at http://127.0.0.1:8000 answers" in said
        assert f"a process of {getpass.getuser()} (you, with another home" in said
        find_target(ClientSettings(url=f"http://127.0.0.1:{port}"))
        running(state_dir, port)
        find_target(ClientSettings())
    assert capsys.readouterr().err == "" and not listener_owner(port)
