"""Options of workers."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.config.option import flag, option, variable
from dynamo.errors import ConfigError, name_problem

NO_PARSER = "none"
"""The name that chooses no format, also where the model's own would be chosen."""
TOOL_CALL_PARSERS = (
    "apertus", "cohere_command", "deepseek_v3", "deepseek_v3_1", "deepseek_v3_2", "deepseek_v4",
    "deepseek_v41", "dots", "ernie45", "functiongemma", "gemma4", "gigachat3", "glm45", "granite",
    "granite_20b_fc", "harmony", "hermes", "hy_v3", "inkling", "internlm", "jamba", "k2_horizon",
    "kimi_k2", "kimi_k3", "lfm2", "llama3_json", "longcat", "mimo", "minicpm5", "minimax_m2",
    "minimax_m3", "mistral", "muse_glimmer", "nemotron_deci", "olmo3", "phi4", "plamo3",
    "pythonic", "qwen3_coder", "seed_oss", "step3", "xlam",
)  # fmt: skip
REASONING_PARSERS = (
    "basic", "cohere_command", "deepseek_r1", "deepseek_v3", "deepseek_v3_1", "deepseek_v4",
    "ernie45", "gemma4", "glm45", "gpt_oss", "granite", "hunyuan_a13b", "hy_v3", "inkling",
    "k2_horizon", "kimi", "kimi_k2", "kimi_k25", "kimi_k3", "minimax_append_think", "minimax_m2",
    "minimax_m2_append_think", "minimax_m3", "mistral", "muse_glimmer", "nemotron_deci",
    "nemotron_nano", "plamo3", "qwen3", "seed_oss", "step3",
)  # fmt: skip


def _aliases(names: tuple[str, ...], aliases: dict[str, str]) -> dict[str, str]:
    """Return ``aliases``, and every name and alias with dashes too."""
    dashed = {name.replace("_", "-"): name for name in names if "_" in name}
    return {**dashed, **{alias.replace("_", "-"): aliases[alias] for alias in aliases}, **aliases}


TOOL_CALL_ALIASES = _aliases(
    TOOL_CALL_PARSERS,
    {
        # Other spellings, and families that write their calls in the format of another one.
        "gemma-4": "gemma4",
        "kimi_k25": "kimi_k2",
        "muse": "muse_glimmer",
        "nemotron_nano": "qwen3_coder",
        "qwen25": "hermes",
        "qwen3": "hermes",
        # vLLM's names
        "cohere_command3": "cohere_command",
        "cohere_command4": "cohere_command",
        "deepseek_v31": "deepseek_v3_1",
        "deepseek_v32": "deepseek_v3_2",
        "glm47": "glm45",
        "granite4": "hermes",
        "hunyuan_a13b": "jamba",
        "hy_v4": "hy_v3",
        "ling3": "glm45",
        "llama4_json": "llama3_json",
        "llama4_pythonic": "pythonic",
        "openai": "harmony",
        "phi4_mini_json": "phi4",
        "poolside_v1": "glm45",
        "qwen3_json": "hermes",
        "qwen3_xml": "qwen3_coder",
        "step3p5": "qwen3_coder",
    },
)
REASONING_ALIASES = _aliases(
    REASONING_PARSERS,
    {
        "deepseek_v3_2": "deepseek_v3_1",
        "gemma-4": "gemma4",
        "muse": "muse_glimmer",
        "nemotron3": "nemotron_nano",
        # vLLM's names
        "cohere_command3": "cohere_command",
        "cohere_command4": "cohere_command",
        "deepseek_v41": "deepseek_v4",
        "glm47": "glm45",
        "granite_thinking_parser": "basic",
        "holo2": "deepseek_r1",
        "hy_v4": "hy_v3",
        "ling3": "glm45",
        "mimo": "qwen3",
        "minicpmv": "qwen3",
        "nemotron_v3": "nemotron_nano",
        "olmo3": "deepseek_r1",
        "openai_gptoss": "gpt_oss",
        "poolside_v1": "basic",
        "step3p5": "step3",
    },
)
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
        choices=(*TOOL_CALL_PARSERS, NO_PARSER),
        aliases=TOOL_CALL_ALIASES,
        metavar="NAME",
        help=f"format of the model's tool calls: {', '.join(TOOL_CALL_PARSERS)}, or none; vLLM "
        "workers choose after the chat template if it is not given",
    )
    reasoning_parser: str | None = option(
        None,
        "--dyn-reasoning-parser",
        env="DYN_REASONING_PARSER",
        choices=(*REASONING_PARSERS, NO_PARSER),
        aliases=REASONING_ALIASES,
        metavar="NAME",
        help=f"format of the model's reasoning: {', '.join(REASONING_PARSERS)}, or none; vLLM "
        "workers choose after the chat template if it is not given",
    )

    def __post_init__(self) -> None:
        check_model_name(self.model_name or (self.model_path or "").rpartition("/")[2])


def check_model_name(name: str | None) -> None:
    """Raise ConfigError for a ``name`` of a model that cannot be printed on a line."""
    if problem := name_problem(name or ""):
        raise ConfigError(f"--served-model-name {name!r} {problem}")
