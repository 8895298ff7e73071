"""What a step costs, and how many prompt tokens it may hold beside sequences that decode.

A sequence that decodes waits for the whole step, including the prompts of others. What a step costs
differs by processor and model, so it is learned from the steps that have run:

    seconds = base(rows that decode) + slope * prompt tokens
    longest = max_decode_slowdown * base(usual rows)
    budget  = (longest - base) / slope, or no limit for one token in 128

`base` is the median of the last steps without prompts, by the number of rows; `slope` that of the
steps with prompts, after `base` is taken off. While prompts arrive there may be no step without
them to learn from, and `base` grows with the rows: growth that goes unnoticed would be mistaken for
the cost of the prompts. So where no number of rows near this one has run without prompts, a step
gets few prompt tokens, and its time without them is taken as a first guess of `base`.

The usual rows are the mean of the last few hundred steps. A reader notices the longest gaps, so
while fewer rows decode than usual prompts may lengthen a step to what is allowed beside more, and
beside more rows than usual they get less. After a sudden growth the present rows count.

A prompt that comes beside few rows is worth more than their smooth streams: computed at once, it
delays one token of each of them, once. So one token in `TOKENS_PER_LONG_GAP` may wait for a step
without that limit, fewer than the hundredth above the 99th percentile. Every row that decodes
counts towards the next such step, and each row of such a step costs that many; what is saved is
enough for `MAX_LONG_GAP_ROWS` rows at the most, so the limit holds beside more of them. Under load
there are more, and nothing changes.

Has no clock: seconds come with the results, so a replay decides the same.
"""

from __future__ import annotations

from collections import deque
from statistics import median

MIN_PROMPT_TOKENS = 32  # per step, so that prompts make progress whatever they cost
TOKENS_PER_LONG_GAP = 128
MAX_LONG_GAP_ROWS = 2
_NUM_REMEMBERED_STEPS = 9
_NEAR_RATIO = 1.5  # numbers of rows whose ratio is at most this are near each other
_MEAN_WINDOW_STEPS = 256


class Pace:
    """Learns from `observe`, answers `budget` and `min_duration_s`; `account_for_step` is told what
    was planned. With `max_decode_slowdown` 0 there is no limit.
    """

    def __init__(self, max_decode_slowdown: float, max_num_batched_tokens: int) -> None:
        self.max_decode_slowdown = max_decode_slowdown
        self.max_num_batched_tokens = max_num_batched_tokens
        self._decode_s_by_rows: dict[int, deque[float]] = {}  # of the last steps, without prompts
        self._prompt_token_s: deque[float] = deque(maxlen=_NUM_REMEMBERED_STEPS)
        self._base_s_by_rows: dict[int, float] = {}
        self._usual_num_rows = 0.0  # that decode
        self._num_saved_tokens = 0  # that decoded, less what long gaps have cost; bounded

    def observe(self, num_decoding: int, num_prompt_tokens: int, seconds: float) -> None:
        """Learn from a step that has taken `seconds`: `num_decoding` rows that run one token each,
        and others with `num_prompt_tokens`.
        """
        if seconds <= 0:
            return
        if not num_prompt_tokens:
            self._remember_base(num_decoding, seconds)
        elif (
            num_prompt_tokens <= MIN_PROMPT_TOKENS
            and self._prompt_token_s
            and self._is_new_row_count(num_decoding)
        ):
            decode_s = seconds - num_prompt_tokens * median(self._prompt_token_s)
            self._remember_base(num_decoding, max(seconds / 2, decode_s))
        else:
            prompts_s = seconds - (self.base_s(num_decoding) or 0.0)
            self._prompt_token_s.append(max(0.0, prompts_s) / num_prompt_tokens)

    def _remember_base(self, num_decoding: int, seconds: float) -> None:
        recent_decode_s = self._decode_s_by_rows.setdefault(
            num_decoding, deque(maxlen=_NUM_REMEMBERED_STEPS)
        )
        recent_decode_s.append(seconds)
        self._base_s_by_rows[num_decoding] = median(recent_decode_s)

    def _is_new_row_count(self, num_decoding: int) -> bool:
        """Whether rows decode, and no number of them near this one has run without prompts."""
        return num_decoding > 0 and not any(
            num_decoding <= _NEAR_RATIO * num_rows and num_rows <= _NEAR_RATIO * num_decoding
            for num_rows in self._base_s_by_rows
        )

    def base_s(self, num_decoding: int) -> float | None:
        """Seconds that a step takes with this many decoding rows and no prompts, from the nearest
        number that has run. None if none has, or no row decodes.
        """
        if not num_decoding or not self._base_s_by_rows:
            return None
        if num_decoding in self._base_s_by_rows:
            return self._base_s_by_rows[num_decoding]
        return self._base_s_by_rows[
            min(self._base_s_by_rows, key=lambda num_rows: abs(num_rows - num_decoding))
        ]

    def budget(self, num_decoding: int) -> int:
        """The most prompt tokens that a step may hold beside this many decoding rows."""
        if num_decoding * TOKENS_PER_LONG_GAP <= self._num_saved_tokens:
            return self.max_num_batched_tokens
        return self._smooth_budget(num_decoding)

    def account_for_step(self, num_decoding: int, num_prompt_tokens: int) -> None:
        """Account for a planned step: rows that decode are saved up, or wait for whole prompts."""
        if num_prompt_tokens and num_prompt_tokens > self._smooth_budget(num_decoding):
            num_spent_tokens = num_decoding * TOKENS_PER_LONG_GAP
            self._num_saved_tokens = max(0, self._num_saved_tokens - num_spent_tokens)
        else:
            max_saved_tokens = MAX_LONG_GAP_ROWS * TOKENS_PER_LONG_GAP
            self._num_saved_tokens = min(max_saved_tokens, self._num_saved_tokens + num_decoding)
        if num_decoding:
            self._usual_num_rows = self._usual_num_rows or num_decoding
            self._usual_num_rows += (num_decoding - self._usual_num_rows) / _MEAN_WINDOW_STEPS

    def _smooth_budget(self, num_decoding: int) -> int:
        """The most prompt tokens with which a step takes no longer than usual ones may."""
        if not self.max_decode_slowdown or not num_decoding or not self._prompt_token_s:
            return self.max_num_batched_tokens
        base_s = self.base_s(num_decoding)
        if base_s is None or self._is_new_row_count(num_decoding):
            return min(self.max_num_batched_tokens, MIN_PROMPT_TOKENS)
        allowed_prompt_s = self._max_step_s(num_decoding) - base_s
        token_s = median(self._prompt_token_s)
        if not token_s or self.max_num_batched_tokens * token_s <= allowed_prompt_s:
            return self.max_num_batched_tokens
        return min(
            self.max_num_batched_tokens, max(MIN_PROMPT_TOKENS, int(allowed_prompt_s / token_s))
        )

    def _max_step_s(self, num_decoding: int) -> float:
        """Seconds that a step with so many decoding rows may take."""
        reference_num_rows = max(self._usual_num_rows, num_decoding / _NEAR_RATIO)
        return self.max_decode_slowdown * (self.base_s(max(1, round(reference_num_rows))) or 0.0)

    def min_duration_s(self, num_decoding: int, num_prompt_tokens: int) -> float:
        """Seconds that a step with these rows and tokens takes at the least, judging by the last
        ones. 0 if too little has run to tell.
        """
        row_counts = [num_rows for num_rows in self._decode_s_by_rows if num_rows <= num_decoding]
        if num_decoding and not row_counts:
            return 0.0
        if num_prompt_tokens and not self._prompt_token_s:
            return 0.0
        base_s = min(self._decode_s_by_rows[max(row_counts)]) if num_decoding else 0.0
        return base_s + num_prompt_tokens * min(self._prompt_token_s, default=0.0)
