"""``dynamo restart``, ``drain``, ``sleep``, ``wake``, ``load``, ``unload``: operate the workers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from dynamo import operations
from dynamo.cli.options import DeploymentSettings, LoadModelSettings, OperateSettings
from dynamo.config import load as load_options
from dynamo.operations.operate import BoxActions, Steps, recorded
from dynamo.serve.state.events import actor
from dynamo.status.deployment import chosen_runtime

_NAME = "NAME is a worker (dynamo_Worker_1), or a service for all of its workers.\n"
_EPILOG = """The command returns when the action is complete; Ctrl-C ends {what}.
Exit status: 0 done, 1 it failed, or no deployment runs, 2 there is no such name."""

Action = Callable[[BoxActions, str], Steps]
"""What a verb does with a worker, a service or a model of this name."""

_GOES_ON = "only the command, the action goes on"
_ENDS = "the action where it is:\nthe same command again completes it"


def restart(argv: Sequence[str] | None = None) -> int:
    """Run ``dynamo restart``; return the exit status."""
    text = "Replace processes one after another, so that requests are served; start failed ones."
    return _on_workers("restart", BoxActions.restart, text, _GOES_ON, argv)


def drain(argv: Sequence[str] | None = None) -> int:
    """Run ``dynamo drain``; return the exit status."""
    text = "Let workers finish their requests and exit; they are not started again."
    return _on_workers("drain", BoxActions.drain, text, _GOES_ON, argv)


def sleep(argv: Sequence[str] | None = None) -> int:
    """Run ``dynamo sleep``; return the exit status."""
    text = "Let workers finish their requests and free their GPU memory, but keep their processes."
    return _on_workers("sleep", BoxActions.sleep, text, _ENDS, argv)


def wake(argv: Sequence[str] | None = None) -> int:
    """Run ``dynamo wake``; return the exit status."""
    text = "Let workers that sleep serve again."
    return _on_workers("wake", BoxActions.wake, text, _ENDS, argv)


def load(argv: Sequence[str] | None = None) -> int:
    """Run ``dynamo load``; return the exit status."""
    text = "Wake or start a worker of a model that has none, and wait until it serves."
    return _on_model("load", BoxActions.load, text, argv)


def unload(argv: Sequence[str] | None = None) -> int:
    """Run ``dynamo unload``; return the exit status."""
    text = "Free the GPUs of a model: its workers finish their requests, then sleep or exit."
    return _on_model("unload", BoxActions.unload, text, argv)


def pause_planner(argv: Sequence[str] | None = None) -> int:
    """Run ``dynamo planner pause``; return the exit status."""
    text = "Let the planner observe only, until it is resumed."
    (deployment,) = load_options("dynamo planner pause", text, [DeploymentSettings], argv)
    return _run("pause", deployment, BoxActions.pause_planner, "planner")


def resume_planner(argv: Sequence[str] | None = None) -> int:
    """Run ``dynamo planner resume``; return the exit status."""
    text = "Let a paused planner add and remove workers again."
    (deployment,) = load_options("dynamo planner resume", text, [DeploymentSettings], argv)
    return _run("resume", deployment, BoxActions.resume_planner, "planner")


def _on_workers(
    verb: str, action: Action, text: str, interrupt: str, argv: Sequence[str] | None
) -> int:
    groups: list[type[Any]] = [OperateSettings, DeploymentSettings]
    epilog = _NAME + _EPILOG.format(what=interrupt)
    target, deployment = load_options(f"dynamo {verb}", text, groups, argv, epilog=epilog)
    return _run(verb, deployment, lambda actions: action(actions, target.name), target.name)


def _on_model(verb: str, action: Action, text: str, argv: Sequence[str] | None) -> int:
    groups: list[type[Any]] = [LoadModelSettings, DeploymentSettings]
    epilog = _EPILOG.format(what=_ENDS)
    target, deployment = load_options(f"dynamo {verb}", text, groups, argv, epilog=epilog)
    return _run(verb, deployment, lambda actions: action(actions, target.model), target.model)


def _run(
    action: str, deployment: DeploymentSettings, steps: Callable[[BoxActions], Steps], name: str
) -> int:
    """Run an action on ``name``, print what it reports."""
    # Of the warnings only those of operations: of connections to engines an operator needs none.
    notes = logging.StreamHandler()
    notes.setFormatter(logging.Formatter(f"dynamo {action}: %(message)s"))
    notes.addFilter(logging.Filter(operations.__name__))
    logging.getLogger().addHandler(notes)
    runtime = chosen_runtime(deployment.namespace)
    actions = BoxActions(runtime)
    asyncio.run(print_steps(recorded(runtime, action, name, actor(), steps(actions))))
    return 0


async def print_steps(steps: Steps) -> None:
    """Print each step. Output that cannot be written does not interrupt them: it is raised last."""
    problem: OSError | None = None
    async for text in steps:
        try:
            print(text, flush=True)
        except OSError as error:
            problem = error
    if problem is not None:
        raise problem
