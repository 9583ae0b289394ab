"""The planner: adds and removes workers as the load changes. Seed planner.txt."""

__all__: list[str] = []
