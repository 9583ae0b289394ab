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
    (states,) = await run(seed, replays, tmp_path)
    model = [*MODELS][seed]
    missing = [state for state in (*EVERY_STATE, *MODEL_STATES[model]) if not states[state]]
    assert not missing, (model, states)


@pytest.mark.parametrize("replays", ["all", "none"])
@pytest.mark.parametrize("seed", range(3))
async def test_ranks_restart_on_their_own_and_with_other_groups(
    tmp_path: Path, seed: int, replays: str
) -> None:
    for states in await run(seed, replays, tmp_path, ranks=2, changing=True):
        assert states["restarted"] and states["router complete"], states
