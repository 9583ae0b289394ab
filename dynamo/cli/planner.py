"""``dynamo planner``: scale a deployment, explain the decisions, change it, replay a trace."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence

import msgspec

from dynamo.cli.lab import lab_verb
from dynamo.cli.operate import pause_planner, resume_planner
from dynamo.cli.options import DeploymentSettings
from dynamo.config import load
from dynamo.config.planner import ExplainSettings, SetSettings
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import InvalidArgument, Unavailable
from dynamo.observability.logs import counted
from dynamo.operations.operate import BoxActions
from dynamo.operations.planner_client import call_planner, no_planner
from dynamo.planner.live.decisions import DECISIONS_FILE, DecisionLog
from dynamo.planner.reports.explain import EXPLAIN, ExplainReport, ModelReport, report_text
from dynamo.protocols.control import PlannerChange, PlannerState
from dynamo.runtime.process.paths import state_path
from dynamo.serve.state.events import BoxEventLog, actor
from dynamo.status.deployment import chosen_runtime

_DESCRIPTION = "Show the last decisions of the planner, and what it would decide now."
_SET_DESCRIPTION = "Change the targets and limits of a running planner until the deployment ends."
_DIGITS = 64
"""More than any number that is taken; int() refuses more than 4,300."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in _VERBS:
        return _VERBS[words[0]](words[1:])
    if words[:1] == ["replay"]:
        return int(lab_verb("planner_replay").main(words[1:]))
    from dynamo.planner.__main__ import main as run  # tensorboardX takes a second to import

    return run(words, "dynamo planner")


def _set(words: Sequence[str]) -> int:
    settings, deployment = load(
        "dynamo planner set", _SET_DESCRIPTION, [SetSettings, DeploymentSettings], words
    )
    change = PlannerChange(
        ttft_ms=settings.ttft_ms,
        itl_ms=settings.itl_ms,
        max_gpu_budget=settings.max_gpu_budget,
        min_gpu_budget=settings.min_gpu_budget,
        minima=_minima(settings.minima) or None,
    )
    runtime = chosen_runtime(deployment.namespace)
    state = asyncio.run(BoxActions(runtime).change_planner(change))
    # Without an option the settings are only shown.
    if change != PlannerChange():
        events = BoxEventLog(state_path(runtime) / runtime.namespace)
        events.add("planner", "planner", msgspec.json.encode(change).decode(), by=actor())
    print(msgspec.json.encode(state).decode() if settings.json else "\n".join(_state_lines(state)))
    return 0


def _minima(texts: Sequence[str]) -> dict[str, int | None]:
    """Return the minima of ``SERVICE=N``. Raises InvalidArgument."""
    minima: dict[str, int | None] = {}
    for text in texts:
        service, _, count = text.partition("=")
        number = count.isascii() and count.isdigit() and len(count) <= _DIGITS
        if not service or not (count == "graph" or number):
            raise InvalidArgument(f"--min must be SERVICE=N or SERVICE=graph, got {text!r}")
        minima[service] = None if count == "graph" else int(count)
    return minima


def _state_lines(state: PlannerState) -> Iterator[str]:
    yield f"mode {state.mode}" + ("; paused" if state.paused else "")
    if state.ttft_ms is not None and state.itl_ms is not None:
        yield f"targets: TTFT {state.ttft_ms:g} ms, ITL {state.itl_ms:g} ms"
    gpus, kept = counted(state.max_gpu_budget, "GPU"), counted(state.min_gpu_budget, "GPU")
    yield f"at most {gpus}; each pool keeps {kept}"
    for service, count in sorted(state.minima.items()):
        yield f"  {service} keeps {count}"


def _explain(words: Sequence[str]) -> int:
    groups = [ExplainSettings, DeploymentSettings]
    settings, deployment = load("dynamo planner explain", _DESCRIPTION, groups, words)
    runtime = chosen_runtime(deployment.namespace)
    decisions = DecisionLog(state_path(runtime) / runtime.namespace / DECISIONS_FILE).read()
    models = asyncio.run(_ask(runtime, settings.timeout_s))
    last = decisions[-settings.number :] if settings.number else []
    report = ExplainReport(
        namespace=runtime.namespace,
        running=models is not None,
        models=tuple(models or ()),
        decisions=tuple(last),
    )
    print(msgspec.json.encode(report).decode() if settings.json else report_text(report))
    return 0 if report.running else 1


async def _ask(settings: RuntimeSettings, timeout_s: float) -> list[ModelReport] | None:
    """Return what the running planner would decide; None if there is none."""
    reports = await call_planner(settings, EXPLAIN[1], {}, timeout_s)
    if reports is not None:
        return msgspec.convert(reports, list[ModelReport])
    # Unavailable: the graph has a planner, which does not answer.
    if isinstance(error := no_planner(settings), Unavailable):
        raise error
    return None


_VERBS: dict[str, Callable[[Sequence[str]], int]] = {
    "explain": _explain,
    "set": _set,
    "pause": pause_planner,
    "resume": resume_planner,
}
