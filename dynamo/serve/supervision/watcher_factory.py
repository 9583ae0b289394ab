"""Makes the watchers of a deployment, and keeps what each of them runs."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from dynamo.config import environ
from dynamo.config.serve import ServeSettings
from dynamo.serve.graph.watchers import DeploymentPlan, WatcherSpec, plan_added
from dynamo.serve.supervision.output import Announcer, LogFile, ServiceOutput
from dynamo.serve.supervision.supervised import RestartPolicy, SupervisedWatcher, single_because
from dynamo.serve.supervision.supervised_process import FrontendListener, quote_program

_REMOVED = 16
"""Removed watchers whose log file stays open."""
# Options of circus that a watcher of ours decides itself.
_OURS = ("copy_env", "copy_path", "stop_children", "respawn", "shell", "use_sockets")


class WatcherFactory:
    """Makes watchers. ``specs`` has those of every watcher, as it runs now, by name.

    ``plan`` is that of the graph that was started or reloaded last.
    """

    def __init__(
        self, plan: DeploymentPlan, settings: ServeSettings, logs: Path, announcer: Announcer
    ) -> None:
        self.plan = plan
        self.specs = {spec.name: spec for spec in plan.specs}
        self._policy = RestartPolicy(
            settings.restart_burst, settings.restart_window_s, settings.unreachable_starts
        )
        self._log_bytes = int(settings.log_size_mb * 1e6)
        self._logs = logs
        self._announcer = announcer
        self._outputs: dict[str, ServiceOutput] = {}

    def output(self, name: str) -> ServiceOutput:
        """Return the output of the watcher ``name``."""
        return self._outputs[name]

    def is_frontend(self, name: str) -> bool:
        """Whether the watcher ``name`` is a frontend."""
        spec = self.specs.get(name)
        return spec is not None and spec.is_frontend

    def make(self, spec: WatcherSpec) -> SupervisedWatcher:
        """Make the watcher of ``spec``, not started yet."""
        self.specs[spec.name] = spec
        return self._make(spec, quote_program(spec.argv), {"args": list(spec.argv[1:])})

    def make_added(
        self, name: str, cmd: str, args: Sequence[str] = (), **options: Any
    ) -> SupervisedWatcher:
        """Make the watcher of ``circusctl add``."""
        env = {str(key): str(value) for key, value in (options.pop("env", None) or {}).items()}
        argv = [*shlex.split(cmd), *(args or ())]
        spec = self.specs[name] = plan_added(name, argv, env, self.plan.all_specs)
        options = {"working_dir": spec.working_dir, **options}
        return self._make(spec, cmd, {"args": list(args or ()), **options})

    def configure(self, watcher: SupervisedWatcher, spec: WatcherSpec) -> None:
        """Use ``spec`` for the next start of ``watcher``."""
        watcher.configure(self.specs[watcher.name], spec)
        watcher.listener.address = spec.address
        self.specs[watcher.name] = spec

    def forget(self, in_use: Collection[str]) -> list[str]:
        """Close the log files of removed watchers, and forget these; return their names.

        Watchers ``in_use`` stay, and the newest removed ones, whose last lines may be reported yet.
        """
        removed = [name for name in self._outputs if name not in in_use]
        planned = {spec.name for spec in self.plan.all_specs}
        for name in removed[:-_REMOVED]:
            self._outputs.pop(name).close()
            if name not in planned:  # a reload looks up which of these were started
                del self.specs[name]
        return removed[:-_REMOVED]

    def close(self) -> None:
        """Close the log files."""
        for output in self._outputs.values():
            output.close()

    def _make(self, spec: WatcherSpec, cmd: str, options: dict[str, Any]) -> SupervisedWatcher:
        name = spec.name
        if name not in self._outputs:
            log_file = LogFile(self._logs / f"{name}.log", self._log_bytes)
            self._outputs[name] = ServiceOutput(name, log_file, self._announcer)
        own = {
            "graceful_timeout": spec.graceful_timeout_s,
            "working_dir": spec.working_dir,
            **{key: value for key, value in options.items() if key not in _OURS},
        }
        watcher = SupervisedWatcher(
            name,
            cmd,
            env={**environ(), "DYN_NAMESPACE": self.plan.namespace, **spec.env},
            policy=self._policy,
            on_line=self._outputs[name],
            stop_stage=spec.stop_stage,
            single_because=single_because(spec),
            listener=FrontendListener(spec.address),
            **own,
        )
        watcher.gpus = spec.shares
        return watcher
