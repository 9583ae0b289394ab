"""The models that the frontend serves, and the workers admitted to each."""

__all__: list[str] = []
