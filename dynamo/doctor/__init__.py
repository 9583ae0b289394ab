"""What disturbs a deployment on this machine: what is read, and the checks of it."""

__all__: list[str] = []
