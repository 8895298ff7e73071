"""Sampling parameters: what is refused and by what name, layers of defaults, seeds."""

from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.errors import RequestError
from scheduler.params import (
    DEFAULT_SAMPLING_PARAMS,
    MAX_LOGPROBS,
    SEED_LIMIT,
    ResolvedSampling,
    SamplingParams,
    StructuredOutputs,
    derive_seed,
)

LOWEST_AND_HIGHEST: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_k": (-1, 2**31 - 1),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "seed": (-SEED_LIMIT, SEED_LIMIT - 1),
    "min_tokens": (0, 2**31 - 1),
    "max_tokens": (1, 2**31 - 1),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "n": (1, 128),
}
WHOLE = ("top_k", "seed", "min_tokens", "max_tokens", "logprobs", "prompt_logprobs", "n")
ALL_NUMBERS = (*LOWEST_AND_HIGHEST, "repetition_penalty")


def refusal(**values: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**values)
    return caught.value


# -- ranges ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOWEST_AND_HIGHEST)
def test_ends_of_a_range_are_accepted(name: str) -> None:
    for value in LOWEST_AND_HIGHEST[name]:
        assert getattr(SamplingParams(**{name: value}), name) == value  # type: ignore[arg-type]


@pytest.mark.parametrize("name", LOWEST_AND_HIGHEST)
def test_value_beside_a_range_is_refused_with_the_range(name: str) -> None:
    low, high = LOWEST_AND_HIGHEST[name]
    for value in (low - 1, high + 1):
        error = refusal(**{name: value})
        assert error.parameter == name
        assert name in str(error) and str(low) in str(error) and str(high) in str(error)


def test_zero_is_refused_where_the_range_is_open() -> None:
    for value in (0, 0.0, -1.0, 100.5):
        assert refusal(repetition_penalty=value).parameter == "repetition_penalty"
    for value in (1e-9, 100.0):
        assert SamplingParams(repetition_penalty=value).repetition_penalty == value


@pytest.mark.parametrize("name", ALL_NUMBERS)
@pytest.mark.parametrize("value", [True, "1", [1], math.nan, math.inf, -math.inf, 10**400])
def test_what_is_no_number_in_range_is_refused_by_name(name: str, value: object) -> None:
    assert refusal(**{name: value}).parameter == name


@pytest.mark.parametrize("name", WHOLE)
def test_fraction_is_refused_where_a_whole_number_is_needed(name: str) -> None:
    assert "a whole number" in str(refusal(**{name: 1.0}))


@pytest.mark.parametrize("value", [0, 1, "yes"])
def test_ignore_eos_is_true_or_false(value: object) -> None:
    assert refusal(ignore_eos=value).parameter == "ignore_eos"


@pytest.mark.parametrize("value", ["", ["a", ""], [1], 5, {"a": 1}])
def test_stop_must_be_strings_that_are_not_empty(value: object) -> None:
    assert refusal(stop=value).parameter == "stop"


@pytest.mark.parametrize("value", [[-1], [2**31], [True], ["1"], 5, [1.0]])
def test_stop_token_ids_must_be_token_ids(value: object) -> None:
    assert refusal(stop_token_ids=value).parameter == "stop_token_ids"


@pytest.mark.parametrize(
    "value", [[1], {-1: 0.0}, {"x": 0.0}, {1: 101.0}, {1: "a"}, {1: math.nan}, {True: 1.0}]
)
def test_logit_bias_maps_token_ids_to_numbers(value: object) -> None:
    assert refusal(logit_bias=value).parameter == "logit_bias"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"x": 0.0}, "has 'x' as a token id; token ids are whole numbers from 0 to 2147483647"),
        ({3: 0.0, 7: 101.0}, "of token 7 must be a number between -100.0 and 100.0, got 101.0"),
        ({7: "a"}, "of token 7 must be a number, got 'a'"),
    ],
)
def test_a_refused_logit_bias_is_named_with_its_token(value: object, message: str) -> None:
    assert str(refusal(logit_bias=value)) == f"logit_bias {message}"


def test_stop_strings_are_a_tuple_however_they_were_given() -> None:
    given_as = [
        SamplingParams(stop=stop).stop_strings() for stop in ("a", ["a", "b"], ("a",), [], None)
    ]
    assert given_as == [("a",), ("a", "b"), ("a",), (), ()]


# -- from JSON -------------------------------------------------------------------------------------


def test_unknown_key_is_refused_by_name_with_the_known_ones() -> None:
    with pytest.raises(RequestError, match="'temprature'") as caught:
        SamplingParams.from_dict({"temprature": 1.0})
    assert caught.value.parameter == "temprature" and "temperature" in str(caught.value)


def test_every_field_can_come_from_json() -> None:
    values: dict[str, Any] = {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "logit_bias": {"7": 1.5},
        "seed": 4,
        "stop": ["x"],
        "stop_token_ids": [5],
        "min_tokens": 1,
        "max_tokens": 9,
        "ignore_eos": True,
        "logprobs": 2,
        "prompt_logprobs": 2,
        "n": 3,
        "stream_interval": 8,
    }
    params = SamplingParams.from_dict(values)
    assert params.logit_bias == {7: 1.5}
    unset = {name for name in SamplingParams.__slots__ if getattr(params, name) is None}
    assert unset == {"structured_outputs"}, "which is not possible with min_tokens"
    structured = SamplingParams.from_dict({"structured_outputs": {"regex": "a", "json": None}})
    assert structured.structured_outputs == StructuredOutputs(regex="a")


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        ({}, "needs exactly one of json, json_object, .* has none"),
        ({"regex": "a", "choice": ["b"]}, "has regex, choice"),
        ({"grammar": "x"}, "unknown key 'grammar'; known are json"),
        ({"json": 3}, "json must be a JSON schema, got 3"),
        ({"json_object": 1}, "json_object must be true or false"),
        ({"regex": 3}, "regex must be text, got 3"),
        ({"choice": []}, "choice must be a list of non-empty texts"),
        ({"choice": ["a", ""]}, "choice must be a list of non-empty texts"),
        ({"choice": "ab"}, "choice must be a list of non-empty texts"),
        ({"structural_tag": "x"}, "structural_tag must be an object"),
    ],
)
def test_structures_that_are_none_are_refused(structure: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        SamplingParams.from_dict({"structured_outputs": structure})
    assert caught.value.parameter == "structured_outputs"


@pytest.mark.parametrize("other", [{"min_tokens": 2}, {"ignore_eos": True}])
def test_a_structure_says_itself_when_an_output_ends(other: dict[str, Any]) -> None:
    structure = {"structured_outputs": {"choice": ["a"]}}
    with pytest.raises(RequestError, match="is not possible with structured_outputs"):
        SamplingParams.from_dict(other | structure)
    with pytest.raises(RequestError):
        SamplingParams.from_dict(structure).with_defaults(SamplingParams.from_dict(other))


@pytest.mark.parametrize("key", ["x", "-1", "1.0", "", "²", "9" * 5000, str(2**31)])
def test_logit_bias_key_that_is_no_token_id_is_refused(key: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams.from_dict({"logit_bias": {key: 1.0}})
    assert caught.value.parameter == "logit_bias"


def test_logit_bias_with_whole_numbers_for_keys_is_accepted() -> None:
    assert SamplingParams.from_dict({"logit_bias": {7: 1.5}}).logit_bias == {7: 1.5}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=3), children, max_size=3)
    ),
    max_leaves=5,
)


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(SamplingParams.__slots__) | st.text(max_size=5), JSON, max_size=4
    )
)
def test_any_json_is_accepted_or_refused_by_a_request_error(values: dict[str, Any]) -> None:
    try:
        params = SamplingParams.from_dict(values)
    except RequestError as error:
        assert error.parameter in values
    else:
        params.resolve(seed=1)


# -- layers ----------------------------------------------------------------------------------------


def test_what_is_set_wins_over_the_defaults_below() -> None:
    request, flags = SamplingParams(temperature=0.0, top_k=5), SamplingParams(top_k=9, top_p=0.5)
    merged = request.with_defaults(flags)
    assert (merged.temperature, merged.top_k, merged.top_p, merged.min_p) == (0.0, 5, 0.5, None)


def test_layers_can_be_stacked() -> None:
    request, flags, checkpoint = (
        SamplingParams(n=2),
        SamplingParams(top_k=9),
        SamplingParams(top_k=20, top_p=0.8),
    )
    merged = request.with_defaults(flags).with_defaults(checkpoint)
    assert (merged.n, merged.top_k, merged.top_p) == (2, 9, 0.8)


def test_laying_over_changes_neither_layer() -> None:
    request, flags = SamplingParams(temperature=0.0), SamplingParams(top_k=9)
    request.with_defaults(flags)
    assert request == SamplingParams(temperature=0.0) and flags == SamplingParams(top_k=9)


# -- the engine's message --------------------------------------------------------------------------


def test_unset_parameters_resolve_to_the_defaults() -> None:
    assert SamplingParams().resolve(seed=3) == ResolvedSampling(seed=3, max_tokens=256)


def test_every_set_parameter_reaches_the_engine() -> None:
    params = SamplingParams(
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        logit_bias={9: 1.0, 2: -1.0},
        stop_token_ids=[5],
        min_tokens=1,
        max_tokens=9,
        logprobs=0,
    )
    assert params.resolve(seed=3) == ResolvedSampling(
        seed=3,
        max_tokens=9,
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        logit_bias=((2, -1.0), (9, 1.0)),
        stop_token_ids=frozenset({5}),
        min_tokens=1,
        logprobs=0,
    )


def test_resolved_message_can_be_hashed_and_pickled() -> None:
    sampling = SamplingParams(logit_bias={1: 2.0}).resolve(seed=3)
    assert pickle.loads(pickle.dumps(sampling)) == sampling and isinstance(hash(sampling), int)


@pytest.mark.parametrize(("top_k", "kept"), [(None, 0), (-1, 0), (0, 0), (7, 7)])
def test_top_k_of_minus_one_or_zero_keeps_all(top_k: int | None, kept: int) -> None:
    assert SamplingParams(top_k=top_k).resolve(seed=1).top_k == kept


@pytest.mark.parametrize(("logprobs", "message"), [(None, -1), (0, 0), (5, 5)])
def test_logprobs_unset_is_not_logprobs_zero(logprobs: int | None, message: int) -> None:
    assert SamplingParams(logprobs=logprobs).resolve(seed=1).logprobs == message
    of_prompt = SamplingParams(prompt_logprobs=logprobs)
    assert of_prompt.resolve(seed=1).prompt_logprobs == message


def test_no_output_at_all_is_only_possible_with_log_probabilities_of_the_prompt() -> None:
    assert refusal(max_tokens=0).parameter == "max_tokens"
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    assert params.resolve(seed=1).max_tokens == 1, "the engine samples a token, which is dropped"


@pytest.mark.parametrize(
    ("ignore_eos", "ids"), [(None, {5, 8, 9}), (False, {5, 8, 9}), (True, {5})]
)
def test_ignore_eos_leaves_only_the_callers_stop_ids(
    ignore_eos: bool | None, ids: set[int]
) -> None:
    params = SamplingParams(stop_token_ids=[5], ignore_eos=ignore_eos)
    assert params.resolve(seed=1, eos_token_ids=[8, 9]).stop_token_ids == ids


def test_defaults_leave_nothing_open_that_the_engine_needs() -> None:
    optional = {
        *("logit_bias", "seed", "stop", "stop_token_ids", "structured_outputs"),
        *("logprobs", "prompt_logprobs"),
    }
    assert {
        name for name in SamplingParams.__slots__ if getattr(DEFAULT_SAMPLING_PARAMS, name) is None
    } == optional


# -- seeds -----------------------------------------------------------------------------------------


def test_first_output_has_the_seed_of_the_request() -> None:
    assert derive_seed(41, 0) == 41
    assert SamplingParams(n=3).resolve(seed=41).seed == 41


@pytest.mark.parametrize("seed", [-1, -2, -SEED_LIMIT])
def test_a_negative_seed_is_as_good_as_another(seed: int) -> None:
    [first, second] = SamplingParams(n=2).resolve_all(seed=seed)
    assert 0 <= first.seed < SEED_LIMIT and first.seed == derive_seed(seed, 0)
    assert 0 <= second.seed < SEED_LIMIT and second.seed != derive_seed(seed + 1, 1)
    assert second.seed == derive_seed(seed % SEED_LIMIT, 1)


def test_outputs_have_seeds_of_their_own() -> None:
    seeds = {derive_seed(seed, index) for seed in range(20) for index in range(128)}
    assert len(seeds) == 20 * 128
    assert all(0 <= seed < SEED_LIMIT for seed in seeds)


def test_derived_seeds_are_the_same_in_every_process() -> None:
    third = SamplingParams(n=3).resolve_all(seed=41)[2]
    assert third.seed == derive_seed(41, 2) == 2493709923089234907


def test_outputs_differ_in_their_seeds_and_share_all_else() -> None:
    params = SamplingParams(n=3, logit_bias={5: 1.0}, stop_token_ids=[7])
    each = params.resolve_all(seed=41, eos_token_ids=[9])
    first = params.resolve(seed=41, eos_token_ids=[9])
    assert each == [dataclasses.replace(first, seed=derive_seed(41, i)) for i in range(3)]
    assert len({id(sampling.logit_bias) for sampling in each}) == 1
    assert len({id(sampling.stop_token_ids) for sampling in each}) == 1


def test_only_the_first_output_asks_for_the_scores_of_the_prompt() -> None:
    each = SamplingParams(n=3, prompt_logprobs=0).resolve_all(seed=41)
    assert [sampling.prompt_logprobs for sampling in each] == [0, -1, -1]


# -- bounds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stop": ["a"] * 33}, "stop: 33 texts are too many; at most 32"),
        ({"stop": "a" * 1025}, "1025 characters are too many; at most 1024"),
        ({"stop": ["a", "b" * 1025]}, "the stop text 'bb.*: 1025 characters are too many"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids: 1025 token ids are too many"),
        ({"logit_bias": dict.fromkeys(range(1025), 0)}, "logit_bias: 1025 token ids are too many"),
        ({"structured_outputs": {"regex": "a" * 8193}}, "regex: 8193 characters are too many"),
        ({"structured_outputs": {"choice": ["a"] * 1025}}, "choice: 1025 texts are too many"),
        ({"structured_outputs": {"choice": ["a" * 65_537]}}, "choice: 65537 characters are too"),
        ({"structured_outputs": {"json": "a" * 65_537}}, "json: 65537 characters are too many"),
        ({"structured_outputs": {"json": {"anyOf": [{}] * 16_384}}}, "json: 16386 values are too"),
        (
            {"structured_outputs": {"structural_tag": {"a": "a" * 65_536}}},
            "structural_tag: 65537 characters are too many",
        ),
    ],
)
def test_more_than_a_bound_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        SamplingParams.from_dict(values)
    assert refused.value.parameter in values


def test_what_is_at_its_bound_is_accepted() -> None:
    SamplingParams(
        stop=["a" * 1024] * 32, stop_token_ids=[1] * 1024, logit_bias=dict.fromkeys(range(1024), 1)
    )
    SamplingParams(structured_outputs=StructuredOutputs(choice=["a" * 64] * 1024))


def test_an_error_shows_the_beginning_of_what_was_given() -> None:
    for wrong in ({"stop": [0] * 32}, {"n": "a" * 10**6}, {"logit_bias": "a" * 10**6}):
        with pytest.raises(RequestError) as refused:
            SamplingParams.from_dict(wrong)
        assert len(str(refused.value)) < 250


@pytest.mark.parametrize(
    "form", [{"regex": "\ud800"}, {"choice": ["a", "\ud800"]}, {"json": {"const": "\ud800"}}]
)
def test_what_an_output_must_match_is_unicode(form: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="cannot be encoded") as refused:
        StructuredOutputs(**form)
    assert refused.value.parameter == "structured_outputs"
