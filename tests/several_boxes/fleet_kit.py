"""A deployment over etcd, tcp and an event plane: frontends and mockers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deployment import Deployment, free_port


class Fleet(Deployment):
    """Mockers and frontends that find each other through ``etcd``; NATS or ZMQ for the events."""

    def __init__(self, tmp_path: Path, etcd: str, nats: str | None, lease_ttl_s: float) -> None:
        super().__init__(tmp_path, forked=False)  # each in the network where it is started
        self.ports: list[int] = []
        self.env.update(
            DYN_DISCOVERY_BACKEND="etcd",
            ETCD_ENDPOINTS=etcd,
            ETCD_LEASE_TTL=str(lease_ttl_s),
            DYN_REQUEST_PLANE="tcp",
            DYN_TCP_RPC_HOST="0.0.0.0",
            DYN_EVENT_PLANE="zmq" if nats is None else "nats",
            NATS_SERVER=nats or "",
        )

    def kv_frontend(self) -> int:
        """One more frontend; its port."""
        self.port = free_port()
        self.ports.append(self.port)
        self.frontend("--router-mode", "kv", "--http-host", "127.0.0.1")
        return self.port

    def worker(self) -> Any:
        """One more mocker."""
        return self.mocker("--speedup-ratio", "0", "--block-size", "16")

    def ask(self, text: str, port: int | None = None, **nvext: Any) -> tuple[int, int | None]:
        """A completion: the status, and which worker answered."""
        body = {
            "model": "tiny",
            "prompt": text,
            "max_tokens": 4,
            "nvext": {"extra_fields": ["worker_id"], **nvext},
        }
        self.port = self.ports[0] if port is None else port
        status, _, answer = self.request("POST", "/v1/completions", body)
        if status != 200:
            return status, None
        return 200, int(json.loads(answer)["nvext"]["worker_id"]["decode_worker_id"])

    def held(self, text: str, port: int | None = None) -> dict[int, int]:
        """Return the blocks of the prompt that each worker holds, according to the router."""
        self.port = self.ports[0] if port is None else port
        body = {"model": "tiny", "prompt": text}
        status, _, answer = self.request("POST", "/v1/route", body)
        if status != 200:
            return {}
        return {row["worker_id"]: row["overlap_blocks"] for row in json.loads(answer)["candidates"]}
