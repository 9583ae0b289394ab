"""The names of the profiles, for the command line."""

__all__ = ["PROFILE_NAMES"]

PROFILE_NAMES = ("agg", "replicas", "disagg", "box", "manual", "scaled")
