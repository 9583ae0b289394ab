"""Capacity and abilities that a worker tells the frontend and the router. Spec 7.11."""

from __future__ import annotations

import json

from dynamo.protocols.card import RuntimeConfig

__all__ = ["ModelRuntimeConfig"]


class ModelRuntimeConfig(RuntimeConfig, omit_defaults=True):
    """Set its attributes, then hand it to :func:`dynamo.llm.register_model`."""

    def set_engine_specific(self, key: str, value: str) -> None:
        """Remember the JSON text ``value``. ValueError if it is not JSON."""
        self.runtime_data[key] = json.loads(value)

    def get_engine_specific(self, key: str) -> str | None:
        """The JSON text under ``key``."""
        return json.dumps(self.runtime_data[key]) if key in self.runtime_data else None

    def set_disaggregated_endpoint(self, host: str | None = None, port: int | None = None) -> None:
        """Where decode workers fetch the KV cache from."""
        self.bootstrap_host = host
        self.bootstrap_port = port
