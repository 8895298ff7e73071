"""Make the small Qwen3 model that ships with Eagleray.

The script writes its own text, trains the tokenizer and the model on it, measures the
model on sums it was never shown, and writes a checkpoint in the Hugging Face form:

    python configs/default_model/train.py [--out DIR] [--minutes M] [--seed 0]

The text is chat in Qwen's form, and there are five kinds of question: a sum of two
numbers under 100, a difference, counting on, a word spelled backwards, and the day after
(or before) a day. Many questions are packed into one conversation, so that an answer
after a long preamble is as good as one asked alone.

About one unordered pair of numbers in twenty is held out, chosen by a hash of the pair. Its sums
and its difference never appear in the training text.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

LIMIT = 100  # questions are about the numbers 0 to LIMIT - 1
HELD_OUT_ONE_IN = 20
VOCAB_SIZE = 512
CONTEXT = 1024
# Rotary embeddings have no limit of their own. Beyond `CONTEXT` the answers mean nothing, but
# programs with long prompts can be tried.
POSITIONS = 131072
IGNORED = -100  # the label of a token that carries no loss

DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
SYSTEM_MESSAGES = [
    "You are a helpful assistant.",
    "You answer short questions.",
    "Answer with the result alone.",
    "You are good at sums.",
]
# Real words, used only for measuring; training uses made-up ones.
TEST_WORDS = [
    "cat",
    "dog",
    "sun",
    "tree",
    "fish",
    "bird",
    "moon",
    "lamp",
    "river",
    "stone",
    "bread",
    "chair",
    "table",
    "house",
    "horse",
    "water",
    "light",
    "paper",
    "green",
    "black",
    "seven",
    "music",
    "ocean",
    "tiger",
    "garden",
    "winter",
    "summer",
    "bridge",
    "window",
    "pencil",
    "silver",
    "planet",
    "flower",
    "orange",
    "rabbit",
]
# Plain prose, so that the tokenizer's merges are useful outside the questions too.
PROSE = """
The engine reads the weights of the model and cuts each matrix into as many parts as there
are workers. Every worker holds its own part and its own share of the cache, and after each
layer the parts of the result are added together, so that all of them see the same numbers.
A request comes in as text, is turned into tokens, and waits until there is room for it. When
there is, its prompt is run through the layers once, and from then on one token is made at a
time. Other requests are handled in the same step, and they come and go as they please. What
is written here is only an example of English: there is nothing in it that the model needs.
"""

# How Qwen's tokenizer cuts text before merging: every digit by itself, a word with the
# space before it, punctuation, line ends, other space.
PRETOKENIZE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [END_OF_TEXT, TURN_START, TURN_END]
THINK_TOKENS = ["<think>", "</think>"]
Message = dict[str, str]


class Encoder(Protocol):
    """Anything that turns text into something with a length: either library's tokenizer."""

    def encode(self, text: str, /) -> Sized: ...


@dataclass(frozen=True)
class Turn:
    """A question and its one right answer."""

    question: str
    answer: str


# ---------------------------------------------------------------- the questions


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


# ---------------------------------------------------------------- chat form


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


# ---------------------------------------------------------------- the tokenizer


def tokenizer_text(seed: int) -> Iterator[str]:
    """Text for the merges: prose and every question but the spelling of words."""
    rng = random.Random(f"tokenizer {seed}")
    yield from [PROSE] * 20
    yield from SYSTEM_MESSAGES * 20
    for _ in range(4000):
        turn = random_turn(rng)
        if turn.question.startswith("Spell"):
            turn = Turn("Spell backwards.", "")
        yield f"user\n{turn.question}\nassistant\n{turn.answer}\n"


def train_tokenizer(seed: int) -> Tokenizer:
    """Byte-level BPE; the markers come after the merges, as they do in Qwen's own."""
    tokenizer = Tokenizer(models.BPE())
    split_pattern = pre_tokenizers.Split(Regex(PRETOKENIZE), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split_pattern, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS) - len(THINK_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(tokenizer_text(seed), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in THINK_TOKENS])
    return tokenizer


def tokenizer_settings(tokenizer: Tokenizer) -> dict[str, object]:
    """The contents of tokenizer_config.json."""
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": token in SPECIAL_TOKENS,
        }
        for token in SPECIAL_TOKENS + THINK_TOKENS
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": added,
        "additional_special_tokens": [TURN_START, TURN_END],
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "model_max_length": POSITIONS,
        "clean_up_tokenization_spaces": False,
    }


# ---------------------------------------------------------------- training batches


class Batches:
    """Endless training batches; only the answers and the marks that end them carry loss."""

    TOKENS = 4096
    # (length of a row, its weight at the start of training, its weight at the end)
    LENGTHS = (
        (64, 0.5, 0.2),
        (128, 0.3, 0.2),
        (256, 0.15, 0.2),
        (512, 0.05, 0.3),
        (1024, 0.0, 0.1),
    )

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.tokenizer = tokenizer
        self.rng = random.Random(f"batches {seed}")
        self.cache: dict[str, list[int]] = {}
        pad_id = tokenizer.token_to_id(END_OF_TEXT)
        assert pad_id is not None
        self.pad = pad_id

    def ids(self, text: str) -> list[int]:
        if text not in self.cache:
            self.cache[text] = self.tokenizer.encode(text).ids
        return self.cache[text]

    def turn(self) -> list[tuple[int, int]]:
        """One random turn, as (token, label) pairs."""
        turn = random_turn(self.rng)
        prompt = [(token_id, IGNORED) for token_id in self.ids(question_text(turn.question))]
        answer = [(token_id, token_id) for token_id in self.ids(f"{turn.answer}{TURN_END}")]
        return prompt + answer + [(token_id, IGNORED) for token_id in self.ids("\n")]

    def conversation(self, length: int) -> list[tuple[int, int]]:
        """As many turns as fit, sometimes after a system message, padded to the length."""
        row: list[tuple[int, int]] = []
        if self.rng.random() < 0.15:
            text = f"{TURN_START}system\n{self.rng.choice(SYSTEM_MESSAGES)}{TURN_END}\n"
            row = [(token_id, IGNORED) for token_id in self.ids(text)]
        while len(row) + len(turn := self.turn()) <= length:
            row += turn
        return row + [(self.pad, IGNORED)] * (length - len(row))

    def batch(self, progress: float) -> tuple[Tensor, Tensor]:
        """Tokens and labels, in rows of equal length; short rows are more frequent at the start."""
        weights = [
            start_weight + (end_weight - start_weight) * progress
            for _, start_weight, end_weight in self.LENGTHS
        ]
        length = self.rng.choices([row_length for row_length, _, _ in self.LENGTHS], weights)[0]
        rows = torch.tensor([self.conversation(length) for _ in range(self.TOKENS // length)])
        return rows[..., 0], rows[..., 1]


# ---------------------------------------------------------------- the model


def model_config(tokenizer: Tokenizer) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(TURN_END),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
    )


class Trainer:
    """Muon for the matrices, AdamW for the embedding and the norms, one shared schedule."""

    WARMUP = 0.02  # share of the run
    DECAY = 0.45  # share of the run over which the learning rate falls to zero

    def __init__(self, model: Qwen3ForCausalLM, muon_rate: float, adam_rate: float) -> None:
        self.model = model
        matrices: list[Tensor] = []
        other_parameters: list[Tensor] = []
        for name, parameter in model.named_parameters():
            is_matrix = parameter.ndim == 2 and "embed" not in name
            (matrices if is_matrix else other_parameters).append(parameter)
        self.optimizers = [
            torch.optim.Muon(
                matrices, lr=muon_rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(other_parameters, lr=adam_rate, betas=(0.9, 0.98), weight_decay=0.0),
        ]
        self.rates = [muon_rate, adam_rate]

    def set_rate(self, progress: float) -> None:
        rate_share = min(1.0, progress / self.WARMUP, (1.0 - progress) / self.DECAY)
        for optimizer, rate in zip(self.optimizers, self.rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * max(rate_share, 1e-3)

    def step(self, tokens: Tensor, labels: Tensor) -> float:
        """One update; the loss is averaged over the tokens of the answers."""
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.model.model(input_ids=tokens).last_hidden_state[:, :-1]
            targets = labels[:, 1:]
            has_loss = targets != IGNORED
            logits = self.model.lm_head(hidden[has_loss])
        loss = torch.nn.functional.cross_entropy(logits.float(), targets[has_loss])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return float(loss.detach())


def train(
    model: Qwen3ForCausalLM,
    tokenizer: Tokenizer,
    args: argparse.Namespace,
    save: Callable[[], None],
) -> None:
    """Run the requested number of steps, or as many as fit into the minutes."""
    batches, trainer = Batches(tokenizer, args.seed), Trainer(model, args.muon_rate, args.adam_rate)
    start_s, loss_sum = time.monotonic(), 0.0
    for step in range(1, args.steps + 1):
        seconds = time.monotonic() - start_s
        progress = max(step / args.steps, seconds / (60 * args.minutes))
        if progress > 1.0:
            break
        trainer.set_rate(progress)
        loss_sum += trainer.step(*batches.batch(progress))
        if step % 100 == 0:
            check_result = quick_check(model, tokenizer)
            print(
                f"{seconds:6.0f} s  step {step}  loss {loss_sum / 100:.4f}  {check_result}",
                flush=True,
            )
            loss_sum = 0.0
        if args.save_every and step % args.save_every == 0:
            save()


# ---------------------------------------------------------------- measuring


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


# ---------------------------------------------------------------- the checkpoint


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save_checkpoint(model: Qwen3ForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write everything to a folder next to the target, in bfloat16, then move it into place."""
    out.mkdir(parents=True, exist_ok=True)
    staging_dir = Path(tempfile.mkdtemp(dir=out.parent))
    bfloat16_model: Any = Qwen3ForCausalLM(model.config)
    bfloat16_model.to(torch.bfloat16)
    bfloat16_model.load_state_dict(model.state_dict())
    bfloat16_model.save_pretrained(staging_dir)
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    end_ids = [tokenizer.token_to_id(TURN_END), end_of_text]
    generation = {"do_sample": False, "eos_token_id": end_ids, "pad_token_id": end_of_text}
    write_json(staging_dir / "generation_config.json", generation)
    tokenizer.save(str(staging_dir / "tokenizer.json"))
    write_json(staging_dir / "tokenizer_config.json", tokenizer_settings(tokenizer))
    shutil.copy(Path(__file__).with_name("chat_template.jinja"), staging_dir)
    for file in staging_dir.iterdir():
        file.chmod(0o644)
        file.replace(out / file.name)
    shutil.rmtree(staging_dir)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop by then")
    parser.add_argument("--steps", type=int, default=3600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--muon-rate", type=float, default=4e-3)
    parser.add_argument("--adam-rate", type=float, default=4e-3)
    parser.add_argument("--save-every", type=int, default=0, help="also save every N steps")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    start_s = time.monotonic()
    tokenizer = train_tokenizer(args.seed)
    model = Qwen3ForCausalLM(model_config(tokenizer))
    print(f"{model.num_parameters() / 1e6:.2f} million parameters", flush=True)
    train(model, tokenizer, args, lambda: save_checkpoint(model, tokenizer, args.out))
    save_checkpoint(model, tokenizer, args.out)
    print(f"trained in {(time.monotonic() - start_s) / 60:.1f} minutes", flush=True)
    saved_model = Qwen3ForCausalLM.from_pretrained(args.out, dtype=torch.bfloat16)
    print(as_table(measure(saved_model, tokenizer)), flush=True)


if __name__ == "__main__":
    main()
