"""What every engine worker shares: its life, its admission gate, what it publishes."""

__all__: list[str] = []
