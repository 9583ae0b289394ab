"""``dynamo top``: GPUs, models, workers, planner and requests, live; keys operate the workers."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from dynamo.box.collect import BoxCollector
from dynamo.box.deployments import chosen_runtime
from dynamo.cli.screen import Screen, Wakeup
from dynamo.cli.top_view import BAD, PLAIN, SORT_ORDERS, WARN, TopView, frame, sorted_workers
from dynamo.config import load
from dynamo.config.operate import DeploymentSettings, TopSettings
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import ConfigError, DynamoError
from dynamo.operations.control import ActionOutcome, BoxControl
from dynamo.protocols.status import WorkerStatus
from dynamo.runtime.process.paths import state_path
from dynamo.status.logs import LogLine, LogReader

__all__ = ["main"]

DESCRIPTION = "Show GPUs, models, workers, the planner and the last requests, live."
EPILOG = """Without a terminal it prints one frame and exits, as with --once.
Exit status: 0, or with --once 1 if no deployment runs."""

_IDLE_S = 60.0
_ANSWERS = 50
_LOG_LINES = 1000
_MESSAGE_S = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; return the exit status."""
    groups: list[type[Any]] = [TopSettings, DeploymentSettings]
    settings, deployment = load("dynamo top", DESCRIPTION, groups, argv, epilog=EPILOG)
    try:
        runtime = chosen_runtime(deployment.namespace)
        collector = BoxCollector(runtime, settings.api_key)
        if settings.once or not (sys.stdin.isatty() and sys.stdout.isatty()):
            return _print_once(collector)
        return Top(runtime, collector, settings.interval_s).run()
    except ConfigError as error:
        print(f"dynamo top: {error.message}", file=sys.stderr)
        return 2


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
        self._answers: deque[ActionOutcome] = deque(maxlen=_ANSWERS)
        self._quits = False
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
        """Handle a key; return whether to go on."""
        if self._asked is not None:
            asked, self._asked = self._asked, None
            self._say("")
            if key in ("y", "Y"):
                asked()
            return not self._quits
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
        self._asked = self._quit
        self._say(f"{self._control.running} actions still run; leave them? y/n", WARN)
        return True

    def _quit(self) -> None:
        self._quits = True

    def _select(self, step: int) -> None:
        """Move the selection; without a selected worker select the first."""
        names = [one.name for one in sorted_workers(self._status, self._view.sort)]
        if self._view.selected in names:
            at = names.index(self._view.selected) + step
            self._view.selected = names[max(0, min(at, len(names) - 1))]
        else:
            self._view.selected = names[0] if names else ""

    def _sort(self) -> None:
        orders = [*SORT_ORDERS]
        self._view.sort = orders[(orders.index(self._view.sort) + 1) % len(orders)]

    def _selected(self) -> WorkerStatus | None:
        workers = sorted_workers(self._status, self._view.sort)
        return next((one for one in workers if one.name == self._view.selected), None)

    def _drain(self) -> None:
        name = self._view.selected
        if name:
            self._asked = partial(self._act, self._control.drain, name)
            self._say(f"drain {name}: it finishes its requests and exits; y/n", WARN)

    def _sleep_or_wake(self) -> None:
        worker = self._selected()
        if worker is not None:
            asleep = worker.state == "asleep"
            self._act(self._control.wake if asleep else self._control.sleep, worker.name)

    def _pause_or_resume(self) -> None:
        planner = self._status.planner
        paused = planner is not None and planner.state == "paused"
        self._act(self._control.resume_planner if paused else self._control.pause_planner)

    def _act(self, action: Callable[..., str], *names: str) -> None:
        """Begin an action in a thread: it may wait for the arbiter."""
        self._say("…")
        threading.Thread(target=self._begin, args=(action, *names), daemon=True).start()

    def _begin(self, action: Callable[..., str], *names: str) -> None:
        try:
            text, failed = action(*names), False
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
