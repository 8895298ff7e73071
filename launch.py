"""Eagleray's command line.

    python launch.py generate "What is 47 + 38?" --tp 2
    python launch.py generate --input requests.jsonl --output answers.jsonl --model DIR_OR_HUB_ID
    python launch.py bench --num-seqs 64 --max-input 256 --max-output 256
    python launch.py doctor

Exit codes: 0; 2 for what the user did wrong; 1 for a fault of ours; 130 after Ctrl-C.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from configs.engine import ATTENTION_BACKENDS, DEVICES, LOG_LEVELS, EngineConfig
from scheduler.errors import ClientError, EaglerayError
from scheduler.params import SamplingParams

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Tensor-parallel inference for Qwen3 on a Ray cluster.",
)
ENGINE, SAMPLING, WORKLOAD = "Engine", "Sampling", "Made-up requests"
DEFAULT = EngineConfig()


def _engine(flags: str, text: str) -> Any:
    return typer.Option(flags, help=text, rich_help_panel=ENGINE)


def _sampling(flags: str, text: str) -> Any:
    return typer.Option(flags, help=text, rich_help_panel=SAMPLING)


def _workload(flags: str, text: str, default: float) -> Any:
    return typer.Option(flags, help=f"{text} [made-up requests; {default}]", rich_help_panel=WORKLOAD)


def _engine_config(
    model: Annotated[str | None, _engine("--model", "Directory or hub id; a small model of ours if left out.")] = None,
    tp: Annotated[int, _engine("--tp", "Tensor-parallel size: ranks, each an actor with a share.")] = 1,
    tokenizer: Annotated[str | None, _engine("--tokenizer", "Directory or hub id of another tokenizer.")] = None,
    revision: Annotated[str | None, _engine("--revision", "Revision of a hub id.")] = None,
    device: Annotated[str, _engine("--device", f"One of {', '.join(DEVICES)}.")] = DEFAULT.device,
    dtype: Annotated[str, _engine("--dtype", "auto (the checkpoint's), float32, bfloat16 or float16.")] = DEFAULT.dtype,
    attention_backend: Annotated[
        str, _engine("--attention-backend", f"One of {', '.join(ATTENTION_BACKENDS)}.")
    ] = DEFAULT.attention_backend,
    block_size: Annotated[int | None, _engine("--block-size", "Tokens a KV block; the backend's best.")] = None,
    num_kv_blocks: Annotated[int | None, _engine("--num-kv-blocks", "KV blocks, instead of a memory size.")] = None,
    kv_cache_bytes: Annotated[
        int, _engine("--kv-cache-bytes", "KV cache of all ranks together on CPU.")
    ] = DEFAULT.kv_cache_bytes,
    max_num_seqs: Annotated[int, _engine("--max-num-seqs", "Sequences running at once.")] = DEFAULT.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int | None, _engine("--max-num-batched-tokens", "Tokens in one step; the device's best.")
    ] = None,
    max_model_len: Annotated[int | None, _engine("--max-model-len", "Tokens of prompt and output.")] = None,
    gpu_memory_utilization: Annotated[
        float, _engine("--gpu-memory-utilization", "Share of a GPU's memory to use.")
    ] = DEFAULT.gpu_memory_utilization,
    prefix_caching: Annotated[
        bool, typer.Option("--prefix-caching/--no-prefix-caching", rich_help_panel=ENGINE)
    ] = DEFAULT.enable_prefix_caching,
    enforce_eager: Annotated[bool, _engine("--enforce-eager", "No CUDA graphs.")] = False,
    num_steps_ahead: Annotated[
        int, _engine("--num-steps-ahead", "Steps submitted beyond the last unread result; 0 waits for each.")
    ] = DEFAULT.num_steps_ahead,
    seed: Annotated[int | None, _engine("--seed", "Makes unseeded sampling repeatable.")] = None,
    ray_address: Annotated[str | None, _engine("--ray-address", "Ray cluster to join.")] = None,
    log_level: Annotated[str, _engine("--log-level", f"One of {', '.join(LOG_LEVELS)}.")] = DEFAULT.log_level,
) -> EngineConfig:
    """The flags of an engine, declared once for every command that starts one."""
    options: dict[str, Any] = {} if model is None else {"model": model}
    return EngineConfig(
        **options, tokenizer=tokenizer, revision=revision, tensor_parallel_size=tp, device=device, dtype=dtype,
        attention_backend=attention_backend, block_size=block_size, num_kv_blocks=num_kv_blocks,
        kv_cache_bytes=kv_cache_bytes, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len, gpu_memory_utilization=gpu_memory_utilization,
        enable_prefix_caching=prefix_caching, enforce_eager=enforce_eager, num_steps_ahead=num_steps_ahead,
        seed=seed, ray_address=ray_address, log_level=log_level,
    )  # fmt: skip


def _with_engine_flags(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with the flags of `_engine_config` in place of its parameter `config`, which gets what they make."""
    flags = inspect.signature(_engine_config, eval_str=True).parameters
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        parameters += flags.values() if parameter.name == "config" else [parameter]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        with _exit_codes():
            config = _engine_config(**{name: values.pop(name) for name in flags})
            command(config=config, **values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


@app.command()
@_with_engine_flags
def generate(
    prompts: Annotated[
        list[str] | None, typer.Argument(help="Questions; asked through the chat template if there is one.")
    ] = None,
    input: Annotated[Path | None, typer.Option("--input", help="JSONL file of requests.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", help="JSONL file of answers; else standard output.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue PROMPT as it stands, without chat template.")] = False,
    config: EngineConfig = DEFAULT,
    max_tokens: Annotated[int | None, _sampling("--max-tokens", "Longest output; 256 if unset.")] = None,
    temperature: Annotated[float | None, _sampling("--temperature", "0 is greedy.")] = None,
    top_k: Annotated[int | None, _sampling("--top-k", "0 keeps all.")] = None,
    top_p: Annotated[float | None, _sampling("--top-p", "Nucleus.")] = None,
    min_p: Annotated[float | None, _sampling("--min-p", "Least share of the best token's probability.")] = None,
    repetition_penalty: Annotated[float | None, _sampling("--repetition-penalty", "1 is none.")] = None,
    presence_penalty: Annotated[float | None, _sampling("--presence-penalty", "0 is none.")] = None,
    frequency_penalty: Annotated[float | None, _sampling("--frequency-penalty", "0 is none.")] = None,
    stop: Annotated[list[str] | None, _sampling("--stop", "End before this text; may be repeated.")] = None,
    min_tokens: Annotated[int | None, _sampling("--min-tokens", "No end before so many tokens.")] = None,
    ignore_eos: Annotated[bool | None, _sampling("--ignore-eos", "Do not end at end-of-sequence.")] = None,
    n: Annotated[int | None, _sampling("--n", "Outputs a request.")] = None,
) -> None:
    """Generate text for PROMPTs or for a file of requests."""
    defaults = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty, presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty, stop=stop or None, min_tokens=min_tokens, ignore_eos=ignore_eos, n=n,
    )  # fmt: skip
    _start_logging(config.log_level)
    from cluster.generate import GenerateJob, run_generate  # loads torch and Ray

    run_generate(
        GenerateJob(config=config, defaults=defaults, prompts=tuple(prompts or ()), input=input, output=output, raw=raw)
    )


@app.command()
@_with_engine_flags
def bench(
    input: Annotated[Path | None, typer.Option("--input", help="JSONL file of requests, as for generate.")] = None,
    num_seqs: Annotated[int | None, _workload("--num-seqs", "Requests.", 256)] = None,
    max_input: Annotated[int | None, _workload("--max-input", "Longest prompt; the shortest is a tenth.", 1024)] = None,
    max_output: Annotated[
        int | None, _workload("--max-output", "Longest output; the shortest is a tenth.", 1024)
    ] = None,
    temperature: Annotated[float | None, _workload("--temperature", "0 is greedy.", 0.6)] = None,
    request_rate: Annotated[
        float | None, typer.Option("--request-rate", help="Requests a second, Poisson; all at once if left out.")
    ] = None,
    num_warmup: Annotated[int, typer.Option("--num-warmup", help="Tiny requests before, which are not timed.")] = 1,
    config: EngineConfig = DEFAULT,
) -> None:
    """Time a file of requests, or made-up ones, and print one JSON line. --seed (here 0) draws prompts, lengths and
    arrivals, too."""
    config = dataclasses.replace(config, seed=config.seed or 0)
    _start_logging(config.log_level)
    from cluster.bench import BenchJob, run_bench  # loads torch and Ray

    run_bench(
        BenchJob(
            config=config, input=input, num_seqs=num_seqs, max_input=max_input, max_output=max_output,
            temperature=temperature, request_rate=request_rate, num_warmup=num_warmup,
        )
    )  # fmt: skip


@app.command()
def doctor() -> None:
    """Say what is installed, which devices there are, which backend would run, and what clashes."""
    with _exit_codes():
        from cluster.doctor import examine

        lines, wrong = examine()
        for line in lines:
            print(line)
        for line in wrong:
            print(f"WRONG: {line}")
        print("nothing clashes" if not wrong else f"{len(wrong)} to put right")
        if wrong:
            raise typer.Exit(2)


def _start_logging(level: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("eagleray")
    logger.addHandler(handler)
    logger.setLevel(level.upper())


@contextlib.contextmanager
def _exit_codes() -> Iterator[None]:
    """Errors made on purpose become one line and an exit code; SIGTERM stops as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except ClientError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    except EaglerayError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise typer.Exit(130) from None


if __name__ == "__main__":
    app()
