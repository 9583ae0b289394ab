"""What a person or the planner does to workers: start, drain, sleep, wake, load, reconcile."""

__all__: list[str] = []
