"""API keys and operators' routes on real sockets: files, headers, roles, reload, hostile pages."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from memory_kit import memory_of
from until import until

from dynamo.errors import ConfigError
from dynamo.http import Exchange, HttpLimits, HttpServer
from dynamo.http.access import Access, OperatorGuard
from dynamo.http.api_keys import ApiKeys, key_line, new_key, parse_keys
from dynamo.http.errors import KeyRefused

OPEN = frozenset(("/health", "/live", "/metrics"))


class KeyFile:
    """A key file with a user's and an operator's key."""

    def __init__(self, at: Path) -> None:
        self.path = str(at / "keys")
        self.user, self.operator = new_key(), new_key()
        self.write(
            key_line("alice", "user", self.user), key_line("root", "operator", self.operator)
        )

    def write(self, *lines: str) -> None:
        """Replace the file as an editor does."""
        new = Path(self.path + "~")
        new.write_text("# comment\n\n" + "".join(lines))
        new.chmod(0o600)
        new.replace(self.path)


@pytest.fixture
def file(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path)


class Site:
    """A server that demands keys and shows what a route sees."""

    def __init__(self, file: KeyFile) -> None:
        self.read = asyncio.Event()
        self.keys = ApiKeys(file.path, on_change=lambda text: self.read.set())
        access = Access(keys=self.keys, is_open=OPEN.__contains__)
        limits = HttpLimits(sweep_s=0.02, linger_s=0.1)
        self.refused: list[int] = []
        self.ended = asyncio.Event()
        self.streams: list[Exchange] = []
        self.writers: list[asyncio.StreamWriter] = []
        self.server = HttpServer(
            self.handle,
            limits,
            self.refused.append,
            access=access,
            is_reserved=OPEN.__contains__,
        )
        self.port = 0

    def handle(self, exchange: Exchange) -> None:
        key = exchange.api_key
        if exchange.path == "/stream":
            exchange.on_disconnect = self.ended.set
            self.streams.append(exchange)
            exchange.start(200, "text/plain")
            exchange.write(b"begun")
            return
        if exchange.path == "/refused":
            exchange.respond(422, b"{}")
            return
        shown = {"key": key and key.name, "headers": exchange.headers, "size": len(exchange.body)}
        exchange.respond(200, json.dumps(shown).encode())

    async def send(self, data: bytes) -> tuple[int, dict[str, str], Any]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        async with asyncio.timeout(20):
            found = await response(reader)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        return found

    async def ask(self, *headers: str, path: str = "/v1/models") -> tuple[int, Any]:
        head = "\r\n".join((f"GET {path} HTTP/1.1", "Host: a", *headers))
        status, _, body = await self.send(f"{head}\r\n\r\n".encode("latin-1"))
        return status, body

    async def rewrite(self, file: KeyFile, *lines: str) -> None:
        """Replace the keys, and wait until the server has read them."""
        self.read.clear()
        file.write(*lines)
        async with asyncio.timeout(20):
            await self.read.wait()

    async def until(self, key: str, status: int) -> None:
        """Wait until requests with ``key`` get ``status``."""

        async def answered() -> bool:
            return (await self.ask(f"X-Api-Key: {key}"))[0] == status

        await until(answered)


async def response(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], Any]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    lines = [line.split(": ", 1) for line in head.split("\r\n")[1:-2]]
    headers = {name.lower(): value for name, value in lines}
    body = await reader.readexactly(int(headers["content-length"]))
    return int(head[9:12]), headers, json.loads(body)


@pytest.fixture
async def site(file: KeyFile) -> AsyncIterator[Site]:
    site = Site(file)
    _, site.port = await site.server.start("127.0.0.1", 0)
    yield site
    for writer in site.writers:
        writer.close()
    await site.server.close(0.2)


async def test_keys_open_and_credentials_go_no_further(site: Site, file: KeyFile) -> None:
    for headers in (
        [f"Authorization: Bearer {file.user}"],
        [f"authorization: bEARER   {file.user}"],
        [f"X-Api-Key: {file.user}"],
        [f"X-Api-Key: {file.operator}", f"Authorization: Bearer {file.user}"],
    ):
        for _ in range(2):  # also from the cache of heads
            status, seen = await site.ask(*headers)
            assert (status, seen["key"]) == (200, "alice")
            assert seen["headers"] == {"host": "a"}
    counts = {key.name: key.requests for key in site.keys.entries.values()}
    assert counts == {"alice": 8, "root": 0}


async def test_a_refused_head_has_no_body(site: Site) -> None:
    """Claude Code begins with a HEAD without its key. RFC 9110 9.3.2."""
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    writer.write(b"HEAD / HTTP/1.1\r\nHost: a\r\n\r\n")
    head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 401 ") and b"content-length: " in head and not rest
    assert b"\r\nx-should-retry: false" in head
    writer.close()
    await writer.wait_closed()


async def test_a_refusal_of_a_head_or_a_body_echoes_the_id_of_its_request(site: Site) -> None:
    """Without a key, and with a body that is too large: neither reaches a route."""
    large = f"Content-Length: {site.server.limits.body_bytes + 1}\r\n"
    for path, more in (("/v1/models", ""), ("/live", large)):
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nX-Request-Id: mine\r\n{more}\r\n"
        status, headers, _ = await site.send(head.encode())
        assert (status, headers["x-request-id"]) == (413 if more else 401, "mine")
    status, headers, _ = await site.send(b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n")
    assert status == 401 and "x-request-id" not in headers


async def test_an_error_that_a_route_writes_itself_echoes_the_id(site: Site, file: KeyFile) -> None:
    auth = f"Authorization: Bearer {file.user}\r\n"
    for own in ("", "X-Request-Id: mine\r\n"):
        head = f"GET /refused HTTP/1.1\r\nHost: a\r\n{auth}{own}\r\n"
        status, headers, _ = await site.send(head.encode())
        assert (status, headers.get("x-request-id")) == (422, "mine" if own else None)
    status, headers, _ = await site.send(head.replace("/refused", "/v1/models").encode())
    assert status == 200 and "x-request-id" not in headers


async def test_an_api_with_error_bodies_of_its_own(site: Site) -> None:
    def body(path: str, status: int, message: str) -> bytes | None:
        own = json.dumps({"own": [path, status, message]}).encode()
        return own if path == "/v1/messages" else None

    site.server.error_bodies = body
    missing = "API key is missing; send it as 'Authorization: Bearer KEY'"
    assert await site.ask(path="/v1/messages?x=1") == (401, {"own": ["/v1/messages", 401, missing]})
    status, _ = await site.ask("X-Api-Key: wrong", path="/v1/messages")
    assert status == 401
    assert "error" in (await site.ask())[1]


async def test_what_is_open_needs_no_key(site: Site) -> None:
    for path in OPEN:
        assert await site.ask(path=path) == (
            200,
            {"key": None, "headers": {"host": "a"}, "size": 0},
        )
    for path in ("/", "/health/", "/HEALTH", "/v1/models", "/metrics2", "//live", "/openapi.json"):
        assert (await site.ask(path=path))[0] == 401, path
    assert (await site.ask(path="/h%65alth?x=1"))[0] == 200  # the route sees the same path


async def test_wrong_keys(site: Site, file: KeyFile, caplog: pytest.LogCaptureFixture) -> None:
    digest = hashlib.sha256(file.user.encode()).hexdigest()
    for headers in (
        *([], ["Authorization:"], ["Authorization: Bearer"], ["Authorization: Bearer "]),
        ["Authorization: Bearer wrong"],
        [f"Authorization: Bearer {file.user[:-1]}"],
        [f"Authorization: Bearer {file.user}x"],
        [f"Authorization: Bearer {digest}"],
        [f"Authorization: Basic {file.user}"],
        [f"Authorization: {file.user}"],
        [f"Authorization: Bearer {file.user}", f"Authorization: Bearer {file.user}"],
        ["Authorization: Bearer wrong", f"X-Api-Key: {file.user}"],
        [f"X-Api-Key: Bearer {file.user}"],
        ["Authorization: Bearer \xff\xe9"],
    ):
        status, body = await site.ask(*headers)
        assert status == 401, headers
        error = body["error"]
        assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
        assert file.user not in json.dumps(body) and "wrong" not in json.dumps(body)
    status, seen = await site.ask(f"Authorization: Bearer {file.user}x", path="/live")
    assert (status, seen["key"], seen["headers"]) == (200, None, {"host": "a"})
    assert set(site.refused) == {401}
    assert file.user not in caplog.text


async def test_a_key_without_its_scheme_is_refused_also_after_another_request(
    site: Site, file: KeyFile
) -> None:
    assert (await site.ask(f"X-Api-Key: {file.user}"))[0] == 200
    assert (await site.ask(f"Authorization: {file.user}"))[0] == 401
    assert (await site.ask(f"Authorization: Bearer {file.user}"))[0] == 200
    assert (await site.ask(f"X-Api-Key: Bearer {file.user}"))[0] == 401


async def test_a_removed_key_opens_nothing_as_soon_as_the_file_is_read(
    site: Site, file: KeyFile
) -> None:
    for _ in range(2):  # the head is remembered
        assert (await site.ask(f"X-Api-Key: {file.user}"))[0] == 200
    await site.rewrite(file, key_line("root", "operator", file.operator))
    assert (await site.ask(f"X-Api-Key: {file.user}"))[0] == 401


async def test_the_key_of_the_deployment_opens_to_itself_alone(file: KeyFile) -> None:
    local = new_key()
    keys = ApiKeys(file.path, local)
    operator, user = (keys.take({"x-api-key": key}) for key in (local, file.user))
    assert operator is not None and operator.operator and not keys.is_withdrawn(operator)
    assert user is not None and (user.name, user.operator) == ("alice", False)
    for wrong in ("wrong", local[:-1], f"{file.user}x", ""):
        with pytest.raises(KeyRefused):
            keys.take({"x-api-key": wrong})


async def test_an_operator_is_served_above_the_connection_limit(site: Site, file: KeyFile) -> None:
    site.server.limits = dataclasses.replace(site.server.limits, connections=0)
    assert (await site.ask(f"X-Api-Key: {file.user}"))[0] == 503
    assert (await site.ask(f"X-Api-Key: {file.operator}"))[0] == 200
    assert (await site.ask(path="/live"))[0] == 200


@pytest.mark.parametrize("role", [None, "user"])
async def test_streams_of_a_withdrawn_key_end(
    site: Site, file: KeyFile, caplog: pytest.LogCaptureFixture, role: str | None
) -> None:
    """A key is withdrawn by its removal; an operator's also by the role of a user."""
    caplog.set_level("INFO")
    streams = []
    for key in (file.operator, file.user):
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        writer.write(f"GET /stream HTTP/1.1\r\nHost: a\r\nX-Api-Key: {key}\r\n\r\n".encode())
        await reader.readuntil(b"begun")
        streams.append((reader, writer))
    lines = [key_line("alice", "user", file.user)]
    file.write(*lines, *([key_line("root", role, file.operator)] if role else []))
    async with asyncio.timeout(20):
        with contextlib.suppress(ConnectionError):
            assert b"0\r\n\r\n" not in await streams[0][0].read()
        await site.ended.wait()
    assert "closed a stream of the withdrawn key root" in caplog.text
    assert site.server.connections == 1
    for _, writer in streams:
        writer.close()


async def test_other_streams_go_on_when_a_key_is_withdrawn(site: Site, file: KeyFile) -> None:
    """Streams of a valid operator key, and answers to a POST, end on their own."""
    for method, key in (("GET", file.operator), ("POST", file.user)):
        _, writer = await asyncio.open_connection("127.0.0.1", site.port)
        writer.write(f"{method} /stream HTTP/1.1\r\nHost: a\r\nX-Api-Key: {key}\r\n\r\n".encode())
        site.writers.append(writer)
    await until(lambda: len(site.streams) == 2)
    await site.rewrite(file, key_line("root", "operator", file.operator))
    assert (await site.ask(f"X-Api-Key: {file.user}"))[0] == 401
    assert not any(stream.gone for stream in site.streams)


async def test_the_challenge_tells_a_missing_key_from_a_wrong_one(site: Site) -> None:
    _, headers, _ = await site.send(b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n")
    assert headers["www-authenticate"] == 'Bearer realm="dynamo"'
    assert headers["connection"] == "close"
    _, headers, _ = await site.send(b"GET /x HTTP/1.1\r\nHost: a\r\nX-Api-Key: k\r\n\r\n")
    assert headers["www-authenticate"] == 'Bearer realm="dynamo", error="invalid_token"'


@pytest.mark.parametrize("length", ["Content-Length: 40000000", "Transfer-Encoding: chunked"])
async def test_refused_before_the_body(site: Site, length: str) -> None:
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n{length}\r\nExpect: 100-continue\r\n"
    status, _, body = await site.send(f"{head}\r\n".encode())
    assert status == 401 and body["error"]["code"] == "invalid_api_key"
    assert site.server.bodies_bytes == 0


async def test_each_request_of_a_connection_is_checked(site: Site, file: KeyFile) -> None:
    good = f"GET /v1 HTTP/1.1\r\nHost: a\r\nX-Api-Key: {file.user}\r\n\r\n".encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    writer.write(good + good + b"GET /v1 HTTP/1.1\r\nHost: a\r\n\r\n" + good)
    assert [(await response(reader))[0] for _ in range(3)] == [200, 200, 401]
    assert await reader.read() == b""
    writer.close()


async def test_rotation_under_load(
    site: Site, file: KeyFile, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests with a key that stays never fail; one that is removed opens nothing any more."""
    caplog.set_level("INFO")
    kept, removed, added = file.operator, file.user, new_key()
    stop = asyncio.Event()
    seen: list[int] = []

    async def load() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        while not stop.is_set():
            path = random.choice(("/v1/a", "/v1/b"))
            writer.write(f"GET {path} HTTP/1.1\r\nHost: a\r\nX-Api-Key: {kept}\r\n\r\n".encode())
            seen.append((await response(reader))[0])
        writer.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(load())
        for _ in range(3):
            file.write(key_line("root", "operator", kept), key_line("bob", "user", added))
            await site.until(removed, 401)
            assert (await site.ask(f"X-Api-Key: {added}"))[1]["key"] == "bob"
            file.write(key_line("root", "operator", kept), key_line("alice", "user", removed))
            await site.until(removed, 200)
            assert (await site.ask(f"X-Api-Key: {added}"))[0] == 401
        stop.set()
    assert len(seen) > 50 and set(seen) == {200}
    counts = {key.name: key.requests for key in site.keys.entries.values()}
    assert counts["root"] == len(seen)


@pytest.mark.parametrize("damage", ["text", "mode", "gone", "empty", "directory"])
async def test_a_broken_file_keeps_the_keys(
    site: Site, file: KeyFile, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    path = Path(file.path)
    if damage == "text":
        file.write(key_line("a", "user", "x"), f"pasted {file.user}\n")
    elif damage == "mode":
        path.chmod(0o640)
    elif damage == "empty":
        file.write()
    else:
        path.unlink()
        if damage == "directory":
            path.mkdir()
    async with asyncio.timeout(20):
        while "keeping what was loaded before" not in caplog.text:  # noqa: ASYNC110 - a log line
            await asyncio.sleep(0.01)
    expected = {
        "text": "line 4: must be NAME:ROLE:DIGEST",
        "mode": f"has mode 0640, so other users can use it; run: chmod 600 {path}",
        "gone": "No such file",
        "empty": "has no key",
        "directory": "",
    }
    assert expected[damage] in caplog.text and file.user not in caplog.text
    assert (await site.ask(f"X-Api-Key: {file.user}"))[0] == 200
    if damage == "mode":
        path.chmod(0o600)
        caplog.set_level("INFO")
        async with asyncio.timeout(20):
            while "reloaded" not in caplog.text:  # noqa: ASYNC110 - a log line
                await asyncio.sleep(0.01)


def test_errors_at_the_start(tmp_path: Path) -> None:
    good = key_line("a", "user", "x")
    for lines, message in (
        (["a:user"], "line 1: must be NAME:ROLE:DIGEST or NAME:ROLE:DIGEST:GRANTS with a role of"),
        ([good.strip() + ":priority=-1"], "line 1: grants are priority=N, strict-priority=N"),
        ([good.strip() + ":priority=4294967296"], "line 1: grants are"),
        ([good.strip() + ":everything"], "line 1: grants are"),
        ([key_line("a", "operator", "x", "routing")], "line 1: grants are for users"),
        (["# c", "", "a:root:" + "0" * 64], "line 3: must be"),
        ([good, "b:user:" + "0" * 63], "line 2: must be"),
        ([good, "b c:user:" + "0" * 64], "line 2: must be"),
        ([good, good], "line 2: the name a is in the file twice"),
        ([good, good.replace("a:", "b:", 1)], "line 2: this key is in the file twice"),
    ):
        with pytest.raises(ConfigError) as caught:
            parse_keys("\n".join(line.strip() for line in lines), "f")
        assert message in caught.value.message
    (tmp_path / "keys").write_text(good)
    for mode in (0o640, 0o604, 0o620, 0o666):
        (tmp_path / "keys").chmod(mode)
        with pytest.raises(ConfigError, match=f"has mode {mode:04o}.*run: chmod 600"):
            ApiKeys(str(tmp_path / "keys"))
    (tmp_path / "keys").chmod(0o400)
    assert [key.name for key in ApiKeys(str(tmp_path / "keys")).entries.values()] == ["a"]
    with pytest.raises(ConfigError, match="No such file"):
        ApiKeys(str(tmp_path / "none"))


def test_what_is_remembered_is_bounded(file: KeyFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo.http.api_keys._REMEMBERED", 100)

    def take() -> ApiKeys:
        keys = ApiKeys(file.path)
        for number in range(5000):
            with pytest.raises(KeyRefused):
                keys.take({"x-api-key": f"guess {number}"})
            spaces = " " * (1 + number % 100) + "\t" * (number // 100)
            for end in ("", " " * 5000):
                assert keys.take({"authorization": f"Bearer{spaces}{file.user}{end}"}) is not None
        return keys

    take()
    assert memory_of(take).left < 100_000, "100 short ones at most"


def exchange(peer: str | None = "127.0.0.1", key: Any = None, **headers: str) -> Any:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    seen = {"host": "localhost:8000", **given}
    return SimpleNamespace(peer=peer, api_key=key, headers=seen, path="/op", method="POST")


def test_operators_without_keys_call_from_this_machine() -> None:
    guard = OperatorGuard(False, ("0.0.0.0", "Box.lan", "*"))
    for host in ("localhost", "127.0.0.1:80", "[::1]:8000", "127.8.8.8", "box.LAN:1", "localhost."):
        assert guard.check(exchange(host=host)) == "", host
    for peer in ("::1", "127.0.0.9", "::ffff:127.0.0.1"):
        assert guard.check(exchange(peer)) == ""
    assert guard.check(exchange(sec_fetch_site="none")) == ""
    for other in ("10.0.0.1", "::ffff:10.0.0.1", "2001:db8::1", None, ""):
        assert "send an operator's API key" in guard.check(exchange(other))
    for host in ("evil.example", "", "*", "192.168.1.2", "localhost.evil.example", "[::1", "a b"):
        assert "is not served as host" in guard.check(exchange(host=host)), host
    for headers in (
        {"origin": "http://localhost:8000"},
        {"origin": "null"},
        {"sec_fetch_site": "cross-site"},
    ):
        assert "not for web pages" in guard.check(exchange(**headers))
    for name in ("forwarded", "x_forwarded_for", "via", "x_real_ip"):
        assert "proxy" in guard.check(exchange(**{name: "x"}))


def test_pages_of_this_server_are_its_own_where_they_are_admitted() -> None:
    guard = OperatorGuard(False, own_pages=True)
    for own in ("http://localhost:8000", "https://LOCALHOST:8000"):
        assert guard.check(exchange(origin=own)) == ""
    for other in ("http://localhost:3000", "http://evil.example", "file://localhost:8000", "null"):
        assert "not for web pages" in guard.check(exchange(origin=other)), other
    foreign = {"origin": "http://localhost:8000", "sec_fetch_site": "same-site"}
    assert "not for web pages" in guard.check(exchange(**foreign))


def test_with_keys_only_an_operators_key_counts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    guard = OperatorGuard(True)
    user, operator = (SimpleNamespace(name="n", operator=is_one) for is_one in (False, True))
    assert guard.check(exchange("10.0.0.1", operator, origin="x", host="any")) == ""
    assert "POST /op by operator n" in caplog.text
    assert "the key 'n' has the role user" in guard.check(exchange(key=user))
    assert "without a key" in guard.check(exchange())


def test_a_refused_call_of_an_operators_route_is_not_counted() -> None:
    routed: list[Any] = []
    guarded = OperatorGuard(True).before(routed.append)
    for is_operator, counted in ((True, 1), (False, 0)):
        key = SimpleNamespace(name="n", operator=is_operator, requests=1)  # as on its arrival
        seen = exchange(key=key)
        seen.refuse = lambda status, text: None
        guarded(seen)
        assert key.requests == counted and len(routed) == 1, "only the operator's is passed on"
