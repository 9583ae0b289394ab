"""Routes for operators: state, recent requests, recordings, routing, thresholds."""

__all__: list[str] = []
