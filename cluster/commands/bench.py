"""`launch.py bench`: a workload through the engine, timed as a client sees it, in one JSON line.

engine, model, dtype, quantization, tp, device   the model: as given, or the shape
requests, input_tokens, output_tokens, cached_tokens
total_s, output_tokens_per_s  from when the first request is due to when the last one ends
ttft_s, inter_token_s         p50 and p99, see `cluster.commands.timing`
preemptions, num_steps        of the driver, without the warm-up
start_s                       seconds of each phase of the start, and of "all" together
roofline                      lower bound on the time of the workload on this machine, see
                              `workers.roofline`; does not apply to ranks on other machines; of a
                              model with experts it counts those of one token, far fewer than many
                              rows read
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import logging
import math
import random
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cluster.client.setup import make_engine_setup
from cluster.commands.batch import BatchRequest, read_requests, tokenize_batch
from cluster.commands.timing import TimedRun, draw_due_times_s, run_timed
from cluster.llm import LLM
from configs.engine import EngineConfig, ResolvedConfig
from configs.model import ModelConfig
from configs.shapes import SHAPES
from scheduler.errors import ConfigError, RequestError
from scheduler.messages import EngineStats
from scheduler.params import SamplingParams
from workers.models.random_checkpoint import write_random_checkpoint
from workers.models.size import count_parameters
from workers.roofline import Machine, make_workload, probe_cpu, roofline_entry

DEFAULT_NUM_SEQS = 256
DEFAULT_MAX_INPUT_TOKENS = 1024
DEFAULT_MAX_OUTPUT_TOKENS = 1024
DEFAULT_TEMPERATURE = 0.6
MAX_SYNTHETIC_TOKEN_ID = 10000

logger = logging.getLogger("eagleray")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchJob:
    """What to time: the requests of a file, or synthetic ones, where None means the default.
    `config` must have a seed.

    `request_rate` is in requests per second; None sends all at once. `shape`: instead of the model
    of `config`, random weights in this shape, of which `num_layers` layers (None: all).
    """

    config: EngineConfig
    shape: str | None = None
    num_layers: int | None = None
    input: Path | None
    num_seqs: int | None
    max_input: int | None
    max_output: int | None
    temperature: float | None
    request_rate: float | None
    num_warmup: int


def run_bench(job: BenchJob) -> None:
    """Check, probe the machine, start an engine, run the requests, print the line. Raises
    `ClientError` before the engine starts, unless only the engine knows whether a prompt fits.
    """
    _check_job(job)
    if job.shape is None:
        _run(job, job.config.model)
        return
    with tempfile.TemporaryDirectory(prefix="eagleray-") as folder:
        num_ranks = job.config.tensor_parallel_size
        name = _write_checkpoint_of_shape(Path(folder), job.shape, job.num_layers, num_ranks)
        config = dataclasses.replace(job.config, model=folder)
        _run(dataclasses.replace(job, config=config), name)


def _run(job: BenchJob, model_name: str) -> None:
    setup = make_engine_setup(job.config)
    config = setup.expected_config
    with contextlib.closing(setup.request_builder()) as builder:
        requests = tokenize_batch(builder, _read_or_make_requests(job, config))
    machine = _probe_machine(config)
    with LLM(setup=setup) as llm:
        gc.freeze()
        gc.enable()  # `launch.py` starts without it
        requests = tokenize_batch(llm.client.builder, requests)
        run_timed(llm, [_warmup_request(llm)] * job.num_warmup, [0.0] * job.num_warmup)
        stats_before = llm.stats()
        logger.info("%d requests", len(requests))
        due_times_s = draw_due_times_s(len(requests), job.request_rate, job.config.seed or 0)
        run = run_timed(llm, requests, due_times_s)
        result = _result(llm, config, run, stats_before, machine) | {"model": model_name}
    print(json.dumps(result), flush=True)


def synthetic_requests(
    num_seqs: int,
    max_input: int,
    max_output: int,
    *,
    seed: int,
    temperature: float,
    vocab_size: int,
) -> list[BatchRequest]:
    """Synthetic requests; the same arguments give the same requests.

    Lengths of prompt and output are uniform between a tenth of the maximum and the maximum, token
    ids between 0 and 10,000 (or the last of the vocabulary); no end-of-sequence id ends an output.
    For each request `random.Random(seed)` draws with `randint` the prompt's length, its ids and the
    output's length, in this order.
    """
    rng = random.Random(seed)
    last_token_id = min(MAX_SYNTHETIC_TOKEN_ID, vocab_size - 1)

    def draw_length(max_length: int) -> int:
        return rng.randint(max(1, max_length // 10), max_length)

    requests = []
    for i in range(num_seqs):
        token_ids = [rng.randint(0, last_token_id) for _ in range(draw_length(max_input))]
        params = SamplingParams(
            temperature=temperature, max_tokens=draw_length(max_output), ignore_eos=True
        )
        source, prompt = f"synthetic request {i}", {"prompt_token_ids": token_ids}
        requests.append(BatchRequest(source=source, prompt=prompt, params=params))
    return requests


def _write_checkpoint_of_shape(
    folder: Path, shape: str, num_layers: int | None, num_ranks: int
) -> str:
    """Write a random checkpoint; returns what to call it. Raises `ConfigError` if so many ranks
    cannot split it, or the folder has too little room.
    """
    raw_config = dict(SHAPES[shape])
    if num_layers is not None:
        raw_config["num_hidden_layers"] = num_layers
    model = ModelConfig.from_dict(raw_config, shape)
    model.check_tensor_parallel_size(num_ranks)
    needed_bytes = 2 * count_parameters(model).total
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise ConfigError(
            f"random weights in the shape {shape} take {needed_bytes / 1e9:.1f} GB, and"
            f" {folder} has room for {free_bytes / 1e9:.1f} GB; name another folder in TMPDIR, or"
            " take fewer layers (--num-layers)"
        )
    logger.info("writing %.1f GB of random weights to %s", needed_bytes / 1e9, folder)
    write_random_checkpoint(folder, raw_config, torch.bfloat16)
    return shape if num_layers is None else f"{shape}, {num_layers} layers"


def _check_job(job: BenchJob) -> None:
    _check_shape(job)
    synthetic_options = {
        "--num-seqs": job.num_seqs,
        "--max-input": job.max_input,
        "--max-output": job.max_output,
    }
    given_flags = [flag for flag, value in synthetic_options.items() if value is not None]
    if (job.input is not None) == bool(given_flags):
        raise RequestError(
            f"give --input FILE.jsonl, or one or more of {', '.join(synthetic_options)} for"
            " synthetic requests"
            + (f"; not both --input and {given_flags[0]}" if given_flags else "")
        )
    if job.input is not None and job.temperature is not None:
        raise RequestError(
            "--temperature is for synthetic requests; the lines of --input say it in"
            " `sampling_params`"
        )
    for flag, value in synthetic_options.items():
        if value is not None and value < 1:
            raise RequestError(f"{flag} must be at least 1, got {value}")
    if job.num_warmup < 0:
        raise RequestError(f"--num-warmup must be at least 0, got {job.num_warmup}")
    if job.request_rate is not None and not 0 < job.request_rate < math.inf:
        raise RequestError(
            f"--request-rate must be above 0 requests per second, got {job.request_rate}"
        )


def _check_shape(job: BenchJob) -> None:
    if job.shape is None:
        if job.num_layers is not None:
            raise RequestError("--num-layers is for --shape; a checkpoint has the layers it has")
        return
    if job.config.model != EngineConfig().model:
        raise RequestError("give --model or --shape, not both")
    if job.shape not in SHAPES:
        raise RequestError(f"--shape {job.shape!r} is not known; possible are {', '.join(SHAPES)}")
    max_num_layers = SHAPES[job.shape]["num_hidden_layers"]
    if job.num_layers is not None and not 1 <= job.num_layers <= max_num_layers:
        raise RequestError(
            f"--num-layers must be between 1 and {max_num_layers} for {job.shape}, got"
            f" {job.num_layers}"
        )


def _read_or_make_requests(job: BenchJob, config: ResolvedConfig) -> list[BatchRequest]:
    if job.input is not None:
        return read_requests(job.input)
    max_input = job.max_input or DEFAULT_MAX_INPUT_TOKENS
    max_output = job.max_output or DEFAULT_MAX_OUTPUT_TOKENS
    if max_input + max_output > config.max_model_len:
        raise ConfigError(
            f"--max-input {max_input} and --max-output {max_output} make {max_input + max_output}"
            f" tokens, more than max_model_len {config.max_model_len}; lower them or, as far as the"
            " checkpoint goes, raise --max-model-len"
        )
    return synthetic_requests(
        job.num_seqs or DEFAULT_NUM_SEQS,
        max_input,
        max_output,
        seed=job.config.seed or 0,
        temperature=DEFAULT_TEMPERATURE if job.temperature is None else job.temperature,
        vocab_size=config.model.vocab_size,
    )


def _warmup_request(llm: LLM) -> BatchRequest:
    """Three prompt tokens and four output tokens, or as many as the engine takes."""
    prompt = [1, 2, 3][: llm.report.limits.max_total_tokens - 1]
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    return BatchRequest(source="the warm-up", prompt={"prompt_token_ids": prompt}, params=params)


def _probe_machine(config: ResolvedConfig) -> Machine | None:
    """Measure this machine, unless the ranks will run on GPUs."""
    device = config.engine.device
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return probe_cpu(config.dtype, config.quantization)
    return None


def _result(
    llm: LLM,
    config: ResolvedConfig,
    run: TimedRun,
    stats_before: EngineStats,
    machine: Machine | None,
) -> dict[str, Any]:
    stats, device, generations = llm.stats(), llm.report.device, run.generations
    completions = [completion for g in generations for completion in g.completions]
    workload = make_workload(
        [generation.prompt_token_ids for generation in generations for _ in generation.completions],
        [len(completion.token_ids) for completion in completions],
    )
    return {
        "engine": "eagleray",
        "model": None,
        "dtype": config.dtype,
        "quantization": config.quantization and config.quantization.name,
        "tp": config.engine.tensor_parallel_size,
        "device": device,
        "requests": len(generations),
        "input_tokens": sum(len(generation.prompt_token_ids) for generation in generations),
        "output_tokens": run.num_output_tokens,
        "cached_tokens": sum(generation.num_cached_tokens for generation in generations),
        "total_s": round(run.total_s, 4),
        "output_tokens_per_s": round(run.output_tokens_per_s, 2),
        "ttft_s": run.ttft_percentiles(),
        "inter_token_s": run.inter_token_percentiles(),
        "preemptions": stats.num_preemptions - stats_before.num_preemptions,
        "num_steps": stats.num_steps - stats_before.num_steps,
        "start_s": {name: round(seconds, 3) for name, seconds in llm.report.seconds.items()},
        "roofline": roofline_entry(
            config.model,
            config.dtype,
            workload,
            run.total_s,
            machine if device == "cpu" else None,
            config.quantization,
            config.weight_dtype,
        ),
    }
