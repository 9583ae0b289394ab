"""The steps in statefile, circus and leases that operations consist of."""

__all__: list[str] = []
