"""Makes the picker of the mode in the settings."""

from __future__ import annotations

from random import Random

from dynamo._fast.radix import RadixTree
from dynamo.config.router import RouterSettings
from dynamo.router.caches.predicted import PredictedCache, make_predicted_cache
from dynamo.router.kv_mode.kv import KvPicker
from dynamo.router.metrics import DecisionMetrics
from dynamo.router.modes import InflightPicker
from dynamo.router.picker import Picker

__all__ = ["make_index", "make_kv_picker", "make_picker", "make_predicted"]


def make_index(settings: RouterSettings) -> RadixTree | None:
    """Return the prefix index, or None where overlap must not matter (weight 0).

    An index of predictions needs no cap: :class:`PredictedCache` bounds it.
    """
    if not settings.uses_index:
        return None
    return RadixTree(0 if settings.predicts else settings.max_index_blocks)


def make_predicted(settings: RouterSettings, index: RadixTree | None) -> PredictedCache | None:
    """Return the prediction of caches where events are not followed, else None."""
    if index is None or not settings.predicts:
        return None
    return make_predicted_cache(settings, index)


def make_kv_picker(
    settings: RouterSettings,
    block_size: int,
    index: RadixTree | None,
    metrics: DecisionMetrics | None = None,
    random: Random | None = None,
) -> KvPicker:
    """Return the picker of the kv mode; ``index`` as made by :func:`make_index`."""
    predicted = make_predicted(settings, index)
    return KvPicker(settings, block_size, index, metrics, random, predicted=predicted)


def make_picker(
    settings: RouterSettings,
    block_size: int,
    *,
    index: RadixTree | None = None,
    metrics: DecisionMetrics | None = None,
    random: Random | None = None,
) -> Picker:
    """Return the picker of ``settings.mode``; ``index`` and ``metrics`` are for the kv mode."""
    if settings.mode == "kv":
        return make_kv_picker(settings, block_size, index, metrics, random)
    return InflightPicker(settings.mode, random, settings)
