"""Tools beside the appliance: the planner in virtual time, profiles, and replays of routing.

The distribution ``dynamo-appliance-lab``. The appliance runs its verbs, and imports nothing else.
"""

__all__: list[str] = []
