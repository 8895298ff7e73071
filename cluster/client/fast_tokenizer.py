"""A tokenizer and chat template without transformers, whose import takes seconds.

`load` accepts only what it is sure to treat exactly as transformers does, which a test compares: a
`tokenizer.json` whose settings agree with `tokenizer_config.json`, and a chat template that needs
only messages. For everything else it returns None, and `cluster/client/tokenizer.py` uses
transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence as Seq
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Encoding
from tokenizers import Tokenizer as Backend

from cluster.client.prompts import Conversation

SHORT = 4096  # characters of a text that is encoded in a few milliseconds
_GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
_QWEN2_CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
# What transformers' Qwen2 class builds, regardless of `tokenizer.json`.
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Settings of `tokenizer_config.json` that change ids or text, with the only value that is
# understood here.
_PLAIN = {
    "add_bos_token": False,
    "add_eos_token": False,
    "add_prefix_space": False,
    "split_special_tokens": False,
    "clean_up_tokenization_spaces": False,
}
_SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_TOKEN_FLAGS = ("content", "lstrip", "rstrip", "single_word", "normalized", "special")


class FastTokenizer:
    """Encodes, decodes and renders with `tokenizers` and jinja2."""

    def __init__(
        self, backend: Backend, template: str | None, special_tokens: dict[str, str]
    ) -> None:
        self._backend = backend
        self._special_tokens = special_tokens
        self.template = template
        self._template = None if template is None else _environment().from_string(template)
        self.template_variables = template_variables(template or "")

    @property
    def backend(self) -> Backend:
        """The tokenizer that does the work."""
        return self._backend

    @property
    def eos_token(self) -> str | None:
        """The token that ends a sequence, according to `tokenizer_config.json`."""
        return self._special_tokens.get("eos_token")

    @property
    def has_chat_template(self) -> bool:
        """Whether `render` can be called."""
        return self._template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer adds around a text,
        unless told not to.
        """
        ids: list[int] = self._encoding(text, add_special_tokens).ids
        return ids

    def count(self, text: str) -> int:
        """The number of tokens of a text, without those around a text."""
        return len(self._encoding(text, add_special_tokens=False))

    def _encoding(self, text: str, add_special_tokens: bool) -> Encoding:
        """`encode` holds the interpreter while it runs, for a second per MiB; `encode_batch` does
        not, and takes a little longer to begin.
        """
        if len(text) <= SHORT:
            return self._backend.encode(text, add_special_tokens=add_special_tokens)
        batch = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        [encoding] = batch
        return encoding

    def decode(self, token_ids: Seq[int]) -> str:
        """Text of token ids, without special tokens. As for `_encoding`, many of them at once would
        hold the interpreter.
        """
        ids = list(token_ids)
        if len(ids) <= SHORT:
            text: str = self._backend.decode(ids, skip_special_tokens=True)
        else:
            [text] = self._backend.decode_batch([ids], skip_special_tokens=True)
        return text

    def render_chat(self, conversation: Conversation) -> str:
        """The text of a conversation, up to where the assistant answers; all of it if the answer is
        its last message.
        """
        assert self._template is not None
        return self._template.render(
            messages=[_with_reasoning(message) for message in conversation.messages],
            tools=conversation.tools,
            documents=None,
            add_generation_prompt=not conversation.continues_last,
            **self._special_tokens | conversation.template_variables,
        )

    def token_bytes(self, token_id: int) -> bytes:
        """See `Tokenizer.token_bytes`."""
        return bytes_of_token(self._backend, token_id)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its reasoning under the names that templates read, as transformers does."""
    names = ("reasoning_content", "thinking", "reasoning")
    given = [message[name] for name in names if message.get(name) is not None]
    if not given:
        return message
    return {"thinking": given[0]} | message | {"reasoning_content": given[0]}


def template_variables(template: str) -> frozenset[str]:
    """The names of the variables that a chat template reads."""
    environment = _environment()
    return frozenset(jinja2.meta.find_undeclared_variables(environment.parse(template)))


def special_id(backend: Backend, text: str | None) -> int | None:
    """The special token with which a text begins."""
    for token_id, token in backend.get_added_tokens_decoder().items():
        if text and token.special and text.startswith(str(token.content)):
            return int(token_id)
    return None


def bytes_of_token(backend: Backend, token_id: int) -> bytes:
    """See `Tokenizer.token_bytes`."""
    added = backend.get_added_tokens_decoder().get(token_id)
    if added is not None:
        return str(added.content).encode()
    token = backend.id_to_token(token_id)
    if token is None:
        return b""  # ids beyond the tokenizer's own, which pad the vocabulary
    if all(char in _BYTE_OF for char in token):
        return bytes(_BYTE_OF[char] for char in token)
    return str(backend.decode([token_id], skip_special_tokens=False)).encode()


def _byte_alphabet() -> dict[str, int]:
    """The character that byte-level vocabularies write for each byte (`bytes_to_unicode` of GPT-2's
    encoder): printable ones stand for themselves, the others follow from 256 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    printable += range(ord("®"), ord("ÿ") + 1)
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def load(path: Path) -> FastTokenizer | None:
    """The tokenizer in a directory, or None if transformers has to load it."""
    try:
        config = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
        stored = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
        if not _is_understood(config, stored) or (path / "additional_chat_templates").exists():
            return None
        template_file = path / "chat_template.jinja"
        template = config.get("chat_template")
        if template_file.exists():
            template = template_file.read_text(encoding="utf-8")
        if not _is_plain_template(template, config) or (path / "chat_template.json").exists():
            return None
        special = {
            name: _content(config[name]) for name in _SPECIAL_NAMES if config.get(name) is not None
        }
        return FastTokenizer(Backend.from_file(str(path / "tokenizer.json")), template, special)
    except Exception:  # transformers says more clearly what is wrong with the files
        return None


def _is_understood(config: dict[str, Any], stored: dict[str, Any]) -> bool:
    """Whether `tokenizer.json` alone determines ids and text."""
    kind = config.get("tokenizer_class")
    if kind not in (*_GENERIC_CLASSES, *_QWEN2_CLASSES) or "auto_map" in config:
        return False
    if any(config.get(name, plain) not in (plain, None) for name, plain in _PLAIN.items()):
        return False
    if any(stored.get(name) is not None for name in ("truncation", "padding")):
        return False
    processor = stored.get("post_processor")
    if processor is not None and processor.get("type") != "ByteLevel":
        return False
    return _same_added_tokens(config, stored) and (kind in _GENERIC_CLASSES or _is_qwen2(stored))


def _is_qwen2(stored: dict[str, Any]) -> bool:
    """Whether the pipeline of `tokenizer.json` is the one that transformers' Qwen2 class builds."""
    model, pre_tokenizer = stored["model"], stored.get("pre_tokenizer") or {}
    parts = pre_tokenizer.get("pretokenizers") or []
    return (
        model.get("type") == "BPE"
        and not any(
            model.get(name)
            for name in ("dropout", "unk_token", "fuse_unk", "byte_fallback", "ignore_merges")
        )
        and (stored.get("normalizer") or {}).get("type") == "NFC"
        and [part.get("type") for part in parts] == ["Split", "ByteLevel"]
        and parts[0].get("pattern") == {"Regex": _QWEN2_SPLIT}
        and parts[0].get("behavior") == "Isolated"
        and not parts[0].get("invert")
        and not parts[1].get("add_prefix_space")
        and not parts[1].get("use_regex")
        and (stored.get("decoder") or {}).get("type") == "ByteLevel"
    )


def _same_added_tokens(config: dict[str, Any], stored: dict[str, Any]) -> bool:
    """Whether the configuration adds no token, and changes none, of those that `tokenizer.json`
    has.
    """
    by_id = {str(token["id"]): token for token in stored.get("added_tokens", [])}
    for token_id, token in (config.get("added_tokens_decoder") or {}).items():
        known = by_id.get(token_id)
        if known is None or any(known.get(flag) != token.get(flag) for flag in _TOKEN_FLAGS):
            return False
    special = {token["content"] for token in by_id.values() if token["special"]}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    named = [*extra, *(config[name] for name in _SPECIAL_NAMES if config.get(name) is not None)]
    return isinstance(extra, list) and all(_content(token) in special for token in named)


def _is_plain_template(template: object, config: dict[str, Any]) -> bool:
    if template is None:
        return True
    if not isinstance(template, str) or re.search(r"\{%-?\s*generation\b", template):
        return False  # several templates, or a block that only transformers knows
    if config["tokenizer_class"] in _GENERIC_CLASSES:
        return True
    # Qwen2 has defaults for these.
    return not re.search(rf"\b({'|'.join(_SPECIAL_NAMES)})\b", template)


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def _environment() -> jinja2.Environment:
    """Set up as in transformers: a sandbox, because the template is code that comes with the
    checkpoint.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """jinja2's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)
