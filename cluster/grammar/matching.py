"""Which tokens constrained outputs may contain next: a helper process follows them through their
grammars.

A matcher is a function of the known tokens of its sequence, so whatever happens to the helper, or
to the ranks, another one gets all tokens again and goes on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence as Seq
from pathlib import Path

from cluster.grammar.helper import Helper, HelperError, HelperLostError
from scheduler.errors import EaglerayError, RequestFailedError
from scheduler.sequence import Sequence

MASK_TIMEOUT_S = 5.0


class GrammarMatching:
    """`Grammars` by a helper process, which is started with the first constrained request. One
    thread, except for `start`.
    """

    def __init__(self, tokenizer: Path, vocab_size: int, eos_token_ids: Seq[int]) -> None:
        """See `Helper`."""
        self._helper = Helper(tokenizer, vocab_size, eos_token_ids)
        self._num_sent: dict[str, int] = {}  # output tokens that the helper knows
        self._ended: list[str] = []

    def start(self) -> None:
        """Start the helper if it does not run. Takes seconds, so it must not be called on the
        thread that runs steps. If it fails, the requests that need the helper fail later.
        """
        with contextlib.suppress(HelperError, HelperLostError):
            self._helper.start()

    def masks(self, sequences: list[Sequence]) -> list[bytes | EaglerayError | None]:
        """See `Grammars`."""
        try:
            return self._ask(sequences)
        except HelperLostError:
            return [self._alone(seq) for seq in sequences]

    def forget(self, request_id: str) -> None:
        """See `Grammars`."""
        if self._num_sent.pop(request_id, None) is not None:
            self._ended.append(request_id)

    def close(self) -> None:
        """End the helper."""
        self._helper.close()

    def _alone(self, seq: Sequence) -> bytes | EaglerayError | None:
        """After the helper was lost: ask for one sequence at a time. Sequences that lose it again
        are at fault.
        """
        try:
            return self._ask([seq])[0]
        except HelperLostError:
            return RequestFailedError(
                f"the grammar of request {seq.request_id} takes longer than {MASK_TIMEOUT_S:g} s"
                " per token; all other requests go on"
            )

    def _ask(self, sequences: list[Sequence]) -> list[bytes | EaglerayError | None]:
        wanted = []
        for seq in sequences:
            sent = self._num_sent.get(seq.request_id)
            grammar = seq.grammar if sent is None else b""
            new = seq.token_ids[seq.num_prompt_tokens + (sent or 0) :]
            wanted.append((seq.request_id, grammar, new))
        ended, self._ended = self._ended, []
        try:
            answers = self._helper.call(MASK_TIMEOUT_S, "masks", wanted, ended)
        except HelperLostError:
            self._num_sent.clear()
            raise
        except HelperError as error:  # it is not known how far the helper got
            self._helper.close()
            self._num_sent.clear()
            return [
                RequestFailedError(f"no mask for request {seq.request_id}: {error}")
                for seq in sequences
            ]
        for seq in sequences:
            self._num_sent[seq.request_id] = seq.num_output_tokens
        return [
            RequestFailedError(f"request {seq.request_id}: {answer}")
            if isinstance(answer, str)
            else answer
            for seq, answer in zip(sequences, answers, strict=True)
        ]
