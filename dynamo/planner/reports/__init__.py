"""What the planner shows of itself: metrics, tensorboard, files, explanations."""

__all__: list[str] = []
