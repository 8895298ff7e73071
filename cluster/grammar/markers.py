"""The markers of a Qwen3 answer, and the part of the answer at which a rendered prompt ends."""

from __future__ import annotations

import enum

THINK, END_THINK = "<think>", "</think>"
THINKING_SWITCH = "enable_thinking"  # the template's variable, where it can switch
LINE_ENDS = "\n\r"  # next to a marker, they are a part of the format and not of the text
CALL, END_CALL = "<tool_call>", "</tool_call>"


class AnswerState(enum.Enum):
    """The part of an answer that the next text belongs to."""

    UNDECIDED = "undecided"  # reasoning if it begins with <think>, otherwise content
    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"


def answer_state_after(prompt: str) -> AnswerState:
    """How an answer begins after a rendered prompt. A template may have opened the reasoning, or
    closed it because thinking is off.
    """
    tail = prompt.rstrip()
    if tail.endswith(END_THINK):
        return AnswerState.CONTENT
    return AnswerState.REASONING if tail.endswith(THINK) else AnswerState.UNDECIDED
