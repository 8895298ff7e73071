"""What a caller may ask of sampling, and what the engine receives.

`SamplingParams` is the caller's: every field may be left unset. `with_defaults` lays it over the
flags and the checkpoint's `generation_config`; `resolve` fills the rest from
`DEFAULT_SAMPLING_PARAMS` and returns `ResolvedSampling`, which the engine gets in a `Request`. Stop
strings, `n` and `ignore_eos` stay in the frontend, which is the only part that knows text and
end-of-sequence ids; `stream_interval` and `structured_outputs` become fields of the `Request`.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from scheduler.bounds import (
    MAX_OUTPUTS,
    check_bound,
    check_schema_bounds,
    check_unicode,
    short_repr,
)
from scheduler.errors import RequestError

MAX_LOGPROBS = 20
SEED_LIMIT = 2**63


def _parameter(
    default: Any = None,
    *,
    low: float | None = None,
    high: float | None = None,
    is_integer: bool = False,
    help: str,
    has_flag: bool = True,
) -> Any:
    """A field of `SamplingParams`: unset at first, `default` where nothing sets it, a number from
    `low` to `high`. `has_flag`: on the command line.
    """
    limits = {"default": default, "low": low, "high": high, "is_integer": is_integer}
    return dataclasses.field(default=None, metadata=limits | {"help": help, "has_flag": has_flag})


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSampling:
    """How the next token of one sequence is chosen and when the sequence ends, with every field
    set.

    `top_k` 0 and `top_p` 1.0 keep everything. `logprobs` is the number of alternatives to report,
    -1 for no logprobs; `prompt_logprobs` is the same for the tokens of the prompt.
    `stop_token_ids` holds every id that ends the sequence, those of the checkpoint included.
    """

    seed: int
    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    logprobs: int = -1
    prompt_logprobs: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """What the answer must match, in exactly one form; tool calls have a subclass without any.

    json: a JSON schema, as an object, true, false, or text. json_object: any JSON object. regex:
    the whole answer matches it. choice: the answer is one of these texts. structural_tag: a format
    of xgrammar's structural tags, passed on unchanged.
    """

    json: Mapping[str, Any] | bool | str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | list[str] | None = None
    structural_tag: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        names = [field.name for field in dataclasses.fields(self)]
        given_names = [name for name in names if self._is_given(name)]
        if len(given_names) != 1:
            raise _structure_error(
                f"needs exactly one of {', '.join(names)}; has {', '.join(given_names) or 'none'}"
            )
        if not isinstance(self.json, Mapping | bool | str | None):
            raise _structure_error(f"json must be a JSON schema, got {short_repr(self.json)}")
        if not isinstance(self.json_object, bool):
            raise _structure_error(
                f"json_object must be true or false, got {short_repr(self.json_object)}"
            )
        if not isinstance(self.regex, str | None):
            raise _structure_error(f"regex must be text, got {short_repr(self.regex)}")
        if self.choice is not None and not (
            isinstance(self.choice, list | tuple)
            and self.choice
            and all(isinstance(text, str) and text for text in self.choice)
        ):
            raise _structure_error(
                f"choice must be a list of non-empty texts, got {short_repr(self.choice)}"
            )
        if not isinstance(self.structural_tag, Mapping | None):
            raise _structure_error(
                f"structural_tag must be an object, got {short_repr(self.structural_tag)}"
            )
        self._check_bounds()

    def _check_bounds(self) -> None:
        """Raise `RequestError` for a form whose grammar would be too large, or that is not Unicode
        or JSON.
        """
        field = "structured_outputs"
        if self.json is not None:
            check_schema_bounds(self.json, f"{field}.json", field)
        if self.regex is not None:
            check_bound("regex", len(self.regex), f"{field}.regex", field)
            check_unicode(self.regex, f"{field}.regex", field)
        if self.choice is not None:
            check_bound("choice", len(self.choice), f"{field}.choice", field)
            check_bound("choice text", sum(map(len, self.choice)), f"{field}.choice", field)
            check_unicode("".join(self.choice), f"{field}.choice", field)
        if self.structural_tag is not None:
            check_schema_bounds(self.structural_tag, f"{field}.structural_tag", field)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StructuredOutputs:
        """Build from decoded JSON; null means not given. Raises `RequestError`."""
        known_keys = [field.name for field in dataclasses.fields(cls)]
        unknown_keys = [key for key in values if key not in known_keys]
        if unknown_keys:
            raise _structure_error(
                f"has the unknown key {short_repr(unknown_keys[0])}; known are"
                f" {', '.join(known_keys)}"
            )
        return cls(**{key: value for key, value in values.items() if value is not None})

    def _is_given(self, name: str) -> bool:
        value = getattr(self, name)
        return value is not None and not (name == "json_object" and value is False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request, under the field's standard names; None means unset.

    temperature: 0 is greedy. top_k: 0 or -1 keeps all. top_p in [0, 1]; 0 keeps the most probable
    token. min_p in [0, 1]. seed: any 64-bit number; the engine's is the same modulo 2**63.
    repetition_penalty: > 0, over prompt and output (Keskar et al. 2019, arXiv:1909.05858).
    presence_penalty, frequency_penalty: in [-2, 2], over the output. logit_bias: token id to a bias
    in [-100, 100]. logprobs: number of alternatives, 0 to 20; prompt_logprobs: the same for each
    token of the prompt, given those before it. max_tokens: 0 only with prompt_logprobs. stop: the
    text ends before the first match; in a conversation, reasoning is not searched. stop_token_ids:
    ids that end the sequence besides the checkpoint's end-of-sequence ids, which `ignore_eos`
    switches off. n: number of outputs, each with its own seed. stream_interval: a stream brings the
    first token, then this many at a time; a stop string is noticed when they come.
    structured_outputs: what the answer must match, after the reasoning; not with min_tokens or
    ignore_eos. How long lists and texts may be is said in `scheduler/bounds.py`.
    """

    temperature: float | None = _parameter(1.0, low=0.0, high=100.0, help="0 is greedy.")
    top_k: int | None = _parameter(
        0, low=-1, high=2**31 - 1, is_integer=True, help="0 keeps all tokens."
    )
    top_p: float | None = _parameter(
        1.0, low=0.0, high=1.0, help="Probability mass of the nucleus; 0 keeps the best token."
    )
    min_p: float | None = _parameter(
        0.0, low=0.0, high=1.0, help="Least share of the best token's probability."
    )
    repetition_penalty: float | None = _parameter(
        1.0, low=0.0, high=100.0, help="Over prompt and output; 1 means none."
    )
    presence_penalty: float | None = _parameter(
        0.0, low=-2.0, high=2.0, help="Over the output; 0 means none."
    )
    frequency_penalty: float | None = _parameter(
        0.0, low=-2.0, high=2.0, help="Over the output, per occurrence; 0 means none."
    )
    logit_bias: Mapping[int, float] | None = _parameter(
        help="Token id to a number from -100 to 100.", has_flag=False
    )
    seed: int | None = _parameter(
        low=-SEED_LIMIT,
        high=SEED_LIMIT - 1,
        is_integer=True,
        help="Any 64-bit number; the same seed gives the same tokens. Drawn if unset; the flag"
        " `--seed` is the engine's.",
        has_flag=False,
    )
    stop: str | tuple[str, ...] | list[str] | None = _parameter(
        help="End the output before this text; may be repeated."
    )
    stop_token_ids: tuple[int, ...] | list[int] | None = _parameter(
        help="Ids that end the output besides the checkpoint's own: those of its config.json,"
        " generation_config.json, tokenizer and chat template (the end of a turn) together.",
        has_flag=False,
    )
    min_tokens: int | None = _parameter(
        0, low=0, high=2**31 - 1, is_integer=True, help="No end before this many tokens."
    )
    max_tokens: int | None = _parameter(
        256,
        low=0,
        high=2**31 - 1,
        is_integer=True,
        help="Longest output; 256 if unset, over HTTP 16 for completions and the rest of the"
        " context for chats and responses, as in `launch.py chat`.",
    )
    ignore_eos: bool | None = _parameter(False, help="Do not end at an end-of-sequence token.")
    logprobs: int | None = _parameter(
        low=0,
        high=MAX_LOGPROBS,
        is_integer=True,
        help=f"Alternatives to report per token, 0 to {MAX_LOGPROBS}, from the raw logits.",
        has_flag=False,
    )
    prompt_logprobs: int | None = _parameter(
        low=0,
        high=MAX_LOGPROBS,
        is_integer=True,
        help="The same for each token of the prompt, given those before it; max_tokens may then be"
        " 0. Such a request computes its whole prompt: it reads no cached prefix.",
        has_flag=False,
    )
    n: int | None = _parameter(
        1,
        low=1,
        high=MAX_OUTPUTS,
        is_integer=True,
        help="Outputs per request; they share the prompt's blocks, and each has its own seed.",
    )
    stream_interval: int | None = _parameter(
        1,
        low=1,
        high=2**31 - 1,
        is_integer=True,
        help="A stream brings the first token, then so many at a time, or what there is after 2 s;"
        " a stop string is noticed with them.",
    )
    structured_outputs: StructuredOutputs | None = _parameter(
        help="What the answer must match: one of json, json_object, regex, choice, structural_tag;"
        " not with min_tokens or ignore_eos.",
        has_flag=False,
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, low = getattr(self, field.name), field.metadata["low"]
            if value is not None and low is not None:
                high, is_integer = field.metadata["high"], field.metadata["is_integer"]
                _check_number(field.name, value, low, high, is_integer=is_integer)
        if self.repetition_penalty == 0:
            raise RequestError("repetition_penalty must be above 0, got 0", "repetition_penalty")
        if self.ignore_eos is not None and not isinstance(self.ignore_eos, bool):
            raise RequestError(
                f"ignore_eos must be true or false, got {short_repr(self.ignore_eos)}", "ignore_eos"
            )
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise RequestError(
                f"max_tokens must be a whole number between 1 and {2**31 - 1}, got 0; 0 is possible"
                " with prompt_logprobs, and with echo in a completion, to ask for the prompt alone",
                "max_tokens",
            )
        self._check_structured_outputs()
        _check_stop(self.stop)
        _check_stop_token_ids(self.stop_token_ids)
        _check_logit_bias(self.logit_bias)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from decoded JSON. An unknown key raises `RequestError` naming the known keys."""
        known_names = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in known_names:
                raise RequestError(
                    f"unknown sampling parameter {short_repr(key)}; known are"
                    f" {', '.join(known_names)}",
                    str(key)[:100],
                )
        values = dict(values)
        if isinstance(values.get("logit_bias"), dict):
            check_bound("logit_bias", len(values["logit_bias"]), "logit_bias")
            values["logit_bias"] = {
                _token_id_key(token_id): bias for token_id, bias in values["logit_bias"].items()
            }
        if isinstance(values.get("structured_outputs"), dict):
            values["structured_outputs"] = StructuredOutputs.from_dict(values["structured_outputs"])
        return cls(**values)

    def with_defaults(self, defaults: SamplingParams) -> SamplingParams:
        """These parameters, with unset ones taken from `defaults`."""
        names = [field.name for field in dataclasses.fields(self)]
        unset_names = [name for name in names if getattr(self, name) is None]
        return dataclasses.replace(self, **{name: getattr(defaults, name) for name in unset_names})

    def _check_structured_outputs(self) -> None:
        if self.structured_outputs is None:
            return
        if not isinstance(self.structured_outputs, StructuredOutputs):
            raise _structure_error(
                f"must be a StructuredOutputs, got {type(self.structured_outputs).__name__}"
            )
        for name in ("min_tokens", "ignore_eos"):
            if getattr(self, name):
                raise RequestError(
                    f"{name} is not possible with structured_outputs, which say when an output is"
                    " complete",
                    name,
                )

    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def resolve(self, *, seed: int, eos_token_ids: Iterable[int] = ()) -> ResolvedSampling:
        """What the engine gets for the first output; `seed` is the request's, or drawn if it had
        none. Unset fields get the value in `DEFAULT_SAMPLING_PARAMS`.
        """
        params = self.with_defaults(DEFAULT_SAMPLING_PARAMS)
        stop_token_ids = frozenset(params.stop_token_ids or ())
        if not params.ignore_eos:
            stop_token_ids |= frozenset(eos_token_ids)
        fields = dataclasses.fields(ResolvedSampling)
        return ResolvedSampling(
            **{field.name: getattr(params, field.name) for field in fields}
            | {
                "seed": derive_seed(seed, 0),
                "top_k": max(0, params.top_k or 0),
                "logit_bias": tuple(sorted((params.logit_bias or {}).items())),
                "stop_token_ids": stop_token_ids,
                # What is generated for a `max_tokens` of 0 is dropped where the output is made.
                "max_tokens": max(1, params.max_tokens or 0),
                "logprobs": -1 if params.logprobs is None else params.logprobs,
                "prompt_logprobs": -1 if params.prompt_logprobs is None else params.prompt_logprobs,
            }
        )

    def resolve_all(
        self, *, seed: int, eos_token_ids: Iterable[int] = ()
    ) -> list[ResolvedSampling]:
        """What the engine gets for each output: as `resolve`, and sharing all but their seeds.
        Only the first asks for the log probabilities of the prompt, which are the same for all.
        """
        first_sampling = self.resolve(seed=seed, eos_token_ids=eos_token_ids)
        other_seeds = (derive_seed(seed, index) for index in range(1, self.n or 1))
        return [
            first_sampling,
            *(
                dataclasses.replace(first_sampling, seed=other_seed, prompt_logprobs=-1)
                for other_seed in other_seeds
            ),
        ]


def _structure_error(problem: str) -> RequestError:
    return RequestError(f"structured_outputs {problem}", "structured_outputs")


def derive_seed(seed: int, index: int) -> int:
    """Seed of output number `index` of a request, below `SEED_LIMIT`: the request's own seed modulo
    that for output 0, a hash of this and the index for the others. Indices from `MAX_OUTPUTS` on
    are free for other streams of random numbers.
    """
    seed %= SEED_LIMIT
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % SEED_LIMIT


def _check_number(
    name: str, value: object, low: float, high: float, *, is_integer: bool, parameter: str = ""
) -> None:
    """`parameter`: the one at fault, if `name` says more."""
    accepted_types: tuple[type, ...] = (int,) if is_integer else (int, float)
    expected_kind = "a whole number" if is_integer else "a number"
    if isinstance(value, bool) or not isinstance(value, accepted_types):
        raise RequestError(
            f"{name} must be {expected_kind}, got {short_repr(value)}", parameter or name
        )
    assert isinstance(value, int | float)
    if not low <= value <= high:  # NaN is in no range
        raise RequestError(
            f"{name} must be {expected_kind} between {low} and {high}, got {short_repr(value)}",
            parameter or name,
        )


def _check_stop(stop: Any) -> None:
    if stop is None:
        return
    stop_strings = [stop] if isinstance(stop, str) else stop
    is_list = isinstance(stop_strings, list | tuple)
    if is_list:
        check_bound("stop", len(stop_strings), "stop")
    if not is_list or not all(isinstance(text, str) and text for text in stop_strings):
        raise RequestError(
            f"stop must be a non-empty string or a list of them, got {short_repr(stop)}", "stop"
        )
    for text in stop_strings:
        check_bound("stop text", len(text), f"the stop text {short_repr(text)}", "stop")


def _check_stop_token_ids(stop_token_ids: Any) -> None:
    if stop_token_ids is None:
        return
    is_list = isinstance(stop_token_ids, list | tuple)
    if is_list:
        check_bound("stop_token_ids", len(stop_token_ids), "stop_token_ids")
    if not is_list or not all(map(is_token_id, stop_token_ids)):
        raise RequestError(
            f"stop_token_ids must be a list of token ids, got {short_repr(stop_token_ids)}",
            "stop_token_ids",
        )


def _check_logit_bias(logit_bias: object) -> None:
    if logit_bias is None:
        return
    if not isinstance(logit_bias, Mapping):
        raise RequestError(
            f"logit_bias must map token ids to numbers, got {short_repr(logit_bias)}", "logit_bias"
        )
    check_bound("logit_bias", len(logit_bias), "logit_bias")
    for token_id, bias in logit_bias.items():
        if not is_token_id(token_id):
            raise RequestError(
                f"logit_bias has {short_repr(token_id)} as a token id; token ids are whole numbers"
                f" from 0 to {2**31 - 1}",
                "logit_bias",
            )
        name = f"logit_bias of token {token_id}"
        _check_number(name, bias, -100.0, 100.0, is_integer=False, parameter="logit_bias")


def is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _token_id_key(key: object) -> object:
    """JSON keys are strings; whatever is not a token id is left for the check to refuse."""
    if isinstance(key, str) and len(key) <= 10 and key.isascii() and key.isdecimal():
        return int(key)
    return key


DEFAULT_SAMPLING_PARAMS = SamplingParams(
    **{field.name: field.metadata["default"] for field in dataclasses.fields(SamplingParams)}
)
