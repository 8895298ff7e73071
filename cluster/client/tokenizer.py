"""Text to token ids and back, through a checkpoint's tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from tokenizers import Encoding

from cluster.client import tokenizer_files
from cluster.client.prompts import Conversation
from cluster.grammar.markers import AnswerState, answer_state_after
from scheduler.errors import PromptTooLongError, RequestError

# Text that fits hardly ever has more characters per token.
CHARACTERS_PER_TOKEN = 8
MAX_SHORT_LENGTH = 4096  # characters, or tokens, that take a few milliseconds


class _LazyTokenBytes(dict[int, bytes]):
    """What `compute` returns for each token id that was asked for; at most the vocabulary."""

    def __init__(self, compute: Callable[[int], bytes]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, token_id: int) -> bytes:
        token_bytes = self[token_id] = self._compute(token_id)
        return token_bytes


class Tokenizer:
    """A checkpoint's tokenizer and chat template. Any thread may call.

    file: path of `tokenizer.json`, None if its tokens are not byte-level. template_variables: what
    the chat template reads. takes_arguments_as_text: see `ChatTemplate`.
    """

    def __init__(self, path: Path) -> None:
        """Load from a directory. Raises `ConfigError` when its files cannot be read."""
        files = tokenizer_files.read(path)
        self._fast_tokenizer, self._template = files.fast_tokenizer, files.template
        self._eos_token = files.eos_token
        self._bytes_by_token_id = _LazyTokenBytes(self._bytes_of)
        added_tokens = self._fast_tokenizer.get_added_tokens_decoder().items()
        self._special_ids = {token_id for token_id, token in added_tokens if token.special}
        text_bytes = _LazyTokenBytes(self._bytes_in_text)
        self.text_bytes = text_bytes.__getitem__ if files.decodes_bytes else None
        self.file = path / "tokenizer.json" if files.is_byte_level else None
        template = files.template
        self.template_variables = frozenset[str]() if template is None else template.variables
        self.takes_arguments_as_text = template is not None and template.takes_arguments_as_text

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be encoded."""
        return self._template is not None

    def encode(self, text: str, max_total_tokens: int | None = None) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer adds around it. Raises
        `RequestError` for text that is not Unicode (half a surrogate pair), and for text of far
        more than `max_total_tokens` tokens, without encoding all of it.
        """
        return self._encode(text, max_total_tokens, "prompt", add_special_tokens=True)

    def encode_rendered(self, text: str, max_total_tokens: int | None = None) -> list[int]:
        """Token ids of a rendered conversation, with its special tokens. Raises as `encode`."""
        return self._encode(text, max_total_tokens, "messages", add_special_tokens=False)

    def _encode(
        self, text: str, max_total_tokens: int | None, field: str, *, add_special_tokens: bool
    ) -> list[int]:
        try:
            self._check_far_too_long(text, max_total_tokens, field)
            ids: list[int] = self._encoding(text, add_special_tokens=add_special_tokens).ids
            return ids
        except (TypeError, UnicodeError) as error:
            raise RequestError(f"the {field} cannot be encoded: {error}", field) from None

    def _check_far_too_long(self, text: str, max_total_tokens: int | None, field: str) -> None:
        """Raise `PromptTooLongError` if even the beginning of a text has twice as many tokens as
        are possible. A token takes 350 bytes while it is encoded.
        """
        if max_total_tokens is None or len(text) <= CHARACTERS_PER_TOKEN * max_total_tokens:
            return
        beginning = text[: CHARACTERS_PER_TOKEN * max_total_tokens]
        num_tokens = len(self._encoding(beginning, add_special_tokens=False))
        if num_tokens > 2 * max_total_tokens:
            raise PromptTooLongError(
                f"the prompt has {len(text)} characters, and the first {len(beginning)} of them are"
                f" {num_tokens} tokens; at most {max_total_tokens - 1} are possible. Shorten the"
                " prompt",
                field,
            )

    def _encoding(self, text: str, *, add_special_tokens: bool) -> Encoding:
        """`encode` holds the interpreter while it runs, for a second per MiB; `encode_batch` does
        not, and takes a little longer to begin.
        """
        if len(text) <= MAX_SHORT_LENGTH:
            return self._fast_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        [encoding] = self._fast_tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        return encoding

    def decode(self, token_ids: Seq[int]) -> str:
        """Text of token ids, without special tokens. Many at once would hold the interpreter, as in
        `_encoding`.
        """
        ids = list(token_ids)
        if len(ids) <= MAX_SHORT_LENGTH:
            text: str = self._fast_tokenizer.decode(ids, skip_special_tokens=True)
        else:
            [text] = self._fast_tokenizer.decode_batch([ids], skip_special_tokens=True)
        return text

    def _bytes_in_text(self, token_id: int) -> bytes:
        """What a token adds to what `decode` returns, which the `ByteLevel` decoder of the
        tokenizers library makes of the bytes of all tokens.
        """
        token = self._fast_tokenizer.id_to_token(token_id)
        is_left_out = token is None or token_id in self._special_ids
        return b"" if is_left_out else _spelled_bytes(str(token))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for, maybe part of a character; a special token's name."""
        return self._bytes_by_token_id[token_id]

    def _bytes_of(self, token_id: int) -> bytes:
        added_token = self._fast_tokenizer.get_added_tokens_decoder().get(token_id)
        if added_token is not None:
            return str(added_token.content).encode()
        token = self._fast_tokenizer.id_to_token(token_id)
        if token is None:
            return b""  # ids beyond the tokenizer's own, which pad the vocabulary
        if all(char in _BYTE_BY_CHAR for char in token):
            return _spelled_bytes(token)
        return str(self._fast_tokenizer.decode([token_id], skip_special_tokens=False)).encode()

    def render_chat(self, conversation: Conversation) -> str:
        """The text of a conversation, up to where the assistant answers or continues its last
        message. Raises `RequestError`.
        """
        if self._template is None:
            raise RequestError(
                "this checkpoint has no chat template; send a prompt instead of messages",
                "messages",
            )
        requested_variables = {*conversation.template_variables}
        if conversation.tools:
            requested_variables.add("tools")
        for name in sorted(requested_variables - self.template_variables):
            raise RequestError(
                f"the chat template of this checkpoint does not use {name!r}, so it would have no"
                " effect; leave it out",
                name,
            )
        if conversation.continues_last_message:
            conversation = _with_end_mark(conversation)
        try:
            text = self._template.render(conversation)
        except Exception as error:  # the template is a program of the checkpoint
            raise RequestError(
                f"the chat template refuses these messages: {error}", "messages"
            ) from error
        if conversation.continues_last_message:
            return _text_before_end_mark(text, conversation)
        return text

    @cached_property
    def thinks_by_default(self) -> bool:
        """Whether an answer begins within the reasoning unless a variable says otherwise."""
        question = Conversation(messages=[{"role": "user", "content": "Hi"}])
        return answer_state_after(self.render_chat(question)) is AnswerState.REASONING

    @cached_property
    def end_token_ids(self) -> frozenset[int]:
        """The special tokens that end an answer: the tokenizer's end of sequence, and what the chat
        template puts behind a message of the assistant.
        """
        end_texts = (self._eos_token, self._end_of_turn())
        return frozenset(
            token_id
            for token_id, token in self._fast_tokenizer.get_added_tokens_decoder().items()
            if token.special and any(text and text.startswith(token.content) for text in end_texts)
        )

    def _end_of_turn(self) -> str:
        """What the chat template puts behind a message of the assistant."""
        answer = {"role": "assistant", "content": _MESSAGE_END_MARK}
        try:
            question = {"role": "user", "content": "Hello"}
            text = self.render_chat(Conversation(messages=[question, answer]))
        except RequestError:  # no template, or one that refuses this
            return ""
        _, end_mark, text_after_answer = text.rpartition(_MESSAGE_END_MARK)
        # A template may leave such a message out.
        return text_after_answer.lstrip() if end_mark else ""


def load_tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer in a directory, None when it has no tokenizer files. Raises `ConfigError`."""
    has_files = any((path / name).exists() for name in tokenizer_files.FILE_NAMES)
    return Tokenizer(path) if has_files else None


# Marks the end of a message that is continued, and stands for an answer in `_end_of_turn`:
# private-use characters, which no template treats specially.
_MESSAGE_END_MARK = "\ue0c0\ue0c1\ue0c0"


def _with_end_mark(conversation: Conversation) -> Conversation:
    """The messages with the mark behind the content of the last one."""
    *earlier_messages, last_message = conversation.messages
    marked_message = last_message | {"content": last_message["content"] + _MESSAGE_END_MARK}
    return replace(conversation, messages=[*earlier_messages, marked_message])


def _text_before_end_mark(text: str, conversation: Conversation) -> str:
    """The text up to the mark, without what the template puts behind the last content."""
    content = conversation.messages[-1]["content"].removesuffix(_MESSAGE_END_MARK)
    text = text[: max(0, text.rfind(_MESSAGE_END_MARK))]
    if not text.endswith(content.lstrip()):
        raise RequestError(
            "the chat template of this checkpoint changes the last message, so it cannot be"
            " continued",
            "continue_final_message",
        )
    return text


def _byte_alphabet() -> dict[str, int]:
    """The byte for which byte-level vocabularies write each character (the inverse of GPT-2's
    `bytes_to_unicode`): printable ones stand for themselves, the others follow from 256 on.
    """
    printable_bytes = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    printable_bytes += range(ord("®"), ord("ÿ") + 1)
    unprintable_bytes = [byte for byte in range(256) if byte not in printable_bytes]
    alphabet = {chr(byte): byte for byte in printable_bytes}
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(unprintable_bytes)}


_BYTE_BY_CHAR = _byte_alphabet()


def _spelled_bytes(token: str) -> bytes:
    """The bytes that a token spells in that alphabet; UTF-8 if it has other characters too."""
    try:
        return bytes(map(_BYTE_BY_CHAR.__getitem__, token))
    except KeyError:
        return token.encode()
