"""The table of flags, which is read without vLLM, is that of vLLM's parser."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor

from forked_kit import fork_context
from servers_kit import ENGINE_ENV, PRELOADED

from dynamo.vllm.known_flags import KNOWN_FLAGS, unknown_flag


def parser_flags() -> list[str]:
    """The flags of vLLM's parser."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    return [flag for action in parser._actions for flag in action.option_strings]


def test_the_table_has_each_flag_of_the_parser_and_no_other() -> None:
    # In a process of its own: the import of torch raises warnings, which are errors in tests.
    context = fork_context(PRELOADED, ENGINE_ENV)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        options = pool.submit(parser_flags).result()
    flags = {option.removeprefix("--") for option in options if option.startswith("--")}
    assert unknown_flag([f"--{flag}" for flag in sorted(flags)]) == ""
    positive = {flag for flag in flags if flag.removeprefix("no-") not in flags - {flag}}
    positive.add("config")  # the parser replaces it before argparse reads the words
    missing, unknown = positive - KNOWN_FLAGS, KNOWN_FLAGS - positive
    assert not missing and not unknown, (missing, unknown)
