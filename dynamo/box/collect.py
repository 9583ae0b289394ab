"""Collects the state of a deployment: what ``top``, ``/ui`` and others show."""

from __future__ import annotations

import msgspec

from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import ConfigError
from dynamo.protocols.status import BoxStatus, FrontendStatus
from dynamo.runtime.process.paths import planned_socket_path
from dynamo.status.reading import BoxReader
from dynamo.status.status_client import STATUS_SOCKET, ask

__all__ = ["BoxCollector"]

_ANSWER_S = 3.0
_decode = msgspec.json.Decoder(BoxStatus).decode


class BoxCollector:
    """Asks the arbiter of the namespace of ``runtime``, and reads the state here if it is silent.

    ``api_key`` is an operator's, for frontends that need one. Blocks for about 2 ms, at most some
    seconds. Use it in one thread at a time.
    """

    def __init__(self, runtime: RuntimeSettings, api_key: str | None = None) -> None:
        self._api_key = api_key
        self._reader = BoxReader(runtime)
        self._runtime = runtime

    def collect(self, own: FrontendStatus | None = None) -> BoxStatus:
        """Return the state now. A part that cannot be read is missing, and a problem says so.

        A frontend that needs a key, which the arbiter has not, gives its ``own`` figures: then the
        state is read here.
        """
        if own is not None:
            return self._reader.read(self._api_key, own)
        try:
            path = planned_socket_path(self._runtime, STATUS_SOCKET)
            return _decode(ask(path, self._api_key, _ANSWER_S))
        except (ConfigError, OSError, msgspec.MsgspecError):
            return self._reader.read(self._api_key)
