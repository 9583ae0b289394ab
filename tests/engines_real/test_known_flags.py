"""The table of flags, which is read without vLLM, is that of vLLM's parser."""

from __future__ import annotations

import json
import subprocess
import sys

from dynamo.vllm.known_flags import KNOWN_FLAGS, unknown_flag

# In a process of its own: the import of torch raises warnings, which are errors in tests.
FLAGS = """
import json
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
print(json.dumps([flag for action in parser._actions for flag in action.option_strings]))
"""


def test_the_table_has_each_flag_of_the_parser_and_no_other() -> None:
    command = [sys.executable, "-c", FLAGS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    options = json.loads(done.stdout.splitlines()[-1])
    flags = {option.removeprefix("--") for option in options if option.startswith("--")}
    assert unknown_flag([f"--{flag}" for flag in sorted(flags)]) == ""
    positive = {flag for flag in flags if flag.removeprefix("no-") not in flags - {flag}}
    positive.add("config")  # the parser replaces it before argparse reads the words
    missing, unknown = positive - KNOWN_FLAGS, KNOWN_FLAGS - positive
    assert not missing and not unknown, (missing, unknown)
