"""The questions that the default model answers, which of them it was never shown, and their form.

There are five kinds: a sum of two numbers under 100, a difference, counting on, a word spelled
backwards, and the day after (or before) a day. They are asked in chat of Qwen's form. About one
unordered pair of numbers in twenty is held out, chosen by a hash of the pair. Its sums and its
difference never appear in the training text.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass
from typing import Protocol

LIMIT = 100  # questions are about the numbers 0 to LIMIT - 1
HELD_OUT_ONE_IN = 20
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
# Real words, used only for measuring; training uses made-up ones.
TEST_WORDS = re.findall(
    r"\w+",
    "cat dog sun tree fish bird moon lamp river stone bread chair table house horse water "
    "light paper green black seven music ocean tiger garden winter summer bridge window "
    "pencil silver planet flower orange rabbit",
)
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
Message = dict[str, str]


class Encoder(Protocol):
    """Anything that turns text into something with a length: either library's tokenizer."""

    def encode(self, text: str, /) -> Sized: ...


@dataclass(frozen=True)
class Turn:
    """A question and its one right answer."""

    question: str
    answer: str


def is_held_out(a: int, b: int) -> bool:
    """Whether the pair, in either order, is kept out of the training text."""
    pair_key = f"{min(a, b)},{max(a, b)}".encode()
    return int.from_bytes(hashlib.sha256(pair_key).digest()[:8], "big") % HELD_OUT_ONE_IN == 0


def held_out_sums() -> list[tuple[int, int]]:
    """Every held-out (a, b), in both orders."""
    return [(a, b) for a in range(LIMIT) for b in range(LIMIT) if is_held_out(a, b)]


def sum_question(a: int, b: int) -> str:
    """The usual wording of a sum."""
    return f"What is {a} + {b}?"


def is_right(answer: str, a: int, b: int) -> bool:
    """Whether the last number in an answer is a + b."""
    numbers = re.findall(r"-?\d+", answer)
    return bool(numbers) and int(numbers[-1]) == a + b


def training_pair(rng: random.Random) -> tuple[int, int]:
    """Two numbers that are not held out; small ones are somewhat more likely than by chance."""
    while True:
        a, b = (rng.randrange(10 if rng.random() < 0.05 else LIMIT) for _ in range(2))
        if not is_held_out(a, b):
            return a, b


def sum_turn(rng: random.Random) -> Turn:
    a, b = training_pair(rng)
    wordings = [sum_question(a, b), f"{a} + {b} = ?", f"Add {a} and {b}."]
    return Turn(rng.choice(wordings), str(a + b))


def difference_turn(rng: random.Random) -> Turn:
    b, a = sorted(training_pair(rng))
    wordings = [f"What is {a} - {b}?", f"{a} - {b} = ?", f"Take {b} from {a}."]
    return Turn(rng.choice(wordings), str(a - b))


def counting(start: int) -> Turn:
    numbers = range(start + 1, start + 6)
    return Turn(f"Count on from {start}.", ", ".join(map(str, numbers)))


def spelling(word: str) -> Turn:
    """Capitals, because the tokenizer never merges two of them: the model sees letters."""
    return Turn(f"Spell {word.upper()} backwards.", word.upper()[::-1])


def made_up_word(rng: random.Random) -> str:
    consonants, vowels = "bcdfghjklmnpqrstvwxyz", "aeiou"
    letters = [rng.choice(vowels if rng.random() < 0.4 else consonants) for _ in range(6)]
    return "".join(letters[: rng.randint(3, 6)])


def spelling_turn(rng: random.Random) -> Turn:
    while (word := made_up_word(rng)) in TEST_WORDS:
        pass
    return spelling(word)


def day_turns() -> list[Turn]:
    after = [Turn(f"What day comes after {d}?", DAYS[(i + 1) % 7]) for i, d in enumerate(DAYS)]
    before = [Turn(f"What day comes before {d}?", DAYS[i - 1]) for i, d in enumerate(DAYS)]
    return after + before


KINDS: list[tuple[float, Callable[[random.Random], Turn]]] = [
    (0.62, sum_turn),
    (0.16, difference_turn),
    (0.06, lambda rng: counting(rng.randrange(LIMIT))),
    (0.12, spelling_turn),
    (0.04, lambda rng: rng.choice(day_turns())),
]


def random_turn(rng: random.Random) -> Turn:
    """One question of any kind, most often a sum; never a held-out pair."""
    weights = [weight for weight, _ in KINDS]
    _, maker = rng.choices(KINDS, weights)[0]
    return maker(rng)


# -- chat ------------------------------------------------------------------------------------------


def question_text(question: str) -> str:
    return f"{TURN_START}user\n{question}{TURN_END}\n{TURN_START}assistant\n"


def as_messages(turns: Iterable[Turn]) -> list[Message]:
    messages = []
    for turn in turns:
        messages.append({"role": "user", "content": turn.question})
        messages.append({"role": "assistant", "content": turn.answer})
    return messages


def preamble(num_tokens: int, tokenizer: Encoder, seed: int = 0) -> list[Message]:
    """Worked examples, none of them held out, of about ``num_tokens`` tokens of chat."""
    rng = random.Random(f"preamble {seed}")
    turns: list[Turn] = []
    length = 0
    while length < num_tokens:
        turn = random_turn(rng)
        turns.append(turn)
        length += len(tokenizer.encode(f"{question_text(turn.question)}{turn.answer}{TURN_END}\n"))
    return as_messages(turns)


def chat_text(messages: Sequence[Message]) -> str:
    """Messages that still need an answer, as the chat template renders them."""
    rendered = [
        f"{TURN_START}{message['role']}\n{message['content']}{TURN_END}\n" for message in messages
    ]
    return "".join(rendered) + f"{TURN_START}assistant\n"
