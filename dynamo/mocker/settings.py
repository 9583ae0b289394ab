"""Options of the simulated engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dynamo.config.absent import MOCKER, AbsentFlag
from dynamo.config.option import option
from dynamo.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class MockerSettings:
    """mocker: size, speed and behaviour of the simulated engine"""

    absent: ClassVar[tuple[AbsentFlag, ...]] = MOCKER
    reply: str = option(
        "random",
        "--reply",
        choices=("random", "sequence", "echo", "script"),
        help="random: max_tokens random tokens; sequence: each follows from all before it; echo: "
        "the prompt, or the last message of a chat; script: the texts of --reply-script",
    )
    reply_script: str | None = option(
        None,
        "--reply-script",
        metavar="FILE",
        help='JSON lines like {"reply": "text", "match": "part of the prompt"}; the first line '
        "that matches is the reply; where none does, --reply decides, and script is an error",
    )
    fatal_seed: int | None = option(
        None,
        "--fatal-seed",
        help="a request with this seed kills the process, as one that crashes an engine does",
    )
    planner_profile_data: str | None = option(
        None,
        "--planner-profile-data",
        metavar="PATH",
        help="be as fast as a profiled engine: a directory of `dynamo profile`, or Dynamo's .npz",
    )
    zmq_kv_events_ports: str | None = option(
        None,
        "--zmq-kv-events-ports",
        metavar="PORT,…",
        help="also publish KV events as vLLM does over ZeroMQ, each rank on its worker's port plus "
        "its number; one port for each of --num-workers",
    )
    speedup_ratio: float = option(
        1.0, "--speedup-ratio", minimum=0, help="how much faster than real; 0 = no delay at all"
    )
    decode_speedup_ratio: float = option(
        1.0,
        "--decode-speedup-ratio",
        minimum=0,
        exclusive_minimum=True,
        help="how much faster decoding is, on top of --speedup-ratio",
    )
    num_gpu_blocks: int = option(
        16384, "--num-gpu-blocks-override", minimum=1, help="KV cache size in blocks"
    )
    num_host_blocks: int = option(
        0,
        "--num-host-blocks",
        minimum=0,
        help="blocks that are kept in host memory after their eviction, per rank; copies take no "
        "time",
    )
    block_size: int | None = option(
        None,
        "--block-size",
        minimum=1,
        maximum=4096,
        help="tokens in a block; default: by --engine-type vllm 64, sglang 1, trtllm 32",
    )
    max_num_seqs: int = option(
        256, "--max-num-seqs", minimum=1, help="sequences computed at once per rank"
    )
    max_num_batched_tokens: int = option(
        8192, "--max-num-batched-tokens", minimum=1, help="tokens computed in one iteration"
    )
    max_model_len: int | None = option(
        None, "--max-model-len", minimum=2, help="longest prompt plus output, in tokens"
    )
    stream_interval: int = option(
        1,
        "--stream-interval",
        minimum=1,
        help="tokens in an output, as vLLM has them: the first alone, then so many at once",
    )
    enable_prefix_caching: bool = option(
        True, "--enable-prefix-caching", help="reuse the blocks of earlier prompts"
    )
    enable_chunked_prefill: bool = option(
        True, "--enable-chunked-prefill", help="split long prompts over iterations"
    )
    preemption_mode: str = option(
        "lifo",
        "--preemption-mode",
        choices=("lifo", "fifo"),
        help="which request is preempted when no block is free: the newest or the oldest",
    )
    watermark: float = option(
        0.0,
        "--watermark",
        minimum=0,
        maximum=1,
        help="share of the blocks that must stay free when a prompt is admitted",
    )
    data_parallel_size: int = option(
        1,
        "--data-parallel-size",
        minimum=1,
        maximum=1024,
        help="ranks, each with its own cache and scheduler",
    )
    num_workers: int = option(
        1, "--num-workers", minimum=1, maximum=1024, help="workers in this one process"
    )
    stagger_delay_s: float = option(
        0.0,
        "--stagger-delay",
        minimum=-1,
        help="seconds between the starts of workers; -1 = by their number",
    )
    startup_time_s: float | None = option(
        None, "--startup-time", minimum=0, help="simulated seconds of loading the model"
    )
    enable_sleep_mode: bool = option(
        False, "--enable-sleep-mode", help="let the planner put the simulated engine to sleep"
    )
    wake_time_s: float = option(
        0.0, "--wake-time", minimum=0, help="simulated seconds of waking the engine"
    )
    engine_type: str = option(
        "vllm",
        "--engine-type",
        choices=("vllm", "sglang", "trtllm"),
        help="engine whose default block size is used",
    )
    disaggregation_mode: str = option(
        "agg",
        "--disaggregation-mode",
        choices=("agg", "prefill", "decode"),
        help="compute prompts and output, prompts alone, or output alone",
    )
    is_prefill_worker: bool = option(
        False,
        "--is-prefill-worker",
        help="older name of --disaggregation-mode prefill",
    )
    is_decode_worker: bool = option(
        False,
        "--is-decode-worker",
        help="older name of --disaggregation-mode decode",
    )
    taints: tuple[str, ...] = option(
        (), "--taint", repeat=True, help="taint that requests may require or avoid; may be repeated"
    )
    kv_transfer_bandwidth_gb_s: float = option(
        64.0,
        "--kv-transfer-bandwidth",
        minimum=0,
        exclusive_minimum=True,
        metavar="GB/S",
        help="how fast a decode worker gets the KV blocks of a prefill worker, in 10^9 bytes/s",
    )
    kv_bytes_per_token: int | None = option(
        None,
        "--kv-bytes-per-token",
        minimum=1,
        help="size of a token's KV; default: from the model's config.json, else 131072",
    )
    kv_cache_dtype: str = option(
        "auto",
        "--kv-cache-dtype",
        choices=("auto", "bfloat16", "fp8", "fp8_ds_mla", "fp8_e4m3", "fp8_e5m2", "fp8_inc"),
        metavar="TYPE",
        help="numbers in the KV cache, for the size of a token's KV; fp8 halves that of a model "
        "of two-byte numbers",
    )
    extra_engine_args: str | None = option(
        None,
        "--extra-engine-args",
        metavar="FILE",
        help="JSON object of settings of this group; they win over flags",
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
