"""Routing: which worker gets a request, from cached prefixes and active load."""

from dynamo.router.caches.indexer import Indexer, Recovery
from dynamo.router.caches.predicted import PredictedCache
from dynamo.router.decision.decision import Decision
from dynamo.router.modes.factory import make_index, make_picker
from dynamo.router.modes.kv import KvPicker
from dynamo.router.modes.picker import InflightPicker, Picker

__all__ = [
    "Decision",
    "Indexer",
    "InflightPicker",
    "KvPicker",
    "Picker",
    "PredictedCache",
    "Recovery",
    "make_index",
    "make_picker",
]
