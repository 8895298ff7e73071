"""Text to token ids and back, through a checkpoint's tokenizer and chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from cluster.client import fast_tokenizer
from cluster.client.model_files import TOKENIZER_FILES
from cluster.client.prompts import Conversation, Message
from cluster.grammar.markers import State, state_after
from scheduler.errors import ConfigError, RequestError

# Text that fits hardly ever has more characters per token.
CHARACTERS_PER_TOKEN = 8


class Tokenizer:
    """A checkpoint's tokenizer and chat template. Any thread may call."""

    def __init__(self, path: Path) -> None:
        """Load from a directory. Raises `ConfigError` when its files cannot be read."""
        self._path = path
        self._bytes: dict[int, bytes] = {}  # by token id; at most as many as the vocabulary has
        self._fast = fast_tokenizer.load(path)
        if self._fast is None:
            _ = self._slow  # loads the tokenizer, so that errors in its files are raised here

    @property
    def file(self) -> Path | None:
        """Path of `tokenizer.json`, or None if there is none or its tokens are not byte-level."""
        path = self._path / "tokenizer.json"
        if not path.exists():
            return None
        decoder = json.loads(path.read_text(encoding="utf-8")).get("decoder") or {}
        kinds = [part.get("type") for part in (decoder, *decoder.get("decoders", ()))]
        return path if "ByteLevel" in kinds else None

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be encoded."""
        return self._fast.has_chat_template if self._fast else bool(self._slow.chat_template)

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """Token ids of a text. Raises `RequestError` for text that is not Unicode (half a surrogate
        pair), and for text of far more than `most` tokens, without encoding all of it.
        """
        try:
            self._check_length(text, most, "prompt")
            return (self._fast or self._slow).encode(text)
        except (TypeError, UnicodeError) as error:
            raise RequestError(f"the prompt cannot be encoded: {error}", "prompt") from None

    def render_chat(self, conversation: Conversation) -> str:
        """The text of a conversation, up to where the assistant answers or continues its last
        message. Raises `RequestError`.
        """
        if not self.has_chat_template:
            raise RequestError(
                "this checkpoint has no chat template; send a prompt instead of messages",
                "messages",
            )
        wanted = {"tools"} if conversation.tools else set()
        for name in sorted({*conversation.template_variables, *wanted} - self.template_variables):
            raise RequestError(
                f"the chat template of this checkpoint does not use {name!r}, so it would have no"
                " effect; leave it out",
                name,
            )
        if conversation.continues_last:
            conversation = _with_end(conversation)
        try:
            if self._fast and all(_is_plain(message) for message in conversation.messages):
                text = self._fast.render_chat(conversation)
            else:
                text = self._slow.apply_chat_template(
                    conversation.messages,
                    tools=conversation.tools,
                    add_generation_prompt=not conversation.continues_last,
                    tokenize=False,
                    **conversation.template_variables,
                )
        except ConfigError:
            raise
        except Exception as error:  # the template is a program of the checkpoint
            raise RequestError(
                f"the chat template refuses these messages: {error}", "messages"
            ) from error
        return _up_to_last(text, conversation) if conversation.continues_last else text

    def encode_rendered(self, text: str, most: int | None = None) -> list[int]:
        """Token ids of a rendered conversation, which contains its special tokens already. Raises
        as `encode`.
        """
        try:
            self._check_length(text, most, "messages")
            return (self._fast or self._slow).encode(text, add_special_tokens=False)
        except (TypeError, UnicodeError) as error:
            raise RequestError(f"the messages cannot be encoded: {error}", "messages") from None

    def _check_length(self, text: str, most: int | None, field: str) -> None:
        """Raise `RequestError` if even the beginning of a text has twice as many tokens as are
        possible. A token takes 350 bytes while it is encoded.
        """
        if most is None or len(text) <= CHARACTERS_PER_TOKEN * most:
            return
        beginning = text[: CHARACTERS_PER_TOKEN * most]
        if self._fast:
            num_tokens = self._fast.count(beginning)
        else:
            num_tokens = len(self._slow.encode(beginning, add_special_tokens=False))
        if num_tokens > 2 * most:
            raise RequestError(
                f"the prompt has {len(text)} characters, and the first {len(beginning)} of them are"
                f" {num_tokens} tokens; at most {most - 1} are possible. Shorten the prompt",
                field,
            )

    @cached_property
    def template_variables(self) -> frozenset[str]:
        """What the chat template reads besides the messages."""
        if self._fast:
            return self._fast.template_variables
        template = self._slow.chat_template
        sources = template.values() if isinstance(template, dict) else [template or ""]
        return frozenset().union(*map(fast_tokenizer.template_variables, sources))

    @cached_property
    def always_thinks(self) -> bool:
        """Whether an answer begins within the reasoning unless a variable says otherwise."""
        question = Conversation(messages=[{"role": "user", "content": "Hi"}])
        return state_after(self.render_chat(question)) is State.REASONING

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """The special tokens that end an answer: the tokenizer's end of sequence, and what the chat
        template puts behind a message of the assistant.
        """
        if self._fast:
            backend, eos_token = self._fast.backend, self._fast.eos_token
        else:
            backend, eos_token = self._slow.backend_tokenizer, self._slow.eos_token
        ends = (eos_token, self._end_of_turn())
        ids = (fast_tokenizer.special_id(backend, end) for end in ends)
        return frozenset(token_id for token_id in ids if token_id is not None)

    def _end_of_turn(self) -> str:
        """What the chat template puts behind a message of the assistant."""
        answer = {"role": "assistant", "content": _END}
        try:
            text = self.render_chat(
                Conversation(messages=[{"role": "user", "content": "Hello"}, answer])
            )
        except RequestError:  # no template, or one that refuses this
            return ""
        _, mark, behind = text.rpartition(_END)
        return behind.lstrip() if mark else ""  # a template may leave such a message out

    @cached_property
    def takes_arguments_as_text(self) -> bool:
        """Whether the chat template takes the arguments of a call as JSON text, so that the next
        prompt repeats exactly what was generated. Other templates take objects.
        """
        template = self._fast.template if self._fast else self._slow.chat_template
        return re.search(r"arguments\s+is\s+string", str(template)) is not None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for, which may be part of a character; a special token's
        name.
        """
        data = self._bytes.get(token_id)
        if data is None:
            if self._fast:
                data = self._fast.token_bytes(token_id)
            else:
                data = fast_tokenizer.bytes_of_token(self._slow.backend_tokenizer, token_id)
            self._bytes[token_id] = data
        return data

    def decode(self, token_ids: Seq[int]) -> str:
        """Text of token ids, without special tokens."""
        if self._fast:
            return self._fast.decode(token_ids)
        text: str = self._slow.decode(list(token_ids), skip_special_tokens=True)
        return text

    @cached_property
    def _slow(self) -> Any:
        """transformers' tokenizer, which takes seconds to import."""
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(str(self._path), trust_remote_code=False)
        except Exception as error:
            raise ConfigError(f"the tokenizer in {self._path} cannot be loaded: {error}") from error


def load_tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer in a directory, None when it has no tokenizer files."""
    return Tokenizer(path) if any((path / name).exists() for name in TOKENIZER_FILES) else None


# Marks the end of a message that is continued: private-use characters, which no template treats
# specially.
_END = "\ue0c0\ue0c1\ue0c0"


def _with_end(conversation: Conversation) -> Conversation:
    """The messages with the mark behind the content of the last one."""
    *others, last = conversation.messages
    marked = last | {"content": last["content"] + _END}
    return replace(conversation, messages=[*others, marked])


def _up_to_last(text: str, conversation: Conversation) -> str:
    """The text up to the mark: without what the template puts behind the content of the last
    message.
    """
    content = conversation.messages[-1]["content"].removesuffix(_END)
    begun = text[: max(0, text.rfind(_END))]
    if not begun.endswith(content.lstrip()):
        raise RequestError(
            "the chat template of this checkpoint changes the last message, so it cannot be"
            " continued",
            "continue_final_message",
        )
    return begun


def _is_plain(message: Message) -> bool:
    """Whether a message has nothing that transformers would rewrite before the template sees it."""
    return isinstance(message["content"], str)
