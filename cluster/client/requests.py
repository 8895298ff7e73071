"""From a prompt and parameters to requests: token ids, complete parameters, request."""

from __future__ import annotations

import dataclasses
import itertools
import random
import threading
import uuid
from array import array
from collections.abc import Collection

from cluster.client.allocator import return_freed_memory
from cluster.client.outputs import Generation, OutputFollower, Sink
from cluster.client.prompts import (
    Conversation,
    ParsedPrompt,
    Prompt,
    broadcast_params,
    parse_prompt,
)
from cluster.client.text_stream import TextStream
from cluster.client.tokenizer import Tokenizer
from cluster.grammar.calls import CallStructure, candidate_formats
from cluster.grammar.compiler import GrammarCompiler
from cluster.grammar.formats import format_after_thinking, format_of, structural_tag_of
from cluster.grammar.markers import THINKING_SWITCH, AnswerState, answer_state_after
from configs.model import ModelConfig
from scheduler.bounds import check_bound
from scheduler.errors import RequestError
from scheduler.limits import SchedulerLimits, check_request, check_vocabulary
from scheduler.messages import Request
from scheduler.params import SEED_LIMIT, SamplingParams, StructuredOutputs

# Characters. A token takes 350 bytes while it is made, in blocks that each thread would keep: eight
# texts of 300,000 characters at once took 400 MiB, and left 370. So few larger ones are encoded at
# a time, as fast on two processors, and what they took is returned.
LARGE_TEXT_CHARS = 65_536
MAX_LARGE_TEXTS = 2


class RequestBuilder:
    """Builds the requests of one client. Any thread may call."""

    def __init__(
        self,
        model: ModelConfig,
        tokenizer: Tokenizer | None,
        sampling_defaults: SamplingParams,
        limits: SchedulerLimits,
        seed: int | None,
    ) -> None:
        """`sampling_defaults` fill what is left unset. `seed` makes drawn seeds repeatable."""
        self._grammar_compiler: GrammarCompiler | None = None
        if tokenizer is not None and tokenizer.file is not None:
            self._grammar_compiler = GrammarCompiler(
                tokenizer.file, model.vocab_size, sorted(model.eos_token_ids)
            )
        self.limits = limits
        self.sampling_defaults = sampling_defaults
        self._model = model
        self._tokenizer = tokenizer
        self._random = random.Random(seed)
        self._id_prefix = uuid.uuid4().hex[:12]
        self._request_numbers = itertools.count()
        self._large_text_semaphore = threading.BoundedSemaphore(MAX_LARGE_TEXTS)

    def build(
        self,
        prompt: Prompt,
        requested_params: SamplingParams | None,
        sink: Sink | None,
        *,
        compiles: bool = True,
    ) -> Generation:
        """A generation whose requests can be sent. Raises `RequestError` if they could not run;
        without `compiles`, `NewGrammarError` if their grammar is not known.

        Without a sink nobody reads tokens before the end, so the driver sends none before it where
        that is possible.
        """
        rendered_prompt = self._render(parse_prompt(prompt))
        token_ids = self._token_ids(rendered_prompt, self.limits.max_total_tokens)
        params = self.parameters(requested_params)
        structural_tag, loosened_tools = self._structural_tag(
            params.structured_outputs, rendered_prompt, compiles=compiles
        )
        seed = params.seed if params.seed is not None else self._random.randrange(SEED_LIMIT)
        if sink is not None:
            num_tokens_per_news = params.stream_interval or 1
        else:
            num_tokens_per_news = int(bool(params.stop_strings()) or params.logprobs is not None)
        outputs: list[OutputFollower] = []
        resolved_params = params.resolve_all(seed=seed, eos_token_ids=self._model.eos_token_ids)
        first_request = Request(
            request_id="",
            token_ids=array("i", token_ids),
            num_prompt_tokens=len(token_ids),
            sampling=resolved_params[0],
            cache_salt=rendered_prompt.cache_salt,
            num_tokens_per_news=num_tokens_per_news,
            structural_tag=structural_tag,
        )
        check_request(first_request, self.limits)
        for index, sampling in enumerate(resolved_params):
            request_id = f"{self._id_prefix}-{next(self._request_numbers)}"
            request = dataclasses.replace(first_request, request_id=request_id, sampling=sampling)
            text_stream = self._text_stream(params, rendered_prompt)
            scores_prompt = params.prompt_logprobs is not None
            outputs.append(
                OutputFollower(
                    request,
                    index,
                    text_stream,
                    sink,
                    is_prompt_only=params.max_tokens == 0,
                    scored_output=outputs[0] if scores_prompt and outputs else None,
                )
            )
        return Generation(rendered_prompt.text, outputs, rendered_prompt.session_id, loosened_tools)

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt, whether or not they could be run. Raises `RequestError`."""
        rendered_prompt = self._render(parse_prompt(prompt))
        check_bound("tokenized text", len(rendered_prompt.text or ""), "the text", "prompt")
        return self._token_ids(rendered_prompt)

    def checked_token_ids(
        self, prompt: Prompt, requested_params: SamplingParams | None
    ) -> list[int]:
        """The token ids of a prompt. Raises `RequestError` if it could not run. Draws no seed."""
        [params] = broadcast_params(requested_params, 1)
        seeded_params = dataclasses.replace(params or SamplingParams(), seed=0)
        return self.build(prompt, seeded_params, None).prompt_token_ids

    def parameters(self, requested_params: SamplingParams | None) -> SamplingParams:
        """Parameters with defaults. Raises `RequestError` for what this checkpoint cannot do."""
        params = (requested_params or SamplingParams()).with_defaults(self.sampling_defaults)
        if params.stop_strings() and self._tokenizer is None:
            raise RequestError(
                "stop strings need a tokenizer, and this checkpoint has none", "stop"
            )
        self.check_ids("logit_bias", params.logit_bias or ())
        self.check_ids("stop_token_ids", params.stop_token_ids or ())
        return params

    def close(self) -> None:
        """End the process that compiles grammars."""
        if self._grammar_compiler is not None:
            self._grammar_compiler.close()

    def _structural_tag(
        self, structure: StructuredOutputs | None, prompt: ParsedPrompt, *, compiles: bool
    ) -> tuple[bytes, tuple[str, ...]]:
        """(the structural tag, empty for an output without a grammar; the tools whose arguments
        need not match their schemas). Only answers in a conversation may begin with reasoning.
        """
        if structure is None:
            return b"", ()
        if self._grammar_compiler is None:
            raise RequestError(
                "structured_outputs need a tokenizer with a tokenizer.json of byte-level tokens,"
                " which this checkpoint does not have",
                "structured_outputs",
            )
        if not self._model.eos_token_ids:
            raise RequestError(
                "structured_outputs need an end-of-sequence token, and this checkpoint has none",
                "structured_outputs",
            )
        state = AnswerState.CONTENT
        if prompt.conversation is not None:
            state = self._answer_state_after(prompt.conversation, prompt.text)
        if not isinstance(structure, CallStructure):
            structural_tag = structural_tag_of(format_after_thinking(format_of(structure), state))
            return self._grammar_compiler.check(structural_tag, compiles=compiles), ()
        refusal: RequestError | None = None
        for candidate in candidate_formats(structure):
            structural_tag = structural_tag_of(format_after_thinking(candidate.format, state))
            try:
                checked_tag = self._grammar_compiler.check(structural_tag, compiles=compiles)
                return checked_tag, candidate.loosened_tools
            except RequestError as error:
                refusal = refusal or error
        assert refusal is not None, "the last candidate is refused with a reason"
        raise refusal

    def _answer_state_after(self, conversation: Conversation, text: str | None) -> AnswerState:
        """How the answer begins. Where thinking off renders the same, the model does not think."""
        assert self._tokenizer is not None and text is not None
        state, switch = answer_state_after(text), THINKING_SWITCH
        if state is not AnswerState.UNDECIDED:
            return state
        variables = conversation.template_variables
        if switch not in self._tokenizer.template_variables or variables.get(switch) is False:
            return AnswerState.CONTENT
        non_thinking_conversation = dataclasses.replace(
            conversation, template_variables=variables | {switch: False}
        )
        is_same_text = self._tokenizer.render_chat(non_thinking_conversation) == text
        return AnswerState.CONTENT if is_same_text else state

    def _render(self, prompt: ParsedPrompt) -> ParsedPrompt:
        """A conversation as text; other prompts unchanged."""
        if prompt.conversation is None:
            return prompt
        if self._tokenizer is None:
            raise _no_tokenizer_error("a conversation")
        text = self._tokenizer.render_chat(prompt.conversation)
        return dataclasses.replace(prompt, text=text)

    def _token_ids(self, prompt: ParsedPrompt, max_total_tokens: int | None = None) -> list[int]:
        """The token ids of a prompt; text of far more than `max_total_tokens` is refused early."""
        if prompt.token_ids is not None:
            # Checked before they are converted to 32-bit numbers.
            check_vocabulary(prompt.token_ids, self._model.vocab_size)
            return prompt.token_ids
        if self._tokenizer is None:
            raise _no_tokenizer_error("a text prompt")
        text, encode = prompt.text, self._tokenizer.encode
        assert text is not None
        if prompt.conversation is not None:
            encode = self._tokenizer.encode_rendered
        if len(text) <= LARGE_TEXT_CHARS:
            return encode(text, max_total_tokens)
        with self._large_text_semaphore:
            try:
                return encode(text, max_total_tokens)
            finally:
                return_freed_memory()

    def _text_stream(self, params: SamplingParams, prompt: ParsedPrompt) -> TextStream | None:
        """Only answers in a conversation may begin with reasoning."""
        if self._tokenizer is None:
            return None
        state = AnswerState.CONTENT
        if prompt.conversation is not None:
            state = answer_state_after(prompt.text or "")
        stop, min_tokens = params.stop_strings(), params.min_tokens or 0
        return TextStream(self._tokenizer, stop, min_tokens, state)

    def check_ids(self, name: str, ids: Collection[int]) -> None:
        """Raise `RequestError` naming the parameter for an id outside the vocabulary."""
        size = self._model.vocab_size
        for token_id in ids:
            if not 0 <= token_id < size:
                raise RequestError(
                    f"{name}: token id {token_id} is outside the vocabulary of {size} ids", name
                )


def _no_tokenizer_error(form: str) -> RequestError:
    return RequestError(
        f"{form} needs a tokenizer, and this checkpoint has none; send prompt_token_ids", "prompt"
    )
