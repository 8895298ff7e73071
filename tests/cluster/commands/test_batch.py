"""The batch format of the command line: input lines, output lines, and errors that name the
line.
"""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from cluster.client.outputs import CompletionOutput, RequestOutput
from cluster.client.prompt_entries import PromptEntries
from cluster.client.requests import RequestBuilder
from cluster.commands.batch import BatchRequest, output_line, read_requests, run_batch
from cluster.llm import LLM
from scheduler.errors import ConfigError, RequestError
from scheduler.messages import PromptLogprobs, TokenLogprobs, int32_array
from scheduler.params import SamplingParams

GOOD = '{"prompt": "Hi"}'


def write(path: Path, *lines: str) -> Path:
    file = path / "requests.jsonl"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


# Input


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("prompt", "What is 2 + 2?"),
        ("prompt_token_ids", [1, 2]),
        ("messages", [{"role": "user", "content": "Hi"}]),
    ],
)
def test_each_form_of_prompt_is_read(tmp_path: Path, key: str, value: Any) -> None:
    [request] = read_requests(write(tmp_path, json.dumps({key: value})))
    assert (request.prompt, request.params) == ({key: value}, SamplingParams())


def test_a_line_may_have_sampling_params_and_a_salt(tmp_path: Path) -> None:
    values = {
        "prompt": "Hi",
        "sampling_params": {"max_tokens": 5, "stop": ["x"]},
        "cache_salt": "me",
    }
    [request] = read_requests(write(tmp_path, json.dumps(values)))
    assert request.prompt == {"prompt": "Hi", "cache_salt": "me"}
    assert request.params == SamplingParams(max_tokens=5, stop=["x"])


@pytest.mark.parametrize("empty", ["null", "{}"])
def test_empty_sampling_params_leave_all_unset(tmp_path: Path, empty: str) -> None:
    [request] = read_requests(write(tmp_path, f'{{"prompt": "Hi", "sampling_params": {empty}}}'))
    assert request.params == SamplingParams()


def test_json_spells_token_ids_of_logit_bias_as_strings(tmp_path: Path) -> None:
    line = '{"prompt": "Hi", "sampling_params": {"logit_bias": {"17": -5}}}'
    [request] = read_requests(write(tmp_path, line))
    assert request.params.logit_bias == {17: -5}


def test_requests_keep_the_order_of_their_lines(tmp_path: Path) -> None:
    requests = read_requests(write(tmp_path, *(f'{{"prompt": "{i}"}}' for i in range(20))))
    assert [request.prompt["prompt"] for request in requests] == [str(i) for i in range(20)]


def test_blank_lines_are_skipped_but_counted(tmp_path: Path) -> None:
    file = write(tmp_path, "", GOOD, "   ", GOOD)
    assert [request.source for request in read_requests(file)] == [
        f"{file}, line 2",
        f"{file}, line 4",
    ]


def test_text_of_any_script_is_read(tmp_path: Path) -> None:
    [request] = read_requests(write(tmp_path, '{"prompt": "ü 🦅 \\u00e9 \\n"}'))
    assert request.prompt == {"prompt": "ü 🦅 é \n"}


# Lines that are refused

MALFORMED = {
    "not JSON": ('{"prompt": "Hi"', "not JSON"),
    "no object": ('["Hi"]', "must be a JSON object with one of prompt, prompt_token_ids, messages"),
    "a bare string": ('"Hi"', "must be a JSON object"),
    "an unknown key": (
        '{"prompt": "Hi", "max_tokens": 5}',
        "unknown key 'max_tokens'; known are prompt, ",
    ),
    "no prompt": (
        '{"sampling_params": {}}',
        "needs exactly one of prompt, prompt_token_ids, messages; has none",
    ),
    "two prompts": (
        '{"prompt": "Hi", "messages": []}',
        "needs exactly one of .*; has prompt, messages",
    ),
    "an empty prompt": ('{"prompt": ""}', "prompt is empty; give at least one token"),
    "no token ids": ('{"prompt_token_ids": []}', "prompt_token_ids is empty"),
    "no messages": ('{"messages": []}', "messages is empty"),
    "sampling_params of the wrong type": (
        '{"prompt": "Hi", "sampling_params": [1]}',
        "sampling_params must be a JSON obj",
    ),
    "an unknown parameter": (
        '{"prompt": "Hi", "sampling_params": {"temprature": 1}}',
        "unknown sampling parameter 'temprature'; known are temperature, ",
    ),
    "a parameter out of range": (
        '{"prompt": "Hi", "sampling_params": {"max_tokens": 0}}',
        "max_tokens must be a whole number between 1 and",
    ),
    "a parameter of the wrong kind": (
        '{"prompt": "Hi", "sampling_params": {"temperature": "warm"}}',
        "temperature must be a number, got 'warm'",
    ),
    "a number that is NaN": (
        '{"prompt": "Hi", "sampling_params": {"temperature": NaN}}',
        "temperature must be a number between 0.0 and 100.0, got nan",
    ),
    "a logit_bias for no token": (
        '{"prompt": "Hi", "sampling_params": {"logit_bias": {"the": 1}}}',
        "logit_bias has 'the' as a token id",
    ),
}


@pytest.mark.parametrize("fault", MALFORMED)
def test_a_malformed_line_is_refused_with_its_number_and_what_is_wrong(
    tmp_path: Path, fault: str
) -> None:
    line, message = MALFORMED[fault]
    file = write(tmp_path, GOOD, "", line, GOOD)
    with pytest.raises(RequestError, match=message) as refused:
        read_requests(file)
    assert str(refused.value).startswith(f"{file}, line 3: ")


def test_the_first_malformed_line_is_the_one_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"line 2: unknown key 'a'"):
        read_requests(write(tmp_path, GOOD, '{"a": 1}', '{"b": 1}'))


def test_the_parameter_at_fault_is_told_apart_from_the_message(tmp_path: Path) -> None:
    with pytest.raises(RequestError) as refused:
        read_requests(write(tmp_path, '{"prompt": "Hi", "sampling_params": {"top_p": 2}}'))
    assert refused.value.parameter == "top_p"


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_file_without_requests_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "empty.jsonl").write_text(content)
    with pytest.raises(RequestError, match=r"empty\.jsonl' holds no requests"):
        read_requests(tmp_path / "empty.jsonl")


def test_a_file_that_is_not_there_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the input file '.*nothing\.jsonl' cannot be read"):
        read_requests(tmp_path / "nothing.jsonl")


def test_a_directory_for_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_requests(tmp_path)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes.jsonl").write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(ConfigError, match="cannot be read"):
        read_requests(tmp_path / "bytes.jsonl")


# Running


class FakeLLM:
    """Treats prompts by their length; refuses those that are too long; records what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, Any]] = []
        self.client = self.builder = self

    def checked_token_ids(self, prompt: dict[str, Any], params: SamplingParams) -> list[int]:
        if len(prompt["prompt"]) > 5:
            raise RequestError("the prompt has too many tokens", "prompt")
        return list(range(len(prompt["prompt"])))

    def generate(self, prompts: Any, params: Any, *, progress: bool) -> list[RequestOutput]:
        self.asked.append((prompts, params))
        return []


def requests_of(*prompts: dict[str, Any]) -> list[BatchRequest]:
    return [
        BatchRequest(source=f"line {number}", prompt=prompt, params=SamplingParams(seed=number))
        for number, prompt in enumerate(prompts, 1)
    ]


def run(llm: FakeLLM, requests: list[BatchRequest]) -> list[RequestOutput]:
    as_llm: Any = llm
    # What the fake replaces.
    assert hasattr(LLM, "generate") and hasattr(RequestBuilder, "checked_token_ids")
    return run_batch(as_llm, requests, progress=False)


def test_every_prompt_is_encoded_once_and_keeps_its_salt_and_parameters() -> None:
    llm = FakeLLM()
    run(llm, requests_of({"prompt": "ab"}, {"prompt": "abc", "cache_salt": "me"}))
    assert llm.asked == [
        (
            [{"prompt_token_ids": [0, 1]}, {"prompt_token_ids": [0, 1, 2], "cache_salt": "me"}],
            [SamplingParams(seed=1), SamplingParams(seed=2)],
        )
    ]


def test_a_prompt_the_engine_cannot_run_is_named_before_anything_runs() -> None:
    llm = FakeLLM()
    with pytest.raises(RequestError, match=r"^line 2: the prompt has too many tokens$") as refused:
        run(llm, requests_of({"prompt": "ab"}, {"prompt": "too long"}))
    assert refused.value.parameter == "prompt"
    assert llm.asked == []


# Output


def completion(index: int = 0, **fields: Any) -> CompletionOutput:
    return CompletionOutput(index, text="4 🦅", token_ids=[7, 8], finish_reason="stop", **fields)


def line_of(*completions: CompletionOutput) -> str:
    return output_line(
        3,
        RequestOutput(
            prompt="2+2", prompt_token_ids=[1, 2, 3], outputs=list(completions), num_cached_tokens=2
        ),
    )


def test_an_output_line_holds_index_text_tokens_reason_and_counts_in_this_order() -> None:
    line = line_of(completion())
    assert list(json.loads(line).items()) == [
        ("index", 3),
        ("text", "4 🦅"),
        ("token_ids", [7, 8]),
        ("finish_reason", "stop"),
        ("num_prompt_tokens", 3),
        ("num_cached_tokens", 2),
    ]


def test_an_output_line_is_one_line_of_readable_text() -> None:
    several = CompletionOutput(0, text="a\nb\r\nü", token_ids=[1], finish_reason="length")
    line = line_of(several)
    assert "\n" not in line and "\r" not in line and "ü" in line
    assert json.loads(line)["text"] == "a\nb\r\nü"


def test_several_outputs_are_a_list_of_what_belongs_to_each() -> None:
    value = json.loads(line_of(completion(0), completion(1)))
    each = {"text": "4 🦅", "token_ids": [7, 8], "finish_reason": "stop"}
    assert value == {
        "index": 3,
        "outputs": [each, each],
        "num_prompt_tokens": 3,
        "num_cached_tokens": 2,
    }


def test_logprobs_have_an_entry_a_token_with_alternatives_by_token_id() -> None:
    logprobs = [TokenLogprobs(logprob=-0.5, top_token_ids=(7, 9), top_logprobs=(-0.5, -1.5)), None]
    value = json.loads(line_of(completion(logprobs=logprobs)))
    assert value["logprobs"] == [{"logprob": -0.5, "top": {"7": -0.5, "9": -1.5}}, None]


def test_prompt_logprobs_belong_to_the_line() -> None:
    of_prompt = PromptLogprobs(
        first_position=1,
        num_top_logprobs=1,
        logprobs=array("f", [-0.5]),
        token_ranks=int32_array([2]),
        top_token_ids=int32_array([7]),
        top_logprobs=array("f", [-0.25]),
    )
    output = RequestOutput(
        prompt=None,
        prompt_token_ids=[1, 2],
        outputs=[completion(), completion(1)],
        num_cached_tokens=0,
        prompt_logprobs=PromptEntries(of_prompt),
    )
    value = json.loads(output_line(3, output))
    assert value["prompt_logprobs"] == [None, {"logprob": -0.5, "top": {"7": -0.25}}]


def test_logprobs_without_alternatives_are_those_of_the_tokens() -> None:
    value = json.loads(line_of(completion(logprobs=[TokenLogprobs(logprob=-0.5)])))
    assert value["logprobs"] == [{"logprob": -0.5, "top": {}}]


@pytest.mark.parametrize("separator", ["\u2028", "\u0085", "\u2029"])
def test_line_separators_inside_a_text_do_not_end_its_line(tmp_path: Path, separator: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"prompt": "a{separator}b"}}\n', encoding="utf-8")
    [request] = read_requests(tmp_path / "a.jsonl")
    assert request.prompt == {"prompt": f"a{separator}b"}


@pytest.mark.parametrize("value", ["0", "[]", "false", '""'])
def test_sampling_params_that_are_empty_but_no_object_are_refused(
    tmp_path: Path, value: str
) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"prompt": "a", "sampling_params": {value}}}\n')
    with pytest.raises(RequestError, match="line 1: sampling_params must be a JSON object"):
        read_requests(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": 5}',
        '{"prompt_token_ids": ["a"]}',
        '{"prompt_token_ids": [5000000000]}',
        '{"messages": [{"role": "user"}]}',
        '{"prompt": "a", "cache_salt": 5}',
    ],
)
def test_a_prompt_of_the_wrong_kind_is_refused_before_an_engine_starts(
    tmp_path: Path, line: str
) -> None:
    (tmp_path / "a.jsonl").write_text(line)
    with pytest.raises(RequestError, match="line 1"):
        read_requests(tmp_path / "a.jsonl")
