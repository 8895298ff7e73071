"""Text at the edge of the engine: encoding prompts, detokenizing as tokens come, stop strings.

The driver knows token ids only. `TextStream` turns the tokens of one output into text that never has to be taken
back: bytes of an unfinished character, and text that may be the beginning of a stop string, are held until decided.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from scheduler.errors import ConfigError, RequestError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
MAX_UNFINISHED = 3  # at the end of a text that may become another character: it has up to three bytes of four so far
CONTEXT = 10  # tokens decoded with new ones: the bytes of as many replacement characters and one character before them
Message = dict[str, Any]


class Tokenizer:
    """A checkpoint's tokenizer and chat template."""

    def __init__(self, path: Path) -> None:
        """Load from a directory. Raises `ConfigError` when its files cannot be read."""
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
        except Exception as error:
            raise ConfigError(f"the tokenizer in {path} cannot be loaded: {error}") from error

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. Raises `RequestError` for one that is not Unicode (half a surrogate pair)."""
        try:
            ids: list[int] = self._tokenizer.encode(text)
        except (TypeError, UnicodeError) as error:
            raise RequestError(f"the prompt cannot be encoded: {error}", "prompt") from None
        return ids

    def encode_chat(self, messages: Seq[Message]) -> list[int]:
        """Token ids of a conversation, up to where the assistant answers. Raises `RequestError`."""
        check_messages(messages)
        if not self.has_chat_template:
            raise RequestError("this checkpoint has no chat template; send a prompt instead of messages", "messages")
        try:
            ids: list[int] = self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as error:  # the template is a program of the checkpoint
            raise RequestError(f"the chat template refuses these messages: {error}", "messages") from error
        return ids

    def decode(self, token_ids: Seq[int]) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text


def load_tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer in a directory, None when it has no tokenizer files."""
    return Tokenizer(path) if any((path / name).exists() for name in TOKENIZER_FILES) else None


class TextStream:
    """Text of one output, token by token. `text` is what has been decided so far.

    The text of the first `min_tokens` tokens is not searched for stop strings.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Seq[str] = (), min_tokens: int = 0) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._min_tokens = min_tokens if stop else 0
        self._searched_from = 0
        self._longest_stop = max(map(len, self._stop), default=0)
        self._num_tokens = 0
        self._recent: list[int] = []
        self._num_known = 0  # characters of their text that are in `_decoded`
        self._decoded = ""
        self.text = ""
        self.stopped = False

    def push(self, token_ids: Seq[int]) -> int | None:
        """Take the next tokens. If a stop string is complete with one of them, how many there are up to that one."""
        if not self._stop:
            self._push(token_ids)
            return None
        return next((i + 1 for i in range(len(token_ids)) if self._push(token_ids[i : i + 1])), None)

    def _push(self, token_ids: Seq[int]) -> bool:
        """Decode tokens together; True if a stop string is complete with them."""
        self._num_tokens += len(token_ids)
        self._recent += token_ids
        text = self._tokenizer.decode(self._recent)
        certain = max(len(text.rstrip(UNFINISHED)), len(text) - MAX_UNFINISHED)
        dropped = 0  # characters that `_recent` no longer gives
        if len(self._recent) > 2 * CONTEXT:
            del self._recent[:-CONTEXT]
            dropped = len(text) - len(self._tokenizer.decode(self._recent))
        certain = max(certain, dropped, self._num_known)
        new, self._num_known = text[self._num_known : certain], certain - dropped
        return self._extend(new)

    def finish(self) -> None:
        """No token comes after: what was held is text now."""
        if self.stopped:
            return
        if not self._extend(self._tokenizer.decode(self._recent)[self._num_known :]):
            self.text = self._decoded

    def _extend(self, text: str) -> bool:
        """Add decoded text; True if it completes a stop string."""
        searched = max(self._searched_from, len(self._decoded) - self._longest_stop + 1)
        self._decoded += text
        if self._num_tokens <= self._min_tokens:
            self.text = self._decoded
            self._searched_from = len(self._decoded)
            return False
        found = [i for i in (self._decoded.find(stop, searched) for stop in self._stop) if i >= 0]
        if found:
            self.stopped = True
            self.text = self._decoded[: min(found)]
            return True
        self.text = self._decoded[: len(self._decoded) - self._held()]
        return False

    def _held(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        tail = self._decoded[max(self._searched_from, len(self._decoded) - self._longest_stop + 1) :]
        for start in range(len(tail)):
            if any(stop.startswith(tail[start:]) for stop in self._stop):
                return len(tail) - start
        return 0


def check_messages(messages: object) -> None:
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestError("messages must be a non-empty list of {role, content}", "messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise RequestError(f"each of messages needs a role and content, got {message!r}", "messages")
