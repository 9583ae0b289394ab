"""The event plane over NATS. Imports of it need the extra ``dynamo-appliance[nats]``."""

__all__: list[str] = []
