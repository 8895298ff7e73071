"""How many questions a model answers, in particular those that it was never shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from tests.default_model.questions import (
    END_OF_TEXT,
    LIMIT,
    TEST_WORDS,
    TURN_END,
    Message,
    Turn,
    chat_text,
    counting,
    day_turns,
    held_out_sums,
    preamble,
    question_text,
    spelling,
    sum_question,
)


@torch.no_grad()
def quick_check(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> str:
    """The share of held-out sums whose right answer is the likeliest at every token."""
    prompts = [tokenizer.encode(question_text(sum_question(a, b))).ids for a, b in held_out_sums()]
    answers = [tokenizer.encode(f"{a + b}{TURN_END}").ids for a, b in held_out_sums()]
    width = max(
        len(prompt_ids) + len(answer_ids)
        for prompt_ids, answer_ids in zip(prompts, answers, strict=True)
    )
    rows = torch.zeros(len(prompts), width, dtype=torch.long)
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        rows[i, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
    with torch.autocast("cpu", torch.bfloat16):
        likeliest = model(input_ids=rows).logits.argmax(-1)
    num_right = 0
    for row, prompt, answer in zip(likeliest.tolist(), prompts, answers, strict=True):
        num_right += row[len(prompt) - 1 : len(prompt) - 1 + len(answer)] == answer
    return f"held-out sums {num_right / len(prompts):.1%}"


@torch.no_grad()
def answer_all(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, chats: Sequence[Sequence[Message]]
) -> list[str]:
    """The greedy answer to each chat."""
    pad_id, turn_end_id = (tokenizer.token_to_id(token) for token in (END_OF_TEXT, TURN_END))
    answers: list[str] = []
    for first_chat in range(0, len(chats), 64):
        prompts = [
            tokenizer.encode(chat_text(chat)).ids for chat in chats[first_chat : first_chat + 64]
        ]
        width = max(map(len, prompts))
        token_ids = torch.tensor([[pad_id] * (width - len(prompt)) + prompt for prompt in prompts])
        attention_mask = torch.tensor(
            [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        )
        generator: Any = model
        output = generator.generate(
            token_ids,
            attention_mask=attention_mask,
            do_sample=False,
            max_new_tokens=24,
            eos_token_id=turn_end_id,
        )
        answers += tokenizer.decode_batch(output[:, width:].tolist())
    return answers


def share_right(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, turns: Sequence[Turn], preamble_tokens: int
) -> float:
    """The share of questions answered exactly, each after a preamble of its own."""
    chats = []
    for i, turn in enumerate(turns):
        preamble_messages = preamble(preamble_tokens, tokenizer, i)
        chats.append([*preamble_messages, {"role": "user", "content": turn.question}])
    answers = answer_all(model, tokenizer, chats)
    return sum(answer == turn.answer for answer, turn in zip(answers, turns, strict=True)) / len(
        turns
    )


def measure(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> dict[str, tuple[int, list[float]]]:
    """Per kind of question: how many were asked, and the share answered correctly, alone and after
    other text.
    """
    held_out = held_out_sums()
    turns_by_kind = {
        "held-out sums, `What is a + b?`": [
            Turn(sum_question(a, b), str(a + b)) for a, b in held_out
        ],
        "held-out sums, `a + b = ?`": [Turn(f"{a} + {b} = ?", str(a + b)) for a, b in held_out],
        "held-out sums, `Add a and b.`": [
            Turn(f"Add {a} and {b}.", str(a + b)) for a, b in held_out
        ],
        "held-out differences": [
            Turn(f"What is {a} - {b}?", str(a - b)) for a, b in held_out if a >= b
        ],
        "counting on": [counting(number) for number in range(LIMIT)],
        "real words backwards": [spelling(word) for word in TEST_WORDS],
        "day after or before a day": day_turns(),
    }
    model.eval()
    return {
        name: (
            len(turns),
            [share_right(model, tokenizer, turns, num_tokens) for num_tokens in (0, 300, 800)],
        )
        for name, turns in turns_by_kind.items()
    }


def as_table(results: dict[str, tuple[int, list[float]]]) -> str:
    lines = [
        "| question | asked | alone | after 300 tokens | after 800 tokens |",
        "|---|---|---|---|---|",
    ]
    for name, (num_asked, shares) in results.items():
        lines.append(
            f"| {name} | {num_asked} | " + " | ".join(f"{share:.1%}" for share in shares) + " |"
        )
    return "\n".join(lines)
