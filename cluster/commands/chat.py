"""`launch.py chat`: a conversation in the terminal.

An answer is shown while it is generated. Ctrl-C ends it; the part shown stays in the conversation.
A second Ctrl-C, Ctrl-C while there is no answer, or Ctrl-D ends the program. If standard input is
not a terminal, its lines are the questions of one conversation, and only answers are printed.
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

from cluster.api.parser import AnswerParser, AnswerParts
from cluster.client.outputs import Chunk
from cluster.client.prompts import Conversation, Message, ParsedPrompt
from cluster.client.setup import EngineSetup, make_engine_setup
from cluster.grammar.markers import answer_state_after
from cluster.llm import LLM
from cluster.resources.session import check_arguments_are_utf8
from configs.engine import EngineConfig
from scheduler.errors import ConfigError, RequestError
from scheduler.params import SamplingParams

INPUT_PROMPT = "> "
HELP = """\
/new            begin a new conversation
/system TEXT    begin a new conversation with this instruction; without TEXT, with none
/think on|off   whether the model thinks before it answers, where its chat template has that switch
/stats          what the last answer took
/help           this list
/quit           end, as Ctrl-D does
A line that ends with \\ goes on in the next one. Ctrl-C ends an answer."""
# Control characters in a model's text could change the terminal.
_CONTROL_CHARACTERS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_DIM_STYLE = Style(dim=True)


@dataclass(slots=True)
class Answer:
    """One answer, so far or complete. first_chunk_s and last_chunk_s count from the question."""

    question_at_s: float = field(default_factory=time.monotonic)
    content: str = ""  # without the reasoning
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    first_chunk_s: float = 0.0
    last_chunk_s: float = 0.0
    finish_reason: str | None = None

    def add(self, chunk: Chunk) -> None:
        """Count a chunk."""
        self.last_chunk_s = time.monotonic() - self.question_at_s
        self.first_chunk_s = self.first_chunk_s or self.last_chunk_s
        self.num_tokens += len(chunk.token_ids)
        self.num_prompt_tokens = chunk.num_prompt_tokens
        self.num_cached_tokens = chunk.num_cached_tokens
        self.finish_reason = chunk.finish_reason

    def describe(self, max_model_len: int) -> str:
        """Tokens, speed, and how much of the context is used, in one line."""
        decode_s = self.last_chunk_s - self.first_chunk_s
        speed = f"{(self.num_tokens - 1) / decode_s:.0f} tokens/s" if decode_s > 0 else "at once"
        return (
            f"{self.num_tokens} tokens, the first after {self.first_chunk_s:.2f} s, then {speed};"
            f" {self.num_prompt_tokens} tokens before them, {self.num_cached_tokens} of these from"
            f" the cache; at most {max_model_len} tokens fit into a conversation"
        )


class Chat:
    """The conversation, and what the user's lines do to it."""

    def __init__(self, llm: LLM, setup: EngineSetup, console: Console) -> None:
        """`console` gets the answers; with their reasoning, if it is a terminal."""
        assert setup.tokenizer is not None
        self._llm = llm
        self._tokenizer = setup.tokenizer
        self._console = console
        self._max_model_len = llm.report.limits.max_model_len
        fallback_params = SamplingParams(max_tokens=llm.report.limits.max_total_tokens)
        self._params = (
            SamplingParams(n=1)
            .with_defaults(setup.sampling_defaults)
            .with_defaults(fallback_params)
        )
        self._messages: list[Message] = []
        self._template_variables: dict[str, bool] = {}
        self._last_answer: Answer | None = None
        self.num_refused_lines = 0

    def handle_line(self, line: str) -> bool:
        """Answer a question or carry out a command. False if the user wants to leave."""
        try:
            if line.startswith("/"):
                return self._run_command(*line[1:].partition(" ")[::2])
            if line.strip():
                self._answer_question(line)
        except RequestError as error:
            self.num_refused_lines += 1
            hint = " (/new begins a new conversation)" if len(self._messages) > 1 else ""
            print(f"error: {error}{hint}", file=sys.stderr)
        return True

    def _run_command(self, command: str, argument: str) -> bool:
        """False if the user wants to leave. Raises `RequestError`."""
        match command, argument.strip():
            case "new", "":
                self._messages = [m for m in self._messages[:1] if m["role"] == "system"]
            case "system", text:
                self._messages = [{"role": "system", "content": text}] if text else []
            case "think", ("on" | "off") as switch:
                if "enable_thinking" not in self._tokenizer.template_variables:
                    raise RequestError("the chat template of this model cannot switch thinking")
                self._template_variables["enable_thinking"] = switch == "on"
            case "stats", "":
                last_answer = self._last_answer
                self._print_note(
                    last_answer.describe(self._max_model_len) if last_answer else "no answer yet"
                )
            case "help", "":
                self._print_note(HELP)
            case (("quit" | "exit" | "bye"), ""):
                return False
            case _:
                raise RequestError(
                    f"there is no command {f'/{command} {argument}'.strip()!r}; /help"
                )
        return True

    def _answer_question(self, question: str) -> None:
        """Show the answer to a question. Raises `RequestError`, with the conversation as before."""
        messages = [*self._messages, {"role": "user", "content": question}]
        self._last_answer = answer = Answer()
        try:
            for parts in self._answer_parts(messages, answer):
                if self._console.is_terminal:
                    show(self._console, parts.reasoning, style=_DIM_STYLE)
                show(self._console, parts.content)
                answer.content += parts.content
        except KeyboardInterrupt:
            if not self._console.is_terminal:
                raise
            answer.finish_reason = "interrupted"
        show(self._console, "\n")
        if answer.finish_reason in ("length", "interrupted"):
            self._print_note(f"[ended: {answer.finish_reason}]")
        self._messages = [*messages, {"role": "assistant", "content": answer.content}]

    def _answer_parts(self, messages: list[Message], answer: Answer) -> Iterator[AnswerParts]:
        """The parts of the answer to a conversation, counted in `answer`."""
        conversation = Conversation(messages=messages, template_variables=self._template_variables)
        prompt = ParsedPrompt(conversation=conversation)
        first_state = answer_state_after(self._tokenizer.render_chat(conversation))
        parser = AnswerParser(first_state, looks_for_calls=False)
        with contextlib.closing(self._llm.stream(prompt, self._params)) as chunks:
            for chunk in chunks:
                answer.add(chunk)
                yield parser.push(chunk.text)
        yield parser.finish()

    def _print_note(self, text: str) -> None:
        if self._console.is_terminal:
            show(self._console, text + "\n", style=_DIM_STYLE)
        else:
            print(text, file=sys.stderr)


def show(console: Console, text: str, style: Style | None = None) -> None:
    """Show a part of an answer, or a note, without control characters. As a segment, because
    `print` would replace tabs in a text.
    """
    text = _CONTROL_CHARACTERS.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r", ""))
    console.print(Segments([Segment(text, style)]), end="", soft_wrap=True)


def run_chat(config: EngineConfig, sampling_defaults: SamplingParams) -> None:
    """Start an engine, answer lines, stop. Raises `ConfigError` before anything runs for a model
    without a chat template, and `RequestError` at the end if lines of a pipe were refused.
    """
    check_arguments_are_utf8(sys.argv)
    setup = make_engine_setup(config, sampling_defaults)
    if not setup.has_chat_template:
        raise ConfigError(f"{config.model} has no chat template; use: launch.py generate --raw")
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # for bytes that its encoding lacks
    with LLM(setup=setup) as llm:
        gc.freeze()
        gc.enable()  # `launch.py` starts without it
        is_terminal = sys.stdin.isatty()
        chat = Chat(llm, setup, Console(force_terminal=None if is_terminal else False))
        if is_terminal:
            print(f"{config.model}. /help lists the commands.")
        for line in _typed_lines() if is_terminal else _piped_lines():
            if not chat.handle_line(line):
                break
    if chat.num_refused_lines and not is_terminal:
        raise RequestError(f"{chat.num_refused_lines} lines were refused")


def _typed_lines() -> Iterator[str]:
    """The lines that a user types, until Ctrl-D. A line that ends with a backslash continues."""
    with contextlib.suppress(ImportError):  # some Pythons lack it
        import readline  # noqa: F401  (makes `input` edit lines and remember them)
    lines: list[str] = []
    with contextlib.suppress(EOFError):
        while True:
            line = input("... " if lines else INPUT_PROMPT)
            lines.append(line.removesuffix("\\"))
            if not line.endswith("\\"):
                yield "\n".join(lines)
                lines = []


def _piped_lines() -> Iterator[str]:
    """The lines of standard input."""
    for line in sys.stdin:
        yield line.rstrip("\n")
