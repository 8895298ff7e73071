"""Which sequences may have killed the ranks, and which must fail for it.

A loss of the ranks, by a crash or otherwise, is a strike for the sequences that ran.
`CLEARING_TOKENS` tokens without a loss clear a sequence. With two strikes it is a suspect: it runs
alone until it is cleared, and begins when all steps of the one before it are read. Two more losses
alone without a token convict it, so a request that kills a rank whenever it runs fails alone, after
four losses. If it gets tokens between its losses (its prompt runs, its decodes kill), four more
convict it: a rank that dies by chance hits a sequence again before its next few tokens far more
often than before its next one. Whoever asks for the same, such as another output of the same
request, is convicted with it.

A suspect whose mask is late gives up its turn and then runs beside others. Losses there may be
theirs, so only those alone convict. After two beside others it keeps its turn: the others wait for
its mask, unless that takes too long.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from scheduler.sequence import Sequence, SequenceStatus

CLEARING_TOKENS = 4
# Losses in a row, with fewer than `CLEARING_TOKENS` tokens from one to the next; without any.
SUSPECT_STRIKES, FAIL_STRIKES, FAIL_STRIKES_WITHOUT_TOKEN = 2, 6, 4
KEEP_TURN_STRIKES = 2  # of a suspect beside others, from which on it keeps its turn
# How often it is asked for, twice every 0.03 s, until it gives up that turn too: about a minute.
MAX_IDLE_POLLS = 4000


class Suspects:
    """The sequences that have to run alone, in order of arrival. Counts the strikes of all; whoever
    calls it moves sequences between the queues.
    """

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self._num_idle_polls = 0  # of one that keeps its turn

    @property
    def first(self) -> Sequence | None:
        """The one whose turn it is."""
        return self.sequences[0] if self.sequences else None

    def strike(self, in_flight_sequences: list[Sequence]) -> list[Sequence]:
        """Count a strike for sequences whose steps were lost. Returns those that this convicts."""
        # Its turn begins when no step is in flight, so then no other was in these.
        is_alone = in_flight_sequences == [self.first]
        for seq in in_flight_sequences:
            if _is_cleared(seq):
                _clear(seq)
            if len(seq.token_ids) > seq.num_tokens_at_strike:
                seq.strikes_without_token = 0
            if is_alone or seq.strikes < SUSPECT_STRIKES:
                seq.strikes += 1
                seq.strikes_without_token += 1
            else:
                seq.strikes_beside_others += 1
            seq.num_tokens_at_strike = len(seq.token_ids)
        convicted = [
            seq
            for seq in in_flight_sequences
            if seq.strikes_without_token >= FAIL_STRIKES_WITHOUT_TOKEN
            or seq.strikes >= FAIL_STRIKES
        ]
        others = [seq for seq in self.sequences if seq not in convicted]
        return convicted + [
            seq for seq in others if any(_asks_the_same(seq, other) for other in convicted)
        ]

    def start_epoch(self, unfinished_sequences: Iterable[Sequence]) -> None:
        """Those with two strikes will run alone."""
        unfinished_sequences = list(unfinished_sequences)
        for seq in filter(_is_cleared, unfinished_sequences):
            _clear(seq)
        self.sequences = [seq for seq in unfinished_sequences if seq.strikes >= SUSPECT_STRIKES]

    def drop(self, seq: Sequence) -> None:
        """Forget a sequence that has ended. Does nothing for one that is not suspect."""
        if seq in self.sequences:
            self.sequences.remove(seq)

    def pop_idle(self) -> Sequence | None:
        """Take away the first suspect if it waits for a mask: nobody waits for it, unless it has
        been in two losses beside others, and then not for ever. None if not.
        """
        seq = self.first
        if seq is None or not seq.waits_for_mask:
            self._num_idle_polls = 0
            return None
        if seq.strikes_beside_others >= KEEP_TURN_STRIKES:
            self._num_idle_polls += 1
            if self._num_idle_polls <= MAX_IDLE_POLLS:
                return None
            self._num_idle_polls = 0
        return self.sequences.pop(0)

    def pop_cleared(self) -> Sequence | None:
        """Take away the first suspect if it has ended or got enough tokens. None if not."""
        seq = self.first
        if seq is None or (seq.status is not SequenceStatus.FINISHED and not _is_cleared(seq)):
            return None
        _clear(seq)
        return self.sequences.pop(0)


def _is_cleared(seq: Sequence) -> bool:
    """Whether it has come far enough since its last strike for that to count no more."""
    return len(seq.token_ids) - seq.num_tokens_at_strike >= CLEARING_TOKENS


def _asks_the_same(seq: Sequence, other: Sequence) -> bool:
    """Whether both ask for the same, but for the seed, whatever they have got. Of the outputs of a
    request, one alone asks for the scores of the prompt.
    """
    sampling = dataclasses.replace(
        seq.sampling,
        seed=other.sampling.seed,
        prompt_logprobs=other.sampling.prompt_logprobs,
    )
    num_prompt_tokens = seq.num_prompt_tokens
    return (sampling, num_prompt_tokens, seq.structural_tag) == (
        other.sampling,
        other.num_prompt_tokens,
        other.structural_tag,
    ) and seq.token_ids[:num_prompt_tokens] == other.token_ids[:num_prompt_tokens]


def _clear(seq: Sequence) -> None:
    seq.strikes = seq.strikes_without_token = seq.strikes_beside_others = 0
