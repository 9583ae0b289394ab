"""Options of workers."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.config.option import flag, option, variable
from dynamo.errors import ConfigError, name_problem

TOOL_CALL_PARSERS = (
    "deepseek_v3",
    "deepseek_v3_1",
    "deepseek_v3_2",
    "deepseek_v4",
    "gemma4",
    "glm45",
    "harmony",
    "hermes",
    "jamba",
    "kimi_k2",
    "llama3_json",
    "minimax_m2",
    "minimax_m3",
    "mistral",
    "nemotron_deci",
    "phi4",
    "pythonic",
    "qwen3_coder",
)
REASONING_PARSERS = (
    "basic",
    "deepseek_r1",
    "deepseek_v3",
    "deepseek_v3_1",
    "deepseek_v4",
    "gemma4",
    "glm45",
    "gpt_oss",
    "kimi",
    "kimi_k2",
    "kimi_k25",
    "minimax_append_think",
    "minimax_m2",
    "minimax_m2_append_think",
    "minimax_m3",
    "mistral",
    "nemotron_deci",
    "nemotron_nano",
    "qwen3",
    "step3",
)


def _dashed(names: tuple[str, ...]) -> dict[str, str]:
    return {name.replace("_", "-"): name for name in names if "_" in name}


TOOL_CALL_ALIASES = {
    # Other spellings, and families that write their calls in the format of another one.
    "gemma-4": "gemma4",
    "glm47": "glm45",
    "kimi_k25": "kimi_k2",
    "kimi-k25": "kimi_k2",
    "qwen25": "hermes",
    "qwen3": "hermes",
    **_dashed(TOOL_CALL_PARSERS),
    # vLLM's names
    "deepseek_v31": "deepseek_v3_1",
    "deepseek_v32": "deepseek_v3_2",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "openai": "harmony",
    "phi4_mini_json": "phi4",
    "qwen3_xml": "qwen3_coder",
}
REASONING_ALIASES = {
    "deepseek_v3_2": "deepseek_v3_1",
    "deepseek-v3-2": "deepseek_v3_1",
    "gemma-4": "gemma4",
    "glm47": "glm45",
    "nemotron3": "nemotron_nano",
    "nemotron_v3": "nemotron_nano",
    "nemotron-v3": "nemotron_nano",
    **_dashed(REASONING_PARSERS),
    # vLLM's names
    "openai_gptoss": "gpt_oss",
}
"""Other spellings, in flags and in the cards of other workers."""


@dataclass(frozen=True, kw_only=True)
class EndpointSettings:
    """endpoint: model, address, admission"""

    model_path: str | None = flag(
        None,
        "--model-path",
        "--model",
        metavar="MODEL",
        help="directory with tokenizer.json, tokenizer_config.json and config.json, or id of a "
        "model on Hugging Face such as Qwen/Qwen3-0.6B",
    )
    model_name: str | None = flag(
        None,
        "--model-name",
        "--served-model-name",
        help="name in the API; default: the name of the directory, or the id",
    )
    endpoint: str | None = option(
        None,
        metavar="NS.COMPONENT.ENDPOINT",
        help="where to serve; default: <namespace>.backend.generate",
    )
    engine_request_limit: int | None = option(
        None,
        minimum=1,
        help="requests in the engine at once; more wait in a bounded queue or are rejected",
    )
    request_queue_limit: int = variable(
        16,
        "DYN_DYNAMO_REQUEST_QUEUE_LIMIT",
        minimum=2,
        help="requests that may wait when --engine-request-limit is reached",
    )

    def endpoint_or(self, default: str) -> str:
        """Return the endpoint to serve, without the scheme ``dyn://``."""
        return (self.endpoint or default).removeprefix("dyn://")


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(EndpointSettings):
    """worker: model, endpoint, admission"""

    endpoint_types: str = option(
        "chat,completions",
        "--endpoint-types",
        "--dyn-endpoint-types",
        help="APIs that the model serves: chat, completions or both, comma separated",
    )
    custom_jinja_template: str | None = option(
        None, metavar="FILE", help="chat template instead of the model's own"
    )
    tool_call_parser: str | None = option(
        None,
        "--dyn-tool-call-parser",
        env="DYN_TOOL_CALL_PARSER",
        choices=TOOL_CALL_PARSERS,
        aliases=TOOL_CALL_ALIASES,
        metavar="NAME",
        help=f"format of the model's tool calls: {', '.join(TOOL_CALL_PARSERS)}",
    )
    reasoning_parser: str | None = option(
        None,
        "--dyn-reasoning-parser",
        env="DYN_REASONING_PARSER",
        choices=REASONING_PARSERS,
        aliases=REASONING_ALIASES,
        metavar="NAME",
        help=f"format of the model's reasoning: {', '.join(REASONING_PARSERS)}",
    )

    def __post_init__(self) -> None:
        check_model_name(self.model_name or (self.model_path or "").rpartition("/")[2])


def check_model_name(name: str | None) -> None:
    """Raise ConfigError for a ``name`` of a model that cannot be printed on a line."""
    if problem := name_problem(name or ""):
        raise ConfigError(f"--served-model-name {name!r} {problem}")
