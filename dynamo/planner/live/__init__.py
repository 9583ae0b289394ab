"""The planner at work: its loop, what it reads, what it does."""

__all__: list[str] = []
