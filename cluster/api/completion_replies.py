"""Answers to completions, whole and as events of a stream, in OpenAI's legacy form."""

from __future__ import annotations

from itertools import chain
from typing import Any

from cluster.api.offsets import Offsets
from cluster.api.prompts_scored import (
    Echo,
    LogprobEntries,
    clamped_logprob,
    prompt_logprobs_field,
    token_text,
    top_logprobs_by_text,
)
from cluster.api.replies import OpenAIWriter, TextEventTemplate
from cluster.client.outputs import Chunk, Generation
from cluster.client.tokenizer import Tokenizer


class CompletionWriter(OpenAIWriter):
    """Answers a completion of one or many prompts."""

    CHUNK_OBJECT = "text_completion"

    def __init__(
        self,
        model: str,
        generations: list[Generation],
        tokenizer: Tokenizer | None,
        *,
        echo: bool,
        includes_token_ids: bool = False,
        num_echo_top_logprobs: int | None = None,
        num_prompt_top_logprobs: int | None = None,
    ) -> None:
        """`num_echo_top_logprobs`, `num_prompt_top_logprobs`: how many alternatives to report per
        token of a repeated prompt, and in vLLM's list; None for no log probabilities.
        """
        super().__init__(
            "cmpl", self.CHUNK_OBJECT, model, generations, includes_token_ids=includes_token_ids
        )
        self._tokenizer, self._echo = tokenizer, echo
        self._num_echo_top_logprobs = num_echo_top_logprobs
        self._num_prompt_top_logprobs = num_prompt_top_logprobs
        self._echoes: dict[int, Echo] = {}  # of each choice that repeats its prompt in parts
        self._offsets: dict[int, Offsets | None] = {}  # of the tokens of each choice
        # The text of prompts that were given as token ids, by prompt index.
        self._echoed_prompts: dict[int, str] = {}
        self._unsent_token_ids: dict[int, list[int]] = {}  # token ids of each choice
        self._sent_prompt_choices: set[int] = set()  # choices that have sent those of their prompt
        # Of choices of which only text is sent.
        self._text_event_templates: dict[int, TextEventTemplate] = {}

    def events(self, prompt_index: int, chunk: Chunk) -> bytes:
        choice_index = self._choice_index(prompt_index, chunk.index)
        if chunk.prompt_logprobs is not None:
            return self._echo_events(prompt_index, choice_index, chunk.prompt_logprobs)
        text = chunk.text
        is_text_only = chunk.finish_reason is None and chunk.logprobs is None
        if is_text_only and choice_index in self._text_event_templates:
            return self._text_event_templates[choice_index](text) if text else b""
        if choice_index not in self._offsets:
            echoed_prompt = self._echoed_prompt(prompt_index)
            if choice_index not in self._echoes:
                text = echoed_prompt + text
            self._offsets[choice_index] = self._new_offsets(echoed_prompt)
        if self._includes_token_ids:
            self._unsent_token_ids.setdefault(choice_index, []).extend(chunk.token_ids)
        logprobs = self._logprobs(chunk.token_ids, chunk.logprobs, self._offsets[choice_index])
        choices = []
        if text or logprobs:
            if logprobs:
                logprobs["top_logprobs"] = list(logprobs["top_logprobs"])
            choices.append(_choice(choice_index, text, logprobs, None))
        if chunk.finish_reason:
            choices.append(_choice(choice_index, "", None, chunk.finish_reason))
        self._add_ids(prompt_index, choice_index, choices)
        if (
            logprobs is None
            and not self._includes_token_ids
            and choice_index not in self._text_event_templates
        ):
            self._text_event_templates[choice_index] = TextEventTemplate(
                lambda text: self._events(
                    self.CHUNK_OBJECT, [_choice(choice_index, text, None, None)]
                )
            )
        return self._events(self.CHUNK_OBJECT, choices)

    def _echo_events(self, prompt_index: int, choice_index: int, entries: LogprobEntries) -> bytes:
        """The events for a part of the prompt that is repeated with log probabilities."""
        if self._num_echo_top_logprobs is None:
            return b""
        if choice_index not in self._echoes:
            self._echoes[choice_index] = self._new_echo(prompt_index, self._num_echo_top_logprobs)
        text, logprobs = self._echoes[choice_index].take(entries)
        logprobs["top_logprobs"] = list(logprobs["top_logprobs"])
        choices = [_choice(choice_index, text, logprobs, None)]
        self._add_ids(prompt_index, choice_index, choices)
        return self._events(self.CHUNK_OBJECT, choices)

    def _add_ids(self, prompt_index: int, choice_index: int, choices: list[dict[str, Any]]) -> None:
        """Add the token ids that are due to the first of `choices`, if any; each is an event."""
        if not choices or not self._includes_token_ids:
            return
        if choice_index not in self._sent_prompt_choices:
            self._sent_prompt_choices.add(choice_index)
            choices[0] |= self._prompt_token_ids_field(prompt_index)
        choices[0]["token_ids"] = self._unsent_token_ids.pop(choice_index, [])

    def body(self) -> dict[str, Any]:
        choices = []
        for prompt_index, generation in enumerate(self._generations):
            echoed_prompt = self._echoed_prompt(prompt_index)
            for completion in generation.completions:
                offsets = self._new_offsets(echoed_prompt)
                logprobs = self._logprobs(completion.token_ids, completion.logprobs, offsets)
                entries = generation.prompt_logprobs
                if self._num_echo_top_logprobs is not None and entries is not None:
                    _, prompt_logprobs = self._new_echo(
                        prompt_index, self._num_echo_top_logprobs
                    ).take(entries)
                    logprobs = _join_logprobs(prompt_logprobs, logprobs)
                index = self._choice_index(prompt_index, completion.index)
                text = echoed_prompt + completion.text
                choices.append(_choice(index, text, logprobs, completion.finish_reason))
                choices[-1] |= prompt_logprobs_field(
                    self._tokenizer, generation, self._num_prompt_top_logprobs
                )
                if self._includes_token_ids:
                    choices[-1] |= self._prompt_token_ids_field(prompt_index)
                    choices[-1]["token_ids"] = completion.token_ids
        return self._body(choices)

    def _prompt_token_ids_field(self, prompt_index: int) -> dict[str, Any]:
        return {"prompt_token_ids": self._generations[prompt_index].prompt_token_ids}

    def _choice_index(self, prompt_index: int, output_index: int) -> int:
        return prompt_index * len(self._generations[prompt_index].outputs) + output_index

    def _echoed_prompt(self, prompt_index: int) -> str:
        """The prompt, if the request asks to repeat it."""
        generation = self._generations[prompt_index]
        if not self._echo or self._tokenizer is None:
            return ""
        if generation.prompt is not None:
            return generation.prompt
        if prompt_index not in self._echoed_prompts:
            self._echoed_prompts[prompt_index] = self._tokenizer.decode(generation.prompt_token_ids)
        return self._echoed_prompts[prompt_index]

    def _new_echo(self, prompt_index: int, num_top_logprobs: int) -> Echo:
        generation = self._generations[prompt_index]
        assert self._tokenizer is not None
        return Echo(
            self._tokenizer,
            self._echoed_prompt(prompt_index),
            generation.prompt_token_ids,
            num_top_logprobs,
            is_text=generation.prompt is not None,
        )

    def _new_offsets(self, echoed_prompt: str) -> Offsets | None:
        """Offsets of an output behind the text that is repeated."""
        return Offsets(self._tokenizer, len(echoed_prompt)) if self._tokenizer is not None else None

    def _logprobs(
        self, token_ids: list[int], logprobs: LogprobEntries | None, offsets: Offsets | None
    ) -> dict[str, Any] | None:
        tokenizer = self._tokenizer
        if logprobs is None or offsets is None or tokenizer is None:
            return None
        tokens, values, text_offsets = [], [], []
        for token_id, entry in zip(token_ids, logprobs, strict=False):
            tokens.append(token_text(tokenizer, token_id))
            text_offsets.append(offsets.next(token_id))
            values.append(clamped_logprob(entry.logprob) if entry else None)
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": (
                top_logprobs_by_text(tokenizer, entry, len(entry.top_logprobs)) if entry else {}
                for entry in logprobs[: len(tokens)]
            ),
            "text_offset": text_offsets,
        }


def _join_logprobs(first: dict[str, Any], second: dict[str, Any] | None) -> dict[str, Any]:
    """The log probabilities of a prompt and of what follows it, as iterators."""
    if second is None:
        return first
    return {name: chain(first[name], second[name]) for name in first}


def _choice(
    index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
