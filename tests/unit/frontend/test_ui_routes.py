"""The routes of the web page on real sockets: files, access, samples, logs, buttons."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import shutil
import threading
import time
import tomllib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo.config.frontend import FrontendSettings
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import InvalidArgument
from dynamo.frontend.access import frontend_access, guard_ui_routes, operator_guard
from dynamo.frontend.requests.recent import RecentRequests, RequestFigures, RequestInfo
from dynamo.frontend.ui import source as sampler
from dynamo.frontend.ui import stream as files
from dynamo.frontend.ui.route import OPEN_UI_PATHS, OPERATOR_UI_ROUTES, OwnFacts, UiRoutes
from dynamo.frontend.ui.source import with_own_figures
from dynamo.http import HttpLimits, HttpServer
from dynamo.http.api_keys import key_line, new_key
from dynamo.http.routes import Routes
from dynamo.operations.operate import ActionOutcome
from dynamo.protocols.status import (
    BoxEvent,
    BoxStatus,
    FrontendStatus,
    ModelFigures,
    RecentList,
    RequestRecord,
    WorkerFigures,
)
from dynamo.runtime.process.tasks import Tasks

OWN = "http://localhost:8000"
STATIC = Path(files.__file__).with_name("static")
ROOT = Path(__file__).resolve().parents[3]


class Peers:
    """The other frontends: ``records`` are theirs."""

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []
        self.problems: tuple[str, ...] = ()

    def begin(self, cursor: float) -> None:
        assert 0 < time.monotonic() - cursor < 60

    def newer(self, limit: int) -> list[RecentList]:
        found, self.records = tuple(self.records), []
        return [RecentList(requests=found, problems=self.problems)]

    def all(self, limit: int) -> list[RecentList]:
        return [RecentList(requests=tuple(self.records))]

    def find(self, request_id: str) -> RequestRecord | None:
        return next((one for one in self.records if one.request_id == request_id), None)


class Page:
    """A server with the page's routes, over a deployment that the test controls."""

    def __init__(self, at: Path, settings: FrontendSettings | None = None) -> None:
        self.frontend = settings or FrontendSettings()
        self.settings = RuntimeSettings()
        self.logs = at / "logs"
        self.history_file = at / "history"
        self.namespace = "ns"
        self.collected = 0
        self.in_thread = False
        self.watching = 0
        self.unwatched = asyncio.Event()
        self.closed = False
        self.ended: list[ActionOutcome] = []
        self.happened: list[BoxEvent] = []
        self.actions = ("drain", "sleep", "wake")
        self.pressed: list[tuple[str, str]] = []
        self.tasks = Tasks("test")
        source: Any = self
        guard = operator_guard(self.frontend, own_pages=True)
        has_keys = self.frontend.api_key_file is not None
        self.recent = RecentRequests()
        self.peers = Peers()
        self.content: dict[str, bytes] = {}
        self.running: dict[str, RequestRecord] = {}
        self.firsts: list[bool] = []
        own = OwnFacts(
            FrontendStatus, self.recent, self.running.get, self.content.get, self.routing
        )
        self.routes = UiRoutes(source, own, self.tasks, guard, has_keys)
        table = Routes()
        self.routes.install(table)
        guard_ui_routes(table, guard)
        limits = HttpLimits(sweep_s=0.02, linger_s=0.1)
        self.server = HttpServer(table, limits, access=frontend_access(self.frontend))
        self.port = 0

    async def routing(self, first: bool) -> object:
        self.firsts.append(first)
        return {"pools": []}

    needs_own = True

    def collect(self, own: FrontendStatus | None) -> BoxStatus:
        self.collected += 1
        self.in_thread = threading.current_thread() is not threading.main_thread()
        name = f"sample{self.collected}"
        return BoxStatus(namespace=name, state="running", at_s=1.0, frontend="ready")

    def close(self) -> None:
        self.closed = True

    def events(self) -> list[BoxEvent]:
        found, self.happened = self.happened, []
        return found

    def outcomes(self) -> Iterator[ActionOutcome]:
        while self.ended:
            yield self.ended.pop()

    @contextlib.contextmanager
    def watch(self, on_change: Callable[[], None]) -> Iterator[None]:
        self.watching += 1
        try:
            yield
        finally:
            self.watching -= 1
            self.unwatched.set()

    def act(self, action: str, name: str, by: str) -> str:
        self.pressed.append((action, name))
        if name == "gone":
            raise InvalidArgument("no worker 'gone'")
        return f"{name}: {action} has begun"

    async def ask(
        self, path: str, *headers: str, method: str = "GET", body: bytes = b""
    ) -> tuple[int, dict[str, str], bytes]:
        """Send one request; read the whole response."""
        reader, writer = await self.send(path, *headers, method=method, body=body)
        status, found = await head_of(reader)
        content = b""
        if method != "HEAD" and status != 304:
            content = await reader.readexactly(int(found["content-length"]))
        await close(writer)
        return status, found, content

    async def send(
        self, path: str, *headers: str, method: str = "GET", body: bytes = b""
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        lines = [f"{method} {path} HTTP/1.1"]
        if not any(one.lower().startswith("host:") for one in headers):
            lines.append("Host: localhost:8000")
        lines += [*headers, f"Content-Length: {len(body)}", "Content-Type: application/json"]
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        return reader, writer

    async def stream(self, path: str, *headers: str) -> Events:
        reader, writer = await self.send(path, *headers)
        status, found = await head_of(reader)
        assert status == 200, await reader.read(500)
        assert found["content-type"] == "text/event-stream"
        assert found["cache-control"] == "no-store"
        return Events(reader, writer)


class Events:
    """A stream of server-sent events in chunks."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.buffer = b""

    async def next(self) -> tuple[str, Any]:
        async with asyncio.timeout(10):
            while b"\n\n" not in self.buffer:
                size = int(await self.reader.readuntil(b"\r\n"), 16)
                if not size:
                    raise EOFError
                self.buffer += (await self.reader.readexactly(size + 2))[:-2]
        one, _, self.buffer = self.buffer.partition(b"\n\n")
        name, data = one.decode().split("\n")
        return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def head_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
    return int(lines[0][9:12]), {k.lower(): v for k, v in (x.split(": ", 1) for x in lines[1:])}


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


@contextlib.asynccontextmanager
async def served(at: Path, settings: FrontendSettings | None = None) -> AsyncIterator[Page]:
    page = Page(at, settings)
    _, page.port = await page.server.start("127.0.0.1", 0)
    try:
        yield page
    finally:
        page.routes.close()
        assert page.closed
        await page.server.close(0.2)
        await page.tasks.close()


@pytest.fixture
async def page(tmp_path: Path) -> AsyncIterator[Page]:
    async with served(tmp_path) as one:
        yield one


# -- files


async def test_files_are_served_with_a_policy_and_an_etag(page: Page) -> None:
    types = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg"}
    types["txt"] = "text/plain"
    for path in sorted(files.file_paths()):
        status, headers, body = await page.ask(path)
        assert (status, len(body) > 50) == (200, True), path
        kind = path.rpartition(".")[2] if "." in path else "html"
        assert headers["content-type"].startswith(types[kind])
        assert "script-src 'self';" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["cache-control"] == "no-cache"
        etag = headers["etag"]
        for known in (etag, f"W/{etag}", f'"x", {etag}'):
            status, headers, _ = await page.ask(path, f"If-None-Match: {known}")
            assert (status, headers["content-length"]) == (304, str(len(body)))
        assert (await page.ask(path, 'If-None-Match: "x"'))[0] == 200
        assert (await page.ask(path, method="HEAD"))[0] == 200
    for path in (
        "/ui/",
        "/ui/nothing.js",
        "/ui/../source.py",
        "/ui/static/ui.js",
        "/ui/index.html",
    ):
        assert (await page.ask(path))[0] == 404, path


async def test_a_browser_at_the_root_gets_the_page(page: Page) -> None:
    for method in ("GET", "HEAD"):
        browser = "Accept: text/html,application/xhtml+xml,*/*;q=0.8"
        status, headers, _ = await page.ask("/", browser, method=method)
        assert (status, headers["location"]) == (307, "/ui")
    status, _, body = await page.ask("/", "Accept: */*")
    assert status == 404 and b"Route not found: GET /" in body
    assert (await page.ask("/nothing", "Accept: text/html"))[0] == 404


def test_the_page_needs_nothing_from_elsewhere_and_has_no_inline_code() -> None:
    html = (STATIC / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=|javascript:", html)
    links = re.findall(r'\b(?:src|href)="([^"#]+)"', html)
    assert {f"/{one}" for one in links} <= files.file_paths() and "ui/ui.js" in links
    for script in STATIC.glob("*.js"):
        text = script.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
        for name in re.findall(r'from "\./([^"]+)"', text):
            assert (STATIC / name).is_file(), name
    assert not [one.name for one in STATIC.glob("*.*") if "://" in _code(one)]


def test_libraries_are_unchanged_and_have_their_licences() -> None:
    """Copies of npm packages; what of them writes HTML is not called, and the policy forbids it."""
    licences = (STATIC / "vendor/LICENSES.txt").read_text()
    known = dict(re.findall(r"^\| (\S+\.js) \|.*\| ([0-9a-f]{64}) \|$", licences, re.MULTILINE))
    scripts = sorted((STATIC / "vendor").glob("*.js"))
    assert {one.name: hashlib.sha256(one.read_bytes()).hexdigest() for one in scripts} == known
    for script in scripts:
        assert not re.search(r"\beval\(|new Function|document\.write", script.read_text())
        assert f"{files.PAGE}/vendor/{script.name}" in files.file_paths()
    licensed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license-files"]
    assert "dynamo/frontend/ui/static/vendor/LICENSES.txt" in licensed


def _code(path: Path) -> str:
    """The text without the name of the SVG language, which is no address."""
    return path.read_text().replace("http://www.w3.org/2000/svg", "").replace('"://"', "")


# -- who is admitted

FOREIGN = [
    ["Origin: http://evil.example"],
    ["Origin: null"],
    ["Origin: http://localhost:3000"],  # another server of this machine
    ["Origin: http://localhost:80001"],
    ["Origin: http://localhost"],
    [f"Origin: {OWN}", "Sec-Fetch-Site: same-site"],
    [f"Origin: {OWN}", "Sec-Fetch-Site: cross-site"],
    ["Sec-Fetch-Site: cross-site"],
    ["Host: evil.example:8000", "Origin: http://evil.example:8000"],  # DNS rebinding
    ["Host: evil.example:8000"],
    ["X-Forwarded-For: 10.0.0.1"],
]
OPERATORS = (
    "/ui/events",
    "/ui/history",
    "/ui/logs?name=x",
    "/ui/requests",
    "/ui/requests/x",
    "/ui/content/x",
    "/ui/models",
    "/ui/models/hub?find=x",
    "/ui/actions",
)


def test_every_route_of_operators_is_tried() -> None:
    tried = [path.partition("?")[0] for path in OPERATORS]
    assert all(any(path.startswith(one) for path in tried) for one in OPERATOR_UI_ROUTES)
    assert not OPERATOR_UI_ROUTES.keys() & OPEN_UI_PATHS


def test_no_two_style_sheets_have_rules_of_one_class() -> None:
    found: dict[str, set[str]] = {}
    for path in STATIC.glob("*.css"):
        wide = path.read_text(encoding="utf-8").partition("@media")[0]
        for name in re.findall(r"^\.([\w-]+) \{", wide, re.MULTILINE):
            found.setdefault(name, set()).add(path.name)
    assert not {name: names for name, names in found.items() if len(names) > 1}


@pytest.mark.parametrize("headers", FOREIGN, ids=" ".join)
async def test_a_foreign_page_can_neither_read_nor_press(page: Page, headers: list[str]) -> None:
    for path in OPERATORS:
        method = "POST" if path.endswith("actions") else "GET"
        body = b'{"action": "drain", "name": "x"}' if method == "POST" else b""
        status, _, answer = await page.ask(path, *headers, method=method, body=body)
        assert status == 403, (path, answer)
    assert not page.pressed and not page.collected


async def test_a_form_of_a_foreign_page_is_refused_by_its_type(page: Page) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", page.port)
    head = "POST /ui/actions HTTP/1.1\r\nHost: localhost:8000\r\nContent-Type: text/plain\r\n"
    writer.write(f"{head}Content-Length: 2\r\n\r\n{{}}".encode())
    assert (await head_of(reader))[0] == 415
    await close(writer)


async def test_without_keys_a_page_of_another_host_is_no_operators(page: Page) -> None:
    _, _, body = await page.ask("/ui/about.json")
    assert json.loads(body) == {"keys": False, "role": "operator", "name": "", "rest": ""}
    about = json.loads((await page.ask("/ui/about.json", "Host: box.lan:8000"))[2])
    assert (about["role"], about["rest"]) == ("user", "not served as host 'box.lan'; use localhost")


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1:8000", "[::1]:8000"])
async def test_its_own_page_is_admitted(page: Page, host: str) -> None:
    headers = (f"Host: {host}", f"Origin: http://{host}", "Sec-Fetch-Site: same-origin")
    body = b'{"action": "drain", "name": "x"}'
    status, _, answer = await page.ask("/ui/actions", *headers, method="POST", body=body)
    assert (status, json.loads(answer)) == (200, {"message": "x: drain has begun"})
    assert page.pressed == [("drain", "x")]
    events = await page.stream("/ui/events", f"Host: {host}", "Sec-Fetch-Site: same-origin")
    assert (await events.next())[1]["namespace"] == "sample1"
    await close(events.writer)


async def test_with_keys_the_files_are_open_and_the_rest_is_for_operators(tmp_path: Path) -> None:
    user, operator = new_key(), new_key()
    keys = tmp_path / "keys"
    keys.write_text(key_line("alice", "user", user) + key_line("root", "operator", operator))
    keys.chmod(0o600)
    async with served(tmp_path, FrontendSettings(api_key_file=str(keys))) as page:
        for path in (*files.file_paths(), "/ui/about.json"):
            assert (await page.ask(path))[0] == 200
        assert (await page.ask("/", "Accept: text/html"))[0] == 307
        roles = {"": ("none", ""), "wrong": ("none", ""), user: ("user", "alice")}
        for key, (role, name) in {**roles, operator: ("operator", "root")}.items():
            headers = (f"X-Api-Key: {key}",) if key else ()
            about = json.loads((await page.ask("/ui/about.json", *headers))[2])
            assert (about["keys"], about["role"], about["name"]) == (True, role, name)
            assert about["rest"].startswith("" if role == "operator" else "for operators; ")
        for path in (one for one in OPERATORS if not one.endswith("actions")):
            assert (await page.ask(path))[0] == 401
            status, _, answer = await page.ask(path, f"Authorization: Bearer {user}")
            assert status == 403 and b"the key 'alice' has the role user" in answer
        assert (await page.ask("/ui/actions", method="POST", body=b"{}"))[0] == 401
        events = await page.stream("/ui/events", f"Authorization: Bearer {operator}")
        assert (await events.next())[0] == "status"
        await close(events.writer)


def test_where_the_page_is_on() -> None:
    assert FrontendSettings().serves_ui and FrontendSettings(http_host="localhost").serves_ui
    assert FrontendSettings(http_host="::1").serves_ui
    assert not FrontendSettings(http_host="0.0.0.0").serves_ui
    assert FrontendSettings(http_host="0.0.0.0", ui=True).serves_ui
    assert not FrontendSettings(ui=False).serves_ui
    assert not FrontendSettings(ui=True, disable_admin_api=True).serves_ui


# -- samples


async def test_pages_share_one_sample_a_tick_and_few_run_without_a_page(page: Page) -> None:
    first = await page.stream("/ui/events")
    assert (await first.next())[1]["namespace"] == "sample1" and page.in_thread
    second = await page.stream("/ui/events")
    assert await second.next() == await first.next()
    assert (page.collected, page.watching) == (2, 1)
    await close(first.writer)
    await close(second.writer)
    async with asyncio.timeout(30):
        await page.unwatched.wait()
    assert page.collected <= 3 and not page.routes.sampler.pages and not page.watching


async def test_a_button_brings_a_sample_at_once(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "_INTERVAL_S", 1e6)
    events = await page.stream("/ui/events")
    assert (await events.next())[1]["namespace"] == "sample1"
    page.ended.append(ActionOutcome(at_s=1.0, text="x: awake"))
    await page.ask("/ui/actions", method="POST", body=b'{"action": "wake", "name": "x"}')
    assert (await events.next())[1]["namespace"] == "sample2"
    assert await events.next() == ("outcome", {"at_s": 1.0, "text": "x: awake", "failed": False})
    await close(events.writer)


async def test_too_many_pages_and_a_stop(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "_INTERVAL_S", 1e6)
    pages = [await page.stream("/ui/events") for _ in range(sampler._PAGES)]
    status, _, body = await page.ask("/ui/events")
    assert status == 503 and b"16 pages or logs are open already" in body
    assert (await page.ask("/ui/events", method="HEAD"))[0] == 503
    page.routes.stop()
    for events in pages:
        while (found := await events.next())[0] == "status":
            pass
        assert found[0] == "end" and "is stopping" in found[1]["message"]
        with pytest.raises(EOFError):
            await events.next()
        await close(events.writer)
    assert b"is stopping" in (await page.ask("/ui/events"))[2]


async def test_a_slow_page_is_dropped(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "_INTERVAL_S", 0.0)
    monkeypatch.setattr(sampler, "_SHORTEST_S", 0.0)
    large = BoxStatus(
        namespace="x", state="running", at_s=1.0, frontend="ready", problems=("y" * 500_000,)
    )
    monkeypatch.setattr(page, "collect", lambda own: large)
    events = await page.stream("/ui/events")  # which reads no more
    async with asyncio.timeout(30):
        await page.unwatched.wait()
    assert not page.routes.sampler.pages
    await close(events.writer)


async def test_the_history_outlives_the_frontend(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    figures = (ModelFigures(model="a", in_flight=3),)
    now = with_own_figures(page.collect(FrontendStatus()), FrontendStatus(models=figures))
    monkeypatch.setattr(page, "collect", lambda own: now)
    events = await page.stream("/ui/events")
    await events.next()
    status, _, body = await page.ask("/ui/history?range=10m&subject=model%20a")
    found = {"output_tokens_per_s": [0.0], "in_flight": [3.0], "queued": [0.0]}
    assert (status, json.loads(body)) == (200, {"start_s": 1, "step_s": 1, "series": found})
    for query in ("range=1y", "after=-1", "after=x", "after=1" + "0" * 20):
        status, _, body = await page.ask(f"/ui/history?{query}")
        assert status == 400 and b"must be" in body, query
    page.routes.stop()
    await close(events.writer)
    async with served(tmp_path) as other:
        assert (await other.ask("/ui/history?subject=model%20a"))[2] == json.dumps(
            {"start_s": 1, "step_s": 1, "series": found}, separators=(",", ":")
        ).encode()
    page.history_file.write_bytes(b"damaged")
    async with served(tmp_path) as third:
        assert b'"series":{}' in (await third.ask("/ui/history"))[2]
    assert "history cannot be used: it is damaged" in caplog.text


# -- logs


async def test_a_log_is_followed_across_its_rotation(page: Page) -> None:
    page.logs.mkdir()
    log = page.logs / "ns_Worker.log"
    log.write_bytes(b"one\n\x1b[32mtwo\x1b[0m\npart")
    events = await page.stream("/ui/logs?name=ns_Worker")
    assert await events.next() == ("first", ["one", "two"])
    with log.open("ab") as file:
        file.write(b"ial\n\xff<b>\n")
    assert await events.next() == ("lines", ["partial", "\ufffd<b>"])
    log.rename(log.with_name("ns_Worker.log.1"))
    log.write_text("new file\n")
    assert await events.next() == ("lines", ["new file"])
    await close(events.writer)


async def test_a_log_is_followed_in_a_directory_that_was_made_again(page: Page) -> None:
    page.logs.mkdir()
    log = page.logs / "ns_Worker.log"
    log.write_text("one\n")
    events = await page.stream("/ui/logs?name=ns_Worker")
    assert await events.next() == ("first", ["one"])
    shutil.rmtree(page.logs)
    page.logs.mkdir()
    log.write_text("two\n")
    assert await events.next() == ("lines", ["two"])
    await close(events.writer)


async def test_a_flood_is_cut_and_said_to_be(page: Page) -> None:
    page.logs.mkdir()
    log = page.logs / "ns_a.log"
    log.write_bytes(b"line\n" * 600 + b"y" * 5000 + b"\n")
    events = await page.stream("/ui/logs?name=ns_a")
    name, lines = await events.next()
    assert (name, len(lines), lines[-1]) == ("first", 500, "y" * 4000 + " …")
    with log.open("ab") as file:
        file.write(b"line\n" * 100_000)
    name, lines = await events.next()
    assert name == "lines" and lines[0] == "… 99,500 lines left out …"
    assert lines[1:] == ["line"] * 500
    await close(events.writer)


async def test_only_logs_of_the_deployment_can_be_named(page: Page, tmp_path: Path) -> None:
    status, _, body = await page.ask("/ui/logs?name=x")
    assert status == 404 and b"no logs in" in body
    page.logs.mkdir()
    for path in (page.logs / "ns_a.log", page.logs / "other_a.log", tmp_path / "ns_secret.log"):
        path.write_text("secret\n")
    for name in ("", "a", "other_a", "../ns_secret", "..%2Fns_secret", "/etc/passwd", "ns_a.log"):
        status, _, body = await page.ask(f"/ui/logs?name={name}")
        assert status == 404 and body.count(b'there are: ns_a"') == 2, (name, body)


# -- buttons


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"action": 1, "name": "x"}', b"\xff"])
async def test_a_wrong_body_is_refused(page: Page, body: bytes) -> None:
    status, _, answer = await page.ask("/ui/actions", method="POST", body=body)
    assert status == 400 and b"JSON" in answer and not page.pressed


async def test_what_fails_is_told(page: Page) -> None:
    body = b'{"action": "sleep", "name": "gone"}'
    status, _, answer = await page.ask("/ui/actions", method="POST", body=body)
    assert (status, json.loads(answer)["message"]) == (400, "no worker 'gone'")


async def test_an_unknown_action_lists_those_on_workers_and_on_disk(page: Page) -> None:
    body = b'{"action": "explode", "name": "x"}'
    status, _, answer = await page.ask("/ui/actions", method="POST", body=body)
    message = json.loads(answer)["message"]
    assert status == 400 and message.startswith("unknown action 'explode'; there are drain, ")
    assert {"sleep", "pull", "delete_model"} <= set(message.partition("there are ")[2].split(", "))
    assert not page.pressed


def test_a_frontend_without_a_deployment_shows_what_it_has() -> None:
    model = ModelFigures(model="m", workers=(WorkerFigures(worker="a1", in_flight=2),))
    own = FrontendStatus(models=(model, ModelFigures(model="cold")))
    none = BoxStatus(namespace="n", state="stopped", at_s=1.0, frontend="none")
    found = with_own_figures(none, own)
    assert [(one.model, one.state, one.ready) for one in found.models] == [
        ("m", "ready", 1),
        ("cold", "zero", 0),
    ]
    assert [(one.name, one.in_flight) for one in found.workers] == [("a1", 2)]
    assert found.frontend == "ready" and "dynamo serve GRAPH" in found.problems[0]


# -- recent requests


def ended(number: int) -> RequestFigures:
    now_s = time.monotonic()
    info = RequestInfo("chat_completions", f"own-{number}", None)
    return RequestFigures(info, "tiny", now_s - 1.0, "ok", now_s, key="alice")


def of_peer(name: str) -> RequestRecord:
    return RequestRecord(
        request_id=name,
        model="tiny",
        endpoint="x",
        received_at_s=time.time(),
        duration_s=0.5,
        outcome="ok",
    )


async def test_a_page_of_the_requests_gets_what_ends_and_no_other_page_does(page: Page) -> None:
    page.recent.add(ended(1))
    page.peers.records.append(of_peer("peer-1"))
    whole = json.loads((await page.ask("/ui/requests"))[2])
    requests = whole["requests"]
    assert requests["count"] == 2 and requests["columns"]["request_id"] == ["peer-1", "own-1"]
    assert (requests["columns"]["model"], requests["texts"]["model"]) == ([0, 0], ["tiny"])
    assert not {"client_id", "worker", "route"} & requests["columns"].keys()  # of none of them
    page.peers.records.clear()
    plain = await page.stream("/ui/events")
    await plain.next()
    shows = await page.stream("/ui/events?show=requests")
    assert (await shows.next())[0] == "status"
    name, first = await shows.next()  # the last seconds again, so that none is between
    assert (name, first["requests"]["columns"]["request_id"]) == ("requests", ["own-1"])
    for number in range(2, 152):
        page.recent.add(ended(number))
    page.peers.records.append(of_peer("peer-2"))
    page.peers.problems = ("one frontend does not answer",)
    page.routes.sampler.wake()
    while (event := await shows.next())[0] == "status":
        pass
    newer = event[1]
    assert newer["requests"]["count"] == 100 and newer["left_out"] == 51
    assert newer["problems"] == ["one frontend does not answer"]
    assert "own-1" not in newer["requests"]["columns"]["request_id"]
    # In the stream a request has no more than this.
    assert len(json.dumps(newer, separators=(",", ":"))) < 100 * 60
    await close(shows.writer)
    for _ in range(3):
        assert (await plain.next())[0] == "status"
    await close(plain.writer)


async def test_a_receipt_of_any_frontend(page: Page) -> None:
    page.recent.add(ended(1))
    page.peers.records.append(of_peer("peer-1"))
    for name in ("own-1", "peer-1"):
        found = json.loads((await page.ask(f"/ui/requests/{name}"))[2])
        assert found["request_id"] == name
    status, _, answer = await page.ask("/ui/requests/nothing")
    assert status == 404 and b"the last 1000 are kept" in answer


async def test_recorded_content(page: Page) -> None:
    status, _, answer = await page.ask("/ui/content/own-1")
    assert status == 404 and b"dynamo record --content" in answer
    page.content["own-1"] = b'{"body": "hello"}'
    assert (await page.ask("/ui/content/own-1"))[2] == b'{"body": "hello"}'


async def test_the_routing_is_read_while_a_page_shows_it(page: Page) -> None:
    page.running["now"] = of_peer("now")
    assert json.loads((await page.ask("/ui/requests/now"))[2])["request_id"] == "now"
    plain = await page.stream("/ui/events")
    for _ in range(2):
        await plain.next()
    assert not page.firsts
    shows = await page.stream("/ui/events?show=routing")
    for _ in range(2):
        assert (await shows.next())[0] == "status"
        assert await shows.next() == ("routing", {"pools": []})
    assert page.firsts[:2] == [True, False]
    another = await page.stream("/ui/events?show=routing")
    while page.firsts.count(True) < 2:
        await another.next()
    await close(another.writer)
    await close(shows.writer)
    await close(plain.writer)


async def test_a_section_that_fails_leaves_the_others(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(first: bool) -> object:
        raise ValueError("no router")

    monkeypatch.setitem(page.routes.sampler._feeds, "routing", fail)
    plain = await page.stream("/ui/events")
    shows = await page.stream("/ui/events?show=routing")
    while (found := await shows.next())[0] == "status":
        pass
    assert found[0] == "end" and "the frontend's log says why" in found[1]["message"]
    for _ in range(2):
        assert (await plain.next())[0] == "status"
    await close(shows.writer)
    await close(plain.writer)


async def test_a_page_that_opens_gets_no_more_events_than_it_can_take(page: Page) -> None:
    page.happened = [BoxEvent(kind="error", at_s=1.0 + n, text="x" * 400) for n in range(500)]
    events = await page.stream("/ui/events")
    opened = await page.stream("/ui/events")
    for one in (events, opened):
        while (found := await one.next())[0] != "events":
            pass
        told = found[1]["events"]
        assert 90 < len(told) < 120 and told[-1]["at_s"] == 500.0
        assert len(json.dumps(told, separators=(",", ":"))) <= sampler._FIRST_BYTES + 1
        await close(one.writer)
