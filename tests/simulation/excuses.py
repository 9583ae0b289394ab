"""What may excuse a failed request: each excuse names its model, its begin and its end.

Two questions are apart. *Has the model no worker?* is what :mod:`presence` saw, and docs/guarantees
allows a 503 then and at no other time. *May it have none?* needs a cause: a fault that hit one of
its workers, their removal by an operator without a later load, or the loss of what starts
workers. A worker that is away without a cause is a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from machine import Process
from presence import PREFILL, SERVED_BY, Span, model_of, service_of
from validator import SILENCE_S

if TYPE_CHECKING:
    from scenario import Step

__all__ = ["RESTART_S", "Cause", "Causes", "target_of"]

RESTART_S = 10.0
"""A fault may be felt so long: until what died is back."""
_BACK = {"load", "reload", "circus start", "circus incr", "circus restart", "restart"}
_LASTING = {
    "circus stop": _BACK - {"circus incr"},  # which changes a number: it starts nothing
    "circus rm": _BACK,
    "circus decr": _BACK,
    "pause planner": {"resume planner"},
}
"""What lasts until an operator brings it back, and with which verbs."""
_LONE_S = 10.0
"""So long a request waits for the only worker of its model that does not answer."""
_NEVER = float("inf")
_REMOVING = ("drain", "unload", "sleep", "circus stop", "circus rm", "circus decr", "pause planner")


@dataclass
class Cause:
    """Why ``whom`` may have no worker from ``since_s`` to ``until_s``.

    ``whom`` is the name of a worker, a service, a model, or "" for each of them but ``spared``.
    ``removing``: an operator removed it, so it stays away until something brings it back; what
    is away for a moment of the time stays excused until it is back.
    """

    why: str
    whom: str
    since_s: float
    until_s: float = _NEVER
    removing: bool = False
    verb: str = ""
    spared: Set[str] = frozenset()

    @property
    def span(self) -> Span:
        """Its time."""
        return Span(self.since_s, self.until_s)

    def meets(self, other: Cause) -> bool:
        """Whether both are about some worker."""
        return (
            not self.whom
            or not other.whom
            or other.names(self.whom if "_" in self.whom else f"box_{self.whom}")
            or self.names(other.whom if "_" in other.whom else f"box_{other.whom}")
        )

    def names(self, worker: str) -> bool:
        """Whether it is about the worker with this name."""
        service = worker.split("_")[1]
        return worker not in self.spared and self.whom in (
            "",
            worker,
            service,
            SERVED_BY.get(service, "?"),
        )


class Causes:
    """The causes of a run, in the order in which they begin.

    ``losses`` has model and time for workers that lost requests and whose life goes on, and
    ``prefill_losses`` name and time of those that compute prompts. ``is_live`` returns
    whether the worker of a name is.
    """

    def __init__(self, is_live: Callable[[str], bool]) -> None:
        self._is_live = is_live
        self.found: list[Cause] = []
        self.losses: list[tuple[str, float]] = []
        self.prefill_losses: list[tuple[str, float]] = []
        self.of_the_graph: set[str] = set()
        """The workers that the graph starts; a reload or a new deployment removes the others."""
        self.reload_returns = True
        """Whether a reload starts stopped workers; not those of models on demand."""
        self._verbs: dict[int, list[Cause]] = {}
        self._of: dict[str, tuple[int, list[Cause]]] = {}

    def hit(self, process: Process, why: str, at_s: float, seconds: float = 0.0) -> None:
        """A fault has hit ``process``, for ``seconds``."""
        model = model_of(process)
        if model or process.name == "serve":
            whom = process.name if model else ""
            self.found.append(Cause(f"{why} {process}", whom, at_s, at_s + seconds + RESTART_S))
        if model and seconds:
            self.lose(process, [at_s + later_s for later_s in _losses_s(seconds)])

    def lose(self, process: Process, times_s: Sequence[float]) -> None:
        """``process`` lost requests at these times, and lives on."""
        self.losses += [(model_of(process), at_s) for at_s in times_s]
        if service_of(process) == PREFILL:
            self.prefill_losses += [(process.name, at_s) for at_s in times_s]

    def everywhere(self, why: str, at_s: float, seconds: float) -> None:
        """A fault has hit whatever starts workers."""
        self.found.append(Cause(why, "", at_s, at_s + seconds + RESTART_S))

    def everywhere_spans(self) -> Iterator[Span]:
        """The times in which a fault was felt everywhere."""
        return (one.span for one in self.found if not one.whom and not one.verb)

    def verb(self, step: Step, at_s: float) -> None:
        """An operator begins."""
        fewer = step.details.get("change") == "workers"
        removing = step.what in _REMOVING or fewer
        why = f"operator {step.number} ({step.what})"
        self._verbs[step.number] = [
            Cause(why, whom, at_s, _NEVER, removing, step.what) for whom in _targets(step)
        ]
        if step.what == "reload":
            self._verbs[step.number].append(
                Cause(why, "", at_s, _NEVER, True, step.what, self.of_the_graph)
            )
        self.found += self._verbs[step.number]

    def verb_ended(self, step: Step, result: str, at_s: float) -> None:
        """An operator has ended, or was killed: then what it did may go on."""
        for cause in self._verbs.pop(step.number):
            refused = result.startswith("refused")
            if refused or step.what not in _LASTING:
                cause.until_s = at_s + RESTART_S
            if refused:
                cause.removing = False
            elif result == "ended":
                self._brought_back(step.what, cause, at_s)

    def _brought_back(self, verb: str, by: Cause, at_s: float) -> None:
        """End what lasts until a verb like this one. A load may have started another worker."""
        if verb == "reload" and not self.reload_returns:
            return
        for cause in self.found:
            lasting = cause.until_s == _NEVER and cause.verb in _LASTING and cause is not by
            if verb == "load" and cause.verb in ("circus stop", "circus decr"):
                lasting = lasting and self._is_live(cause.whom)
            if lasting and verb in _LASTING[cause.verb] and cause.meets(by):
                cause.until_s = at_s + RESTART_S

    def started_again(self, program: str, at_s: float) -> None:
        """Arbiter or planner is new: it does not know what was stopped, added or paused."""
        if program == "arbiter":
            new = Cause("a new deployment", "", at_s, at_s + RESTART_S, True, "", self.of_the_graph)
            self.found.append(new)
        for cause in self.found:
            planner = cause.verb == "pause planner"
            if (
                cause.until_s == _NEVER
                and cause.verb in _LASTING
                and planner == (program == "planner")
            ):
                cause.until_s = at_s + RESTART_S

    def of(self, model: str) -> list[Cause]:
        """Return the causes for which workers of ``model`` may be away."""
        seen, causes = self._of.get(model, (0, []))
        services = [service for service, served in SERVED_BY.items() if served == model]
        causes += [
            one
            for one in self.found[seen:]
            if one.whom in ("", model) or any(word in services for word in one.whom.split("_"))
        ]
        self._of[model] = len(self.found), causes
        return causes


def target_of(step: Step) -> str:
    """Return the service or worker that the operation of ``step`` names; '' if it names none."""
    service, number = step.details.get("service", ""), step.details.get("worker", -1)
    if not service or number < 0:
        return str(service)
    return f"box_{service}" + (f"_{number}" if number else "")


def _targets(step: Step) -> tuple[str, ...]:
    if "model" in step.details:
        return (step.details["model"],)
    if step.what == "reload":
        if step.details["change"] in ("same", "frontend", "extra"):
            return ("extra",)
        return (step.details["service"],)
    if step.what.startswith("circus"):  # which takes a watcher's name
        service = step.details["service"]
        return (f"box_{service}" + (f"_{step.details['worker']}" * (step.details["worker"] > 0)),)
    return (target_of(step),)  # a repair, or the planner: all


def _losses_s(seconds: float) -> list[float]:
    """Return when requests may lose a worker that is stopped.

    They ask it again if it is alone for too long.
    """
    if seconds < _LONE_S:
        return [0.0]
    return [0.0, *(number * SILENCE_S for number in range(int(seconds / SILENCE_S) + 1))]
