"""Options of vLLM workers, beside vLLM's own."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.config.option import flag, option, variable
from dynamo.config.worker import NO_PARSER, TOOL_CALL_ALIASES, TOOL_CALL_PARSERS


@dataclass(frozen=True, kw_only=True)
class VllmSettings:
    """vllm: adapters, disaggregation, driver; every other flag goes to vLLM"""

    disaggregation_mode: str = option(
        "agg",
        env="DYN_VLLM_DISAGGREGATION_MODE",
        choices=("agg", "prefill", "decode"),
        aliases={"aggregated": "agg"},
        help="compute prompts and output, prompts alone, or output alone",
    )
    serve_tool_call_parser: str | None = flag(
        None,
        "--tool-call-parser",
        choices=(*TOOL_CALL_PARSERS, NO_PARSER),
        aliases=TOOL_CALL_ALIASES,
        metavar="NAME",
        help="as in vllm serve: the same as --dyn-tool-call-parser",
    )
    enable_auto_tool_choice: bool = flag(
        False, help="as in vllm serve; without effect: a tool-call parser is enough"
    )
    taints: tuple[str, ...] = flag(
        (), "--taint", repeat=True, help="taint that requests may require or avoid; may be repeated"
    )
    lora_modules: tuple[str, ...] = flag(
        (),
        repeat=True,
        several=True,
        metavar="NAME=DIRECTORY",
        help="LoRA adapters, each a model with its name in the API; turns --enable-lora on",
    )
    lora_dir: str | None = flag(
        None,
        metavar="DIRECTORY",
        help="each subdirectory with an adapter is a model of its name; those that come and go are "
        "loaded and unloaded; turns --enable-lora on",
    )
    use_async_llm: bool = option(
        False,
        env="DYN_VLLM_USE_ASYNC_LLM",
        help="drive vLLM's AsyncLLM instead of its EngineCore; slower, fewer features",
    )
    core_addresses: tuple[str, ...] = variable(
        (),
        "DYN_VLLM_CORE_ADDRESSES",
        repeat=True,
        help="ZMQ addresses 'INPUT OUTPUT' to bind for an EngineCore that another process runs",
    )
