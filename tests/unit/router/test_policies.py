"""Policies that choose workers: the file, the types, and what becomes of those that misbehave."""

from __future__ import annotations

import logging
from array import array
from pathlib import Path
from random import Random
from typing import Any

import pytest

from dynamo.config.router import RouterSettings, with_policies
from dynamo.config.router_policy import read_policies
from dynamo.errors import ConfigError, Unavailable
from dynamo.observability.metrics import Registry
from dynamo.protocols.control import RuntimeConfig
from dynamo.router.labels import RouterLabels
from dynamo.router.modes.policy import SLOW_S, GuardedClassifier, GuardedPolicy, PolicyPicker
from dynamo.router.modes.policy_types import (
    ClassPolicy,
    PolicyRequest,
    PolicyWorker,
    TwoTier,
    WorkerPolicy,
    check_policies,
    make_classifier,
    make_policy,
)

EXAMPLE = Path(__file__).parents[3] / "examples" / "routing_policy" / "policy.yaml"
PROMPT = array("I", range(32))
PLACE = RouterLabels("ns", "backend", "tiny")
QUEUES = """
default_policy_family: standard
uncached_isl_buckets:
  - {min_tokens: 0, bucket: cached}
  - {min_tokens: 3072, bucket: uncached}
policy_classes:
  - {name: cached, policy_family: standard, cache_bucket: cached, quantum: 2048}
  - {name: uncached, policy_family: standard, cache_bucket: uncached, quantum: 512}
"""


def selection(kind: str, parameters: str = "{}") -> str:
    instance = f"{{name: mine, type: '{kind}', parameters: {parameters}}}"
    return f"worker_selection: {{aggregated: mine, instances: [{instance}]}}"


def write(directory: Path, text: str) -> str:
    path = directory / "policy.yaml"
    path.write_text(text)
    return str(path)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def picker(policy: Any, clock: Clock | None = None) -> PolicyPicker:
    """A picker over workers 1 to 3."""
    settings = RouterSettings(mode="kv", overlap_score_weight=0)
    guarded = GuardedPolicy(WorkerPolicy("mine", policy), Registry(), PLACE, clock or Clock())
    made = PolicyPicker(settings, 16, None, guarded, None, Random(1))
    for worker_id in (1, 2, 3):
        made.add_worker(worker_id, RuntimeConfig(total_kv_blocks=100))
    return made


def test_the_example_is_valid() -> None:
    check_policies(RouterSettings(mode="kv").policies)  # none: nothing is tried
    settings = with_policies(RouterSettings(mode="kv", policy_config=str(EXAMPLE)))
    assert settings.track_output_blocks and settings.selection is not None
    check_policies(settings.policies)
    assert settings.selection.name == "even-batches"
    assert settings.at_stage("prefill").selection is None


def test_flags_win_over_the_shared_settings() -> None:
    given = frozenset({"track_output_blocks"})
    path = str(EXAMPLE)
    kept = with_policies(RouterSettings(mode="kv", policy_config=path, given=given))
    assert not kept.track_output_blocks
    assert with_policies(kept) is kept


def test_which_policy_a_stage_has(tmp_path: Path) -> None:
    rows = "[{name: a, type: dynamo-two-tier-cost-fn}, {name: b, type: dynamo-default-cost-fn}]"
    path = write(tmp_path, f"worker_selection: {{prefill: a, decode: a, instances: {rows}}}")
    options: dict[str, Any] = {"mode": "kv", "policy_config": path}

    def names(**more: Any) -> list[str | None]:
        settings = with_policies(RouterSettings(**options, **more))
        found = [settings.at_stage(one).selection for one in ("aggregated", "prefill", "decode")]
        return [None if one is None else one.name for one in found]

    assert names() == [None, "a", "a"]
    assert names(prefill_policy="b") == [None, "b", "a"]
    assert names(selection_policy="b", decode_policy="default") == ["b", "b", None]
    with pytest.raises(ConfigError, match="no policy is called 'c'; those of worker_selection"):
        names(decode_policy="c")


def test_the_built_in_choice_with_other_weights(tmp_path: Path) -> None:
    text = selection("dynamo-default-cost-fn", "{prefill_load_scale: 3, router_temperature: 0.5}")
    settings = with_policies(RouterSettings(mode="kv", policy_config=write(tmp_path, text)))
    assert settings.prefill_load_scale == 1.0
    chosen = settings.at_stage("aggregated")
    assert (chosen.prefill_load_scale, chosen.temperature) == (3.0, 0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zzz: 1", "unknown field `zzz`"),
        ("[1]", "Expected `object`, got `array`"),
        ("a: {", "can't be read as YAML"),
        ("router: {zzz: 1}", "router: unknown zzz .docs/dynamo-flags.md has --zzz.; known are"),
        ("router: {router_ttl_secs: 0}", "must be a finite value > 0, got 0"),
        ("router: {router_ttl_secs: []}", "router.router_ttl_secs must be a number, text"),
        ("router: {use_kv_events: 7}", "must be true, 1, yes or on"),
        ("router: {router_event_threads: .inf}", "must be an integer, got inf"),
        (selection("dynamo-default-cost-fn", "{prefill_load_scale: [1]}"), "must be a number, got"),
        ("request_classifier: {type: a}", "there are no classes to choose from; give policy_class"),
        ("request_classifier: {}", "missing required field `type`"),
        (
            "request_classifier: {type: thunderagent}",
            "request_classifier: thunderagent is not supported: the turns .*; remove it, --router",
        ),
        (selection("thunderagent"), "instances: thunderagent is not supported"),
        ("worker_selection: {encode: a}", "worker_selection.encode is not supported"),
        ("worker_selection: {aggregated: a}", "no policy is called 'a'"),
        ("worker_selection: {instances: [{name: a}]}", "missing required field `type`"),
        (
            "worker_selection: {instances: [{name: default, type: a}]}",
            "default is the built-in choice",
        ),
        ("policy_classes: []", "must be given together"),
        (QUEUES.replace("quantum: 512", "quantum: 0"), "Expected `int` >= 1 - at .*quantum"),
        (QUEUES.replace("min_tokens: 0", "min_tokens: 1"), "must begin with min_tokens 0"),
        (QUEUES.replace("_family: standard\nun", "_family: fast\nun"), "fast has no classes"),
        (QUEUES.replace(", cache_bucket: uncached", ""), "must have both policy_family and"),
        (QUEUES.replace("cache_bucket: uncached", "cache_bucket: cached"), "one class for each"),
        (QUEUES.replace("name: uncached", "name: cached"), "two classes of one name"),
        (selection("dynamo-default-cost-fn", "{zzz: 1}"), "unknown parameters zzz"),
        (selection("dynamo-default-cost-fn", "{prefill_load_scale: -1}"), "must be a finite value"),
    ],
)
def test_a_file_that_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=rf"^--router-policy-config {path}: .*{message}"):
        with_policies(RouterSettings(mode="kv", policy_config=path))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("nothing", "unknown type; give FILE.py:CLASS, MODULE:CLASS, or one of dynamo-default"),
        ("gone.py:Policy", "can't be loaded: FileNotFoundError"),
        ("mine.py:Gone", "can't be loaded: AttributeError"),
        ("mine.py:Empty", "its class has no method filter, score or pick"),
        ("mine.py:NUMBER", "NUMBER is no class"),
        ("mine.py:Raises", "KeyError: 'no'"),
        ("mine.py:Wrong", "ValueError: score returned 1 costs for 2 workers"),
        ("mine.py:Infinite", "a cost that is not finite"),
        ("mine.py:Far", "pick returned 7, not an index of 2 workers"),
        ("json:dumps", "TypeError"),
        ("dynamo-two-tier-cost-fn", "TypeError: .*unexpected keyword argument 'zzz'"),
    ],
)
def test_a_policy_that_is_wrong_ends_the_start(tmp_path: Path, kind: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(
        "NUMBER = 7\n"
        "class Empty:\n    pass\n"
        "class Raises:\n    def score(self, request, workers):\n        raise KeyError('no')\n"
        "class Wrong:\n    def score(self, request, workers):\n        return [1.0]\n"
        "class Infinite:\n    def score(self, request, workers):\n        return [1e999, 1]\n"
        "class Far:\n    def pick(self, request, workers, costs):\n        return 7\n"
    )
    parameters = "{zzz: 1}" if "two-tier" in kind else "{}"
    policies = read_policies(write(tmp_path, selection(kind, parameters)))
    with pytest.raises(ConfigError, match=message):
        check_policies(policies)


def test_a_policy_of_an_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_policy.py").write_text(
        "class Last:\n"
        "    def pick(self, request, workers, costs):\n        return len(workers) - 1\n"
    )
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[dynamo.router.policies]\nlast = their_policy:Last\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    policies = read_policies(write(tmp_path, selection("last")))
    check_policies(policies)
    (instance,) = policies.selection.instances
    assert make_policy(instance, tmp_path).name == "mine"


def test_scores_filters_and_picks_decide() -> None:
    class Score:
        def score(self, request: PolicyRequest, workers: list[PolicyWorker]) -> list[float]:
            assert (request.tokens, request.blocks, request.block_size) == (32, 2, 16)
            return [-worker.worker_id for worker in workers]

    scored = picker(Score())
    decision = scored.pick("scored", PROMPT)
    assert decision.worker_id == 3 and decision.inputs is not None
    for row in decision.inputs.receipt().candidates:
        assert row.terms["policy"] < 0  # what it takes from the built-in cost
        assert sum(row.terms.values()) == pytest.approx(row.cost)

    class FilteredScore(Score):
        def filter(self, request: PolicyRequest, worker: PolicyWorker) -> bool:
            return worker.worker_id < 3

    assert picker(FilteredScore()).pick(None, PROMPT).worker_id == 2

    class Pick:
        def pick(self, request: Any, workers: list[PolicyWorker], costs: list[float]) -> int:
            assert costs == [worker.cost for worker in workers]
            return 1

    decided = picker(Pick())
    decision = decided.pick("r", PROMPT)
    assert decision.worker_id == 2 and decision.inputs is not None
    assert decision.inputs.receipt().reason == "chosen of 3 by the policy mine"

    class Nobody:
        def filter(self, request: PolicyRequest, worker: PolicyWorker) -> bool:
            return False

    with pytest.raises(Unavailable, match="policy mine rejects every worker"):
        picker(Nobody()).pick("r", PROMPT)
    explained = picker(Nobody()).explain(PROMPT)
    assert explained.error == "policy mine rejects every worker"
    assert {row.excluded for row in explained.candidates} == {"rejected by the policy"}


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit, KeyboardInterrupt])
def test_a_policy_that_raises_is_switched_off(
    caplog: pytest.LogCaptureFixture, kind: type[BaseException]
) -> None:
    class Raises:
        asked = 0

        def score(self, request: Any, workers: Any) -> list[float]:
            self.asked += 1
            raise kind("my mistake")

    policy = Raises()
    made = picker(policy)
    with caplog.at_level(logging.WARNING):
        first = made.pick("a", PROMPT).worker_id
        second = made.pick("b", PROMPT).worker_id
    assert first != second  # the built-in cost goes on
    assert policy.asked == 1
    assert "policy mine is switched off until the router restarts" in caplog.text
    assert f"it raised {kind.__name__}: my mistake" in caplog.text


def test_a_slow_policy_is_switched_off() -> None:
    clock = Clock()

    class Slow:
        takes_s = 2 * SLOW_S
        asked = 0

        def score(self, request: Any, workers: list[PolicyWorker]) -> list[float]:
            self.asked += 1
            clock.now_s += self.takes_s
            return [worker.cost for worker in workers]

    policy = Slow()
    made = picker(policy, clock)
    for takes_s in (2 * SLOW_S, 2 * SLOW_S, 0.0, 2 * SLOW_S, 2 * SLOW_S, 2 * SLOW_S, 0.0):
        policy.takes_s = takes_s
        made.pick(None, PROMPT)
    assert policy.asked == 6
    stalls = Slow()
    stalls.takes_s = 0.06
    made = picker(stalls, clock)
    made.pick(None, PROMPT)
    made.pick(None, PROMPT)
    assert stalls.asked == 1


def test_two_tiers() -> None:
    def workers(*rows: tuple[int, int]) -> list[PolicyWorker]:
        return [
            PolicyWorker(place, 0, 1.0, requests, 0, 0, blocks)
            for place, (requests, blocks) in enumerate(rows)
        ]

    request = PolicyRequest(160, 10, 16)
    policy = TwoTier()
    assert policy.pick(request, workers((5, 0), (9, 6), (4, 5)), []) == 1
    assert policy.pick(request, workers((5, 0), (9, 5), (4, 5)), []) == 2
    assert policy.pick(request, workers((5, 0), (40, 10), (4, 0)), []) == 2
    for options in ({"cache_threshold": 2}, {"balance_rel_threshold": 0.5}):
        with pytest.raises(ValueError, match="must be"):
            TwoTier(**options)


CLASSIFIER = """
class Sized:
    def __init__(self, long):
        self.long = long

    def classify(self, request):
        return "uncached" if request.tokens > self.long else None

class Wrong:
    def classify(self, request):
        return 7
"""


def classifier(policy: Any, clock: Clock | None = None) -> GuardedClassifier:
    named = ClassPolicy("request_classifier", policy)
    return GuardedClassifier(named, Registry(), PLACE, clock or Clock())


def test_a_classifier_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CLASSIFIER)
    asked = "request_classifier: {type: 'mine.py:%s', parameters: %s}\n"
    path = write(tmp_path, QUEUES + asked % ("Sized", "{long: 10}"))
    policies = with_policies(RouterSettings(mode="kv", policy_config=path)).policies
    check_policies(policies)
    assert policies is not None and policies.classifier is not None
    made = classifier(make_classifier(policies.classifier, policies.directory))
    named = PolicyRequest(tokens=10, blocks=0, block_size=16, policy_class="urgent")
    assert made.classify(named) is None
    assert made.classify(named._replace(tokens=11)) == "uncached"
    for kind, parameters, text in (
        ("Wrong", "{}", "ValueError: classify returned 7, neither a name nor None"),
        ("Sized", "{}", "TypeError: .*missing 1 required"),
        ("Gone", "{}", "can't be loaded: AttributeError"),
    ):
        write(tmp_path, QUEUES + asked % (kind, parameters))
        with pytest.raises(ConfigError, match=f"policy request_classifier .*{text}"):
            check_policies(with_policies(RouterSettings(mode="kv", policy_config=path)).policies)
    with pytest.raises(ConfigError, match="has no method classify"):
        classifier(object())


def test_a_classifier_that_fails_is_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        def classify(self, request: PolicyRequest) -> str:
            raise KeyError(request.tokens)

    made = classifier(Failing())
    request = PolicyRequest(tokens=10, blocks=0, block_size=16)
    assert made.classify(request) is None and not made.active
    assert made.classify(request) is None
    assert caplog.text.count("is switched off until the router restarts, clients name their") == 1
