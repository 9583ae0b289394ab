"""The event plane: sequenced messages from many publishers, with gap detection."""

from dynamo.runtime.events.plane import (
    FIRST_SEQUENCE,
    EventPlane,
    EventPublisher,
    EventSubscriber,
    ZmqPublisher,
    ZmqSubscriber,
)

__all__ = [
    "FIRST_SEQUENCE",
    "EventPlane",
    "EventPublisher",
    "EventSubscriber",
    "ZmqPublisher",
    "ZmqSubscriber",
]
