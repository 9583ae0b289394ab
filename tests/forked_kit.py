"""Processes forked from one that has imported what they need: 0.4 s of CPU time each for a
frontend, 0.3 s for a verb of `dynamo`, 9 s for vLLM.

That process is the fork server of Python's multiprocessing.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from subprocess import CompletedProcess
from types import MappingProxyType
from unittest.mock import patch

from dynamo.cli.main import VERBS

FORKED = ("dynamo.frontend", "dynamo.mocker", "dynamo.attach")
PRELOADED = (
    *(f"{module}.__main__" for module in FORKED),
    *sorted({f"dynamo.cli.{verb.run.partition(':')[0]}" for verb in VERBS.values()}),
)
# Both streams may write to one file.
_WRITTEN = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def fork_context(
    preloaded: Sequence[str] = PRELOADED, env: Mapping[str, str] = MappingProxyType({})
) -> ForkServerContext:
    """Start the process that is forked, if it does not run: it has imported ``preloaded`` with the
    additional variables ``env``."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preloaded))
    with patch.dict(os.environ, env):
        forkserver.ensure_running()
    return context


class ForkedModule(subprocess.Popen[bytes]):
    """``python -m module flags`` as a fork, with its output in a file.

    The fork calls ``prepare`` before it runs the module. Its errors may go to a file of their own,
    and its input come from ``entered``.
    """

    def __init__(
        self,
        module: str,
        flags: tuple[str, ...],
        env: dict[str, str],
        log: Path,
        prepare: Callable[[], None] | None = None,
        errors: Path | None = None,
        entered: Path = Path(os.devnull),
    ) -> None:
        context = fork_context()
        self.args = [sys.executable, "-m", module, *flags]
        self.returncode: int | None = None
        arguments = (self.args[2:], env, (entered, log, errors or log), prepare)
        self._process: BaseProcess = context.Process(target=_run, args=arguments)
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


def run_verb(
    *words: str, env: dict[str, str], stdin: str = "", timeout: float = 60
) -> CompletedProcess[str]:
    """Run ``dynamo words`` as a fork; return its status and output."""
    with tempfile.TemporaryDirectory() as directory:
        entered, output, errors = (Path(directory, name) for name in ("input", "output", "errors"))
        entered.write_text(stdin)
        process = ForkedModule("dynamo", words, env, output, errors=errors, entered=entered)
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        return CompletedProcess(process.args, status, output.read_text(), errors.read_text())


def _run(
    argv: list[str],
    env: dict[str, str],
    streams: tuple[Path, Path, Path],
    prepare: Callable[[], None] | None,
) -> None:
    gc.freeze()  # a collection would write to each page of what is imported, and so copy it
    if prepare is not None:
        prepare()
    os.environ.clear()
    os.environ.update(env)
    for descriptor, path in enumerate(streams):
        os.dup2(os.open(path, _WRITTEN if descriptor else os.O_RDONLY), descriptor)
    sys.stdin = os.fdopen(0, closefd=False)  # multiprocessing closes it
    sys.argv = list(argv)
    sys.modules.pop(f"{argv[0]}.__main__", None)
    try:
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # multiprocessing ends by os._exit
