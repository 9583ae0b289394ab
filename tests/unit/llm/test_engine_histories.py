"""Random histories of an engine: the index has what the engine's cache has, both ways."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_histories import EVERY_STATE, MODEL_STATES, REPLAYS, run
from engine_pool import MODELS

OTHERS = tuple(each for each in REPLAYS if each != "all")


@pytest.mark.parametrize("seed", range(len(MODELS)))
@pytest.mark.parametrize("complete", [True, False])
async def test_the_index_has_what_the_engine_has(tmp_path: Path, seed: int, complete: bool) -> None:
    replays = "all" if complete else OTHERS[seed % len(OTHERS)]
    states = await run(seed, replays, tmp_path)
    model = [*MODELS][seed]
    missing = [state for state in (*EVERY_STATE, *MODEL_STATES[model]) if not states[state]]
    assert not missing, (model, states)
