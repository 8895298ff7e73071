"""A batch for the command line: reads and checks each input line, generates, formats each output.

Input lines hold one of `prompt`, `prompt_token_ids`, `messages`, and optionally `sampling_params`
and `cache_salt`. Output lines, in input order, hold `index`, `text`, `token_ids`, `finish_reason`,
`num_prompt_tokens` and `num_cached_tokens`, and `logprobs` and `prompt_logprobs` if requested; with
`n` above 1, a list `outputs` with one entry per output; `error` for a request that has failed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.client.outputs import CompletionOutput, RequestOutput
from cluster.client.prompts import EXTRA_KEYS, PROMPT_FORMS, check_token_ids, form_of, parse_prompt
from cluster.client.requests import RequestBuilder
from cluster.llm import LLM
from scheduler.errors import ConfigError, RequestError
from scheduler.messages import TokenLogprobs
from scheduler.params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """A request. source: what names it in errors, such as its file and line, or ""."""

    source: str
    prompt: dict[str, Any]
    params: SamplingParams


def read_requests(path: Path) -> list[BatchRequest]:
    """Every line of a JSONL file, checked for form; blank lines are skipped. Raises `ConfigError`,
    and `RequestError`, naming the line unless there is none.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the input file {str(path)!r} cannot be read: {error}") from None
    numbered_lines = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not numbered_lines:
        raise RequestError(f"the input file {str(path)!r} holds no requests")
    return [_read_line(f"{path}, line {number}", line) for number, line in numbered_lines]


def _read_line(source: str, line: str) -> BatchRequest:
    with _naming_source(source):
        try:
            prompt = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"not JSON: {error}") from None
        if not isinstance(prompt, dict):
            raise RequestError(f"must be a JSON object with one of {', '.join(PROMPT_FORMS)}")
        form = form_of(prompt, ("sampling_params", *EXTRA_KEYS))
        if not prompt[form]:
            raise RequestError(f"{form} is empty; give at least one token", form)
        params = prompt.pop("sampling_params", None)
        params = {} if params is None else params
        if not isinstance(params, dict):
            raise RequestError("sampling_params must be a JSON object", "sampling_params")
        if form == "prompt_token_ids" and isinstance(prompt[form], list):
            check_token_ids(prompt[form], form)
        parse_prompt(prompt)
        return BatchRequest(source=source, prompt=prompt, params=SamplingParams.from_dict(params))


def run_batch(llm: LLM, requests: list[BatchRequest], *, progress: bool) -> list[RequestOutput]:
    """Check every request, then generate. Raises `RequestError` naming the source."""
    requests = tokenize_batch(llm.client.builder, requests)
    prompts, params = [request.prompt for request in requests], [r.params for r in requests]
    return llm.generate(prompts, params, progress=progress)


def tokenize_batch(builder: RequestBuilder, requests: list[BatchRequest]) -> list[BatchRequest]:
    """The requests, checked against the limits, with token ids as prompts. Constrained requests
    keep their prompts, because their grammar depends on how the conversation ends. Raises
    `RequestError` naming the source.
    """
    tokenized_requests = []
    for request in requests:
        with _naming_source(request.source):
            token_ids = builder.checked_token_ids(request.prompt, request.params)
        if request.params.structured_outputs is not None:
            tokenized_requests.append(request)
            continue
        cache_salt = request.prompt.get("cache_salt")
        prompt = {"prompt_token_ids": token_ids}
        if cache_salt:
            prompt["cache_salt"] = cache_salt
        tokenized_requests.append(replace(request, prompt=prompt))
    return tokenized_requests


def output_line(index: int, output: RequestOutput) -> str:
    """The JSON line of one finished request."""
    line: dict[str, Any] = {"index": index}
    if len(output.outputs) == 1:
        line |= _completion_fields(output.outputs[0])
    else:
        line["outputs"] = [_completion_fields(completion) for completion in output.outputs]
    line["num_prompt_tokens"] = len(output.prompt_token_ids)
    line["num_cached_tokens"] = output.num_cached_tokens
    if output.prompt_logprobs is not None:
        line["prompt_logprobs"] = list(map(_logprob_fields, output.prompt_logprobs))
    if output.error is not None:
        line["error"] = str(output.error)
    return json.dumps(line, ensure_ascii=False)


def _completion_fields(completion: CompletionOutput) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
    }
    if completion.logprobs is not None:
        fields["logprobs"] = list(map(_logprob_fields, completion.logprobs))
    return fields


def _logprob_fields(logprobs: TokenLogprobs | None) -> dict[str, Any] | None:
    if logprobs is None:
        return None
    top_logprobs = dict(zip(map(str, logprobs.top_token_ids), logprobs.top_logprobs, strict=True))
    return {"logprob": logprobs.logprob, "top": top_logprobs}


@contextmanager
def _naming_source(source: str) -> Iterator[None]:
    """Begin the message of a `RequestError` with the source of the request."""
    try:
        yield
    except RequestError as error:
        message = f"{source}: {error}" if source else str(error)
        raise type(error)(message, error.parameter) from None
