"""How many KV blocks one rank can hold, and the ledger that states where every byte goes.

Arithmetic alone, without torch: a client refuses a cache that is too small before anything starts.
The driver takes the minimum of `num_blocks` over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from configs.engine import DEFAULT_KV_CACHE_BYTES, DEFAULT_KV_CACHE_TOKENS, ResolvedConfig
from scheduler.errors import ConfigError

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheLedger:
    """How `num_blocks`, never more than `num_wanted_blocks`, was computed. `budget_terms` are named
    bytes: the source of the budget, then what was deducted.
    """

    rank: int
    num_blocks: int
    block_size: int
    block_bytes: int
    num_wanted_blocks: int
    budget_terms: tuple[tuple[str, int], ...]

    def line(self) -> str:
        """One line for the log."""
        parts_text = ", ".join(
            f"{name} {megabytes(num_bytes)}" for name, num_bytes in self.budget_terms
        )
        return (
            f"KV cache of rank {self.rank}: {self.num_blocks} blocks of {self.block_size} tokens,"
            f" {megabytes(self.num_blocks * self.block_bytes)} ({self.block_bytes} bytes per block;"
            f" at most {self.num_wanted_blocks} are wanted; {parts_text})"
        )


def block_bytes(config: ResolvedConfig) -> int:
    """Bytes one block takes on one rank: keys and values of every layer, for the KV heads this rank
    holds.
    """
    model = config.model
    num_kv_heads = max(1, model.num_key_value_heads // config.engine.tensor_parallel_size)
    elements = config.block_size * num_kv_heads * model.head_dim
    return 2 * model.num_hidden_layers * elements * ITEM_BYTES[config.kv_cache_dtype]


def plan_kv_cache(
    config: ResolvedConfig,
    rank: int,
    measure_budget: Callable[[], list[tuple[str, int]]] | None = None,
    num_blocks_at_start: int | None = None,
) -> KVCacheLedger:
    """The number of blocks this rank can hold: as many as the engine began with, or the option
    `num_kv_blocks`, or as many as fit the budget.

    Of those that fit, never more than a full batch of the longest sequences uses; on a CPU without
    `kv_cache_bytes`, not more than `DEFAULT_KV_CACHE_TOKENS` or one sequence. `measure_budget`
    gives the parts of a GPU's budget and is called only where neither a number of blocks nor a
    CPU's `kv_cache_bytes` decides. `num_blocks_at_start` is None if the engine begins now. Raises
    `ConfigError` with the numbers when not even one block fits.
    """
    engine_config = config.engine
    bytes_per_block = block_bytes(config)
    num_wanted_blocks = config.max_num_seqs * config.max_blocks_per_sequence
    if num_blocks_at_start is not None:
        budget_terms = [("as at the start of the engine", num_blocks_at_start * bytes_per_block)]
        num_wanted_blocks = num_blocks_at_start
    elif engine_config.num_kv_blocks is not None:
        budget_terms = [("num_kv_blocks", engine_config.num_kv_blocks * bytes_per_block)]
        num_wanted_blocks = engine_config.num_kv_blocks
    elif config.device == "cpu":
        num_ranks = engine_config.tensor_parallel_size
        total_cache_bytes = engine_config.kv_cache_bytes or DEFAULT_KV_CACHE_BYTES
        budget_terms = [(f"kv_cache_bytes over {num_ranks} ranks", total_cache_bytes // num_ranks)]
        if engine_config.kv_cache_bytes is None:
            default_blocks = -(-DEFAULT_KV_CACHE_TOKENS // config.block_size)
            num_wanted_blocks = min(
                num_wanted_blocks, max(default_blocks, config.max_blocks_per_sequence)
            )
    else:
        assert measure_budget is not None, "the budget of a GPU is measured"
        budget_terms = measure_budget()
    budget_bytes = budget_terms[0][1] - sum(num_bytes for _, num_bytes in budget_terms[1:])
    if budget_bytes < bytes_per_block:
        raise ConfigError(_no_room_message(config, bytes_per_block, budget_bytes, budget_terms))
    return KVCacheLedger(
        rank=rank,
        num_blocks=min(budget_bytes // bytes_per_block, num_wanted_blocks),
        block_size=config.block_size,
        block_bytes=bytes_per_block,
        num_wanted_blocks=num_wanted_blocks,
        budget_terms=tuple(budget_terms),
    )


def megabytes(num_bytes: int) -> str:
    """For messages."""
    return f"{num_bytes / 2**20:.1f} MiB"


def _no_room_message(
    config: ResolvedConfig,
    bytes_per_block: int,
    budget_bytes: int,
    budget_terms: list[tuple[str, int]],
) -> str:
    num_tokens = max(0, budget_bytes) * config.block_size // bytes_per_block
    budget_text = " less ".join(f"{num_bytes} bytes ({name})" for name, num_bytes in budget_terms)
    block_remedy = (
        f"lower block_size to at most {num_tokens}, or" if num_tokens else "not one token fits;"
    )
    if config.device == "cpu":
        needed_bytes = bytes_per_block * config.engine.tensor_parallel_size
        budget_remedy = f"raise kv_cache_bytes to at least {needed_bytes}"
    else:
        budget_remedy = (
            "raise gpu_memory_utilization or tensor_parallel_size, or use a smaller model"
        )
    return (
        f"the KV cache of a rank needs at least one block of {config.block_size} tokens,"
        f" {bytes_per_block} bytes, but gets {budget_text}: {block_remedy} {budget_remedy}"
    )
