"""Processes forked from one that has imported what they need: 0.4 s of CPU time each for a
frontend, 9 s for vLLM.

That process is the fork server of Python's multiprocessing. EngineCore is started by the engine as
ever, and imports vLLM itself.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest.mock import patch


class ForkedModule(subprocess.Popen[bytes]):
    """``python -m module flags`` as a fork, with its output in a file.

    The first one of a test process says what all of them have ``preloaded``.
    """

    def __init__(
        self,
        module: str,
        flags: tuple[str, ...],
        env: dict[str, str],
        log: Path,
        preloaded: Sequence[str],
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(preloaded))
        with patch.dict(os.environ, env):  # torch reads it when it is imported
            forkserver.ensure_running()
        self.args = [sys.executable, "-m", module, *flags]
        self.returncode: int | None = None
        self._process: BaseProcess = context.Process(target=_run, args=(self.args[2:], env, log))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """See ``Popen``."""
        self.returncode = self._process.exitcode
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """See ``Popen``."""
        self._process.join(timeout)
        status = self.poll()
        if status is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return status


def _run(argv: list[str], env: dict[str, str], log: Path) -> None:
    os.environ.clear()
    os.environ.update(env)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    sys.argv = list(argv)
    sys.modules.pop(f"{argv[0]}.__main__", None)
    try:
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # multiprocessing ends by os._exit
