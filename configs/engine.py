"""Engine options: `EngineConfig` as the user gives them, `ResolvedConfig` as the engine runs them.

What is known to be wrong is refused before any actor starts: `EngineConfig` checks each field and
how they go together, `workers/configuration.py` checks them against the checkpoint and the device.
Unknown keys are refused by name. An option is declared once, as a field with its limits and its
flag; the command line is derived from that.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from configs.model import DTYPES, ModelConfig
from configs.options import check_option, option
from configs.paths import DEFAULT_MODEL_DIR
from configs.quantization import QUANTIZATIONS, Quantization
from scheduler.errors import ConfigError

DEVICES = ("auto", "cpu", "cuda")
# "auto" and the names in `kernels/select.py`, which this package does not import.
ATTENTION_BACKENDS = ("auto", "cpu", "triton", "flash_attn", "hybrid", "reference")
KV_CACHE_DTYPES = ("auto", "fp8_e4m3")
LOG_LEVELS = ("debug", "info", "warning", "error")
# Tokens in one step. On a CPU, matrix products gain nothing from more rows, and every running
# sequence waits for the step. On a GPU, a small model would compute fewer tokens in less time than
# the host needs to launch the step.
DEFAULT_MAX_NUM_BATCHED_TOKENS = {"cpu": 256, "cuda": 8192}
# A GPU reads the weights once for all rows of a step, and it finishes a step of a small model
# sooner than the host can read its result and send the next one (`benchmarks/dispatch`).
DEFAULT_MAX_NUM_SEQS = {"cpu": 64, "cuda": 256}
DEFAULT_STEPS_AHEAD = {"cpu": 1, "cuda": 3}
DEFAULT_MAX_MODEL_LEN = 40960  # less if the checkpoint has fewer positions
# The cache on a CPU has at most both of these, but enough for one sequence if the bytes allow: of a
# tiny model, a gigabyte would hold far more than it is used for.
DEFAULT_KV_CACHE_BYTES = 2**30
DEFAULT_KV_CACHE_TOKENS = 2**16
MAX_TIMEOUT_S = 86400.0  # a day


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of one engine. None means that the checkpoint, the backend or the device decides; for
    `ray_address`, what Ray runs already (`cluster/resources/session.py`). Times are seconds.

    `kv_cache_bytes` is the KV cache of the whole engine on CPU, split over the ranks; on a GPU the
    size of the cache follows from `gpu_memory_utilization`. `num_kv_blocks` overrides both.
    """

    model: str = option(
        str(DEFAULT_MODEL_DIR),
        help="Directory or hub id; the small default model if left out.",
        flag_default=None,
    )
    tokenizer: str | None = option(None, help="Directory or hub id of another tokenizer.")
    revision: str | None = option(None, help="Revision of a hub id; not for a directory.")
    tensor_parallel_size: int = option(
        1,
        flag="--tp",
        help="Number of tensor-parallel ranks; must split the heads and the MLP.",
        at_least=1,
    )
    device: str = option(
        "auto",
        help="cpu or cuda; auto takes cuda where the cluster has a GPU for every rank.",
        choices=DEVICES,
    )
    dtype: str = option(
        "auto",
        help="float32, bfloat16 or float16 (not on CPU); auto takes the checkpoint's, or float32"
        " where a processor has no bfloat16, with the weights kept in bfloat16.",
        choices=("auto", *DTYPES),
    )
    quantization: str | None = option(
        None,
        help="int8: 8-bit weights and products on CPUs with VNNI, half the memory, faster and less"
        " exact. int4: weights in 4 bits, rounded in groups of 128 inputs, the least exact; on CPUs"
        " the fastest for one row. fp8: weights in 8 bits (e4m3), rounded in blocks of 128 x 128;"
        " on CPUs slower than bfloat16 from about 4 rows on. int4 and fp8 are not measured on GPUs."
        " Checkpoints of 4 bits without desc_act and of FP8 are kept as they are unless this"
        " option says otherwise; those of compressed-tensors in the format of int8 always are, and"
        " another value is refused. The option rounds the values that others store (the log says"
        " so).",
        choices=QUANTIZATIONS,
    )
    kv_cache_dtype: str = option(
        "auto",
        help="fp8_e4m3: keys and values as 8-bit numbers, so twice the tokens fit; less exact,"
        " slower on a CPU, not with flash-attn.",
        choices=KV_CACHE_DTYPES,
    )
    attention_backend: str = option(
        "auto",
        help="All kernels, not only those of attention: on GPUs flash_attn, triton, hybrid"
        " (FlashAttention-3 for prompts and Triton for decoding, on Hopper) or, with enforce_eager,"
        " reference; on CPU cpu, reference, or triton in its interpreter.",
        choices=ATTENTION_BACKENDS,
    )
    block_size: int | None = option(
        None,
        help="Tokens per KV block; by default 64 with cpu and triton, 128 with FlashAttention-3"
        " (hybrid too), 256 with FlashAttention-2, 16 with reference.",
        at_least=1,
        at_most=2**20,
    )
    num_kv_blocks: int | None = option(
        None,
        help="Number of KV blocks, whatever memory they take.",
        at_least=1,
        at_most=2**31 - 1,  # block ids are 32-bit numbers
    )
    kv_cache_bytes: int | None = option(
        None,
        help="KV cache of all ranks together, on CPU; by default 1 GiB or 65,536 tokens.",
        at_least=1,
    )
    gpu_memory_utilization: float = option(
        0.9, help="Share of a GPU's memory to use.", above=0, at_most=1
    )
    enable_prefix_caching: bool = option(
        True,
        flag="--prefix-caching/--no-prefix-caching",
        help="Share the keys and values of equal prefixes.",
    )
    max_num_seqs: int | None = option(
        None,
        help="Sequences running at once; by default 64 on CPU, 256 on GPUs.",
        at_least=1,
        at_most=65536,  # each takes a row of the batch's tables
    )
    max_num_batched_tokens: int | None = option(
        None,
        help="Tokens per step, at least max_num_seqs; by default 256 on CPU, 8192 on GPUs, or"
        " twice max_num_seqs if that is more.",
        at_least=1,
    )
    max_decode_slowdown: float = option(
        3.0,
        help="Prompts beside sequences that decode may lengthen a step to so many times one that"
        " usually decodes, except for one token in 128; 0: no limit.",
        above=1,
        or_zero=True,
        at_most=1000,
    )
    max_model_len: int | None = option(
        None,
        help="Tokens of prompt and output; by default the checkpoint's, at most 40960.",
        at_least=2,
    )
    enforce_eager: bool = option(False, help="No CUDA graphs.")
    shared_memory: bool = option(
        True,
        flag="--shared-memory/--no-shared-memory",
        help="Sum over the ranks of a node through memory that they share, where that is possible,"
        " instead of gloo or NCCL.",
    )
    num_steps_ahead: int | None = option(
        None,
        help="Steps submitted beyond the oldest unread one; by default 1 on CPU, 3 on GPUs.",
        at_least=0,
        at_most=8,  # each starts a thread on every rank
    )
    seed: int | None = option(None, help="Makes requests without a seed repeatable.", at_least=0)
    ray_address: str | None = option(None, help="Ray cluster to join; local for a new one.")
    wait_for_nodes_s: int = option(
        0,
        help="How long to wait for nodes that the cluster does not have yet, such as those of an"
        " autoscaler; with 0, what its nodes cannot hold is refused at once. serve waits without a"
        " limit, but where the API is apart from the engines (--replicas, --max-replicas,"
        " --api-replicas) for the first engine 360 s plus this. Above 300, also how long lost ranks"
        " and drivers are replaced.",
        at_least=0,
        at_most=int(MAX_TIMEOUT_S),
    )
    start_timeout_s: float = option(
        300.0,
        help="Limit on each start of the ranks.",
        above=0,
        at_most=MAX_TIMEOUT_S,
        has_flag=False,
    )
    stuck_after_s: float = option(
        20.0,
        help="Time without any progress after which the ranks are replaced.",
        above=0,
        at_most=MAX_TIMEOUT_S,
    )
    spares: str = option(
        "warm",
        help="warm: a process per rank that is ready to take its place, on a CPU with its weights"
        " and KV cache; standby: on a GPU with these too, which takes as much of its memory as the"
        " rank has besides them; off saves all of that.",
        choices=("off", "warm", "standby"),
    )
    step_timeout_s: float = option(
        120.0,
        help="Limit on a step; after it the ranks are replaced, even if they make progress.",
        above=0,
        at_most=MAX_TIMEOUT_S,
        has_flag=False,
    )
    frontend_timeout_s: float = option(
        60.0,
        help="Limit on the silence of a frontend, whose requests are then aborted.",
        above=0,
        at_most=MAX_TIMEOUT_S,
        has_flag=False,
    )
    log_level: str = option("info", choices=LOG_LEVELS)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_option(field, getattr(self, field.name))
        if (
            self.max_num_batched_tokens is not None
            and self.max_num_seqs is not None
            and self.max_num_batched_tokens < self.max_num_seqs
        ):
            raise ConfigError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs"
                f" {self.max_num_seqs}: every running sequence needs one token per step; raise the"
                " first or lower the second"
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EngineConfig:
        """Build from JSON or keyword arguments. Raises `ConfigError`, naming an unknown key."""
        known_names = [field.name for field in dataclasses.fields(cls)]
        unknown_names = [key for key in values if key not in known_names]
        if unknown_names:
            raise ConfigError(
                f"unknown engine option {unknown_names[0]!r}; known are {', '.join(known_names)}"
            )
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """What the driver and the workers run: options and checkpoint, with every choice made for which
    the weight files are not needed; these may change `weight_dtype` and `quantization`.

    engine: the options as given. model_dir: a local directory. dtype: of activations and vectors.
    """

    engine: EngineConfig
    model: ModelConfig
    model_dir: str
    device: str
    dtype: str
    weight_dtype: str  # of matrices that are not quantized
    quantization: Quantization | None
    kv_cache_dtype: str
    attention_backend: str
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_steps_ahead: int

    @property
    def max_blocks_per_sequence(self) -> int:
        """Width of a block table."""
        return math.ceil(self.max_model_len / self.block_size)

    @property
    def has_standby(self) -> bool:
        """Whether spares hold weights and KV cache of the ranks, in memory that outlives these."""
        return self.engine.spares == "standby" or (
            self.engine.spares == "warm" and self.device == "cpu"
        )


def resolve_max_num_seqs(engine_config: EngineConfig, device: str) -> int:
    """Sequences that run at once on device "cpu" or "cuda"."""
    default = DEFAULT_MAX_NUM_SEQS[device]
    if engine_config.max_num_seqs is not None:
        return engine_config.max_num_seqs
    if engine_config.max_num_batched_tokens is None:
        return default
    # Half of a step is left to prompts, as where the tokens follow from the sequences.
    return min(default, math.ceil(engine_config.max_num_batched_tokens / 2))
