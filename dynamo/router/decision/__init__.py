"""What a decision weighs, and how it is explained."""

__all__: list[str] = []
