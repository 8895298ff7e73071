"""`launch.py chat`: a conversation in the terminal.

An answer is shown while it is generated. Ctrl-C ends it, and what has come of it stays part of the
conversation; Ctrl-C once more, or while there is no answer, ends the program, as does Ctrl-D. Where
standard input is no terminal, each of its lines is a question of one conversation, and standard
output gets the answers alone.
"""

from __future__ import annotations

import contextlib
import gc
import io
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style

from cluster.api.parser import AnswerParser, Parts
from cluster.client.outputs import Chunk
from cluster.client.prompts import Conversation, Message, ParsedPrompt
from cluster.client.setup import EngineSetup, prepare
from cluster.grammar.markers import state_after
from cluster.llm import LLM
from cluster.resources.session import check_arguments
from configs.engine import EngineConfig
from scheduler.errors import ConfigError, RequestError
from scheduler.params import SamplingParams

PROMPT = "> "
HELP = """\
/new            begin a new conversation
/system TEXT    begin a new conversation with this instruction; without TEXT, with none
/think on|off   whether the model thinks before it answers, where its chat template has that switch
/stats          what the last answer took
/help           this list
/quit           end, as Ctrl-D does
A line that ends with \\ goes on in the next one. Ctrl-C ends an answer."""
# Control characters in a model's text could change the terminal.
_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_DIM = Style(dim=True)


@dataclass(slots=True)
class Answer:
    """One answer, so far or complete, and its times in seconds since the question."""

    asked_s: float = field(default_factory=time.monotonic)
    content: str = ""
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    finish_reason: str | None = None

    def add(self, chunk: Chunk) -> None:
        """Count a chunk."""
        self.last_s = time.monotonic() - self.asked_s
        self.first_s = self.first_s or self.last_s
        self.num_tokens += len(chunk.token_ids)
        self.num_prompt_tokens = chunk.num_prompt_tokens
        self.num_cached_tokens = chunk.num_cached_tokens
        self.finish_reason = chunk.finish_reason

    def describe(self, max_model_len: int) -> str:
        """Tokens, speed, and how much of the context is used, in one line."""
        decode_s = self.last_s - self.first_s
        speed = f"{(self.num_tokens - 1) / decode_s:.0f} tokens/s" if decode_s > 0 else "at once"
        return (
            f"{self.num_tokens} tokens, the first after {self.first_s:.2f} s, then {speed};"
            f" {self.num_prompt_tokens} tokens before them, {self.num_cached_tokens} of these from"
            f" the cache; at most {max_model_len} tokens fit into a conversation"
        )


class Chat:
    """The conversation, and what the user's lines do to it."""

    def __init__(self, llm: LLM, setup: EngineSetup, console: Console) -> None:
        """`console` gets the answers; with their reasoning, if it is a terminal."""
        assert setup.tokenizer is not None
        self._llm, self._tokenizer, self._console = llm, setup.tokenizer, console
        self._max_model_len = llm.report.limits.max_model_len
        longest = SamplingParams(max_tokens=llm.report.limits.max_total_tokens)
        self._params = SamplingParams(n=1).over(setup.defaults).over(longest)
        self._messages: list[Message] = []
        self._variables: dict[str, bool] = {}
        self._last: Answer | None = None
        self.num_refused = 0  # questions and commands

    def take(self, line: str) -> bool:
        """Answer a question or carry out a command. False if the user wants to leave."""
        try:
            if line.startswith("/"):
                return self._obey(*line[1:].partition(" ")[::2])
            if line.strip():
                self._ask(line)
        except RequestError as error:
            self.num_refused += 1
            hint = " (/new begins a new conversation)" if len(self._messages) > 1 else ""
            print(f"error: {error}{hint}", file=sys.stderr)
        return True

    def _obey(self, command: str, argument: str) -> bool:
        match command, argument.strip():
            case "new", "":
                self._messages = [m for m in self._messages[:1] if m["role"] == "system"]
            case "system", text:
                self._messages = [{"role": "system", "content": text}] if text else []
            case "think", ("on" | "off") as switch:
                if "enable_thinking" not in self._tokenizer.template_variables:
                    raise RequestError("the chat template of this model cannot switch thinking")
                self._variables["enable_thinking"] = switch == "on"
            case "stats", "":
                last = self._last
                self._note(last.describe(self._max_model_len) if last else "no answer yet")
            case "help", "":
                self._note(HELP)
            case (("quit" | "exit" | "bye"), ""):
                return False
            case _:
                raise RequestError(
                    f"there is no command {f'/{command} {argument}'.strip()!r}; /help"
                )
        return True

    def _ask(self, question: str) -> None:
        """Show the answer to a question. Raises `RequestError`, with the conversation as before."""
        asked = [*self._messages, {"role": "user", "content": question}]
        self._last = answer = Answer()
        try:
            for parts in self._parts(asked, answer):
                if self._console.is_terminal:
                    show(self._console, parts.reasoning, style=_DIM)
                show(self._console, parts.content)
                answer.content += parts.content
        except KeyboardInterrupt:
            if not self._console.is_terminal:
                raise
            answer.finish_reason = "interrupted"
        show(self._console, "\n")
        if answer.finish_reason in ("length", "interrupted"):
            self._note(f"[ended: {answer.finish_reason}]")
        self._messages = [*asked, {"role": "assistant", "content": answer.content}]

    def _parts(self, messages: list[Message], answer: Answer) -> Iterator[Parts]:
        """The parts of the answer to a conversation, counted in `answer`."""
        conversation = Conversation(messages=messages, template_variables=self._variables)
        prompt = ParsedPrompt(conversation=conversation)
        begins = state_after(self._tokenizer.render_chat(conversation))
        parser = AnswerParser(begins, looks_for_calls=False)
        with contextlib.closing(self._llm.stream(prompt, self._params)) as chunks:
            for chunk in chunks:
                answer.add(chunk)
                yield parser.push(chunk.text)
        yield parser.finish()

    def _note(self, text: str) -> None:
        if self._console.is_terminal:
            show(self._console, text + "\n", style=_DIM)
        else:
            print(text, file=sys.stderr)


def show(console: Console, text: str, style: Style | None = None) -> None:
    """Show a part of an answer as it is, without what could change the terminal. Of a text, `print`
    would replace tabs, so it gets a segment.
    """
    text = _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r", ""))
    console.print(Segments([Segment(text, style)]), end="", soft_wrap=True)


def run_chat(config: EngineConfig, defaults: SamplingParams) -> None:
    """Start an engine, talk, stop. Raises `ConfigError` before anything runs for a model without a
    chat template, and `RequestError` at the end if lines of a pipe were refused.
    """
    check_arguments(sys.argv)
    setup = prepare(config, defaults)
    if not setup.has_chat_template:
        raise ConfigError(f"{config.model} has no chat template; use: launch.py generate --raw")
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # bytes that are no text in its encoding
    with LLM(setup=setup) as llm:
        gc.freeze()
        gc.enable()  # `launch.py` starts without it
        is_terminal = sys.stdin.isatty()
        chat = Chat(llm, setup, Console(force_terminal=None if is_terminal else False))
        if is_terminal:
            print(f"{config.model}. /help lists the commands.")
        for line in _typed() if is_terminal else _piped():
            if not chat.take(line):
                break
    if chat.num_refused and not is_terminal:
        raise RequestError(f"{chat.num_refused} lines were refused")


def _typed() -> Iterator[str]:
    """What a user types, until Ctrl-D."""
    with contextlib.suppress(ImportError):  # not every Python has it
        import readline  # noqa: F401  (makes `input` edit lines and remember them)
    lines: list[str] = []
    with contextlib.suppress(EOFError):
        while True:
            line = input("... " if lines else PROMPT)
            lines.append(line.removesuffix("\\"))
            if not line.endswith("\\"):
                yield "\n".join(lines)
                lines = []


def _piped() -> Iterator[str]:
    """The lines of standard input."""
    for line in sys.stdin:
        yield line.rstrip("\n")
