"""A byte-level tokenizer made by hand, so that a test decides exactly which bytes a token holds.

Ids 0 to 255 are the bytes; then come `PIECES`, tokens of several bytes that cut through characters
and stop strings; then the special tokens. Encoding yields single bytes.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PIECES = (
    b"Hello",
    b" wor",
    b"ld",
    b"EN",
    b"END",
    b"one END two",
    b"aSTOPbENDc",
    "ü".encode(),
    "🦅".encode(),
    "🦅".encode()[:2],
    "🦅".encode()[2:],
    b"x" + "🦅".encode()[:1],
    "🦅".encode()[1:] + b"y",
    "\ufffd".encode(),
    "🦅".encode()[1:] + "🦅".encode()[:1],
)
SPECIAL = ("<|end|>", "<|pad|>")
NUM_IDS = 256 + len(PIECES) + len(SPECIAL)
END_ID = NUM_IDS - 2
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'thief' %}{{ raise_exception('no"
    " thieves') }}{% endif %}{{ message['role'] + ':' + message['content'] + ';' }}{% endfor %}{%"
    " if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def write_tokenizer(path: Path, *, chat_template: str | None = TEMPLATE) -> Path:
    """Write the tokenizer's files to a directory, as in a checkpoint."""
    letters = _letters_of_bytes()
    vocab = {"".join(letters[byte] for byte in piece): i for i, piece in enumerate(_all_pieces())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    )
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    template = {} if chat_template is None else {"chat_template": chat_template}
    (path / "tokenizer_config.json").write_text(json.dumps(config | template))
    return path


def ids(*pieces: str | bytes) -> list[int]:
    """Token ids, one per piece; a piece is a single byte or one of `PIECES`."""
    known = {piece: i for i, piece in enumerate(_all_pieces())}
    return [known[piece.encode() if isinstance(piece, str) else piece] for piece in pieces]


def _all_pieces() -> list[bytes]:
    return [*(bytes([byte]) for byte in range(256)), *PIECES]


def _letters_of_bytes() -> list[str]:
    """The visible character that stands for each byte in a byte-level vocabulary (Radford et al.
    2019, GPT-2).
    """
    visible = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte) if byte in visible else chr(256 + hidden.index(byte)) for byte in range(256)]
