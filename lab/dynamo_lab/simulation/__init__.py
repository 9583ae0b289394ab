"""The planner in virtual time: traffic, workers, scores."""

__all__: list[str] = []
