"""Connects a router to workers, KV events, load reports and other routers."""

__all__: list[str] = []
