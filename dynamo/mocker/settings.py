"""Options of the simulated engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dynamo.config.absent import MOCKER, AbsentFlag
from dynamo.config.option import flag
from dynamo.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class MockerSettings:
    """mocker: size, speed and behaviour of the simulated engine"""

    absent: ClassVar[tuple[AbsentFlag, ...]] = MOCKER
    reply: str = flag(
        "random",
        choices=("random", "sequence", "echo", "script"),
        help="random: max_tokens random tokens; sequence: each follows from all before it; echo: "
        "the prompt, or the last message of a chat; script: the texts of --reply-script",
    )
    reply_script: str | None = flag(
        None,
        metavar="FILE",
        help='JSON lines like {"reply": "text", "match": "part of the prompt"}; the first line '
        "that matches is the reply; where none does, --reply decides, and script is an error",
    )
    fatal_seed: int | None = flag(
        None, help="a request with this seed kills the process, as one that crashes an engine does"
    )
    planner_profile_data: str | None = flag(
        None,
        metavar="PATH",
        help="be as fast as a profiled engine: a directory of `dynamo profile`, or Dynamo's .npz",
    )
    zmq_kv_events_ports: str | None = flag(
        None,
        metavar="PORT,…",
        help="also publish KV events as vLLM does over ZeroMQ, each rank on its worker's port plus "
        "its number; one port for each of --num-workers",
    )
    speedup_ratio: float = flag(
        1.0, minimum=0, help="how much faster than real; 0 = no delay at all"
    )
    decode_speedup_ratio: float = flag(
        1.0,
        minimum=0,
        exclusive_minimum=True,
        help="how much faster decoding is, on top of --speedup-ratio",
    )
    num_gpu_blocks: int = flag(
        16384, "--num-gpu-blocks-override", minimum=1, help="KV cache size in blocks"
    )
    num_host_blocks: int = flag(
        0,
        minimum=0,
        help="blocks that are kept in host memory after their eviction, per rank; copies take no "
        "time",
    )
    block_size: int | None = flag(
        None,
        minimum=1,
        maximum=4096,
        help="tokens in a block; default: by --engine-type vllm 64, sglang 1, trtllm 32",
    )
    max_num_seqs: int = flag(256, minimum=1, help="sequences computed at once per rank")
    max_num_batched_tokens: int = flag(8192, minimum=1, help="tokens computed in one iteration")
    max_model_len: int | None = flag(None, minimum=2, help="longest prompt plus output, in tokens")
    stream_interval: int = flag(
        1,
        minimum=1,
        help="tokens in an output, as vLLM has them: the first alone, then so many at once",
    )
    enable_prefix_caching: bool = flag(True, help="reuse the blocks of earlier prompts")
    enable_chunked_prefill: bool = flag(True, help="split long prompts over iterations")
    preemption_mode: str = flag(
        "lifo",
        choices=("lifo", "fifo"),
        help="which request is preempted when no block is free: the newest or the oldest",
    )
    watermark: float = flag(
        0.0,
        minimum=0,
        maximum=1,
        help="share of the blocks that must stay free when a prompt is admitted",
    )
    data_parallel_size: int = flag(
        1, minimum=1, maximum=1024, help="ranks, each with its own cache and scheduler"
    )
    num_workers: int = flag(1, minimum=1, maximum=1024, help="workers in this one process")
    stagger_delay_s: float = flag(
        0.0,
        "--stagger-delay",
        minimum=-1,
        help="seconds between the starts of workers; -1 = by their number",
    )
    startup_time_s: float | None = flag(
        None, "--startup-time", minimum=0, help="simulated seconds of loading the model"
    )
    enable_sleep_mode: bool = flag(False, help="let the planner put the simulated engine to sleep")
    wake_time_s: float = flag(
        0.0, "--wake-time", minimum=0, help="simulated seconds of waking the engine"
    )
    max_lora_rank: int = flag(16, minimum=1, help="largest rank of a LoRA adapter")
    engine_type: str = flag(
        "vllm", choices=("vllm", "sglang", "trtllm"), help="engine whose default block size is used"
    )
    disaggregation_mode: str = flag(
        "agg",
        choices=("agg", "prefill", "decode"),
        help="compute prompts and output, prompts alone, or output alone",
    )
    is_prefill_worker: bool = flag(False, help="older name of --disaggregation-mode prefill")
    is_decode_worker: bool = flag(False, help="older name of --disaggregation-mode decode")
    taints: tuple[str, ...] = flag(
        (), "--taint", repeat=True, help="taint that requests may require or avoid; may be repeated"
    )
    kv_transfer_bandwidth_gb_s: float = flag(
        64.0,
        "--kv-transfer-bandwidth",
        minimum=0,
        exclusive_minimum=True,
        metavar="GB/S",
        help="how fast a decode worker gets the KV blocks of a prefill worker, in 10^9 bytes/s",
    )
    kv_bytes_per_token: int | None = flag(
        None,
        minimum=1,
        help="size of a token's KV; default: from the model's config.json, else 131072",
    )
    kv_cache_dtype: str = flag(
        "auto",
        choices=("auto", "bfloat16", "fp8", "fp8_ds_mla", "fp8_e4m3", "fp8_e5m2", "fp8_inc"),
        metavar="TYPE",
        help="numbers in the KV cache, for the size of a token's KV; fp8 halves that of a model "
        "of two-byte numbers",
    )
    extra_engine_args: str | None = flag(
        None, metavar="FILE", help="JSON object of settings of this group; they win over flags"
    )

    def __post_init__(self) -> None:
        """Give older names their meaning. Raises ConfigError."""
        modes = [
            mode
            for mode, asked in (
                ("prefill", self.is_prefill_worker),
                ("decode", self.is_decode_worker),
            )
            if asked
        ]
        if not modes:
            return
        if len(modes) > 1 or self.disaggregation_mode not in ("agg", modes[0]):
            raise ConfigError(
                "--is-prefill-worker, --is-decode-worker and --disaggregation-mode contradict each "
                "other; give the last one alone"
            )
        object.__setattr__(self, "disaggregation_mode", modes[0])
