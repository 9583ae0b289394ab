"""/ui: the web page, its samples and logs as server-sent events, and its buttons.

The files are open to everyone who reaches the port; all else is for operators, and for pages of
this frontend alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple
from urllib.parse import unquote

import msgspec

from dynamo.errors import DynamoError, InvalidArgument, shorten
from dynamo.frontend.requests.errors import error_response
from dynamo.frontend.requests.recent import RecentRequests
from dynamo.frontend.ui.requests import RequestFeed
from dynamo.frontend.ui.source import BoxSource, Feed, StatusSampler
from dynamo.frontend.ui.stream import HEADERS, PAGE, LogStreams, file_paths, install_files
from dynamo.http import Exchange, query_fields
from dynamo.http.access import OperatorGuard, operator_name
from dynamo.http.routes import Routes, in_task
from dynamo.protocols.status import FrontendStatus, RequestRecord
from dynamo.runtime.process.tasks import Tasks
from dynamo.runtime.process.threads import in_file_thread

_ABOUT = f"{PAGE}/about.json"
_ACTIONS = f"{PAGE}/actions"
_EVENTS = f"{PAGE}/events"
_HISTORY = f"{PAGE}/history"
_LOGS = f"{PAGE}/logs"
_MODELS = f"{PAGE}/models"
_HUB = f"{PAGE}/models/hub"
_REQUESTS = f"{PAGE}/requests"
_CONTENT = f"{PAGE}/content/"
_ROOT = "/"
_DIGITS = 12
OPEN_UI_PATHS = file_paths() | {_ABOUT, _ROOT}
_READ = (_EVENTS, _HISTORY, _LOGS, _MODELS, _HUB, _REQUESTS, f"{_REQUESTS}/", _CONTENT)
OPERATOR_UI_ROUTES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_READ, ("GET", "HEAD")),
    _ACTIONS: ("POST",),
}


class _Action(msgspec.Struct):
    """A button that was pressed."""

    action: str
    name: str


class _About(msgspec.Struct, frozen=True):
    """``GET /ui/about.json``: whether clients need keys, and what the key that was sent is.

    ``role`` is operator, user or none (a key is needed). ``rest`` is what the other parts of the
    page are for anyone else: "for operators; …". Without keys, clients on other machines are users.
    """

    keys: bool
    role: str
    name: str
    rest: str


_action = msgspec.json.Decoder(_Action).decode


class OwnFacts(NamedTuple):
    """What this frontend itself has to show.

    ``running`` and ``content`` take the id of a request: its record while it runs, and what is
    recorded of its bodies. ``routing`` is the feed of the section of this name.
    """

    status: Callable[[], FrontendStatus]
    recent: RecentRequests
    running: Callable[[str], RequestRecord | None]
    content: Callable[[str], bytes | None]
    routing: Feed


class UiRoutes:
    """The routes of the page. :meth:`stop` ends its streams, so that a drain need not wait."""

    def __init__(
        self, source: BoxSource, own: OwnFacts, tasks: Tasks, guard: OperatorGuard, has_keys: bool
    ) -> None:
        self._content = own.content
        self._requests = RequestFeed(own.recent, own.running, source.peers)
        feeds = {"requests": self._requests.read, "routing": own.routing}
        self.sampler = StatusSampler(source, own.status, tasks, feeds)
        self.store = self.sampler.store
        self._logs = LogStreams(source.logs, source.namespace)
        self._source = source
        self._tasks = tasks
        self._guard = guard
        self._has_keys = has_keys

    def install(self, routes: Routes) -> None:
        """Add the routes to the table."""
        install_files(routes)
        routes.get(_ROOT, _redirect)
        routes.get(_ABOUT, self._describe)
        routes.get(_EVENTS, self.sampler.open)
        routes.get(_HISTORY, self._show_history)
        routes.get(_LOGS, self._logs.open)
        routes.get(_REQUESTS, in_task(self._tasks.spawn, self._list_requests))
        routes.get(f"{_REQUESTS}/", in_task(self._tasks.spawn, self._show_request))
        routes.get(_CONTENT, self._show_content)
        routes.get(_MODELS, in_task(self._tasks.spawn, self._list))
        routes.get(_HUB, in_task(self._tasks.spawn, self._find))
        routes.post(_ACTIONS, in_task(self._tasks.spawn, self._run))

    def stop(self) -> None:
        """End every stream: the frontend drains."""
        message = "the frontend is stopping; the page connects again when one runs"
        self.sampler.pages.end(message)
        self._logs.streams.end(message)
        self.sampler.save()

    def close(self) -> None:
        """Stop, and end what buttons have begun."""
        self.stop()
        self._source.close()

    def _show_history(self, exchange: Exchange) -> None:
        """Answer ``?range=10m&subject=&after=0``; ``after`` is Unix time."""
        query = query_fields(exchange.query)
        after = query.get("after", "0")
        try:
            if not (after.isascii() and after.isdecimal() and len(after) <= _DIGITS):
                raise InvalidArgument(
                    f"`after` must be a whole number of seconds, of at most {_DIGITS} digits, got "
                    f"{shorten(after)}"
                )
            figures = self.sampler.history.read(
                query.get("subject", ""), query.get("range", "10m"), int(after)
            )
        except InvalidArgument as error:
            exchange.refuse(400, error.message)
            return
        _respond(exchange, figures)

    def _describe(self, exchange: Exchange) -> None:
        """Say what the client may see. The path is open: with a wrong key as without one."""
        key, problem = exchange.api_key, self._guard.problem(exchange)
        role = "none" if self._has_keys and key is None else "user" if problem else "operator"
        reason = problem.removeprefix(f"{_ABOUT} is ")
        about = _About(self._has_keys, role, "" if key is None else key.name, reason)
        _respond(exchange, about)

    async def _list_requests(self, exchange: Exchange) -> None:
        _respond(exchange, await self._requests.all())

    async def _show_request(self, exchange: Exchange) -> None:
        try:
            record = await self._requests.find(unquote(exchange.path.removeprefix(f"{_REQUESTS}/")))
        except DynamoError as error:
            exchange.respond(*error_response(error))
        else:
            _respond(exchange, record)

    def _show_content(self, exchange: Exchange) -> None:
        request_id = unquote(exchange.path.removeprefix(_CONTENT))
        content = self._content(request_id)
        if content is None:
            text = "no content of this request is recorded now; see: dynamo record --content"
            exchange.refuse(404, text)
        else:
            _respond(exchange, msgspec.Raw(content))

    async def _run(self, exchange: Exchange) -> None:
        try:
            button = _action(exchange.body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            exchange.refuse(400, f"Failed to deserialize the JSON body: {error}")
            return
        by = operator_name(exchange, "the web page")
        work: Awaitable[str]
        if (on_disk := self.store.actions.get(button.action)) is not None:
            work = on_disk(button.name)
        elif button.action in self._source.actions:
            work = in_file_thread(self._source.act, button.action, button.name, by)
        else:
            actions = ", ".join((*self._source.actions, *self.store.actions))
            exchange.refuse(
                400, f"unknown action {shorten(button.action, 64)!r}; there are {actions}"
            )
            return
        await _answer(exchange, work, "message")
        self.sampler.wake()

    async def _list(self, exchange: Exchange) -> None:
        await _answer(exchange, self.store.stored())

    async def _find(self, exchange: Exchange) -> None:
        text = query_fields(exchange.query).get("find", "")
        await _answer(exchange, self.store.find(text), "models")


async def _answer(exchange: Exchange, work: Awaitable[object], key: str = "") -> None:
    """Respond with the result of ``work``, below ``key`` if there is one, or with its error."""
    try:
        result = await work
    except DynamoError as error:
        # Not 500: most often the state of the worker or the model does not allow it.
        exchange.refuse(409 if error.status == 500 else error.status, error.message)
        return
    _respond(exchange, {key: result} if key else result)


def _respond(exchange: Exchange, body: object) -> None:
    headers = [*HEADERS, ("cache-control", "no-store")]
    exchange.respond(200, msgspec.json.encode(body), headers=headers)


def _redirect(exchange: Exchange) -> None:
    """Send a browser from the address that ``dynamo serve`` prints to the page."""
    if "text/html" in exchange.headers.get("accept", ""):
        exchange.respond(307, b"", "", [("location", PAGE), ("cache-control", "no-store")])
    else:
        text = f"Route not found: {exchange.method} /; the web page is at {PAGE}, the API at /v1"
        exchange.refuse(404, text)
