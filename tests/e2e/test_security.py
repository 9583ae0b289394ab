"""Keys and TLS of real processes: the openai client, rotation, operators, dynamo serve."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority, needs_openssl, plain_context
from deployment import Deployment, free_port
from forked_kit import run_verb
from lazy_module import anthropic, openai
from serving import Serving

from dynamo.http.api_keys import key_line, new_key

pytestmark = needs_openssl
UPSTREAM = Path(__file__).with_name("openai_server.py")
MESSAGES: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``dynamo words``."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("DYN_", "OPENAI_"))}
    return run_verb(*words, env=clean | env)


class Secured:
    """A frontend with a key file and a certificate, and a mocker."""

    def __init__(self, at: Path, authority: Authority) -> None:
        self.authority = authority
        self.keys = str(at / "keys")
        self.user = run("key", "add", "alice", "--api-key-file", self.keys).stdout.strip()
        add = ("key", "add", "root", "--role", "operator")
        self.operator = run(*add, DYN_API_KEY_FILE=self.keys).stdout.strip()
        self.cert, self.key = str(at / "site.crt"), str(at / "site.key")
        self.install("first")
        self.deployment = Deployment(at)
        self.deployment.mocker("--speedup-ratio", "0", "--block-size", "16")
        self.front = self.deployment.frontend(
            *("--router-mode", "kv", "--api-key-file", self.keys),
            *("--tls-cert-path", self.cert, "--tls-key-path", self.key),
            DYN_LOG="debug",
        )
        self.deployment.until(lambda: self.ask("GET", "/health")[0] == 200, "health")

    def install(self, name: str) -> None:
        for made, at in zip(self.authority.sign(name), (self.cert, self.key), strict=True):
            shutil.copy(made, at)

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        key: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, Any]:
        port, context = self.deployment.port, self.authority.trust()
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=30, context=context)
        headers = {"content-type": "application/json", **(headers or {})}
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def client(self, key: str) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"https://127.0.0.1:{self.deployment.port}/v1",
            api_key=key,
            http_client=openai.DefaultHttpxClient(verify=self.authority.trust()),
            max_retries=0,
            timeout=30,
        )

    def logs(self) -> str:
        return "".join(log.read_text() for log in self.deployment.logs.glob("*.log"))


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[Secured]:
    made = Secured(tmp_path_factory.mktemp("secured"), authority)
    try:
        yield made
    finally:
        made.deployment.close()


def test_the_openai_client_with_a_key_over_tls(secured: Secured) -> None:
    with secured.client(secured.user) as client:
        assert [model.id for model in client.models.list().data] == ["tiny"]
        answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=5)
        assert answer.usage is not None and answer.usage.completion_tokens == 5
        stream = client.completions.create(model="tiny", prompt="a b", max_tokens=50, stream=True)
        assert "".join(choice.text for chunk in stream for choice in chunk.choices)
    with secured.client("wrong") as client, pytest.raises(openai.AuthenticationError) as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert caught.value.code == "invalid_api_key"
    assert secured.user not in secured.logs() and secured.operator not in secured.logs()


def test_the_anthropic_client_with_a_key_over_tls(secured: Secured) -> None:
    url = f"https://127.0.0.1:{secured.deployment.port}"

    def client(**key: str) -> anthropic.Anthropic:
        http_client = anthropic.DefaultHttpxClient(verify=secured.authority.trust())
        return anthropic.Anthropic(base_url=url, http_client=http_client, max_retries=0, **key)

    for key in ({"api_key": secured.user}, {"auth_token": secured.user}):
        with client(**key) as one:
            answer = one.messages.create(model="tiny", messages=MESSAGES, max_tokens=5)
            assert answer.usage.output_tokens == 5
    with client(api_key="wrong") as one, pytest.raises(anthropic.AuthenticationError) as caught:
        one.messages.create(model="tiny", messages=MESSAGES, max_tokens=5)
    body: Any = caught.value.body
    assert body["error"]["type"] == "authentication_error"
    headers = {"x-api-key": secured.user, "anthropic-version": "2023-06-01"}
    status, found = secured.ask("GET", "/v1/models", headers=headers)
    assert status == 200 and json.loads(found)["data"][0]["display_name"] == "tiny"


def test_operators(secured: Secured) -> None:
    ask, user, operator = secured.ask, secured.user, secured.operator
    change = {"model": "tiny", "active_decode_blocks_threshold": 0.9}
    chat = {"model": "tiny", "messages": MESSAGES}
    status, answer = ask("POST", "/v1/chat/completions", chat, user)  # the last request
    assert status == 200, answer
    for method, path, body in (
        ("POST", "/busy_threshold", change),
        ("POST", "/v1/route", chat),
        ("GET", "/v1/route?prompt=a", None),
        ("GET", "/v1/requests", None),
        ("GET", "/v1/requests/last", None),
    ):
        assert ask(method, path, body)[0] == 401
        status, answer = ask(method, path, body, user)
        assert status == 403 and b"the key 'alice' has the role user" in answer
        assert ask(method, path, body, operator)[0] == 200
    recorders = (None, user, operator)  # HEAD: a GET streams until it is closed
    assert [ask("HEAD", "/v1/record", None, key)[0] for key in recorders] == [401, 403, 200]
    for body in (None, {"ttft_ms": 900}):  # 503: this deployment has no planner
        method = "GET" if body is None else "POST"
        answers = [ask(method, "/v1/planner", body, key)[0] for key in recorders]
        assert answers == [401, 403, 503]
    assert ask("GET", "/busy_threshold")[0] == 401
    assert ask("GET", "/busy_threshold", key=user)[0] == 200
    for path in ("/health", "/live", "/metrics", "/ping", "/load"):
        assert ask("GET", path)[0] == 200
    assert ask("POST", "/ping")[0] == 200
    for path in ("/invocations", "/v1/chat/completions/batch"):
        assert ask("POST", path, {"model": "tiny"})[0] == 401
    assert ask("GET", "/version")[0] == 401
    page = ask("GET", "/metrics")[1].decode()
    assert 'dynamo_frontend_api_key_requests_total{key="alice"}' in page
    assert 'dynamo_frontend_http_refused_total{status="401"}' in page


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages"])
def test_a_user_may_not_go_first_at_any_entrance(secured: Secured, path: str) -> None:
    """Not by a header, and not by the body; with a long body, too, which threads read."""
    ask, user, operator = secured.ask, secured.user, secured.operator
    text = {"chat/completions": {"messages": MESSAGES}, "completions": {"prompt": "hi"}}
    body = {"model": "tiny", "max_tokens": 4, **text.get(path, {"messages": MESSAGES})}
    if path == "responses":
        body = {"model": "tiny", "input": "hi"}
    strict = {"x-dynamo-request-strict-priority": "1"}
    path = f"/v1/{path}"
    status, answer = ask("POST", path, body, user, strict)
    assert status == 403 and b"strict-priority' = 1 is not granted to the API key 'alice'" in answer
    low = {"x-dynamo-request-strict-priority": "-1", "x-dynamo-session-id": "s"}
    assert ask("POST", path, body, user, low)[0] == 200
    assert ask("POST", path, body, operator, strict)[0] == 200
    if path != "/v1/messages":
        body["nvext"] = {"agent_hints": {"priority": 7}}
        for nothing in ("",) if path == "/v1/responses" else ("", " " * 200_000):
            body["user"] = nothing
            status, answer = ask("POST", path, body, user)
            found = json.loads(answer)["error"]
            assert status == 403 and found["param"] == "nvext.agent_hints.priority", answer
            assert found["type"] == "permission_error"
            assert ask("POST", path, body, operator)[0] == 200


def test_our_own_clients(secured: Secured, tmp_path: Path) -> None:
    url = f"https://localhost:{secured.deployment.port}"
    ca = ("--tls-ca-cert-path", secured.authority.ca, "--url", url)
    load = ("bench", *ca, "--requests", "5", "--osl", "4", "--json")
    done = run(*load, OPENAI_API_KEY=secured.user)
    assert done.returncode == 0 and json.loads(done.stdout)["completed"] == 5, done.stderr
    done = run(*load)
    assert done.returncode == 2 and "API key is missing" in done.stderr
    done = run("bench", "--url", url, OPENAI_API_KEY=secured.user)
    assert done.returncode and "certificate verify failed" in done.stderr
    (tmp_path / "prompt").write_text("a b c")
    ask = ("route", *ca, "--prompt-file", str(tmp_path / "prompt"))
    done = run(*ask, OPENAI_API_KEY=secured.operator)
    assert done.returncode == 0 and done.stdout.startswith("worker "), done.stderr
    done = run(*ask, OPENAI_API_KEY=secured.user)
    assert done.returncode == 1 and "has the role user" in done.stderr
    done = run("explain", *ca, DYN_API_KEY=secured.operator)
    assert done.returncode == 0 and "the only worker" in done.stdout, done.stderr
    done = run("explain", *ca, DYN_API_KEY=secured.user)
    assert done.returncode == 1 and "has the role user" in done.stderr
    for wrong in (str(tmp_path / "none"), str(tmp_path / "prompt")):
        for verb in ("bench", "route"):
            words = (verb, "--url", url, "--tls-ca-cert-path", wrong)
            done = run(*words, *ask[-2:] if verb == "route" else ())
            assert done.returncode == 2
            assert f"--tls-ca-cert-path {wrong}: " in " ".join(done.stderr.split())


def test_rotation_under_load(secured: Secured) -> None:
    """Certificates and keys change while requests run: none fails, and both are in force soon."""
    stop, failures, done = threading.Event(), [], []

    def load() -> None:
        with secured.client(secured.user) as client:
            while not stop.is_set():
                try:
                    stream = client.completions.create(
                        model="tiny", prompt="a", max_tokens=20, stream=True
                    )
                    assert list(stream)[-1].choices[0].finish_reason == "length"
                except Exception as error:  # noqa: BLE001 - shown at the end
                    failures.append(error)
                done.append(1)

    def subject() -> str:
        context = secured.authority.trust()
        raw = socket.create_connection(("127.0.0.1", secured.deployment.port), timeout=5)
        with context.wrap_socket(raw, server_hostname="localhost") as wrapped:
            found: Any = wrapped.getpeercert()
            return str(found["subject"][0][0][1])

    def rotate(name: str) -> None:
        secured.install(name)
        secured.deployment.until(lambda: subject() == name, name)
        new = new_key()
        with Path(secured.keys).open("a") as file:
            file.write(key_line(name, "user", new))
        secured.deployment.until(lambda: secured.ask("GET", "/v1/models", key=new)[0] == 200)

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for name in ("second", "third"):
            rotate(name)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures and len(done) > 20


def test_plain_http_on_the_tls_port(secured: Secured) -> None:
    status, _, body = secured.deployment.request("GET", "/health")
    assert status == 400 and "use https://" in json.loads(body)["message"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--api-key-file", "{at}/none"), "--api-key-file {at}/none: No such file"),
        (("--api-key-file", "{at}/open"), "has mode 0644, so other users can use it; run: chmod"),
        (("--tls-cert-path", "{at}/none", "--tls-key-path", "x"), "--tls-cert-path {at}/none: No"),
    ],
)
def test_a_frontend_without_its_files_does_not_start(
    deployment: Deployment, tmp_path: Path, flags: tuple[str, ...], message: str
) -> None:
    (tmp_path / "open").write_text(key_line("a", "user", "x"))
    (tmp_path / "open").chmod(0o644)
    process = deployment.frontend(*(flag.format(at=tmp_path) for flag in flags))
    assert process.wait(20) == 1
    deployment.processes.remove(process)
    assert message.format(at=tmp_path) in deployment.tail()


def test_half_of_tls_is_an_error() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dynamo.frontend", "--tls-cert-path", "x"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "--tls-key-path is missing" in done.stderr


def test_open_to_the_network(deployment: Deployment) -> None:
    """Without keys a loud line; operators' routes are for this machine and no web page."""
    deployment.mocker("--speedup-ratio", "0")
    deployment.frontend("--router-mode", "kv", "--http-host", "0.0.0.0")
    deployment.wait_for_workers()
    assert "OPEN TO THE NETWORK WITHOUT API KEYS" in deployment.tail()
    change = {"model": "tiny", "active_decode_blocks_threshold": 0.9}
    for headers, status in (
        ({}, 200),
        ({"Host": "localhost:1"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"X-Forwarded-For": "10.0.0.1"}, 403),
    ):
        assert deployment.request("POST", "/busy_threshold", change, headers)[0] == status
    assert deployment.request("GET", "/v1/route?prompt=a", headers={"Host": "evil"})[0] == 403
    assert deployment.request("GET", "/v1/models", headers={"Host": "evil"})[0] == 200
    own = other_address()
    if own is not None:
        connection = http.client.HTTPConnection(own, deployment.port, timeout=10)
        connection.request(
            "POST", "/busy_threshold", json.dumps(change), {"content-type": "application/json"}
        )
        answer = connection.getresponse()
        assert answer.status == 403 and b"send an operator's API key" in answer.read()
        connection.close()


def test_attached_servers_never_get_the_key(deployment: Deployment, tmp_path: Path) -> None:
    port, keys = free_port(), tmp_path / "keys"
    keys.write_text(key_line("alice", "user", "secret-key"))
    keys.chmod(0o600)
    server = subprocess.Popen([sys.executable, str(UPSTREAM), str(port)])
    try:
        seen = Upstream(port)
        deployment.until(lambda: seen.ask("/health") == {}, "the server listens")
        deployment.start("dynamo.attach", "--url", f"http://127.0.0.1:{port}")
        deployment.frontend("--api-key-file", str(keys))
        given = {"x-api-key": "secret-key", "x-other": "1"}
        body = {"model": "org/remote-model", "messages": MESSAGES}
        path = "/v1/chat/completions"
        deployment.until(lambda: deployment.request("POST", path, body, given)[0] == 200)
        bearer = {"authorization": "Bearer secret-key", "x-other": "1"}
        assert deployment.request("POST", path, body, bearer)[0] == 200
        assert deployment.request("POST", "/v1/embeddings", body)[0] == 401
        assert deployment.request("POST", "/v1/anything/else", body)[0] == 401
        sent = seen.ask("/seen")["headers"]
        assert len(sent) >= 2 and all("x-other" in headers for headers in sent)
        assert "secret-key" not in json.dumps(sent) and "secret-key" not in deployment.tail()
    finally:
        server.kill()
        server.wait()


class Upstream:
    """The pages of the attached server."""

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, path: str) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        with contextlib.closing(connection):
            connection.request("GET", path)
            return json.loads(connection.getresponse().read())


def other_address() -> str | None:
    """An address of this machine that is not loopback, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return None
        found = str(probe.getsockname()[0])
    return None if found.startswith("127.") else found


GRAPH = """
Frontend:
  run: dynamo.frontend
  http-port: {port}
  api-key-file: {keys}
  tls-cert-path: {cert}
  tls-key-path: {key}
  tls-client-ca-cert-path: {ca}
Worker:
  run: dynamo.mocker
  model-path: {model}
  model-name: tiny
  speedup-ratio: 0
"""


def test_dynamo_serve_gets_ready(serving: Serving, tmp_path: Path, authority: Authority) -> None:
    """Readiness needs neither a key nor a client's certificate; requests need both."""
    keys, port = str(tmp_path / "keys"), free_port()
    user = run("key", "add", "alice", "--api-key-file", keys).stdout.strip()
    cert, key = authority.sign("serve")
    model = Path(__file__).resolve().parents[2] / "examples/model"
    graph = GRAPH.format(port=port, keys=keys, cert=cert, key=key, ca=authority.ca, model=model)
    serving.start(graph, wait="")
    line = serving.wait_for("ready: ", 60)
    assert f"https://127.0.0.1:{port}/v1" in line and "model: tiny" in line
    own = authority.trust(*authority.sign("client"))
    for context, given, status in (
        (own, user, 200),
        (own, "wrong", 401),
        (plain_context(), user, 403),
    ):
        assert models(port, context, given) == status


def models(port: int, context: ssl.SSLContext, key: str) -> int:
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=10, context=context)
    try:
        connection.request("GET", "/v1/models", headers={"x-api-key": key})
        return connection.getresponse().status
    finally:
        connection.close()
