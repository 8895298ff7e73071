"""The scheduler's limits, from a configuration and the size of the KV cache."""

from __future__ import annotations

from configs.engine import ResolvedConfig
from scheduler.limits import SchedulerLimits


def limits_of(config: ResolvedConfig, num_blocks: int) -> SchedulerLimits:
    """The limits of an engine whose KV cache has `num_blocks` blocks."""
    return SchedulerLimits(
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        vocab_size=config.model.vocab_size,
        enable_prefix_caching=config.engine.enable_prefix_caching,
        max_decode_slowdown=config.engine.max_decode_slowdown,
    )
