"""Routes that other Python packages add to the frontend."""

__all__: list[str] = []
