"""Connect a router to the workers that discovery reports."""

__all__: list[str] = []
