"""The actions of an operator for callers without an event loop of their own: top, the web page."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import DynamoError, Overloaded
from dynamo.operations.operate import BoxActions, Steps

_RUNNING = 32
_OUTCOMES = 50
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionOutcome:
    """What became of an action, at ``at_s`` (Unix time)."""

    at_s: float
    text: str
    failed: bool = False


class BoxControl:
    """Operates the deployment in the namespace of ``runtime``; see :class:`BoxActions`.

    :meth:`begin` returns a sentence about what happens now, or raises DynamoError; the rest goes on
    in a thread of this object, and its end is appended to ``outcomes``. It is thread-safe and
    blocks for some milliseconds, for at most about 30 s while the arbiter is busy: call it in a
    thread, not on an event loop.
    """

    def __init__(self, runtime: RuntimeSettings) -> None:
        self.outcomes: deque[ActionOutcome] = deque(maxlen=_OUTCOMES)
        self.actions = BoxActions(runtime)
        self._running: set[concurrent.futures.Future[None]] = set()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def running(self) -> int:
        """The number of actions that are not complete."""
        return len(self._running)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all actions have ended; return whether they have."""
        with self._lock:
            running = set(self._running)
        return not concurrent.futures.wait(running, timeout_s).not_done

    def close(self) -> None:
        """End the thread; actions that are not complete are left as they are. Idempotent."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)

    def begin(self, action: Callable[[], Steps]) -> str:
        """Run ``action``, one of ``actions``, in the thread; return its first sentence."""
        begun: concurrent.futures.Future[str] = concurrent.futures.Future()
        with self._lock:
            if len(self._running) >= _RUNNING:
                raise Overloaded(f"{_RUNNING} actions run already; wait for the end of one")
            work = asyncio.run_coroutine_threadsafe(self._run(action, begun), self._thread())
            self._running.add(work)
        work.add_done_callback(self._ended)
        return begun.result()

    async def _run(
        self, action: Callable[[], Steps], begun: concurrent.futures.Future[str]
    ) -> None:
        text = ""
        try:
            async for text in action():
                if not begun.done():
                    begun.set_result(text)
        except Exception as error:  # ends one action, not the thread
            if not begun.done():
                begun.set_exception(error)
                return
            if not isinstance(error, DynamoError):
                log.exception("an action failed")
            text = error.message if isinstance(error, DynamoError) else repr(error)
            self.outcomes.append(ActionOutcome(at_s=time.time(), text=text, failed=True))
        else:
            self.outcomes.append(ActionOutcome(at_s=time.time(), text=text))

    def _ended(self, work: concurrent.futures.Future[None]) -> None:
        with self._lock:
            self._running.discard(work)

    def _thread(self) -> asyncio.AbstractEventLoop:
        """Return the loop of the thread, started on first use."""
        if self._loop is None:
            # A daemon: at the exit of the process, what is not complete is left as after a crash,
            # which the arbiter and the planner finish.
            self._loop = asyncio.new_event_loop()
            threading.Thread(
                target=_run_loop, args=(self._loop,), name="box-control", daemon=True
            ).start()
        return self._loop


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()
