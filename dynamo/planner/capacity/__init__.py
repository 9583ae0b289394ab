"""How much load a worker bears: measured by `dynamo profile`, or learned from the traffic."""

__all__: list[str] = []
