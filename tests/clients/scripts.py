"""What the scripted engine answers: what the last user message says it should.

A message may hold directives: `[[call NAME {"a": 1}]]` calls a tool, `[[say TEXT]]` is the answer.
After a message with directives come as many calls as it names, one per turn, then the answer. Calls
of tools that are not offered are left out: programs ask other questions beside, such as for a
title.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from cluster.client.tokenizer import Tokenizer
from configs.paths import DEFAULT_MODEL_DIR
from scheduler.messages import Request

THOUGHT = "The numbers are small."
_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|\Z)", re.DOTALL)
_CALL = re.compile(r"\[\[call (\S+) (\{.*?\})\]\]", re.DOTALL)
_SAY = re.compile(r"\[\[say (.*?)\]\]", re.DOTALL)
_OFFERED = re.compile(r'^\{"type": "function", "function": \{"name": "([^"]+)"', re.MULTILINE)
_NO_THINKING = """
    {%- if enable_thinking is defined and enable_thinking is false -%}
        {{- '<think>\\n\\n</think>\\n\\n' -}}
    {%- endif -%}
"""


def write_tokenizer(folder: Path) -> Tokenizer:
    """The default model's tokenizer with a template that, as Qwen3's, ends the thinking if that is
    off.
    """
    for path in Path(DEFAULT_MODEL_DIR).glob("*.json"):
        shutil.copy(path, folder)
    template = (Path(DEFAULT_MODEL_DIR) / "chat_template.jinja").read_text()
    begin = "{{- '<|im_start|>assistant\\n' -}}\n"
    assert template.count(begin) == 1
    changed = template.replace(begin, begin + _NO_THINKING)
    (folder / "chat_template.jinja").write_text(changed)
    return Tokenizer(folder)


def answer(prompt: str) -> str:
    """The text that follows a rendered prompt."""
    thought = "" if prompt.endswith("</think>\n\n") else f"<think>\n{THOUGHT}\n</think>\n\n"
    if not prompt.endswith(("assistant\n", "</think>\n\n")):
        return " and so on."  # a prompt that is no chat
    turns = [(role, text) for role, text in _TURN.findall(prompt)][:-1]
    asked, num_answers = _last_question(turns)
    offered = _offered(prompt)
    calls = [(name, arguments) for name, arguments in _CALL.findall(asked) if name in offered]
    if num_answers < len(calls):
        name, arguments = calls[num_answers]
        call = f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}'
        return f"{thought}Let me see.\n<tool_call>\n{call}\n</tool_call>"
    said = _SAY.findall(asked)
    return thought + (said[-1] if said else "Well.")


def script(tokenizer: Tokenizer, request: Request) -> str:
    """`answer` for a scripted engine."""
    ids = request.token_ids[: request.num_prompt_tokens]
    return answer(b"".join(map(tokenizer.token_bytes, ids)).decode(errors="replace"))


def _last_question(turns: list[tuple[str, str]]) -> tuple[str, int]:
    """The last message of a user that has directives, and how many answers came after it."""
    num_answers = 0
    for role, text in reversed(turns):
        if role == "user" and (_SAY.search(text) or _CALL.search(text)):
            return text, num_answers
        num_answers += role == "assistant"
    return "", num_answers


def _offered(prompt: str) -> set[str]:
    """The names of the tools that are offered."""
    return set(_OFFERED.findall(prompt))
