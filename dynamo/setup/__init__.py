"""From a model to a running box: engines found, graphs written and checked, units."""

__all__: list[str] = []
