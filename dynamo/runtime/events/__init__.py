"""The event plane: sequenced messages from many publishers, with gap detection."""

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
