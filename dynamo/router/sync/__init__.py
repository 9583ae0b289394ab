"""Router replicas that share their load."""

__all__: list[str] = []
