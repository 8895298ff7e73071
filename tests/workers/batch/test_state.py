"""Batch state: vectorized preparation against a loop that follows the documentation of the
messages, and its laws.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from configs.engine import ResolvedConfig
from kernels.reference.backend import REFERENCE_KERNELS
from scheduler.errors import WorkerError
from scheduler.messages import AdmittedRows, StepPlan, int32_array
from tests.workers.conftest import config_of
from tests.workers.planner import GREEDY, Planner, Row
from workers.batch.state import BatchState, StepInputs, StepRows
from workers.device import open_device

CPU = open_device("cpu")
NUM_BLOCKS = 500
SLOTS = 5


@pytest.fixture
def config(small_checkpoint: Path) -> ResolvedConfig:
    return config_of(
        small_checkpoint, max_num_seqs=SLOTS, max_model_len=30, max_num_batched_tokens=40
    )


def make_state(config: ResolvedConfig, num_blocks: int) -> BatchState:
    return BatchState(config, num_blocks, CPU, REFERENCE_KERNELS, 2)


@dataclass
class NaiveRow:
    tokens: list[int]
    stored: int
    computed: int
    blocks: list[int] = field(default_factory=list)


class NaiveState:
    """The same as `BatchState`, with a loop over rows and tokens."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.rows: dict[int, NaiveRow] = {}

    def apply(self, plan: StepPlan) -> None:
        for slot in plan.released_slots:
            del self.rows[slot]
        if plan.admitted_rows is not None:
            self.admit(plan.admitted_rows)
        for slot, block in zip(plan.appended_slots, plan.appended_block_ids, strict=True):
            self.rows[slot].blocks.append(block)

    def admit(self, rows: AdmittedRows) -> None:
        tokens, blocks = list(rows.token_ids), list(rows.block_ids)
        for slot, num, stored, num_blocks in zip(
            rows.slots, rows.num_tokens, rows.num_stored_tokens, rows.num_blocks, strict=True
        ):
            self.rows[slot] = NaiveRow(
                tokens[:num], stored, min(stored, num - 1), blocks[:num_blocks]
            )
            tokens, blocks = tokens[num:], blocks[num_blocks:]

    def expected(self, plan: StepPlan) -> dict[str, list[int]]:
        out: dict[str, list[int]] = {
            key: [] for key in ("tokens", "positions", "slots", "lens", "last", "ends")
        }
        out["starts"] = [0]
        for slot, new, samples in zip(
            plan.slots, plan.num_new_tokens, plan.sampling_flags, strict=True
        ):
            row = self.rows[slot]
            for position in range(row.computed, row.computed + new):
                place = (
                    row.blocks[position // self.block_size] * self.block_size
                    + position % self.block_size
                )
                out["tokens"].append(row.tokens[position])
                out["positions"].append(position)
                out["slots"].append(-1 if position < row.stored else place)
            row.computed += new
            out["starts"].append(len(out["tokens"]))
            out["lens"].append(row.computed)
            if samples:
                out["last"].append(len(out["tokens"]) - 1)
                out["ends"].append(row.computed)
        return out

    def take(self, plan: StepPlan, tokens: list[int]) -> None:
        sampling = [
            slot for slot, samples in zip(plan.slots, plan.sampling_flags, strict=True) if samples
        ]
        for slot, token in zip(sampling, tokens, strict=True):
            self.rows[slot].tokens.append(token)


def random_plans(rng: random.Random, block_size: int, number: int) -> Any:
    """Plans in which rows are admitted, share blocks, run in chunks, decode and are released;
    yields (plan, planner).
    """
    planner = Planner(block_size)
    rows: list[Row] = []
    for _ in range(number):
        for row in [row for row in rows if row.length >= 28 or rng.random() < 0.05]:
            rows.remove(row)
            planner.release(row)
        free = [slot for slot in range(SLOTS) if slot not in {row.slot for row in rows}]
        rng.shuffle(free)
        for slot in free:
            if rng.random() < 0.5:
                rows.append(admit_random(rng, planner, slot, rows))
        chosen = rng.sample(rows, rng.randint(min(1, len(rows)), len(rows)))
        if chosen:
            yield planner.step([(row, rng.choice([1, 3, 30])) for row in chosen]), planner


def admit_random(rng: random.Random, planner: Planner, slot: int, rows: list[Row]) -> Row:
    prompt = [rng.randrange(1000) for _ in range(rng.randint(1, 20))]
    donor = rng.choice(rows) if rows and rng.random() < 0.5 else None
    shared = min(donor.computed, len(donor.tokens)) // planner.block_size if donor else 0
    if donor is not None and shared:
        prompt = donor.tokens[: shared * planner.block_size] + (
            prompt[:3] if rng.random() < 0.5 else []
        )
    row = Row(prompt, len(prompt))
    planner.admit(row, slot, donor.blocks[:shared] if donor else None, shared * planner.block_size)
    return row


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("seed", range(10))
def test_preparation_equals_a_loop_over_tokens(
    config: ResolvedConfig, seed: int, block_size: int
) -> None:
    config = dataclasses.replace(config, block_size=block_size)
    rng = random.Random(seed)
    state, naive = make_state(config, 10 * NUM_BLOCKS), NaiveState(block_size)
    for plan, planner in random_plans(rng, block_size, 40):
        state.apply(plan)
        naive.apply(plan)
        rows, expected = state.take(plan), naive.expected(plan)
        inputs = inputs_of(state, rows)
        assert_equal(rows, inputs, expected)
        for row, table in zip(plan.slots, inputs.attn.block_table_BW.tolist(), strict=True):
            blocks = naive.rows[row].blocks[: len(table)]
            assert table[: len(blocks)] == blocks
        sampled = [rng.randrange(1000) for _ in expected["last"]]
        write_sampled(state, rows, sampled)
        naive.take(plan, sampled)
        planner.take(plan.step_id, int32_array(sampled))
        state.check()


def prepare(state: BatchState, plan: StepPlan) -> StepInputs:
    return inputs_of(state, state.take(plan))


def inputs_of(state: BatchState, rows: StepRows) -> StepInputs:
    return state.stage(rows, lambda array: CPU.upload(array)[0])()


def write_sampled(state: BatchState, rows: StepRows, token_ids: list[int]) -> None:
    slots_R, positions_R = map(torch.from_numpy, (rows.sampling_slots_R, rows.sampling_positions_R))
    state.write_sampled(slots_R, positions_R, torch.tensor(token_ids, dtype=torch.int64))


def assert_equal(rows: StepRows, inputs: StepInputs, expected: dict[str, list[int]]) -> None:
    attn = inputs.attn
    assert inputs.token_ids_T.tolist() == expected["tokens"]
    assert inputs.positions_T.tolist() == expected["positions"]
    assert attn.kv_places_T.tolist() == expected["slots"] and attn.kv_places_T.dtype == torch.int64
    assert (
        attn.query_start_B1.tolist() == expected["starts"]
        and attn.query_start_B1.dtype == torch.int32
    )
    assert attn.seq_lens_B.tolist() == expected["lens"] and attn.seq_lens_B.dtype == torch.int32
    assert (
        attn.seq_start_B1.tolist() == [0, *np.cumsum(expected["lens"])]
        and attn.seq_start_B1.dtype == torch.int32
    )
    assert inputs.logits_indices_R.tolist() == expected["last"]
    assert rows.sampling_positions_R.tolist() == expected["ends"]
    assert attn.max_seq_len == max(expected["lens"])
    assert attn.max_query_len == int(np.diff(expected["starts"]).max())


def test_next_step_reads_the_sampled_token_from_the_table(config: ResolvedConfig) -> None:
    """It is prepared before the host has seen the token, which is only in the device's table."""
    state, planner = make_state(config, NUM_BLOCKS), Planner(4)
    row = Row([5, 6], 2)
    planner.admit(row, slot=3)
    first = planner.step([(row, 2)])
    second = planner.step([(row, 1)])
    state.apply(first)
    write_sampled(state, state.take(first), [77])
    state.apply(second)
    inputs = prepare(state, second)
    assert inputs.token_ids_T.tolist() == [77] and inputs.positions_T.tolist() == [2]


def test_full_hit_runs_its_last_token_and_writes_nothing(config: ResolvedConfig) -> None:
    state, planner = make_state(config, NUM_BLOCKS), Planner(4)
    row = Row(list(range(8)), 8)
    planner.admit(row, slot=0, shared=[20, 21], num_stored=8)
    plan = planner.step([(row, 8)])
    state.apply(plan)
    inputs = prepare(state, plan)
    assert inputs.token_ids_T.tolist() == [7] and inputs.attn.kv_places_T.tolist() == [-1]
    assert inputs.attn.seq_lens_B.tolist() == [8]


def test_slot_offsets_do_not_overflow_32_bits(config: ResolvedConfig) -> None:
    config = dataclasses.replace(config, block_size=4096)
    state, planner = make_state(config, 2**31 - 1), Planner(4096)
    row = Row([1], 1)
    planner.admit(row, slot=0, shared=[2**31 - 2], num_stored=0)
    plan = planner.step([(row, 1)])
    state.apply(plan)
    assert prepare(state, plan).attn.kv_places_T.tolist() == [(2**31 - 2) * 4096]


def admitted(**changes: Any) -> AdmittedRows:
    rows: dict[str, Any] = {
        "slots": [2],
        "num_tokens": [5],
        "num_prompt_tokens": [5],
        "num_stored_tokens": [0],
        "num_blocks": [2],
        "token_ids": [1, 2, 3, 4, 5],
        "block_ids": [7, 8],
    }
    return AdmittedRows(
        sampling=(GREEDY,), **{key: int32_array(value) for key, value in (rows | changes).items()}
    )


def plan_of(**changes: Any) -> StepPlan:
    parts: dict[str, Any] = {
        "released_slots": [],
        "appended_slots": [],
        "appended_block_ids": [],
        "slots": [],
        "num_new_tokens": [],
    }
    admitted_rows, samples = changes.pop("admitted_rows", None), changes.pop("sampling_flags", b"")
    arrays: dict[str, Any] = {key: int32_array(value) for key, value in (parts | changes).items()}
    return StepPlan(
        step_id=0, epoch=0, admitted_rows=admitted_rows, sampling_flags=samples, **arrays
    )


# A state in which slot 1 holds 3 tokens in one block, none of them computed.
BROKEN = {
    "a released slot is in use": plan_of(released_slots=[2]),
    "released slots exist": plan_of(released_slots=[SLOTS]),
    "released slots are distinct": plan_of(released_slots=[1, 1]),
    "an admitted slot is free": plan_of(admitted_rows=admitted(slots=[1])),
    "admitted slots exist": plan_of(admitted_rows=admitted(slots=[-1])),
    "a row has 1 to max_model_len": plan_of(
        admitted_rows=admitted(num_tokens=[0], num_blocks=[0], token_ids=[])
    ),
    "the prompt is part of": plan_of(admitted_rows=admitted(num_prompt_tokens=[6])),
    "stored tokens are part of": plan_of(admitted_rows=admitted(num_stored_tokens=[6])),
    "stored tokens lie in": plan_of(
        admitted_rows=admitted(num_stored_tokens=[5], num_blocks=[1], block_ids=[7])
    ),
    "token_ids holds": plan_of(admitted_rows=admitted(token_ids=[1, 2])),
    "block_ids holds": plan_of(admitted_rows=admitted(block_ids=[7])),
    "blocks are of the cache": plan_of(appended_slots=[1], appended_block_ids=[NUM_BLOCKS]),
    "blocks are appended to slots in use": plan_of(appended_slots=[0], appended_block_ids=[9]),
    "each appended block names a slot": plan_of(appended_slots=[1], appended_block_ids=[9, 10]),
    "a block table has at most 8": plan_of(appended_slots=[1] * 8, appended_block_ids=range(8)),
    "a scheduled slot is in use": plan_of(slots=[0], num_new_tokens=[1], sampling_flags=b"\0"),
    "scheduled slots are distinct": plan_of(
        slots=[1, 1], num_new_tokens=[1, 1], sampling_flags=b"\0\0"
    ),
    "a scheduled row has a token": plan_of(slots=[1], num_new_tokens=[0], sampling_flags=b"\0"),
    "a row computes only tokens it has": plan_of(
        slots=[1], num_new_tokens=[4], sampling_flags=b"\0"
    ),
    "a row samples at the end": plan_of(slots=[1], num_new_tokens=[2], sampling_flags=b"\1"),
    "slots, num_new_tokens and sampling_flags": plan_of(
        slots=[1], num_new_tokens=[3], sampling_flags=b""
    ),
}


@pytest.mark.parametrize("law", BROKEN)
def test_plan_that_breaks_a_law_is_refused_by_its_name(config: ResolvedConfig, law: str) -> None:
    state = make_state(config, NUM_BLOCKS)
    row = admitted(
        slots=[1],
        num_tokens=[3],
        num_prompt_tokens=[3],
        token_ids=[1, 2, 3],
        num_blocks=[1],
        block_ids=[0],
    )
    state.apply(plan_of(admitted_rows=row))
    with pytest.raises(WorkerError, match=f"batch state: {law}"):
        state.apply(BROKEN[law])
        prepare(state, BROKEN[law])


def test_row_may_not_outgrow_its_block_table(config: ResolvedConfig) -> None:
    state = make_state(config, NUM_BLOCKS)
    state.apply(plan_of(admitted_rows=admitted(num_blocks=[1], block_ids=[7])))
    with pytest.raises(WorkerError, match="computed tokens lie within the block table"):
        prepare(state, plan_of(slots=[2], num_new_tokens=[5], sampling_flags=b"\1"))


def test_row_may_sample_up_to_max_model_len_tokens_and_no_more(config: ResolvedConfig) -> None:
    state = make_state(config, NUM_BLOCKS)
    tokens = list(range(config.max_model_len - 1))
    row = admitted(
        num_tokens=[29],
        num_prompt_tokens=[29],
        token_ids=tokens,
        num_blocks=[8],
        block_ids=range(8),
    )
    state.apply(plan_of(admitted_rows=row))
    plan = plan_of(slots=[2], num_new_tokens=[29], sampling_flags=b"\1")
    write_sampled(state, state.take(plan), [1])
    state.check()
    with pytest.raises(WorkerError, match="a row has room for its token"):
        prepare(state, plan_of(slots=[2], num_new_tokens=[1], sampling_flags=b"\1"))


def test_check_names_the_law_a_corrupt_table_breaks(config: ResolvedConfig) -> None:
    state = make_state(config, NUM_BLOCKS)
    state.check()
    state.block_table_SW[0, 0] = NUM_BLOCKS
    with pytest.raises(WorkerError, match="block tables name blocks of the cache"):
        state.check()
    state.block_table_SW[0, 0] = 0
    state.num_computed_tokens_S[0] = 1
    with pytest.raises(WorkerError, match="a free slot holds nothing"):
        state.check()
