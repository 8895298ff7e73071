"""A model without arithmetic that runs step plans as a rank does, and whose output reveals every
wrong read.

A cell of the fake KV cache holds the *digest* of the prefix that ends there, as the keys and values
of a real model depend on all tokens before them. A step first stores the cells of all its rows,
then every row reads its whole context through its block table (a layer stores before it attends).
The next token is a hash of what was read and of the request's seed, so aliasing, a stale hit or an
early release changes it; and a row that has read something wrong stores wrong cells from then on.
Tokens are kept per slot, as on the device: plans do not contain sampled tokens.

`FakeRank` also checks for errors that a real rank would not notice: in released and admitted slots,
in who writes to which cell, in the table width, in the chunks that sample. The cache salt, which
follows from the seed (`salt_of`), is part of a digest, so that sharing across salts is noticed too.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

import xxhash

from scheduler.engine import MASK_LATE, MaskAnswer
from scheduler.messages import (
    AdmittedRows,
    PromptLogprobs,
    StepMask,
    StepPlan,
    StepResult,
    int32_array,
)
from scheduler.params import ResolvedSampling
from scheduler.sequence import Sequence

VOCAB_SIZE = 1000
SALTS = ("", "north", "south", "a salt of sixteen")
DIGEST_BYTES = 8
_MASK = 2**64 - 1


def salt_of(seed: int) -> str:
    """The cache salt that a request of this seed must carry."""
    return SALTS[seed % len(SALTS)]


def structural_tag_of(seed: int) -> bytes:
    """What stands for the structural tag of a request of this seed; only large seeds have one."""
    return b"fake" if seed >= 650 * len(SALTS) else b""


def prompt_logprobs_of(seed: int) -> int:
    """How many alternatives a request of this seed asks for in its prompt: 0, or none at all."""
    return 0 if seed // len(SALTS) % 7 == 0 else -1


def score(context: bytes, token: int) -> int:
    """What stands for the log probability of a token: it depends on all that was read before it."""
    return xxhash.xxh32_intdigest(context, token) >> 1


def prompt_scores(prompt: list[int], seed: int) -> list[int]:
    """The scores of all tokens of a prompt but the first, in an undisturbed run."""
    digests = array("Q")
    extend_digests(digests, prompt, seed)
    context = digests.tobytes()
    return [
        score(context[: place * DIGEST_BYTES], prompt[place]) for place in range(1, len(prompt))
    ]


def mask_bytes(vocab_size: int) -> int:
    """Bytes of one row's mask."""
    return 4 * -(-vocab_size // 32)


def allowed(token_ids: Iterable[int]) -> bytes | None:
    """The fake grammar: the mask after these tokens, which depends on each of them; None where
    everything is allowed.
    """
    kind = xxhash.xxh32_intdigest(array("i", token_ids).tobytes()) % 3
    return None if kind == 2 else _EVERY_SECOND[kind]


_EVERY_SECOND = tuple(
    bytes([pattern]) * mask_bytes(VOCAB_SIZE) for pattern in (0b01010101, 0b10101010)
)


def nearest_allowed(token: int, mask: bytes | None) -> int:
    """The token, or the next one that a mask allows."""
    while mask is not None and not mask[token // 8] >> token % 8 & 1:
        token = (token + 1) % VOCAB_SIZE
    return token


class FakeGrammars:
    """`Grammars` of the fake grammar. With an `rng`, an answer is late with `late_probability` each
    time it is asked for, until it has been given once, and a third of the requests are not quick.
    """

    def __init__(self, rng: Random | None = None, late_probability: float = 0.0) -> None:
        self.rng = rng
        self.late_probability = late_probability
        self.known: set[str] = set()
        self.num_late = 0
        self._given: dict[str, int] = {}  # length of the sequence by request id

    def masks(self, sequences: list[Sequence], limit_s: float) -> list[MaskAnswer]:
        assert all(seq.structural_tag for seq in sequences), sequences
        self.known.update(seq.request_id for seq in sequences)
        return [self._mask(seq) for seq in sequences]

    def is_quick(self, seq: Sequence) -> bool:
        if self.rng is None or not self.late_probability:
            return True
        return xxhash.xxh32_intdigest(seq.request_id.encode()) % 3 > 0

    def _mask(self, seq: Sequence) -> MaskAnswer:
        length = len(seq.token_ids)
        is_new = self._given.get(seq.request_id) != length
        if is_new and self.rng is not None and self.rng.random() < self.late_probability:
            self.num_late += 1
            return MASK_LATE
        self._given[seq.request_id] = length
        return allowed(seq.token_ids)

    def forget(self, request_id: str) -> None:
        self.known.discard(request_id)
        self._given.pop(request_id, None)


class Lane:
    """The plans of a fake rank, in order: one with masked rows waits for its mask."""

    def __init__(self, rank: FakeRank) -> None:
        self.rank = rank
        self.waiting: deque[StepPlan] = deque()
        self.results: deque[StepResult] = deque()
        self._masks: dict[int, StepMask] = {}

    def launch(self, plan: StepPlan) -> None:
        self.waiting.append(plan)
        self._run_ready()

    def put_mask(self, step_mask: StepMask) -> None:
        assert step_mask.step_id not in self._masks, f"two masks for step {step_mask.step_id}"
        self._masks[step_mask.step_id] = step_mask
        self._run_ready()

    def clear(self) -> None:
        """The epoch has ended."""
        for each in (self.waiting, self.results, self._masks):
            each.clear()

    def _run_ready(self) -> None:
        waiting = self.waiting
        while waiting and (not waiting[0].mask_flags or waiting[0].step_id in self._masks):
            plan = waiting.popleft()
            self.results.append(self.rank.run(plan, self._masks.pop(plan.step_id, None)))


def extend_digests(digests: array[int], token_ids: list[int], seed: int) -> None:
    """Append the digest of each prefix that ends in one of `token_ids`; `digests` holds the
    preceding ones.
    """
    digest = digests[-1] if digests else seed % len(SALTS)
    for token in token_ids:
        digest = ((digest ^ token) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _MASK
        digest ^= digest >> 29
        digests.append(digest)


def next_token(context: bytes, seed: int) -> int:
    """The token after a context, given the cells that were read."""
    return xxhash.xxh3_64_intdigest(context, seed) % VOCAB_SIZE


def generate(
    token_ids: list[int], num_prompt_tokens: int, sampling: ResolvedSampling, max_total_tokens: int
) -> tuple[list[int], str]:
    """All tokens of an undisturbed run and why it ends. `token_ids` may hold generated tokens
    already.
    """
    tokens, digests = list(token_ids), array("Q")
    extend_digests(digests, tokens, sampling.seed)
    most = min(max_total_tokens, num_prompt_tokens + sampling.max_tokens)
    while True:
        if len(tokens) > num_prompt_tokens and tokens[-1] in sampling.stop_token_ids:
            return tokens, "stop"
        if len(tokens) >= most:
            return tokens, "length"
        token = next_token(digests.tobytes(), sampling.seed)
        tokens.append(
            nearest_allowed(token, allowed(tokens) if structural_tag_of(sampling.seed) else None)
        )
        extend_digests(digests, tokens[-1:], sampling.seed)


@dataclass(slots=True)
class Row:
    """One slot of the fake batch state. `digests` is what a correct cache holds for every token."""

    tokens: list[int]
    num_prompt_tokens: int
    num_stored_tokens: int
    num_computed_tokens: int
    digests: array[int]
    block_table: list[int]
    sampling: ResolvedSampling


class FakeRank:
    """Slots and cells. `run` executes a plan at once; callers that want late results hold the
    results back.
    """

    def __init__(
        self, num_blocks: int, block_size: int, max_num_seqs: int, max_model_len: int
    ) -> None:
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.table_width = -(-max_model_len // block_size)
        self.rows: list[Row | None] = [None] * max_num_seqs
        self.blocks = [bytearray() for _ in range(num_blocks)]  # cells, appended in order
        self.num_holders = [0] * num_blocks  # number of tables that name a block
        self.epoch = 0
        self.num_steps = 0  # ids of this epoch
        self.num_stored_tokens = 0
        self.num_written_tokens = 0
        # Step, block, and the cells in it, of what was written since the last result was read.
        self.unread_writes: deque[tuple[int, int, slice]] = deque()

    def note_read(self, step_id: int) -> None:
        """The result of a step was read."""
        while self.unread_writes and self.unread_writes[0][0] <= step_id:
            self.unread_writes.popleft()

    def restart(self, rng: Random, *, cache_survives: bool = False) -> None:
        """A new epoch: no rows, and arbitrary content in the cache, or in a part of the cells that
        were written in steps whose result was not read.
        """
        self.rows = [None] * len(self.rows)
        self.num_holders = [0] * len(self.blocks)
        for _, block_id, cells in self.unread_writes if cache_survives else ():
            if rng.random() < 0.5:
                num_bytes = len(self.blocks[block_id][cells])
                self.blocks[block_id][cells] = rng.randbytes(num_bytes)
        if not cache_survives:
            for block_id in range(len(self.blocks)):
                self.blocks[block_id] = bytearray(rng.randbytes(self.block_size * DIGEST_BYTES))
        self.unread_writes.clear()
        self.epoch += 1
        self.num_steps = 0

    def run(self, plan: StepPlan, step_mask: StepMask | None = None) -> StepResult:
        """Execute a plan at once."""
        assert (step_mask is not None) == bool(plan.mask_flags), f"{step_mask} for {plan}"
        masks = (
            dict(zip(step_mask.rows, step_mask.masks, strict=True)) if step_mask is not None else {}
        )
        assert (plan.step_id, plan.epoch) == (
            self.num_steps,
            self.epoch,
        ), f"step {plan.step_id} out of order"
        self.num_steps += 1
        for slot in plan.released_slots:
            self._release(slot)
        # Before the admitted rows, which may share a block that is appended and filled in this
        # step.
        for slot, block_id in zip(plan.appended_slots, plan.appended_block_ids, strict=True):
            self._append(self._row(slot), block_id)
        if plan.admitted_rows is not None:
            self._admit(plan.admitted_rows)
        assert len(set(plan.slots)) == len(plan.slots) > 0, (
            f"a slot twice in a step, or none: {plan.slots}"
        )
        batch = [self._row(slot) for slot in plan.slots]
        starts = [row.num_computed_tokens for row in batch]
        for row, num_new in zip(batch, plan.num_new_tokens, strict=True):
            self._store(row, num_new)
        sampled, scores = int32_array(), []
        is_scored = plan.scoring_flags or bytes(len(batch))
        is_masked = plan.mask_flags or bytes(len(batch))
        for row, start, samples, masked, scored in zip(
            batch, starts, plan.sampling_flags, is_masked, is_scored, strict=True
        ):
            context = self._attend(row, start)
            if scored:
                scores.append(self._score(row, start, context))
            row_mask = masks.pop(len(sampled), None) if samples else None
            assert masked or row_mask is None, f"a mask for a row without a grammar: {row}"
            assert samples == (row.num_computed_tokens == len(row.tokens)), (
                f"samples {samples} in the wrong chunk: {row}"
            )
            if samples:
                sampled.append(self._sample(row, context, row_mask))
        assert not masks, f"masks for rows that do not sample: {masks.keys()}"
        seconds = {"forward": 0.05 + 0.01 * sum(plan.num_new_tokens)}
        return StepResult(
            step_id=plan.step_id,
            epoch=plan.epoch,
            token_ids=sampled,
            prompt_logprobs=tuple(scores),
            seconds=seconds,
        )

    # -- what changed ------------------------------------------------------------------------------

    def _row(self, slot: int) -> Row:
        row = self.rows[slot]
        assert row is not None, f"slot {slot} holds no row"
        return row

    def _release(self, slot: int) -> None:
        for block_id in self._row(slot).block_table:
            self.num_holders[block_id] -= 1
        self.rows[slot] = None

    def _admit(self, rows: AdmittedRows) -> None:
        first_token = first_block = 0
        for i, slot in enumerate(rows.slots):
            assert self.rows[slot] is None, f"slot {slot} is given away while it is held"
            tokens = rows.token_ids[first_token : first_token + rows.num_tokens[i]].tolist()
            blocks = rows.block_ids[first_block : first_block + rows.num_blocks[i]]
            first_token += len(tokens)
            first_block += len(blocks)
            row = Row(
                tokens=tokens,
                num_prompt_tokens=rows.num_prompt_tokens[i],
                num_stored_tokens=rows.num_stored_tokens[i],
                num_computed_tokens=min(rows.num_stored_tokens[i], len(tokens) - 1),
                digests=array("Q"),
                block_table=[],
                sampling=rows.sampling[i],
            )
            extend_digests(row.digests, tokens, row.sampling.seed)
            assert 0 <= row.num_stored_tokens <= len(tokens)
            self.num_stored_tokens += row.num_stored_tokens
            self.rows[slot] = row
            self._fill_table(row, blocks)
        assert (first_token, first_block) == (
            len(rows.token_ids),
            len(rows.block_ids),
        ), "flat arrays of other lengths"

    def _fill_table(self, row: Row, blocks: array[int]) -> None:
        num_shared, num_kept = divmod(row.num_stored_tokens, self.block_size)
        for block_id in blocks[:num_shared]:
            self.num_holders[block_id] += 1
            row.block_table.append(block_id)
        for block_id in blocks[num_shared:]:
            cells = self.blocks[block_id][: num_kept * DIGEST_BYTES]
            self._append(row, block_id)
            if num_kept:  # the row was here before, and goes on in the block that it was filling
                assert len(cells) == num_kept * DIGEST_BYTES, f"cells are missing: {row}"
                self.blocks[block_id] += cells
                num_kept = 0

    def _append(self, row: Row, block_id: int) -> None:
        """Add a block for new content, which no other table may name."""
        assert self.num_holders[block_id] == 0, (
            f"block {block_id} is handed out while somebody holds it"
        )
        assert len(row.block_table) < self.table_width, (
            f"a table wider than {self.table_width} blocks: {row}"
        )
        self.num_holders[block_id] = 1
        self.blocks[block_id] = bytearray()
        row.block_table.append(block_id)

    # -- what runs ---------------------------------------------------------------------------------

    def _store(self, row: Row, num_new: int) -> None:
        """Write the cells of a chunk, except those in shared blocks."""
        start, end = row.num_computed_tokens, row.num_computed_tokens + num_new
        assert num_new >= 1 and end <= len(row.tokens), f"{num_new} new tokens: {row}"
        assert end <= len(row.block_table) * self.block_size, (
            f"{num_new} new tokens beyond the blocks: {row}"
        )
        position = max(start, row.num_stored_tokens)
        self.num_written_tokens += end - position
        while position < end:
            index, offset = divmod(position, self.block_size)
            upto = min(end, (index + 1) * self.block_size)
            block = self.blocks[row.block_table[index]]
            assert len(block) == offset * DIGEST_BYTES, (
                f"cell {offset} of block {row.block_table[index]} written out of turn, or twice:"
                f" {row}"
            )
            written = row.digests[position:upto].tobytes()
            cells = slice(len(block), len(block) + len(written))
            self.unread_writes.append((self.num_steps - 1, row.block_table[index], cells))
            block += written
            position = upto
        row.num_computed_tokens = end

    def _attend(self, row: Row, start: int) -> bytes:
        """Read the whole context of a row. A wrong read corrupts what the row has stored."""
        blocks = self.blocks
        num_bytes = row.num_computed_tokens * DIGEST_BYTES
        context = b"".join([blocks[block_id] for block_id in row.block_table])[:num_bytes]
        if context != row.digests.tobytes()[:num_bytes]:
            self._spoil(row, start, xxhash.xxh3_64_digest(context))
        return context

    def _spoil(self, row: Row, start: int, wrong: bytes) -> None:
        for position in range(max(start, row.num_stored_tokens), row.num_computed_tokens):
            index, offset = divmod(position, self.block_size)
            first = offset * DIGEST_BYTES
            self.blocks[row.block_table[index]][first : first + DIGEST_BYTES] = wrong

    def _score(self, row: Row, start: int, context: bytes) -> PromptLogprobs:
        """The scores of the prompt tokens that follow those of a chunk."""
        end = min(row.num_computed_tokens + 1, row.num_prompt_tokens)
        assert row.sampling.prompt_logprobs == 0 and start + 1 < end, f"nothing to score: {row}"
        ranks = int32_array(
            score(context[: place * DIGEST_BYTES], row.tokens[place])
            for place in range(start + 1, end)
        )
        return PromptLogprobs(
            first_position=start + 1,
            num_top_logprobs=0,
            logprobs=array("f", bytes(4 * len(ranks))),
            token_ranks=ranks,
            top_token_ids=int32_array(),
            top_logprobs=array("f"),
        )

    def _sample(self, row: Row, context: bytes, mask: bytes | None) -> int:
        token = nearest_allowed(next_token(context, row.sampling.seed), mask)
        row.tokens.append(token)
        extend_digests(row.digests, [token], row.sampling.seed)
        num_output = len(row.tokens) - row.num_prompt_tokens
        assert num_output <= row.sampling.max_tokens, (
            f"ran beyond max_tokens {row.sampling.max_tokens}: {row}"
        )
        assert len(row.tokens) <= self.max_model_len, (
            f"ran beyond max_model_len {self.max_model_len}: {row}"
        )
        return token
