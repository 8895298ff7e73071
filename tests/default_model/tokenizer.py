"""The tokenizer of the default model: what it is trained on, and its files."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.default_model.questions import END_OF_TEXT, TURN_END, TURN_START, Turn, random_turn

VOCAB_SIZE = 512
# Rotary embeddings have no limit of their own. Beyond the 1,024 positions of training the answers
# mean nothing, but programs with long prompts can be tried.
POSITIONS = 131072
SYSTEM_MESSAGES = [
    "You are a helpful assistant.",
    "You answer short questions.",
    "Answer with the result alone.",
    "You are good at sums.",
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
SPECIAL_TOKENS = [END_OF_TEXT, TURN_START, TURN_END]
THINK_TOKENS = ["<think>", "</think>"]


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
