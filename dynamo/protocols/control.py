"""Records in the discovery store: leases, endpoint instances, event channels. Spec 7.2."""

from __future__ import annotations

import msgspec

__all__ = ["EndpointRecord", "EventChannelRecord", "LeaseRecord", "instance_key"]


class LeaseRecord(msgspec.Struct):
    """``leases/<id hex>``: who holds the lease, so that a death on this host is seen at once.

    ``pid_start`` is the process start time in clock ticks since boot (field 22 of /proc/pid/stat),
    ``host`` the boot id of the machine, ``ttl_s`` seconds.
    """

    lease_id: int
    pid: int
    pid_start: int
    ttl_s: float
    host: str


class EndpointRecord(msgspec.Struct, tag_field="type", tag="Endpoint", kw_only=True):
    """``v1/instances/<ns>/<component>/<endpoint>/<instance hex>``: one live instance.

    ``transport`` is ``{"uds": path}`` or ``{"tcp": "host:port"}``.
    """

    namespace: str
    component: str
    endpoint: str
    instance_id: int
    lease_id: int
    transport: dict[str, str]
    device_type: str = "cpu"
    request_plane_codec: str = "msgpack"


class EventChannelRecord(msgspec.Struct, tag_field="type", tag="EventChannel", kw_only=True):
    """``v1/event_channels/namespace/<ns>/component/<c>/topic/<topic>/<publisher hex>``.

    ``transport`` is ``{"kind": "Zmq", "endpoint": "ipc://… or tcp://…"}``, or ``{"kind": "Nats",
    "endpoint": subject}``.
    """

    namespace: str
    component: str
    topic: str
    instance_id: int
    lease_id: int
    transport: dict[str, str]


def instance_key(namespace: str, component: str, endpoint: str, instance_id: int) -> str:
    """``<ns>/<component>/<endpoint>/<instance hex>``, the tail of instance and card keys."""
    return f"{namespace}/{component}/{endpoint}/{instance_id:x}"
