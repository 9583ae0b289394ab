"""The HTTP APIs of the frontend, a folder each: body, prompt, answer, route."""

__all__: list[str] = []
