"""``dynamo serve``: a graph of services under a circus arbiter, which leaves no process behind."""

__all__: list[str] = []
