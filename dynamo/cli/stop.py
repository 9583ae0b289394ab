"""``dynamo stop``: end the running deployment, from any terminal."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Sequence

from dynamo.cli.options import DeploymentSettings
from dynamo.config import load
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import ConfigError, DynamoError
from dynamo.runtime.process.paths import state_path
from dynamo.serve.state.document import Document
from dynamo.serve.state.events import BoxEventLog, actor
from dynamo.status.deployment import chosen_runtime, main_pid, running_deployment

DESCRIPTION = """End the running deployment: frontends refuse new requests and finish those in
flight, then the workers exit. Returns when all have exited."""
EPILOG = """Ctrl-C ends only the command: the deployment goes on to stop.
Exit status: 0 stopped, 1 no deployment runs, or another user's, 2 a bad flag."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb; return the exit status."""
    (settings,) = load("dynamo stop", DESCRIPTION, [DeploymentSettings], argv, epilog=EPILOG)
    try:
        runtime = chosen_runtime(settings.namespace)
        document = running_deployment(runtime)
        if document is None:
            raise DynamoError(f"no deployment runs in namespace {runtime.namespace!r}")
        _stop(document, runtime)
        print("stopped")
    except (DynamoError, OSError) as error:
        print(f"dynamo stop: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def _stop(document: Document, runtime: RuntimeSettings) -> None:
    """Send SIGTERM, of which a second one changes nothing, and wait until all has ended."""
    try:
        main_process = os.pidfd_open(main_pid(document))
    except ProcessLookupError:
        return  # it ended since
    try:
        if running_deployment(runtime) is None:  # else the number is another process's by now
            return
        _terminate(main_process, main_pid(document))
        events = BoxEventLog(state_path(runtime) / runtime.namespace)
        events.add("stop", runtime.namespace, "dynamo stop", by=actor())
        print(f"stopping {runtime.namespace}; requests in flight may finish", flush=True)
        select.select([main_process], [], [])
    finally:
        os.close(main_process)


def _terminate(process: int, pid: int) -> None:
    try:
        signal.pidfd_send_signal(process, signal.SIGTERM)
    except PermissionError:
        raise DynamoError(f"process {pid} is another user's: stop it as that user") from None
    except ProcessLookupError:
        pass  # it ended since
