"""One step on one rank: batch state, model, sampler, in this order.

Owns the KV cache, the batch state and the sampler; the model is passed in. `run` only launches
work: on a GPU it never waits for the device; `PendingStep.finish` does. Logits are computed only
for the last token of sampling rows, and for prompts whose log probabilities are wanted. Where the
device has graphs, the model is one graph in a decode step and in a step with prompts of few tokens,
and sampling is another. Never talks to the driver. Legend: T tokens of the step, B rows, M rows of
the largest graph, padding included, R sampling rows, E hidden size, V this rank's shard of the
vocabulary, S prompt positions scored at a time, P all of them, K KV heads of this rank, W blocks in
a row's table.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from configs.engine import ResolvedConfig
from configs.quantization import INT8
from kernels.metadata import AttentionMetadata, DecodeParts
from kernels.reference.sampling import MAX_LISTED_TOP_K
from scheduler.messages import PromptLogprobs, StepMask, StepPlan, TokenLogprobs, int32_array
from scheduler.params import MAX_LOGPROBS, ResolvedSampling
from workers.batch.decode_graphs import DecodeGraphs
from workers.batch.kv_cache import KVCache, guard_allocation
from workers.batch.mixed_graphs import MixedGraphs, max_graph_rows
from workers.batch.recorded_layers import RecordedLayers
from workers.batch.state import BatchState, StepRows
from workers.device import Device, Event
from workers.memory.inheritance import LastingMemory
from workers.models.qwen3 import Qwen3
from workers.sampling.next_tokens import NextTokens
from workers.sampling.prompt_logprobs import (
    POSITIONS_AT_ONCE,
    PromptScorer,
    ScoredRows,
    ScoredTokens,
    score_slice,
)
from workers.sampling.sampler import SampledLogprobs, SampledTokens, Sampler, to_logprobs
from workers.sampling.shard import LogprobTensors
from workers.sampling.state import PARAMETERS_DTYPE

# What a step sends: three numbers per token; per row its numbers in the batch and its parameters
# for sampling, some of them twice, since those that graphs read are kept apart. Rare parameters,
# like a logit bias, may need more and are sent on their own.
_BYTES_PER_TOKEN = 12
_BYTES_PER_ROW = 128 + 2 * PARAMETERS_DTYPE.itemsize
# Tokens of a step for which quantized products have kernels of their own.
_MEDIUM_STEP_TOKENS = 64
_Forward = Callable[[], tuple[Tensor, ScoredTokens | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingStep:
    """A launched step. Its tensors are on the host once the event `end_event` has passed; the event
    `start_event` is the end of what was launched before the step. `token_ids_R` is None if no row
    samples; `seconds`: the time of each part of launching it, by name.
    """

    device: Device
    token_ids_R: Tensor | None = None
    logprobs: SampledLogprobs | None = None
    scored_tokens: ScoredTokens | None = None
    start_event: Event | None = None
    end_event: Event | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    def finish(
        self, limit_s: float, description: str
    ) -> tuple[array[int], tuple[TokenLogprobs | None, ...] | None]:
        """(token ids, logprobs where requested). Waits for the device. Raises `StepTimeoutError`
        after `limit_s`.
        """
        self.device.wait(self.end_event, limit_s, description)
        if self.token_ids_R is None:
            return int32_array(), None
        token_ids = array("i", self.token_ids_R.numpy().astype(np.int32).tobytes())
        return token_ids, to_logprobs(self.logprobs, len(token_ids))

    def prompt_logprobs(self) -> tuple[PromptLogprobs, ...]:
        """Those of the scored rows. After `finish`."""
        return () if self.scored_tokens is None else self.scored_tokens.messages()

    def device_s(self) -> float | None:
        """Seconds from the step before, or from the launch if that is later, to the end of this
        one, which has passed; None if the device is the host.
        """
        if self.start_event is None or self.end_event is None:
            return None
        return self.device.seconds_between(self.start_event, self.end_event)


class ModelRunner:
    """Runs plans over a KV cache of `num_blocks` blocks."""

    def __init__(
        self,
        config: ResolvedConfig,
        model: Qwen3,
        device: Device,
        num_blocks: int,
        inherited_cache: LastingMemory | None = None,
    ) -> None:
        """Captures graphs where the device has them and `enforce_eager` is off, on all ranks at the
        same time. Raises `ConfigError` if there is not enough memory for cache and batch.
        """
        self.model = model
        self.device = device
        kernels, num_kv_heads = model.kernels, model.num_kv_heads
        self.cache = KVCache(
            config,
            kernels,
            num_blocks,
            num_kv_heads,
            device.torch_device,
            inherited_cache,
            model.group.progress,
            outlives_ranks=config.has_standby,
        )
        max_seqs = config.max_num_seqs
        int32s_per_seq = config.max_model_len + config.max_blocks_per_sequence
        with guard_allocation(
            f"a batch of {max_seqs} sequences",
            4 * max_seqs * int32s_per_seq,
            "max_num_seqs or max_model_len",
        ):
            self.batch_state = BatchState(config, num_blocks, device, kernels, num_kv_heads)
            self.sampler = _make_sampler(config, model)
            self.uploads = device.step_uploads(
                _BYTES_PER_TOKEN * config.max_num_batched_tokens + _BYTES_PER_ROW * max_seqs + 4096
            )
            self.next_tokens = NextTokens(
                config, model, self.sampler, self.batch_state, device, self.uploads
            )
        self.layers = RecordedLayers(config, model, self.cache)
        self.scorer = PromptScorer(model, self.sampler.shard, self.batch_state)
        self.decode_graphs: DecodeGraphs | None = None
        self.mixed_graphs: MixedGraphs | None = None
        if device.has_graphs and not config.engine.enforce_eager:
            self._capture(config)

    def _capture(self, config: ResolvedConfig) -> None:
        model = self.model
        self._static_hidden_ME = torch.zeros(
            max_graph_rows(config),
            config.model.hidden_size,
            dtype=model.dtype,
            device=self.device.torch_device,
        )
        graph_arguments = (
            config,
            model,
            self.cache,
            self.batch_state,
            self.device,
            self.uploads,
            self._static_hidden_ME,
        )
        self.decode_graphs = DecodeGraphs(*graph_arguments)
        self.mixed_graphs = MixedGraphs(*graph_arguments)
        largest_graph = self.decode_graphs.capture(self.mixed_graphs.capture())
        self.next_tokens.capture(self._static_hidden_ME, largest_graph)

    @torch.inference_mode()
    def run(
        self, plan: StepPlan, wait_for_mask: Callable[[], StepMask] | None = None
    ) -> PendingStep:
        """Launch a step. For a plan with masked rows, `wait_for_mask` is called once the logits are
        launched. Raises `WorkerError` when the plan breaks a law of `BatchState`, and whatever
        `wait_for_mask` raises.
        """
        began_s = time.perf_counter()
        start_event = self.device.record_event()
        self._apply(plan)
        if not len(plan.slots):
            return PendingStep(device=self.device)
        rows = self.batch_state.take(plan)
        forward = self._stage(rows, self.scorer.stage(plan, rows, self.uploads.put))
        mask_s = 0.0

        def timed_mask() -> StepMask:
            nonlocal mask_s
            mask_wait_began_s = time.perf_counter()
            assert wait_for_mask is not None, "only plans without masked rows go without"
            step_mask = wait_for_mask()
            mask_s = time.perf_counter() - mask_wait_began_s
            return step_mask

        sample = self.next_tokens.stage(
            rows, self.uploads.put, timed_mask if plan.mask_flags else None
        )
        self.uploads.send()
        prepared_s = time.perf_counter()
        hidden_RE, scored_tokens = forward()
        forwarded_s = time.perf_counter()
        seconds = {"prepare": prepared_s - began_s, "forward": forwarded_s - prepared_s}
        sampled_tokens = sample(hidden_RE) if len(rows.sampling_slots_R) else None
        if sampled_tokens is not None:
            seconds["sample"] = time.perf_counter() - forwarded_s - mask_s
        if plan.mask_flags:
            seconds["mask"] = mask_s
        return self._to_host(sampled_tokens, scored_tokens, start_event, seconds)

    def check(self) -> None:
        """Raise unless the laws of batch state and sampler hold."""
        self.batch_state.check()
        self.sampler.state.check()

    def _apply(self, plan: StepPlan) -> None:
        self.batch_state.apply(plan)
        for slot in plan.released_slots:
            self.sampler.state.release(slot)
        rows = plan.admitted_rows
        if rows is None:
            return
        token_ids = np.asarray(rows.token_ids)
        start = 0
        for slot, num_tokens, num_prompt, sampling in zip(
            rows.slots, rows.num_tokens, rows.num_prompt_tokens, rows.sampling, strict=True
        ):
            self.sampler.admit(slot, sampling, token_ids[start : start + num_tokens], num_prompt)
            self.scorer.admit(slot, sampling)
            start += num_tokens

    def _stage(self, rows: StepRows, scored_rows: ScoredRows | None) -> _Forward:
        """Put what the model needs. Returns a function that launches it and returns the hidden
        states of the last token of each sampling row, and the scores of `scored_rows`, for which no
        graph has the hidden states.
        """
        if scored_rows is None and (replay := self._stage_graph(rows)) is not None:
            hidden_RE = self._static_hidden_ME[: len(rows.sampling_slots_R)]

            def replay_graph() -> tuple[Tensor, None]:
                replay()
                return hidden_RE, None

            return replay_graph
        make_inputs = self.batch_state.stage(rows, self.uploads.put)

        def forward() -> tuple[Tensor, ScoredTokens | None]:
            inputs = make_inputs()
            hidden_TE = self.layers.forward(inputs)
            scored_tokens = (
                None if scored_rows is None else self.scorer.score(hidden_TE, scored_rows)
            )
            hidden_RE = hidden_TE.index_select(0, inputs.logits_indices_R)
            return hidden_RE, scored_tokens

        return forward

    def _stage_graph(self, rows: StepRows) -> Callable[[], None] | None:
        """Put what the graph of these rows reads. Returns what replays it, or None if no graph
        fits.
        """
        if self.decode_graphs is not None and self.decode_graphs.can_replay(rows):
            return self.decode_graphs.stage(rows)
        if self.mixed_graphs is not None and self.mixed_graphs.can_replay(rows):
            return self.mixed_graphs.stage(rows, self.uploads.put)
        return None

    def _to_host(
        self,
        sampled_tokens: SampledTokens | None,
        scored_tokens: ScoredTokens | None,
        start_event: Event | None,
        seconds: dict[str, float],
    ) -> PendingStep:
        to_host = self.device.to_host
        token_ids_R = None if sampled_tokens is None else to_host(sampled_tokens.token_ids_B)
        logprobs = None if sampled_tokens is None else sampled_tokens.logprobs
        if logprobs is not None:
            logprobs = replace(logprobs, tensors=LogprobTensors(*map(to_host, logprobs.tensors)))
        if scored_tokens is not None:
            scored_tokens = replace(
                scored_tokens,
                tensors=LogprobTensors(*map(to_host, scored_tokens.tensors)),
                token_rank_P=to_host(scored_tokens.token_rank_P),
            )
        return PendingStep(
            device=self.device,
            token_ids_R=token_ids_R,
            logprobs=logprobs,
            scored_tokens=scored_tokens,
            start_event=start_event,
            end_event=self.device.record_event(),
            seconds=seconds,
        )


def _make_sampler(config: ResolvedConfig, model: Qwen3) -> Sampler:
    """The sampler of this rank's shard of the vocabulary."""
    start, group = model.head.first_id, model.group
    return Sampler(
        group,
        model.kernels.sampling,
        config.model.vocab_size,
        start,
        start + model.head.shard_size,
        config.max_num_seqs,
        group.device,
    )


def run_largest_step(config: ResolvedConfig, model: Qwen3) -> None:
    """Run the step that needs the most memory: the largest number of tokens and sampling rows, with
    every stage of sampling in use that needs memory per slot or per logit. Every rank runs it at
    the same time.
    """
    num_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
    row_len = min(-(-config.max_num_batched_tokens // num_rows), config.max_model_len)
    sampling = ResolvedSampling(
        seed=0,
        max_tokens=1,
        top_k=MAX_LISTED_TOP_K + 1,
        top_p=0.9,
        repetition_penalty=1.1,
        logprobs=20,
    )
    _run_step(config, model, num_rows, row_len, row_len, [sampling] * num_rows)


@torch.inference_mode()
def warm_up(config: ResolvedConfig, model: Qwen3) -> None:
    """Run everything that a backend compiles at its first use, so that no request waits for it:
    attention over long prompts, short prompts and single tokens, with tight and with the widest
    bounds; every kind of sampling row, with raw and with adjusted logits; updates of the tables.
    Every rank runs it at the same time.
    """
    max_row_len = min(config.max_num_batched_tokens, config.max_model_len)
    samplings = [
        ResolvedSampling(seed=0, max_tokens=1, top_k=top_k, top_p=top_p, presence_penalty=penalty)
        for penalty in (0.0, 1.0)
        for top_k, top_p in ((0, 1.0), (MAX_LISTED_TOP_K, 1.0), (MAX_LISTED_TOP_K + 1, 0.9))
    ]
    num_longest_rows = config.max_num_batched_tokens // max_row_len
    two_token_step = (1, min(2, max_row_len), max_row_len)
    steps = (
        (num_longest_rows, max_row_len, max_row_len),
        two_token_step,
        (1, 1, 1),
        (1, 1, config.max_model_len),
    )
    for num_rows, row_len, max_seq_len in steps:
        _run_step(config, model, num_rows, row_len, max_seq_len, [])
    quantization = config.quantization
    if config.device == "cuda" and quantization and quantization.name != INT8:
        # These have kernels for some rows too, and others for the head.
        row_len = min(_MEDIUM_STEP_TOKENS, max_row_len)
        model.logits(_run_step(config, model, 1, row_len, max_row_len, []))
    for sampling in samplings:
        _run_step(config, model, 1, 1, 1, [sampling])
    table = torch.zeros(1, 1, dtype=torch.int32, device=model.group.device)
    zeros = table[0].clone()
    model.kernels.look_up_tokens(table, table, zeros, zeros, zeros, 1)
    model.kernels.write_tokens(table, zeros, zeros, zeros.to(torch.int64))


@torch.inference_mode()
def _run_step(
    config: ResolvedConfig,
    model: Qwen3,
    num_rows: int,
    row_len: int,
    max_seq_len: int,
    samplings: list[ResolvedSampling],
) -> Tensor:
    """Run a step of equal rows; kernels get `max_seq_len` as the bound of their lengths. The first
    ones are sampled with `samplings`. The cache is one block, which is never written. Returns the
    hidden states [T, E].
    """
    device, kernels = model.group.device, model.kernels
    num_tokens = num_rows * row_len
    cache = KVCache(config, kernels, 1, model.num_kv_heads, device)
    starts_B1 = torch.arange(0, num_tokens + 1, row_len, dtype=torch.int32, device=device)
    max_parts = 0
    if row_len == 1:
        max_parts = kernels.max_decode_parts(num_rows, model.num_kv_heads, max_seq_len, device)
    decode_parts = DecodeParts(
        num_rows=num_rows,
        max_parts=max_parts,
        part_start_B1=starts_B1,
        num_arrived_parts_BK=torch.zeros(
            num_rows, model.num_kv_heads, dtype=torch.int32, device=device
        ),
    )
    attn = AttentionMetadata(
        query_start_B1=starts_B1,
        seq_start_B1=starts_B1,
        seq_lens_B=torch.full((num_rows,), row_len, dtype=torch.int32, device=device),
        block_table_BW=torch.zeros(
            num_rows, -(-max_seq_len // config.block_size), dtype=torch.int32, device=device
        ),
        kv_places_T=torch.full((num_tokens,), -1, dtype=torch.int64, device=device),
        max_query_len=row_len,
        max_seq_len=max_seq_len,
        decode_parts=decode_parts if max_parts else None,
    )
    positions_T = torch.arange(num_tokens, dtype=torch.int32, device=device) % row_len
    hidden_TE = model.forward(torch.zeros_like(positions_T), positions_T, attn, cache.layers)
    if not samplings:
        return hidden_TE
    sampler = _make_sampler(config, model)
    num_sampled_rows = len(samplings)
    for slot, sampling in enumerate(samplings):
        sampler.admit(slot, sampling, [0], 1)
    logits_BV = model.logits(hidden_TE[:num_sampled_rows])
    sampler.sample(logits_BV, sampler.state.batch(range(num_sampled_rows), [1] * num_sampled_rows))
    hidden_SE = hidden_TE[:POSITIONS_AT_ONCE]
    ids_S = torch.zeros(len(hidden_SE), dtype=torch.int64, device=device)
    num_top_logprobs = min(MAX_LOGPROBS, config.model.vocab_size)
    score_slice(model, sampler.shard, hidden_SE, ids_S, num_top_logprobs)
    return hidden_TE
