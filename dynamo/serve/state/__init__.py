"""The statefile of a deployment, its run directory and leases."""

__all__: list[str] = []
