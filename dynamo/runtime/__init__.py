"""The distributed runtime: how processes find each other and stream answers."""

__all__: list[str] = []
