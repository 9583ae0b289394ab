"""The planner's Prometheus metrics, under Dynamo's names."""

from __future__ import annotations

from collections.abc import Mapping

from dynamo.config.planner import PlannerSettings
from dynamo.observability.metrics import Gauge, MetricSpec, Registry, gauge
from dynamo.planner.live.loop import LoopObserver
from dynamo.planner.live.model_state import Pools
from dynamo.planner.policies.base import DECODE, PREFILL, Observation, ScalingDecision
from dynamo.planner.reports.decisions import DecisionRecord

_PREFIX = "dynamo_planner_"
_LABELS = "dynamo_namespace model"


def _gauge(name: str, help: str) -> MetricSpec[Gauge]:
    return gauge(_PREFIX + name, help, _LABELS)


def _states(name: str, help: str) -> MetricSpec[Gauge]:
    """Declare an enumeration: a gauge per state, 1 for the current one. The label has its name."""
    return gauge(_PREFIX + name, help, f"{_LABELS} {_PREFIX}{name}")


_GAUGES = (
    _gauge("num_prefill_replicas", "Prefill workers that serve"),
    _gauge("num_decode_replicas", "Decode or aggregated workers that serve"),
    _gauge("predicted_num_prefill_replicas", "Prefill workers that the last decision wants"),
    _gauge("predicted_num_decode_replicas", "Decode workers that the last decision wants"),
    _gauge("predicted_requests_per_second", "Forecast of the request rate"),
    _gauge("predicted_input_sequence_tokens", "Forecast of the mean prompt length"),
    _gauge("predicted_output_sequence_tokens", "Forecast of the mean output length"),
    _gauge("gpu_hours", "GPU hours that the workers have held since the planner started"),
    _gauge("estimated_ttft_ms", "Time to first token that the policy estimates"),
    _gauge("estimated_itl_ms", "Time between tokens that the policy estimates"),
    _gauge("sla_target_ttft_ms", "Target of the time to first token (--ttft)"),
    _gauge("sla_target_itl_ms", "Target of the time between tokens (--itl)"),
    _gauge("observed_ttft_ms", "Mean time to first token of the last interval"),
    _gauge("observed_itl_ms", "Mean time between tokens of the last interval"),
    _gauge("observed_requests_per_second", "Requests per second of the last interval"),
    _gauge("observed_request_duration_seconds", "Mean duration of the last interval's requests"),
    _gauge("observed_input_sequence_tokens", "Mean prompt length of the last interval"),
    _gauge("observed_output_sequence_tokens", "Mean output length of the last interval"),
)
_BY_NAME = {spec.name.removeprefix(_PREFIX): spec for spec in _GAUGES}
_LOAD_DECISION = _states("load_scaling_decision", "What the load decided last")
_THROUGHPUT_DECISION = _states("throughput_scaling_decision", "What the forecast decided last")
_LOAD_STATES = (
    *("unset", "disabled", "no_fpm_data", "scaling_in_progress", "worker_count_mismatch"),
    *("insufficient_data", "no_change", "scale_up", "scale_down"),
    "scale_down_capped_by_throughput",
)
_THROUGHPUT_STATES = (
    *("unset", "disabled", "no_traffic_data", "predict_failed", "model_not_ready"),
    *("set_lower_bound", "scale"),
)


class PlannerMetrics(LoopObserver):
    """Shows the loop's figures on ``registry``; a figure without a value keeps its last one."""

    def __init__(self, registry: Registry, namespace: str, settings: PlannerSettings) -> None:
        self._registry = registry
        self._namespace = namespace
        self._settings = settings
        self._counted_s: dict[str, float] = {}

    def configure(self, settings: PlannerSettings) -> None:
        """Show the targets of ``settings`` from now on."""
        self._settings = settings

    def counted(self, model: str, now_s: float, pools: Pools) -> None:
        """See :class:`LoopObserver`."""
        for name in (DECODE, PREFILL):
            pool = pools.get(name)
            self._set(model, f"num_{name}_replicas", 0 if pool is None else pool.ready)
        hours = (now_s - self._counted_s.get(model, now_s)) / 3600
        self._counted_s[model] = now_s
        gpus = sum(pool.gpus for pool in pools.values())
        self._gauge(model, "gpu_hours").value += hours * gpus

    def decided(self, record: DecisionRecord, seen: Observation, made: ScalingDecision) -> None:
        """See :class:`LoopObserver`."""
        model, settings = record.model, self._settings
        targets = {"sla_target_ttft_ms": settings.ttft_ms, "sla_target_itl_ms": settings.itl_ms}
        for name, value in {**targets, **observed(seen), **made.forecast}.items():
            if name in _BY_NAME:
                self._set(model, name, value)
        for pool in record.pools:  # after the forecast, which ignores the budget and the load
            self._set(model, f"predicted_num_{pool.pool}_replicas", pool.wanted)
        load, throughput = (
            load_state(settings.mode, record, seen),
            throughput_state(settings.mode, seen),
        )
        self._state(model, _LOAD_DECISION, _LOAD_STATES, load)
        self._state(model, _THROUGHPUT_DECISION, _THROUGHPUT_STATES, throughput)

    def forgotten(self, model: str) -> None:
        """See :class:`LoopObserver`."""
        self._registry.forget("model", model)
        self._counted_s.pop(model, None)

    def _gauge(self, model: str, name: str) -> Gauge:
        return self._registry.child(_BY_NAME[name], self._namespace, model)

    def _set(self, model: str, name: str, value: float) -> None:
        self._gauge(model, name).value = value

    def _state(
        self, model: str, spec: MetricSpec[Gauge], states: tuple[str, ...], current: str
    ) -> None:
        for state in states:
            child = self._registry.child(spec, self._namespace, model, state)
            child.value = float(state == current)


def observed(seen: Observation) -> Mapping[str, float]:
    """Return the known figures of the interval's traffic, by the names of their metrics."""
    traffic = seen.traffic
    if not traffic.known or traffic.duration_s <= 0:
        return {}
    figures = {
        "observed_ttft_ms": traffic.ttft_ms,
        "observed_itl_ms": traffic.itl_ms,
        "observed_requests_per_second": traffic.arrived / traffic.duration_s,
        "observed_request_duration_seconds": traffic.request_s,
        "observed_input_sequence_tokens": traffic.isl,
        "observed_output_sequence_tokens": traffic.osl,
    }
    return {name: value for name, value in figures.items() if value is not None}


def load_state(mode: str, record: DecisionRecord, seen: Observation) -> str:
    """Return Dynamo's word for what the load decided."""
    if "load" not in mode.split("+"):
        return "disabled"
    if any(pool.wanted > pool.before for pool in record.pools):
        return "scale_up"
    if record.changes:
        return "scale_down"
    if seen.changed:
        return "worker_count_mismatch"
    return "no_change" if any(pull.decode for pull in seen.pulls) else "no_fpm_data"


def throughput_state(mode: str, seen: Observation) -> str:
    """Return Dynamo's word for what the forecast decided."""
    if "sla" not in mode.split("+"):
        return "disabled"
    if not seen.traffic.known:
        return "no_traffic_data"
    return "set_lower_bound" if "load" in mode.split("+") else "scale"
