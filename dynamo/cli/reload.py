"""``dynamo reload graph.yaml``: apply a changed graph to a running deployment."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dynamo.config import from_env, load
from dynamo.config.runtime import RuntimeSettings
from dynamo.config.serve import ReloadSettings
from dynamo.operations.reload import reload_graph, running
from dynamo.runtime.process.paths import state_dir
from dynamo.serve.graph.graph import parse_graph, read_text
from dynamo.serve.graph.overrides import split_overrides
from dynamo.serve.state.statefile import Statefile
from dynamo.status.deployment import chosen_runtime

DESCRIPTION = "Apply a changed graph to a running deployment, one process after another."
EPILOG = """Only what changed is touched: services and workers are added, restarted or removed.
Overrides replace those of the start: --Service.key=value. Without a graph file, the file and the
overrides of the start or the last reload are used. A graph with an error changes nothing.
Exit status: 0 reloaded, 1 a new process failed, or no deployment runs, 2 the graph is wrong."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; return the exit status."""
    words, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
    (settings,) = load("dynamo reload", DESCRIPTION, [ReloadSettings], words, epilog=EPILOG)
    runtime = from_env(RuntimeSettings) if settings.graph else chosen_runtime(settings.namespace)
    namespace = settings.namespace or runtime.namespace
    request: dict[str, Any] = {"overrides": [override.text for override in overrides]}
    if settings.graph:
        path = Path(settings.graph).absolute()
        namespace = parse_graph(
            read_text(path), str(path), overrides, settings.namespace, namespace
        ).namespace
        request["graph"] = str(path)
    document = running(Statefile(state_dir(runtime), namespace))
    planned = reload_graph(document, {**request, "dry_run": True})
    print("\n".join(planned["changes"]) or "nothing to change", flush=True)
    if settings.dry_run:
        print(planned["summary"])
        return 0
    print(f"reloaded: {reload_graph(document, request)['summary']}")
    return 0
