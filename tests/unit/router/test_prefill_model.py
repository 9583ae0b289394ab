"""Which model of prefill times the settings ask for, and what a decision makes of it."""

from __future__ import annotations

import importlib.util
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo._fast.radix import RadixTree
from dynamo.config.router import RouterSettings
from dynamo.errors import ConfigError
from dynamo.protocols.control import RuntimeConfig
from dynamo.router.load.prefill_model import PrefillFit, prefill_model
from dynamo.router.modes.kv import KvPicker

AIC = {"ais_backend": "vllm", "ais_system": "h200_sxm", "ais_model_path": "Qwen/Qwen3-32B"}


def of(**settings: Any) -> RouterSettings:
    return RouterSettings(mode="kv", **settings)


def test_none_unless_asked_for() -> None:
    assert prefill_model(of()) is None
    assert prefill_model(RouterSettings(prefill_load_model="fitted")) is None


def test_fitted_is_new_for_each_pool() -> None:
    first, second = (prefill_model(of(prefill_load_model="fitted")) for _ in "ab")
    assert isinstance(first, PrefillFit) and first is not second


def test_a_callers_predictor_wins() -> None:
    own = prefill_model(of(prefill_load_predictor=lambda tokens, cached: tokens / 100 + cached))
    assert own is not None and own.predict(50, 1) == 1.5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"prefill_load_model": "fitted", "track_prefill_tokens": False},
            "--router-prefill-load-model=fitted needs --router-track-prefill-tokens",
        ),
        (
            {"prefill_load_model": "ais", "ais_system": "h200_sxm"},
            "--router-prefill-load-model=ais needs --ais-backend, --ais-model-path",
        ),
    ],
)
def test_conflicting_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        prefill_model(of(**settings))
    assert caught.value.message == message


@pytest.mark.skipif(
    importlib.util.find_spec("aiconfigurator") is not None, reason="AIConfigurator is installed"
)
def test_in_seconds_every_model_is_a_first_guess_that_learns() -> None:
    own = prefill_model(
        of(cost="seconds", prefill_load_predictor=lambda tokens, cached: 0.01 + tokens / 5000)
    )
    assert isinstance(own, PrefillFit)
    assert own.predict(4000, 0) == pytest.approx(0.81, rel=0.05)
    unsure = prefill_model(of(cost="seconds", prefill_load_predictor=lambda tokens, cached: None))
    for model in (unsure, prefill_model(of(cost="seconds"))):
        assert model is not None and model.predict(10_000, 0) == pytest.approx(1.02)
    fitted = prefill_model(of(cost="seconds", prefill_load_model="fitted"))
    assert isinstance(fitted, PrefillFit) and fitted.predict(100, 0) is not None
    with pytest.raises(ConfigError, match="--router-cost=seconds needs"):
        prefill_model(of(cost="seconds", track_prefill_tokens=False))


def test_a_missing_aiconfigurator_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'dynamo-appliance\[aic\]'"):
        prefill_model(of(prefill_load_model="aic", **AIC))


@pytest.mark.skipif(
    importlib.util.find_spec("aiconfigurator") is None, reason="needs AIConfigurator"
)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_aiconfigurator_estimates() -> None:
    model = prefill_model(of(prefill_load_model="aic", ais_tp_size=2, **AIC))
    assert model is not None
    short, long = model.predict(256, 0), model.predict(8192, 0)
    assert short is not None and long is not None
    assert 0.001 < short < long < 10.0


def test_estimates_of_aiconfigurator_are_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One estimate takes milliseconds: a decision takes none."""
    asked: list[int] = []

    def estimate(model: str, system: str, *, isl: int, prefix: int, **more: Any) -> Any:
        asked.append(isl)
        return SimpleNamespace(ttft=10.0 + (isl - prefix) / 5)

    monkeypatch.setattr("dynamo.router.load.prefill_model._estimator", lambda: estimate)
    model = prefill_model(of(prefill_load_model="aic", **{**AIC, "ais_system": "of this test"}))
    count = len(asked)
    assert model is not None and model.predict(4000, 0) == pytest.approx(0.81, rel=0.05)
    assert len(asked) == count > 0


class Box:
    """Two workers that compute 10,000 tokens a second, and the router before them."""

    def __init__(self, **settings: Any) -> None:
        self.now_s = 0.0
        self.number = 0
        self.picker = KvPicker(of(**settings), 16, RadixTree(), clock=lambda: self.now_s)
        for worker_id in (1, 2):
            self.picker.add_worker(worker_id, RuntimeConfig())

    def prompt(self, tokens: int) -> array[int]:
        """Like no other."""
        self.number += 1
        return array("I", [self.number]) * tokens

    def serve(self, tokens: int) -> None:
        """One prompt, from the decision to the end."""
        name = f"served {self.number}"
        self.picker.pick(name, self.prompt(tokens))
        self.now_s += 0.001 + tokens / 10_000
        self.picker.mark_prefill_complete(name)
        self.now_s += 1.0
        self.picker.free(name)

    def learn(self) -> None:
        """A day's work."""
        for tokens in (100, 1000, 300, 5000, 2000, 700, 10_000, 100, 400):
            self.serve(tokens)


@pytest.mark.parametrize(("model", "chosen_first"), [("none", False), ("fitted", True)])
def test_a_worker_that_is_nearly_done_is_not_avoided(model: str, chosen_first: bool) -> None:
    box = Box(prefill_load_model=model, track_active_blocks=False)
    box.learn()
    first = box.picker.pick("long", box.prompt(10_000)).worker_id
    box.now_s += 0.9
    second = box.picker.pick("short", box.prompt(2000)).worker_id
    assert second != first
    third = box.picker.pick(None, box.prompt(160)).worker_id
    assert (third == first) is chosen_first  # 1,000 tokens left there, or 10,000; 2,000 here


def test_all_readers_get_the_estimated_load() -> None:
    box = Box(prefill_load_model="fitted")
    box.learn()
    decision = box.picker.pick("long", box.prompt(10_000))
    box.now_s += 0.5005
    slot = box.picker.worker_pool.members[decision.worker_id].slots[0]
    assert 4900 <= box.picker.active.load(slot)[0] <= 5100
    inputs = box.picker.weigh(box.prompt(16)).inputs
    assert inputs.load(slot, 0).prefill_tokens == box.picker.active.load(slot)[0]
    box.picker.free("long")
    assert box.picker.active.load(slot) == (0, 0, 0)
