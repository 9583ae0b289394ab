"""Options that every engine worker has: model, endpoint, admission."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.config.option import option

__all__ = ["EndpointSettings", "WorkerSettings"]


@dataclass(frozen=True, kw_only=True)
class EndpointSettings:
    """endpoint: model, address, admission"""

    model_path: str | None = option(
        None,
        "--model-path",
        "--model",
        help="directory with tokenizer.json, tokenizer_config.json and config.json",
    )
    model_name: str | None = option(
        None,
        "--model-name",
        "--served-model-name",
        help="name in the API; default: the name of the directory",
    )
    endpoint: str | None = option(
        None,
        "--endpoint",
        env="DYN_ENDPOINT",
        metavar="NS.COMPONENT.ENDPOINT",
        help="where to serve; default: <namespace>.backend.generate",
    )
    engine_request_limit: int | None = option(
        None,
        "--engine-request-limit",
        env="DYN_ENGINE_REQUEST_LIMIT",
        minimum=1,
        help="requests in the engine at once; more wait in a bounded queue or are rejected",
    )
    request_queue_limit: int = option(
        16,
        env="DYN_DYNAMO_REQUEST_QUEUE_LIMIT",
        minimum=2,
        help="requests that may wait when --engine-request-limit is reached",
    )


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(EndpointSettings):
    """worker: model, endpoint, admission"""

    endpoint_types: str = option(
        "chat,completions",
        "--endpoint-types",
        "--dyn-endpoint-types",
        env="DYN_ENDPOINT_TYPES",
        help="APIs that the model serves: chat, completions or both, comma separated",
    )
    custom_jinja_template: str | None = option(
        None,
        "--custom-jinja-template",
        env="DYN_CUSTOM_JINJA_TEMPLATE",
        metavar="FILE",
        help="chat template instead of the model's own",
    )
