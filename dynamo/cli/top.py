"""``dynamo top``: the deployment live on a terminal, with keys that operate the workers."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import termios
import threading
import time
import tty
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import FrameType
from typing import Any

from dynamo.cli.options import DeploymentSettings, TopSettings
from dynamo.cli.top_view import BAD, PLAIN, SORT_ORDERS, WARN, TopView, frame, sorted_workers
from dynamo.config import environ, load
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import DynamoError
from dynamo.operations.operate import ActionOutcome, BoxControl, Steps, recorded
from dynamo.runtime.process.os_process import heeded
from dynamo.runtime.process.paths import state_path
from dynamo.serve.state.events import actor
from dynamo.status.deployment import chosen_runtime
from dynamo.status.logs import LogLine, LogReader
from dynamo.status.reading import BoxCollector

DESCRIPTION = "Show GPUs, models, workers, the planner and the last requests, live."
EPILOG = """Without a terminal it prints one frame and exits, as with --once.
Exit status: 0, or with --once 1 if no deployment runs."""
_IDLE_S = 60.0
_ANSWERS = 50
_LOG_LINES = 1000
_MESSAGE_S = 10.0
_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"  # other buffer, no cursor, no wrapping, clear
_LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"
_STYLES = {"title": "1", "head": "2;4", "chosen": "7", "bad": "31", "warn": "33", "dim": "2"}
_COLOURED = ("bad", "warn")
# In this order: escape alone is the beginning of all others.
_SEQUENCES = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1bOA": "up",
    "\x1bOB": "down",
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
    "\x1b": "escape",
}
_READ_BYTES = 1024


class Wakeup:
    """Ends a wait of :meth:`Screen.keys` from another thread or a signal handler.

    It is never closed: a thread may wake it until the process exits.
    """

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        os.set_blocking(self._write_fd, False)

    def wake(self) -> None:
        """End the wait, or the next one."""
        with contextlib.suppress(BlockingIOError):  # full: it wakes anyway
            os.write(self._write_fd, b"\0")

    def clear(self) -> None:
        """Forget the wakes so far."""
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self.read_fd, _READ_BYTES)) == _READ_BYTES:
                pass


class Screen:
    """The terminal on standard input and output. Use :meth:`opened`."""

    def __init__(self, wakeup: Wakeup) -> None:
        self._wakeup = wakeup
        self._in, self._out = sys.stdin.fileno(), sys.stdout.fileno()
        self._before = termios.tcgetattr(self._in)
        self._shown: list[str] = []
        self._size = (0, 0)
        self._styles = _STYLES
        if environ().get("NO_COLOR"):
            self._styles = {name: _STYLES[name] for name in _STYLES if name not in _COLOURED}

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows."""
        return shutil.get_terminal_size()

    @contextlib.contextmanager
    def opened(self) -> Iterator[Screen]:
        """Own the terminal for the block; SIGTERM and SIGHUP end it with SystemExit."""
        ending = heeded(signal.SIGTERM, signal.SIGHUP)
        before: dict[int, Any] = {number: signal.signal(number, _end) for number in ending}
        before[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, lambda *_: self._wakeup.wake())
        before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._suspend)
        try:
            self._enter()
            yield self
        finally:
            self._leave()
            for number, handler in before.items():
                signal.signal(number, handler)

    def draw(self, lines: Sequence[tuple[str, str]]) -> None:
        """Show a frame; write only the lines that differ from those shown."""
        if self._size != self.size:
            self._size, self._shown = self.size, []
        parts = [] if self._shown else ["\x1b[2J"]
        rows = [self._styled(style, text) for style, text in lines]
        before = [*self._shown, *[None] * (len(rows) - len(self._shown))]
        for number, (row, old) in enumerate(zip(rows, before, strict=False), 1):
            if row != old:
                # Clear first: behind a full row the cursor is still on its last character.
                parts.append(f"\x1b[{number};1H\x1b[K{row}")
        if len(rows) < len(self._shown):
            parts.append(f"\x1b[{len(rows) + 1};1H\x1b[J")
        self._shown = rows
        self._write("".join(parts))

    def keys(self, timeout_s: float) -> list[str]:
        """Wait for keys, a wake or the timeout; return the keys: letters, or ``up``, ``escape``."""
        ready, _, _ = select.select([self._in, self._wakeup.read_fd], [], [], timeout_s)
        self._wakeup.clear()
        if self._in not in ready:
            return []
        data = os.read(self._in, _READ_BYTES)
        if not data:
            raise EOFError  # the terminal is gone
        return list(_decoded(data.decode(errors="ignore")))

    def _enter(self) -> None:
        tty.setcbreak(self._in)
        self._shown = []
        self._write(_ENTER)

    def _leave(self) -> None:
        with contextlib.suppress(OSError, termios.error):  # the terminal may be gone
            self._write(_LEAVE)
            termios.tcsetattr(self._in, termios.TCSADRAIN, self._before)

    def _suspend(self, number: int, stack: FrameType | None) -> None:
        """Handle Ctrl-Z: restore the terminal, stop, and own it again when continued."""
        self._leave()
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, handler)
        self._enter()
        self._wakeup.wake()

    def _styled(self, style: str, text: str) -> str:
        code = self._styles.get(style)
        return f"\x1b[{code}m{text}\x1b[0m" if code and text else text

    def _write(self, text: str) -> None:
        data = text.encode(sys.stdout.encoding, "replace")
        while data:
            data = data[os.write(self._out, data) :]


def _end(number: int, stack: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _decoded(text: str) -> Iterator[str]:
    while text:
        key = next(filter(text.startswith, _SEQUENCES), text[0])
        yield _SEQUENCES.get(key, key)
        text = text[len(key) :]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; return the exit status."""
    groups: list[type[Any]] = [TopSettings, DeploymentSettings]
    settings, deployment = load("dynamo top", DESCRIPTION, groups, argv, epilog=EPILOG)
    runtime = chosen_runtime(deployment.namespace)
    collector = BoxCollector(runtime, settings.api_key)
    if settings.once or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return _print_once(collector)
    return Top(runtime, collector, settings.interval_s).run()


def _print_once(collector: BoxCollector) -> int:
    status = collector.collect()
    # In a pipe or a file nothing is cut.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    for _, text in frame(status, TopView(keys=False), width):
        print(text.rstrip())
    return 0 if status.state == "running" else 1


class Top:
    """The live display of the deployment of ``runtime``."""

    def __init__(
        self, runtime: RuntimeSettings, collector: BoxCollector, interval_s: float
    ) -> None:
        self._runtime = runtime
        self._collector = collector
        self._interval_s = interval_s
        self._control = BoxControl(runtime)
        self._view = TopView()
        self._wakeup = Wakeup()
        self._status = collector.collect()
        self._ended = threading.Event()
        self._asked: Callable[[], None] | None = None
        #: Of threads: append and popleft of a deque need no lock.
        self._answers: deque[ActionOutcome] = deque(maxlen=_ANSWERS)
        self._message_until_s = 0.0
        self._reader: LogReader | None = None
        self._log: deque[str] = deque(maxlen=_LOG_LINES)

    def run(self) -> int:
        """Show frames until the user quits; return the exit status."""
        with Screen(self._wakeup).opened() as screen:
            threading.Thread(target=self._collect, name="collector", daemon=True).start()
            try:
                self._show(screen)
            except (EOFError, OSError):
                return 1  # the terminal is gone
            finally:
                self._ended.set()
                self._close_log()
        return 0

    def _collect(self) -> None:
        while not self._ended.wait(self._interval_s):
            self._status = self._collector.collect()
            self._wakeup.wake()

    def _show(self, screen: Screen) -> None:
        while True:
            self._select(0)
            self._update_message()
            self._read_log()
            screen.draw(frame(self._status, self._view, *screen.size))
            for key in screen.keys(_IDLE_S):
                if not self._on_key(key):
                    return

    def _on_key(self, key: str) -> bool:
        """Handle a key; return whether to continue."""
        # Any key but y is a no, also one that has a meaning of its own.
        if self._asked is not None:
            asked, self._asked = self._asked, None
            self._say("")
            if key in ("y", "Y"):
                asked()
            return not self._ended.is_set()
        if key == "q" or (key == "escape" and self._view.log_of):
            return self._on_quit()
        keys: dict[str, Callable[[], None]] = {
            "up": partial(self._select, -1),
            "down": partial(self._select, 1),
            "o": self._sort,
            "l": self._open_log,
            "d": self._drain,
            "s": self._sleep_or_wake,
            "p": self._pause_or_resume,
        }
        if key in keys:
            keys[key]()
        return True

    def _on_quit(self) -> bool:
        if self._view.log_of:
            self._close_log()
            return True
        if not self._control.running:
            return False
        self._asked = self._ended.set
        self._say(f"{self._control.running} actions still run; leave them? y/n", WARN)
        return True

    def _select(self, step: int) -> None:
        """Move the selection; without a selected worker select the first."""
        names = [worker.name for worker in sorted_workers(self._status, self._view.sort)]
        if self._view.selected in names:
            at = names.index(self._view.selected) + step
            self._view.selected = names[max(0, min(at, len(names) - 1))]
        else:
            self._view.selected = names[0] if names else ""

    def _sort(self) -> None:
        orders = [*SORT_ORDERS]
        self._view.sort = orders[(orders.index(self._view.sort) + 1) % len(orders)]

    def _drain(self) -> None:
        name = self._view.selected
        if name:
            self._asked = partial(self._act, self._control.actions.drain, name)
            self._say(f"drain {name}: it finishes its requests and exits; y/n", WARN)

    def _sleep_or_wake(self) -> None:
        actions = self._control.actions
        for worker in (*self._status.workers, *self._status.others):
            if worker.name == self._view.selected:
                asleep = worker.state == "asleep"
                self._act(actions.wake if asleep else actions.sleep, worker.name)

    def _pause_or_resume(self) -> None:
        planner = self._status.planner
        paused = planner is not None and planner.state == "paused"
        actions = self._control.actions
        self._act(actions.resume_planner if paused else actions.pause_planner)

    def _act(self, action: Callable[..., Steps], *names: str) -> None:
        """Begin an action in a thread: it may wait for the arbiter."""
        self._say("…")
        kind = action.__name__.removesuffix("_planner")
        name = names[0] if names else "planner"

        def begin() -> Steps:
            return recorded(self._runtime, kind, name, actor(), action(*names))

        threading.Thread(target=self._begin, args=(begin,), daemon=True).start()

    def _begin(self, action: Callable[[], Steps]) -> None:
        try:
            text, failed = self._control.begin(action), False
        except DynamoError as error:
            text, failed = error.message, True
        self._answers.append(ActionOutcome(at_s=time.time(), text=text, failed=failed))
        self._wakeup.wake()

    def _update_message(self) -> None:
        for answers in (self._answers, self._control.outcomes):
            while answers:
                answer = answers.popleft()
                self._say(answer.text, BAD if answer.failed else PLAIN)
        if self._asked is None and time.monotonic() > self._message_until_s:
            self._view.message = ""

    def _say(self, text: str, style: str = PLAIN) -> None:
        self._view.message, self._view.message_style = text, style
        self._message_until_s = time.monotonic() + _MESSAGE_S

    def _open_log(self) -> None:
        name, namespace = self._view.selected, self._runtime.namespace
        if name:
            self._close_log()
            directory = state_path(self._runtime) / namespace / "logs"
            self._reader = LogReader(directory, namespace, name)
            self._add_to_log(self._reader.last(_LOG_LINES))
            self._view.log_of = name

    def _read_log(self) -> None:
        if self._reader is not None:
            self._add_to_log(self._reader.read())

    def _add_to_log(self, lines: Iterable[LogLine]) -> None:
        self._log.extend(line.decode(errors="replace") for _, line in lines)
        self._view.log_lines = list(self._log)

    def _close_log(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader, self._view.log_of = None, ""
        self._log.clear()
