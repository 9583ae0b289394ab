"""The seeds of the simulation that find mutants; ``scripts/mutate --simulate N`` writes it."""

from __future__ import annotations

SEEDS: dict[str, int] = {}
