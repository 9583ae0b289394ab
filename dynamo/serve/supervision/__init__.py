"""The arbiter, its watchers and their processes."""

__all__: list[str] = []
