"""When a prompt goes to a prefill worker, and invalid settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo.config.option import from_env
from dynamo.config.router import RouterSettings
from dynamo.config.router_kv import Conditions, conditions_of
from dynamo.errors import ConfigError


@pytest.mark.parametrize(
    ("prompt", "cached", "queue", "reason"),
    [
        (1001, 0, 1, ""),
        (1000, 0, 0, "short"),
        (1500, 500, 0, "short"),
        (1501, 500, 0, ""),
        (1001, 0, 2, "queue"),
    ],
)
def test_the_defaults_are_strict(prompt: int, cached: int, queue: int, reason: str) -> None:
    assert Conditions().local_reason(prompt, cached, queue) == reason


def test_the_uncached_share_of_a_prompt() -> None:
    conditions = Conditions(eff_isl_threshold=0, eff_isl_ratio_threshold=0.5)
    assert conditions.local_reason(100, 50, 0) == "cached"
    assert conditions.local_reason(100, 49, 0) == ""
    assert conditions.local_reason(100, 100, 0) == "short", "nothing to compute"


def test_text_and_file_are_equivalent(tmp_path: Path) -> None:
    text = '{"max_local_prefill_length": 5, "max_prefill_queue_size": null}'
    file = tmp_path / "conditions.json"
    file.write_text(text)
    wanted = Conditions(eff_isl_threshold=5, max_prefill_queue_size=None)
    assert conditions_of(text) == conditions_of(str(file)) == wanted
    assert wanted.local_reason(6, 0, 10**6) == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("/no/such/file", "can't be read as JSON"),
        ("{", "can't be read as JSON"),
        ('{"eff_isl": 1}', "unknown eff_isl; known are eff_isl_threshold"),
        ('{"eff_isl_threshold": -1}', "eff_isl_threshold must be an integer >= 0, got -1"),
        ('{"eff_isl_threshold": true}', "must be an integer >= 0, got True"),
        ('{"eff_isl_ratio_threshold": 2}', "must be between 0 and 1 or null, got 2"),
        ('{"max_prefill_queue_size": "2"}', "max_prefill_queue_size must be an integer >= 0"),
        ('{"eff_isl_threshold": 1, "max_local_prefill_length": 1}', "are the same; give one"),
    ],
)
def test_invalid_thresholds_are_config_errors(text: str, message: str) -> None:
    variable = {"DYN_ROUTER_CONDITIONAL_DISAGG_CONFIG": text}
    with pytest.raises(ConfigError, match="--router-conditional-disagg-config.*" + message):
        from_env(RouterSettings, variable)


def test_a_list_of_thresholds_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "list.json"
    file.write_text("[]")
    with pytest.raises(ConfigError, match="must be a JSON object"):
        conditions_of(str(file))


def test_thresholds_apply_only_when_enabled() -> None:
    assert from_env(RouterSettings, {}).conditions is None
    assert from_env(RouterSettings, {}, conditional_disagg=True).conditions == Conditions()
