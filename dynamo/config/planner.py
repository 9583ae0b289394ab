"""Options of the planner."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from dynamo.config.option import flag, option
from dynamo.config.parser import option_of
from dynamo.errors import ConfigError

_SHARING_OPTIONS = {
    "idle_timeout_s": "it ends the last worker of a model",
    "min_residency_s": "it is how long models that share GPUs keep them",
    "max_sleeping_workers": "it is how many workers wait without a GPU until they are woken",
}


@dataclass(frozen=True, kw_only=True)
class PlannerSettings:
    """planner: when workers are added and removed"""

    served_model_name: str | None = flag(
        None, help="model whose workers are scaled; default: every model"
    )
    environment: str = flag(
        "local",
        choices=("local", "kubernetes"),
        help="local: the deployment of `dynamo serve` on this machine; kubernetes: a "
        "DynamoGraphDeployment; needs dynamo-appliance[kubernetes]",
    )
    graph_deployment: str | None = option(
        None,
        env="DYN_PARENT_DGD_K8S_NAME",
        metavar="NAME",
        help="kubernetes: the DynamoGraphDeployment to scale",
    )
    kubernetes_namespace: str | None = option(
        None,
        env="DYN_PARENT_DGD_K8S_NAMESPACE",
        metavar="NAME",
        help="kubernetes: its namespace; default: that of the pod, or of the kubeconfig's context",
    )
    mode: str = flag(
        "load",
        choices=("auto", "load", "sla", "load+sla"),
        help="load: KV load and prefill queue against thresholds; sla: forecast of the traffic "
        "against --ttft and --itl; load+sla: the forecast and a fast reaction to load; auto: load "
        "until the cost of a request is learned, then load+sla, at most twice the workers in an "
        "--adjustment-interval",
    )
    config_file: str | None = flag(
        None,
        "--config",
        metavar="FILE",
        help="JSON or YAML file with these options, by our names or by those of Dynamo 1.6, or "
        "the JSON itself; flags win over it",
    )
    no_operation: bool = flag(False, help="observe and log only; never change the workers")
    log_dir: str | None = flag(
        None,
        metavar="DIR",
        help="tensorboard directory, at most 64 MiB for each model; default: logs/<time>",
    )
    adjustment_interval_s: float = flag(
        30.0,
        "--adjustment-interval",
        minimum=0,
        exclusive_minimum=True,
        metavar="SECONDS",
        heading="intervals and budget",
        help="time between decisions; load+sla and auto decide at least every 5 s",
    )
    metric_pulling_interval_s: float = flag(
        1.0,
        "--metric-pulling-interval",
        minimum=0,
        exclusive_minimum=True,
        metavar="SECONDS",
        help="time between metric pulls",
    )
    max_gpu_budget: int = flag(
        8, minimum=0, help="GPUs that prefill and decode workers together may hold"
    )
    min_gpu_budget: int = flag(
        1,
        minimum=0,
        help="GPUs whose workers each pool keeps; 0: scale to zero after --idle-timeout",
    )
    min_endpoint: int | None = flag(
        None,
        minimum=0,
        help="workers that each pool keeps, whatever their GPUs; instead of --min-gpu-budget",
    )
    prefill_min_endpoint: int | None = flag(
        None, minimum=1, help="workers that a prefill pool keeps; instead of --min-endpoint"
    )
    decode_min_endpoint: int | None = flag(
        None, minimum=1, help="workers that a decode pool keeps; instead of --min-endpoint"
    )
    decode_kv_scale_up_threshold: float = flag(
        0.9, minimum=0, heading="load: thresholds", help="KV load that adds a decode worker"
    )
    decode_kv_scale_down_threshold: float = flag(
        0.5, minimum=0, help="KV load below which a decode worker is removed"
    )
    prefill_queue_scale_up_threshold: float = flag(
        0.5, minimum=0, help="queued prefill requests per slot that add a prefill worker"
    )
    prefill_queue_scale_down_threshold: float = flag(
        0.2,
        minimum=0,
        help="queued prefill requests per slot below which a prefill worker is removed",
    )
    decode_engine_num_gpu: float | None = flag(
        None,
        minimum=0,
        heading="GPUs of a worker",
        help="GPUs of a decode worker; default: as the graph says, else 1",
    )
    prefill_engine_num_gpu: float | None = flag(
        None, minimum=0, help="GPUs of a prefill worker; default: as the graph says, else 1"
    )
    ttft_ms: float = flag(
        500.0,
        "--ttft",
        minimum=0,
        exclusive_minimum=True,
        metavar="MS",
        heading="sla: targets and forecast",
        shows_default=False,
        help="target of the time to first token; without it 500 (sla, load+sla), or that of the "
        "profile, else 2000 (auto); none in mode load",
    )
    itl_ms: float = flag(
        50.0,
        "--itl",
        minimum=0,
        exclusive_minimum=True,
        metavar="MS",
        shows_default=False,
        help="target of the time between tokens; without it 50, with auto that of the profile, if "
        "there is one; none in mode load",
    )
    load_predictor: str = flag(
        "kalman",
        choices=("constant", "kalman"),
        retired=dict.fromkeys(
            ("arima", "prophet"), "kalman, the default, replaces it and needs no library"
        ),
        help="how the traffic is forecast",
    )
    load_prediction_window_size: int = flag(
        50, minimum=1, help="intervals that the forecast looks at"
    )
    profile_results_dir: str | None = flag(
        None,
        metavar="DIR",
        help="result of `dynamo profile`; without it capacity is learned from the traffic",
    )
    no_correction: bool = flag(False, help="do not correct the profile by what is observed")
    idle_timeout_s: float = flag(
        300.0,
        "--idle-timeout",
        minimum=0,
        metavar="SECONDS",
        heading="start and stop of workers",
        help="with --min-gpu-budget 0: time without requests after which the last worker goes",
    )
    min_residency_s: float = flag(
        30.0,
        "--min-residency",
        minimum=0,
        metavar="SECONDS",
        help="time a model on demand serves before a model with waiting requests takes its GPUs",
    )
    start_timeout_s: float = flag(
        1800.0,
        "--start-timeout",
        minimum=0,
        exclusive_minimum=True,
        metavar="SECONDS",
        help="time a new worker has to serve; then it is removed again",
    )
    max_sleeping_workers: int | None = flag(
        None,
        minimum=0,
        help="workers of a service that may sleep instead of exiting, if their engine can; "
        "default: one, and more as far as a tenth of the RAM stays available",
    )
    given: frozenset[str] = frozenset()
    """Names of the options that a command line has set, be it to their defaults."""

    def is_set(self, *names: str) -> bool:
        """Return whether one of the options ``names`` has another value than its default.

        An option whose default depends on the mode is set by whatever value is given.
        """
        return any(
            getattr(self, field.name) != field.default
            or (field.name in self.given and not option_of(field).shows_default)
            for field in fields(self)
            if field.name in names
        )

    def least_workers(self, gpus_per_worker: float, pool: str = "decode") -> int:
        """Return how many workers a pool keeps; one that shares a GPU counts as a whole one."""
        own = self.prefill_min_endpoint if pool == "prefill" else self.decode_min_endpoint
        least = self.min_endpoint if own is None else own
        if least is not None:
            return least
        return math.ceil(self.min_gpu_budget / max(1.0, gpus_per_worker))

    def __post_init__(self) -> None:
        """Reject values that contradict each other."""
        if self.min_gpu_budget > self.max_gpu_budget:
            raise ConfigError(
                f"--min-gpu-budget {self.min_gpu_budget} is above --max-gpu-budget "
                f"{self.max_gpu_budget}: lower the first or raise the other"
            )
        if self.metric_pulling_interval_s > self.adjustment_interval_s:
            raise ConfigError(
                f"--metric-pulling-interval {self.metric_pulling_interval_s:g} is above "
                f"--adjustment-interval {self.adjustment_interval_s:g}, so a decision would have "
                "no metrics: lower the first or raise the other"
            )
        for name in ("decode_kv", "prefill_queue"):
            up, down = (getattr(self, f"{name}_scale_{way}_threshold") for way in ("up", "down"))
            if down > up:
                flag = f"--{name.replace('_', '-')}-scale"
                raise ConfigError(
                    f"{flag}-down-threshold {down:g} is above {flag}-up-threshold {up:g}; a load "
                    "between them would add and remove a worker: lower the first or raise the other"
                )
        if self.environment == "kubernetes":
            self._check_cluster()

    def _check_cluster(self) -> None:
        """Reject what the planner cannot do in a cluster, and a deployment without a name."""
        if not self.graph_deployment:
            raise ConfigError(
                "--environment kubernetes needs --graph-deployment NAME (DYN_PARENT_DGD_K8S_NAME, "
                "which the operator sets): the DynamoGraphDeployment to scale"
            )
        if 0 in (self.least_workers(1.0, pool) for pool in ("prefill", "decode")):
            flag = "min-gpu-budget" if self.min_endpoint is None else "min-endpoint"
            raise ConfigError(
                f"--{flag} 0 with --environment kubernetes: the last worker of a model "
                "takes it out of /v1/models there, and no request could bring it back. Use at "
                "least 1"
            )
        for name, use in _SHARING_OPTIONS.items():
            if self.is_set(name):
                raise ConfigError(
                    f"--{name.removesuffix('_s').replace('_', '-')} with --environment kubernetes: "
                    f"{use}, which needs the GPUs of one machine; in a cluster the scheduler "
                    "assigns them. Remove the option"
                )


@dataclass(frozen=True, kw_only=True)
class ExplainSettings:
    """explain: which decisions"""

    number: int = flag(10, "-n", "--number", minimum=0, help="decisions to show")
    json: bool = flag(False, help="print the report as JSON")
    timeout_s: float = flag(
        10.0, "--timeout-secs", minimum=0.1, help="seconds to wait for the planner"
    )


@dataclass(frozen=True, kw_only=True)
class SetSettings:
    """set: what to change; without an option the settings are shown"""

    ttft_ms: float | None = flag(
        None, "--ttft", metavar="MS", help="target of the time to first token"
    )
    itl_ms: float | None = flag(
        None, "--itl", metavar="MS", help="target of the time between tokens"
    )
    max_gpu_budget: int | None = flag(None, help="GPUs that all workers together may hold")
    min_gpu_budget: int | None = flag(
        None, help="GPUs whose workers each pool without a min of its own keeps"
    )
    minima: tuple[str, ...] = flag(
        (),
        "--min",
        repeat=True,
        metavar="SERVICE=N",
        help="workers that a service keeps, such as Worker=2; Worker=graph: as the graph says",
    )
    json: bool = flag(False, help="print the settings as JSON")
