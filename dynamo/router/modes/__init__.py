"""The modes of a router: each chooses a worker of those that may take a request."""

__all__: list[str] = []
