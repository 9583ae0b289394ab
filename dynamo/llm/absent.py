"""The names of Dynamo's ``dynamo.llm`` that this package does not provide, and why.

They can be imported, because workers import them beside names that they use; calling one raises
NotImplementedError. docs/dynamo-workers.md lists them.
"""

from __future__ import annotations

import functools

_FRONTEND = "run `python -m dynamo.frontend` instead of a frontend in the worker's process"
_REPLAY = "the simulated engine is `python -m dynamo.mocker`"
_STATE = "this runtime has no KV state agents"

ABSENT = {
    "AisPerfConfig": "the prefill load model is configured by DYN_AIS_… variables",
    "EngineType": _FRONTEND,
    "EntrypointArgs": _FRONTEND,
    "HttpAsyncEngine": _FRONTEND,
    "HttpService": _FRONTEND,
    "KserveGrpcService": "this runtime has no KServe server",
    "KvDcRelay": "this runtime has no relay between data centres",
    "KvStateAgentHost": _STATE,
    "KvStateAttachmentOwner": _STATE,
    "LoRADownloader": "give adapters as local directories",
    "ModelCardInstanceId": _FRONTEND,
    "ModelDeploymentCard": "model cards are JSON in discovery, see dynamo.protocols.control",
    "MultimodalEmbeddingCachePublisher": "routers here do not index embedding caches",
    "PlannerDecision": "the planner changes the statefile instead",
    "PythonAsyncEngine": _FRONTEND,
    "RoutedEngine": _FRONTEND,
    "SelectionService": "the router as a service is `python -m dynamo.router`",
    "VirtualConnectorClient": "the planner changes the statefile instead",
    "VirtualConnectorCoordinator": "the planner changes the statefile instead",
    "make_engine": _FRONTEND,
    "run_input": _FRONTEND,
    "run_kv_indexer": "there is no standalone indexer; each router has its own",
    "run_mocker_synthetic_trace_replay": _REPLAY,
    "run_mocker_trace_replay": _REPLAY,
    "run_select_service": "the router as a service is `python -m dynamo.router`",
    "run_slot_tracker": "the load of a worker is counted by its routers",
}
"""Name → why it is absent."""


class Absent:
    """The base of the placeholders; ``why`` names what to do instead."""

    why = ""

    def __init__(self, *_: object, **__: object) -> None:
        name = type(self).__name__
        raise NotImplementedError(
            f"{name} of NVIDIA Dynamo is not part of this runtime: {self.why}. "
            "See docs/dynamo-workers.md"
        )


@functools.cache
def absent(name: str) -> type[Absent]:
    """Return the placeholder of ``name``. KeyError for a name that is not in :data:`ABSENT`."""
    return type(name, (Absent,), {"why": ABSENT[name], "__module__": "dynamo.llm"})
