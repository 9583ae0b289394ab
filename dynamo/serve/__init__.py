"""``dynamo serve``: a graph of services under a circus arbiter, and nothing left when it ends."""

__all__: list[str] = []
