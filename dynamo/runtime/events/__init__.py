"""The event plane: numbered messages from many publishers, with gaps that are noticed."""

from dynamo.runtime.events.base import FIRST_SEQUENCE, EventPlane, EventPublisher, EventSubscriber
from dynamo.runtime.events.zmq import ZmqPublisher, ZmqSubscriber

__all__ = [
    "FIRST_SEQUENCE",
    "EventPlane",
    "EventPublisher",
    "EventSubscriber",
    "ZmqPublisher",
    "ZmqSubscriber",
]
