"""Routes of extensions: found by name, served in threads, and none of the frontend's own."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_service import frontend

from dynamo.config.frontend import FrontendSettings
from dynamo.errors import ConfigError
from dynamo.frontend.apis import extensions
from dynamo.frontend.apis.extensions import load_routes
from dynamo.llm import FrontendExtensionContext, FrontendResponse, FrontendRoute

CONTEXT = FrontendExtensionContext(ready=True, draining=False, models=(("b", True), ("a", False)))


@pytest.fixture
def extension() -> Iterator[Any]:
    """A module that tests fill."""
    module: Any = types.ModuleType("their_routes")
    sys.modules["their_routes"] = module
    yield module
    del sys.modules["their_routes"]


def test_what_a_handler_can_ask() -> None:
    assert CONTEXT.is_ready() and not CONTEXT.is_cancelled()
    assert CONTEXT.has_any_ready_model()
    assert CONTEXT.is_model_ready_to_serve("b") and not CONTEXT.is_model_ready_to_serve("a")
    assert not CONTEXT.is_model_ready_to_serve("c")
    assert CONTEXT.model_display_names() == ["a", "b"]
    assert CONTEXT.serving_ready_display_names() == ["b"]


async def _async(context: FrontendExtensionContext) -> None: ...


@pytest.mark.parametrize(
    ("method", "path", "handler", "message"),
    [
        ("POST", "/a", print, "method must be GET, got POST"),
        ("GET", "/a/{id}", print, "the path must be fixed"),
        ("GET", "a", print, "the path must be fixed"),
        ("GET", "/a/", print, "the path must be fixed"),
        ("GET", "/a", 7, "must be a function"),
        ("GET", "/a", _async, "must not be an async function"),
    ],
)
def test_routes_that_cannot_be(method: str, path: str, handler: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        FrontendRoute(method, path, handler)
    with pytest.raises(ValueError, match="status_code must be"):
        FrontendResponse(99, None)


def test_how_extensions_are_found(
    extension: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = FrontendRoute("GET", "/one", print)
    extension.one, extension.none = lambda: one, lambda: None
    extension.several = types.SimpleNamespace(routes=lambda: iter([one, one]))
    extension.number = 7
    extension.wrong = lambda: ["/one"]
    extension.fails = lambda: 1 / 0
    assert load_routes(["their_routes:one", "their_routes:none", "their_routes:one"]) == [one]
    assert load_routes(["their_routes:several.routes"]) == [one, one]
    for name, message in (
        ("gone", "no such extension; give MODULE:FUNCTION or an entry point"),
        ("gone:routes", "can't be loaded: ModuleNotFoundError"),
        ("their_routes:gone", "can't be loaded: AttributeError"),
        ("their_routes:number", "is no function"),
        ("their_routes:wrong", "gave '/one', not a dynamo.llm.FrontendRoute"),
        ("their_routes:fails", "ZeroDivisionError"),
    ):
        with pytest.raises(ConfigError, match=f"^--frontend-route-extension {name}: {message}"):
            load_routes([name])
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    points = "[dynamo.frontend.routes]\nmine = their_routes:one\n"
    (info / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_routes(["mine"]) == [one]


async def get(port: int, path: str) -> tuple[int, Any]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    async with asyncio.timeout(60):
        answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body) if body else None


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
async def test_requests_to_extensions(
    extension: Any, tmp_path: Path, kind: type[BaseException]
) -> None:
    main, threads = threading.get_ident(), set()

    def names(context: FrontendExtensionContext) -> Any:
        threads.add(threading.get_ident())
        return {"models": context.model_display_names(), "ready": context.is_ready()}

    def fails(context: FrontendExtensionContext) -> Any:
        raise RuntimeError("boom")

    def exits(context: FrontendExtensionContext) -> Any:
        raise kind("bye")

    extension.routes = lambda: [
        FrontendRoute("GET", "/exits", exits),
        FrontendRoute("GET", "/names", names),
        FrontendRoute("GET", "/refused", lambda context: FrontendResponse(418, {"tea": 1})),
        FrontendRoute("GET", "/fails", fails),
        FrontendRoute("GET", "/v1/mine", lambda context: [1]),
    ]
    settings = FrontendSettings(http_port=0, route_extensions=("their_routes:routes",))
    async with frontend(tmp_path, settings=settings) as one:
        _, port = await one.start()
        assert await get(port, "/names") == (200, {"models": [], "ready": True})
        assert await get(port, "/refused") == (418, {"tea": 1})
        assert (await get(port, "/fails"))[0] == 500
        assert (await get(port, "/exits"))[0] == 500
        status, body = await get(port, "/exits")
        assert status == 503 and f"it raised {kind.__name__}" in json.dumps(body)
        assert await get(port, "/v1/mine") == (200, [1])
        assert main not in threads


async def test_handlers_whose_clients_left_count_until_they_end(
    extension: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extensions, "_MAX_RUNNING", 1)
    entered, leave = threading.Event(), threading.Event()

    def slow(context: FrontendExtensionContext) -> Any:
        entered.set()
        leave.wait(60)

    extension.routes = lambda: [FrontendRoute("GET", "/slow", slow)]
    settings = FrontendSettings(http_port=0, route_extensions=("their_routes:routes",))
    async with frontend(tmp_path, settings=settings) as one:
        _, port = await one.start()
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert await asyncio.to_thread(entered.wait, 60)
        writer.close()
        async with asyncio.timeout(60):
            while any(task.get_name() == "/slow" for task in asyncio.all_tasks()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (await get(port, "/slow"))[0] == 503
        leave.set()
        async with asyncio.timeout(60):
            while (await get(port, "/slow"))[0] == 503:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("path", ["/health", "/v1/models/mine", "/v1/chat/completions"])
async def test_a_path_that_is_taken_ends_the_start(
    extension: Any, tmp_path: Path, path: str
) -> None:
    extension.routes = lambda: FrontendRoute("GET", path, print)
    settings = FrontendSettings(route_extensions=("their_routes:routes",))
    with pytest.raises(ConfigError, match=f"the frontend serves {path} itself"):
        async with frontend(tmp_path, settings=settings):
            pass
