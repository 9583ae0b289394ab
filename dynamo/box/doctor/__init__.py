"""What disturbs a deployment on this machine: facts, checks of them, and where they come from.

A check is a pure function of facts; the modules ``read_*`` read the facts and decide nothing.
"""

__all__: list[str] = []
