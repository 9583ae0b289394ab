"""The health check of a worker that takes tokens, the same for every engine: one token."""

from __future__ import annotations

from typing import Any

from dynamo.errors import ConfigError
from dynamo.health_check import HealthCheckPayload
from dynamo.protocols import codec

__all__ = ["TokensCheck", "health_check_payload"]


class TokensCheck(HealthCheckPayload):
    """A prompt of one token, shorter than any KV block, answered by one token."""

    def __init__(self, model: str) -> None:
        self.default_payload = {
            "model": model,
            "token_ids": [1],
            "stop_conditions": {"max_tokens": 1, "ignore_eos": True},
            "sampling_options": {"temperature": 0.0},
        }
        super().__init__()


def health_check_payload(model: str) -> dict[str, Any]:
    """Return the payload, or that of ``DYN_HEALTH_CHECK_PAYLOAD``. ConfigError: bad token ids."""
    payload = TokensCheck(model).to_dict()
    try:
        return {"model": model, **payload, "token_ids": codec.tokens(payload["token_ids"])}
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            "DYN_HEALTH_CHECK_PAYLOAD needs token_ids, a list of token ids: "
            f"{type(error).__name__}: {error}"
        ) from None
