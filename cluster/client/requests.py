"""From a prompt and parameters to requests: form, token ids, complete parameters, request, each
step once.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import threading
import time
import uuid
from array import array
from collections.abc import Collection

from cluster.client.allocator import return_freed_memory
from cluster.client.outputs import Generation, OutputFollower, Sink
from cluster.client.prompts import Conversation, ParsedPrompt, Prompt, one_per_prompt, parse_prompt
from cluster.client.text_stream import TextStream
from cluster.client.tokenizer import Tokenizer
from cluster.grammar.calls import CallStructure, candidates
from cluster.grammar.compiler import GrammarCompiler
from cluster.grammar.formats import after_thinking, format_of, source_of
from cluster.grammar.markers import THINKING_SWITCH, State, state_after
from configs.model import ModelConfig
from scheduler.bounds import check
from scheduler.errors import RequestError
from scheduler.limits import SchedulerLimits, check_request, check_vocabulary
from scheduler.messages import Request
from scheduler.params import SEED_LIMIT, SamplingParams, StructuredOutputs

# Characters. A token takes 350 bytes while it is made, in blocks that each thread would keep: eight
# texts of 300,000 characters at once took 400 MiB, and left 370. So few larger ones are encoded at
# a time, as fast on two processors, and what they took is returned.
LARGE_TEXT = 65_536
MAX_LARGE_TEXTS = 2


class RequestBuilder:
    """Builds the requests of one client. Any thread may call."""

    def __init__(
        self,
        model: ModelConfig,
        tokenizer: Tokenizer | None,
        defaults: SamplingParams,
        limits: SchedulerLimits,
        seed: int | None,
    ) -> None:
        """`defaults` fill what a request leaves unset. `seed` makes the seeds of requests without
        one repeatable.
        """
        self._grammars: GrammarCompiler | None = None
        if tokenizer is not None and tokenizer.file is not None:
            self._grammars = GrammarCompiler(
                tokenizer.file, model.vocab_size, sorted(model.eos_token_ids)
            )
        self.limits = limits
        self.defaults = defaults
        self._model = model
        self._tokenizer = tokenizer
        self._random = random.Random(seed)
        self._name = uuid.uuid4().hex[:12]
        self._numbers = itertools.count()
        self._large_texts = threading.BoundedSemaphore(MAX_LARGE_TEXTS)

    def build(
        self, prompt: Prompt, requested: SamplingParams | None, sink: Sink | None
    ) -> Generation:
        """A generation whose requests can be sent. Raises `RequestError` if they could not run.

        Without a sink nobody reads tokens before the end, so the driver sends none before it where
        that is possible.
        """
        rendered = self._rendered(parse_prompt(prompt))
        token_ids = self._token_ids(rendered, self.limits.max_total_tokens)
        params = self.parameters(requested)
        grammar, loosened = self._grammar(params.structured_outputs, rendered)
        seed = params.seed if params.seed is not None else self._random.randrange(SEED_LIMIT)
        if sink is not None:
            news_interval = params.stream_interval or 1
        else:
            news_interval = int(bool(params.stop_strings()) or params.logprobs is not None)
        arrival_s = time.time()
        outputs = []
        resolved_params = params.resolve_all(seed=seed, eos_token_ids=self._model.eos_token_ids)
        for index, sampling in enumerate(resolved_params):
            request = Request(
                request_id=f"{self._name}-{next(self._numbers)}",
                token_ids=array("i", token_ids),
                num_prompt_tokens=len(token_ids),
                sampling=sampling,
                cache_salt=rendered.cache_salt,
                news_interval=news_interval,
                arrival_s=arrival_s,
                grammar=grammar,
            )
            check_request(request, self.limits)
            outputs.append(
                OutputFollower(
                    request,
                    index,
                    self._text_stream(params, rendered),
                    sink,
                    only_prompt=params.max_tokens == 0,
                )
            )
        return Generation(rendered.text, outputs, rendered.session_id, loosened)

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt, whether or not they could be run. Raises `RequestError`."""
        rendered = self._rendered(parse_prompt(prompt))
        check("tokenized text", len(rendered.text or ""), "the text", "prompt")
        return self._token_ids(rendered)

    def checked_token_ids(self, prompt: Prompt, requested: SamplingParams | None) -> list[int]:
        """The token ids of a prompt. Raises `RequestError` if it could not be run. Draws no
        seed.
        """
        [params] = one_per_prompt(requested, 1)
        seeded = dataclasses.replace(params or SamplingParams(), seed=0)
        return self.build(prompt, seeded, None).prompt_token_ids

    def parameters(self, requested: SamplingParams | None) -> SamplingParams:
        """Parameters with the defaults filled in. Raises `RequestError` for what this checkpoint
        cannot do.
        """
        params = (requested or SamplingParams()).over(self.defaults)
        if params.stop_strings() and self._tokenizer is None:
            raise RequestError(
                "stop strings need a tokenizer, and this checkpoint has none", "stop"
            )
        self.check_ids("logit_bias", params.logit_bias or ())
        self.check_ids("stop_token_ids", params.stop_token_ids or ())
        return params

    def close(self) -> None:
        """End the process that compiles grammars."""
        if self._grammars is not None:
            self._grammars.close()

    def _grammar(
        self, structure: StructuredOutputs | None, prompt: ParsedPrompt
    ) -> tuple[bytes, tuple[str, ...]]:
        """(the grammar, empty for an output without one; the tools whose arguments need not match
        their schemas). Only answers in a conversation may begin with reasoning.
        """
        if structure is None:
            return b"", ()
        if self._grammars is None:
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
        state = State.CONTENT
        if prompt.conversation is not None:
            state = self._state_after(prompt.conversation, prompt.text)
        if not isinstance(structure, CallStructure):
            return self._grammars.check(source_of(after_thinking(format_of(structure), state))), ()
        refusal: RequestError | None = None
        for candidate in candidates(structure):
            source = source_of(after_thinking(candidate.format, state))
            try:
                return self._grammars.check(source), candidate.loosened
            except RequestError as error:
                refusal = refusal or error
        assert refusal is not None, "the last candidate is refused with a reason"
        raise refusal

    def _state_after(self, conversation: Conversation, text: str | None) -> State:
        """How the answer begins. If the template renders the same with thinking off, the model does
        not think.
        """
        assert self._tokenizer is not None and text is not None
        state, switch = state_after(text), THINKING_SWITCH
        if state is not State.UNDECIDED:
            return state
        variables = conversation.template_variables
        if switch not in self._tokenizer.template_variables or variables.get(switch) is False:
            return State.CONTENT
        without_thinking = dataclasses.replace(
            conversation, template_variables=variables | {switch: False}
        )
        return State.CONTENT if self._tokenizer.render_chat(without_thinking) == text else state

    def _rendered(self, prompt: ParsedPrompt) -> ParsedPrompt:
        """A conversation as text; other prompts unchanged."""
        if prompt.conversation is None:
            return prompt
        if self._tokenizer is None:
            raise _no_tokenizer("a conversation")
        text = self._tokenizer.render_chat(prompt.conversation)
        return dataclasses.replace(prompt, text=text)

    def _token_ids(self, prompt: ParsedPrompt, max_num_tokens: int | None = None) -> list[int]:
        """The token ids of a prompt; text of far more than `max_num_tokens` is refused early."""
        if prompt.token_ids is not None:
            # Checked before they are converted to 32-bit numbers.
            check_vocabulary(prompt.token_ids, self._model.vocab_size)
            return prompt.token_ids
        if self._tokenizer is None:
            raise _no_tokenizer("a text prompt")
        text, encode = prompt.text, self._tokenizer.encode
        assert text is not None
        if prompt.conversation is not None:
            encode = self._tokenizer.encode_rendered
        if len(text) <= LARGE_TEXT:
            return encode(text, max_num_tokens)
        with self._large_texts:
            try:
                return encode(text, max_num_tokens)
            finally:
                return_freed_memory()

    def _text_stream(self, params: SamplingParams, prompt: ParsedPrompt) -> TextStream | None:
        """Only answers in a conversation may begin with reasoning."""
        if self._tokenizer is None:
            return None
        state = State.CONTENT
        if prompt.conversation is not None:
            state = state_after(prompt.text or "")
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


def _no_tokenizer(form: str) -> RequestError:
    return RequestError(
        f"{form} needs a tokenizer, and this checkpoint has none; send prompt_token_ids", "prompt"
    )
