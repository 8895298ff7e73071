"""`launch.py generate`: generates answers to prompts or to a file of requests."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import time
from pathlib import Path

from cluster.client.outputs import RequestOutput
from cluster.client.setup import make_engine_setup
from cluster.commands.batch import (
    BatchRequest,
    output_line,
    read_requests,
    run_batch,
    tokenize_batch,
)
from cluster.llm import LLM
from cluster.resources.session import check_arguments_are_utf8
from configs.engine import EngineConfig
from scheduler.errors import ConfigError, RequestError
from scheduler.params import SamplingParams

logger = logging.getLogger("eagleray")


def run_generate(
    config: EngineConfig,
    sampling_defaults: SamplingParams,
    *,
    prompts: list[str],
    input: Path | None,
    output: Path | None,
    raw: bool,
) -> None:
    """Check the input, prompts or a file, start an engine, generate, write answers, stop. Raises
    `ClientError` before anything runs, later if only the engine knows what fits, or writing fails.
    """
    check_arguments_are_utf8(sys.argv)
    if bool(prompts) == (input is not None):
        raise RequestError("give either PROMPTs or --input FILE.jsonl")
    if raw and input is not None:
        raise RequestError(
            "--raw applies to PROMPTs; each line of --input has `prompt` or `messages` itself"
        )
    requests = read_requests(input) if input is not None else None
    if output is not None:
        _check_output(output, input)
    for prompt in prompts:
        if not prompt:
            raise RequestError("a prompt is empty; give at least one token", "prompt")
    setup = make_engine_setup(config, sampling_defaults)
    if requests is None:
        is_chat = setup.has_chat_template and not raw
        requests = [_request_of(prompt, is_chat=is_chat) for prompt in prompts]
    with contextlib.closing(setup.request_builder()) as builder:
        requests = tokenize_batch(builder, requests)
    with LLM(setup=setup) as llm:
        gc.freeze()
        gc.enable()  # `launch.py` starts without it
        began_s = time.perf_counter()
        outputs = run_batch(llm, requests, progress=sys.stderr.isatty())
        seconds = time.perf_counter() - began_s
        _write_outputs(outputs, prompts, output)
        logger.info("%s", _describe_speed(outputs, seconds))


def _check_output(output: Path, input: Path | None) -> None:
    """Raise `ConfigError` unless answers can be written there. Leaves no new file behind."""
    option = f"--output {str(output)!r}"
    try:
        if output.is_dir():
            raise ConfigError(f"{option} is a folder; name a file")
        if not output.parent.is_dir():
            raise ConfigError(f"the folder of {option} does not exist")
        if input is not None and output.exists() and output.samefile(input):
            raise ConfigError(
                f"{option} is the file of --input, so the answers would overwrite the requests;"
                " name another"
            )
        is_new = not os.path.lexists(output)
        output.open("a").close()
        if is_new:
            output.unlink()
    except OSError as error:
        raise ConfigError(f"{option} cannot be written: {error}") from None


def _request_of(text: str, *, is_chat: bool) -> BatchRequest:
    prompt = {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
    return BatchRequest(source="", prompt=prompt, params=SamplingParams())


def _write_outputs(outputs: list[RequestOutput], prompts: list[str], path: Path | None) -> None:
    """Lines of JSON to the file or to standard output, where answers to `prompts` are text."""
    if prompts and path is None:
        for prompt, output in zip(prompts, outputs, strict=True):
            if output.error is not None:
                logger.error("%r failed: %s", prompt, output.error)
            for completion in output.outputs:
                print(f"> {prompt}\n{completion.text}\n", flush=True)
        return
    lines = "".join(output_line(i, output) + "\n" for i, output in enumerate(outputs))
    if path is None:
        print(lines, end="", flush=True)
        return
    try:
        path.write_text(lines, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {str(path)!r} cannot be written: {error}") from None


def _describe_speed(outputs: list[RequestOutput], seconds: float) -> str:
    num_prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    num_cached_tokens = sum(output.num_cached_tokens for output in outputs)
    num_output_tokens = sum(
        len(completion.token_ids) for output in outputs for completion in output.outputs
    )
    return (
        f"{len(outputs)} requests in {seconds:.2f} s: {num_prompt_tokens} prompt tokens"
        f" ({num_cached_tokens} cached) and {num_output_tokens} output tokens,"
        f" {num_prompt_tokens / seconds:.0f} and {num_output_tokens / seconds:.0f} tokens/s"
    )
