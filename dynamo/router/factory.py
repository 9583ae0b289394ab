"""From the settings to the picker of the mode they name."""

from __future__ import annotations

import logging
from random import Random

from dynamo._fast.radix import RadixTree
from dynamo.config.router import RouterSettings
from dynamo.router.kv import KvPicker
from dynamo.router.metrics import DecisionMetrics
from dynamo.router.modes import InflightPicker
from dynamo.router.picker import Picker

__all__ = ["make_index", "make_picker"]

logger = logging.getLogger(__name__)


def make_index(settings: RouterSettings) -> RadixTree | None:
    """The prefix index, or None where overlap must not matter (spec 3.2: weight 0, no index)."""
    if settings.mode == "kv" and not settings.kv_events:
        logger.warning(
            "without KV events the kv mode routes by active load alone: "
            "predicting caches from routing decisions is not in this version"
        )
    return RadixTree(settings.max_index_blocks) if settings.uses_index else None


def make_picker(
    settings: RouterSettings,
    block_size: int,
    *,
    index: RadixTree | None = None,
    metrics: DecisionMetrics | None = None,
    random: Random | None = None,
) -> Picker:
    """The picker of ``settings.mode``; ``index`` as made by :func:`make_index` (kv mode)."""
    if settings.mode == "kv":
        return KvPicker(settings, block_size, index, metrics, random)
    return InflightPicker(settings.mode, random)
