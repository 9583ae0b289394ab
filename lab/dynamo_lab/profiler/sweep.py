"""A whole profile: start a worker, measure every point, write files, plots and thresholds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dynamo.bench.runner import first_model
from dynamo.config.programs import MODEL_PROGRAMS
from dynamo.errors import ConfigError, DynamoError
from dynamo.planner.capacity.interpolation import (
    Curve,
    DecodePoints,
    PrefillPoints,
    WorkerProfile,
    write_profile,
)
from dynamo.serve.graph.graph import Graph
from dynamo.serve.graph.service import Service
from dynamo_lab.profiler.measure import MeasurementFailed, ProfiledDeployment, WorkerProbe
from dynamo_lab.profiler.results import (
    FULL,
    QUICK,
    DecodeSample,
    DecodeStep,
    Effort,
    EngineLimits,
    PrefillSample,
    ProfileResult,
    decode_advice,
    decode_steps,
    prefill_advice,
    prefill_lengths,
)
from dynamo_lab.profiler.settings import ProfileSettings

_ITL_S = 0.03
"""Assumed by the estimate until decoding has been measured."""


@dataclass(frozen=True, kw_only=True)
class ProfileProgress:
    """What was just measured or is about to be; ``remaining_s`` is an estimate, None without."""

    text: str
    done: float = 0.0
    remaining_s: float | None = None


OnProfileProgress = Callable[[ProfileProgress], None]


def choose_services(graph: Graph, name: str | None) -> tuple[Service, Service]:
    """Return the services to measure prefill and decode on. Raises ConfigError.

    With ``name`` both are that service. Without, both are the only one that registers a model, or
    the prefill and the decode service of a disaggregated graph.
    """
    workers = [service for service in graph.services if service.program in MODEL_PROGRAMS]
    names = ", ".join(service.name for service in workers) or "none"
    if name is not None:
        chosen = [service for service in workers if service.name == name]
        if not chosen:
            raise ConfigError(
                f"--service {name}: no such worker in {graph.source}; its workers are {names}"
            )
        return chosen[0], chosen[0]
    prefill = [
        worker for worker in workers if worker.options.get("disaggregation-mode") == "prefill"
    ]
    decode = [worker for worker in workers if worker not in prefill]
    if len(decode) == 1 and len(prefill) <= 1:
        return (prefill or decode)[0], decode[0]
    raise ConfigError(
        f"{graph.source} has no worker to profile, or several (workers: {names}); "
        "choose one with --service"
    )


def check_directory(path: Path) -> None:
    """Create ``path`` and prove that files can be written to it. Raises ConfigError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".profile"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"--output {path}: cannot write there: {error.strerror}") from None


async def run_profile(
    graph: Graph, settings: ProfileSettings, on_progress: OnProfileProgress
) -> ProfileResult:
    """Measure the worker of ``graph``; write the files; return the result.

    Raises ConfigError, ServeFailed or MeasurementFailed; nothing is written then.
    """
    directory = Path(settings.output)
    check_directory(directory)
    prefill, decode = choose_services(graph, settings.service)
    effort = QUICK if settings.quick else FULL
    sweep = _Sweep(graph, settings, effort, on_progress)
    result = await sweep.of(prefill, with_decode=decode is prefill)
    if decode is not prefill:
        decoded = await sweep.of(decode, with_decode=True, with_prefill=False)
        result.services += decoded.services
        result.gpus_per_worker += decoded.gpus_per_worker
        result.max_kv_tokens, result.decode = decoded.max_kv_tokens, decoded.decode
        result.skipped += decoded.skipped
        result.start_s = _longer(result.start_s, decoded.start_s)
        result.wake_s = _longer(result.wake_s, decoded.wake_s)
    if not result.decode or result.max_kv_tokens is None:
        reasons = "; ".join(result.skipped)
        raise MeasurementFailed(f"no decode point could be measured: {reasons}")
    isl, osl = settings.isl, settings.osl
    result.prefill_queue = prefill_advice(result.prefill, isl, settings.ttft_ms)
    result.decode_kv = decode_advice(result.decode, isl + osl / 2, settings.itl_ms)
    write_profile(directory, _arrays(result, result.max_kv_tokens))
    return result


class _Sweep:
    """Starts workers of ``graph`` and measures them, as ``settings`` say."""

    def __init__(
        self,
        graph: Graph,
        settings: ProfileSettings,
        effort: Effort,
        on_progress: OnProfileProgress,
    ) -> None:
        self._graph = graph
        self._settings = settings
        self._effort = effort
        self._on_progress = on_progress

    async def of(
        self, service: Service, *, with_decode: bool, with_prefill: bool = True
    ) -> ProfileResult:
        """Return the points of one service."""
        self._say(f"starting one worker of {service.name}")
        gpus = service.gpu or 1.0
        deployment = ProfiledDeployment(self._graph, service, self._settings.gpus, self._say)
        async with deployment as target:
            model = await first_model(target)
            probe = WorkerProbe(target, model, gpus)
            limits = await probe.limits()
            result = ProfileResult(
                model=model,
                services=[service.name],
                gpus_per_worker=[gpus],
                directory=self._settings.output,
                max_kv_tokens=limits.kv_tokens,
                start_s=deployment.start_s,
            )
            lengths = prefill_lengths(limits, self._effort, self._settings.max_isl)
            steps = self._steps(limits) if with_decode else ()
            warm = await probe.prefill(lengths[-1], 1)
            remaining = _Remaining(warm, self._effort, steps, lengths if with_prefill else ())
            self._say(f"{service.name}: about {remaining.seconds():.0f} s to go", remaining)
            if with_prefill:
                await self._prefill(probe, lengths, result, remaining)
            await self._decode(probe, steps, result, remaining)
            await self._wake(deployment, result)
        return result

    def _steps(self, limits: EngineLimits) -> tuple[DecodeStep, ...]:
        settings = self._settings
        return decode_steps(limits, self._effort, settings.max_isl, settings.max_concurrency)

    async def _prefill(
        self,
        probe: WorkerProbe,
        lengths: Sequence[int],
        result: ProfileResult,
        remaining: _Remaining,
    ) -> None:
        for isl in lengths:
            point = await probe.prefill(isl, self._effort.repeats)
            result.prefill.append(point)
            remaining.prefilled(isl)
            self._say(f"prefill: {isl} tokens in {point.ttft_ms:.1f} ms", remaining)

    async def _decode(
        self,
        probe: WorkerProbe,
        steps: Sequence[DecodeStep],
        result: ProfileResult,
        remaining: _Remaining,
    ) -> None:
        assert result.max_kv_tokens is not None
        for step in steps:
            what = f"decode: {step.concurrency} x {step.isl} tokens"
            try:
                point = await probe.decode(step, self._effort, result.max_kv_tokens)
            except MeasurementFailed as failed:
                result.skipped.append(f"{what}: {failed.message}")
                self._say(f"left out: {result.skipped[-1]}", remaining)
            else:
                result.decode.append(point)
                text = f"{what}: ITL {point.itl_ms:.1f} ms at KV load {point.kv_usage:.2f}"
                self._say(text, remaining)
            remaining.decoded(step)

    async def _wake(self, deployment: ProfiledDeployment, result: ProfileResult) -> None:
        """Measure last: a worker that does not wake costs no other point."""
        try:
            result.wake_s = await deployment.wake_s()
        except DynamoError as failed:
            result.skipped.append(f"sleep: {failed.message}")
            self._say(f"left out: {result.skipped[-1]}")
            return
        if result.wake_s is not None:
            self._say(f"sleep: awake again in {result.wake_s:.2f} s")

    def _say(self, text: str, remaining: _Remaining | None = None) -> None:
        if remaining is None:
            self._on_progress(ProfileProgress(text=text))
            return
        self._on_progress(
            ProfileProgress(text=text, done=remaining.done, remaining_s=remaining.seconds())
        )


class _Remaining:
    """The work that is left, in seconds of the first measurement's speed; corrected as it goes."""

    def __init__(
        self,
        warm: PrefillSample,
        effort: Effort,
        steps: Sequence[DecodeStep],
        lengths: Sequence[int],
    ) -> None:
        self._per_token_s = warm.ttft_ms / 1000 / warm.isl
        self._effort = effort
        self._total_s = sum(map(self._prefill_s, lengths)) + sum(map(self._decode_s, steps))
        self._left_s = self._total_s
        self._began_s = time.monotonic()

    @property
    def done(self) -> float:
        """The share that is done, 0..1."""
        return 1 - self._left_s / self._total_s if self._total_s else 1.0

    def seconds(self) -> float:
        """Return the estimate of the time that is left."""
        spent_s = time.monotonic() - self._began_s
        if self.done < 0.05:  # too little to correct the estimate by
            return self._left_s
        return spent_s * (1 - self.done) / self.done

    def prefilled(self, isl: int) -> None:
        """Count a measured prompt length."""
        self._left_s = max(0.0, self._left_s - self._prefill_s(isl))

    def decoded(self, step: DecodeStep) -> None:
        """Count a measured step."""
        self._left_s = max(0.0, self._left_s - self._decode_s(step))

    def _prefill_s(self, isl: int) -> float:
        return isl * self._per_token_s * self._effort.repeats

    def _decode_s(self, step: DecodeStep) -> float:
        tokens = self._effort.window + self._effort.settle
        return step.concurrency * step.isl * self._per_token_s + tokens * _ITL_S


def _longer(first: float | None, second: float | None) -> float | None:
    durations_s = [seconds for seconds in (first, second) if seconds is not None]
    return max(durations_s, default=None)


def _arrays(result: ProfileResult, kv_tokens: int) -> WorkerProfile:
    def column(points: Sequence[PrefillSample] | Sequence[DecodeSample], name: str) -> Curve:
        values: Curve = np.array([getattr(point, name) for point in points], dtype=float)
        return values

    return WorkerProfile(
        prefill=PrefillPoints(
            isl=column(result.prefill, "isl"),
            ttft_ms=column(result.prefill, "ttft_ms"),
            tokens_per_s=column(result.prefill, "tokens_per_s_per_gpu"),
        ),
        decode=DecodePoints(
            kv_usage=column(result.decode, "kv_usage"),
            context=column(result.decode, "context_tokens"),
            itl_ms=column(result.decode, "itl_ms"),
            tokens_per_s=column(result.decode, "tokens_per_s_per_gpu"),
            max_kv_tokens=kv_tokens,
        ),
        start_s=result.start_s,
        wake_s=result.wake_s,
    )
