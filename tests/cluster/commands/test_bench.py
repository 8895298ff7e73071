"""`launch.py bench`: the workload it makes up, what it measures, and what it refuses."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import launch
from cluster.client.outputs import Chunk
from cluster.commands import bench
from cluster.commands.bench import synthetic_requests
from cluster.commands.timing import Timeline, draw_due_times_s, percentiles
from cluster.resources.session import SESSION
from configs.paths import SOURCE_ROOT
from scheduler.params import SamplingParams
from workers.models.random_checkpoint import write_random_checkpoint

RAW: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "dtype": "float32",
}


# The workload


def test_made_up_requests_are_drawn_as_documented() -> None:
    rng, wanted = random.Random(5), []
    for _ in range(20):
        prompt = [rng.randint(0, 10000) for _ in range(rng.randint(7, 70))]
        wanted.append((prompt, rng.randint(1, 9)))
    requests = synthetic_requests(20, 70, 9, seed=5, temperature=0.6, vocab_size=151936)
    assert [(r.prompt["prompt_token_ids"], r.params.max_tokens) for r in requests] == wanted
    assert all(r.params.temperature == 0.6 and r.params.ignore_eos for r in requests)


def test_made_up_requests_stay_what_they_were() -> None:
    requests = synthetic_requests(3, 6, 30, seed=7, temperature=0.0, vocab_size=151936)
    assert [(r.prompt["prompt_token_ids"], r.params) for r in requests] == [
        ([2471, 6468, 791], SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)),
        (
            [1542, 5991, 9548, 950, 8313],
            SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True),
        ),
        ([1408], SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)),
    ]


def test_made_up_token_ids_are_below_a_small_vocabulary() -> None:
    requests = synthetic_requests(50, 20, 5, seed=0, temperature=0.0, vocab_size=64)
    ids = {token for r in requests for token in r.prompt["prompt_token_ids"]}
    assert ids == set(range(64))


def test_requests_are_due_at_once_or_as_a_poisson_process() -> None:
    assert draw_due_times_s(3, None, seed=0) == [0.0, 0.0, 0.0]
    due = draw_due_times_s(4001, 8.0, seed=1)
    assert due[0] == 0.0 and due == sorted(due) and due == draw_due_times_s(4001, 8.0, seed=1)
    gaps = [b - a for a, b in itertools.pairwise(due)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean == pytest.approx(1 / 8, rel=0.1) and variance == pytest.approx(mean**2, rel=0.2)


# What the client sees


def chunk(index: int, num_tokens: int, reason: str | None = None) -> Chunk:
    return Chunk(index=index, text="", token_ids=[1] * num_tokens, finish_reason=reason)


def timeline(*chunks: tuple[float, Chunk]) -> Timeline:
    """A request that was due at 10 s and received `chunks` at these moments."""
    moments = iter([moment for moment, part in chunks if part.token_ids])
    line = Timeline(10.0, clock=lambda: next(moments))
    for _, part in chunks:
        line(part)
    return line


def test_a_chunk_of_k_tokens_is_one_gap_and_zeros() -> None:
    line = timeline(
        (10.5, chunk(0, 1)), (11.0, chunk(0, 3)), (13.0, chunk(0, 1)), (13.5, chunk(0, 0, "length"))
    )
    assert line.time_to_first_token_s == 0.5
    assert line.inter_token_gaps_s() == [0.5, 0.0, 0.0, 2.0]


def test_tokens_of_a_first_chunk_have_no_gap_to_anything_before() -> None:
    assert timeline((10.5, chunk(0, 2))).inter_token_gaps_s() == [0.0]


def test_gaps_are_between_tokens_of_one_output() -> None:
    line = timeline(
        (12.0, chunk(1, 1)), (13.0, chunk(0, 1)), (16.0, chunk(0, 1)), (18.0, chunk(1, 1))
    )
    assert line.time_to_first_token_s == 2.0
    assert sorted(line.inter_token_gaps_s()) == [3.0, 6.0]


def test_gaps_within_a_window_are_those_that_end_in_it() -> None:
    line = timeline(*((moment, chunk(0, 1)) for moment in (11.0, 12.0, 14.0, 17.0)))
    assert line.inter_token_gaps_s(11.0, 14.0) == [1.0, 2.0]


def test_a_request_without_tokens_has_no_times() -> None:
    line = timeline((11.0, chunk(0, 0, "abort")))
    assert (line.time_to_first_token_s, line.inter_token_gaps_s()) == (None, [])


def test_percentiles_are_linear_between_neighbors() -> None:
    assert percentiles([0.1 * i for i in range(101)]) == {"p50": 5.0, "p99": 9.9}
    assert percentiles([1.0, 2.0]) == {"p50": 1.5, "p99": 1.99}
    assert percentiles([]) == {"p50": None, "p99": None}


# What is refused


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench")
    write_random_checkpoint(path, RAW, torch.float32)
    return path


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch, restored: None) -> None:
    """Makes the test fail if anything starts Ray or probes the machine."""

    def refuse(*_: object) -> None:
        raise AssertionError("the command would have started an engine")

    monkeypatch.setattr(SESSION, "connect", refuse)
    monkeypatch.setattr(bench, "probe_cpu", refuse)


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [],
            (
                "give --input FILE.jsonl, or one or more of --num-seqs, --max-input, --max-output"
                " for synthetic requests"
            ),
        ),
        (["--input", "x.jsonl", "--num-seqs", "4"], "not both --input and --num-seqs"),
        (["--input", "x.jsonl", "--temperature", "0"], "--temperature is for synthetic requests"),
        (["--input", "nothing.jsonl"], "the input file 'nothing.jsonl' cannot be read"),
        (["--num-seqs", "0"], "--num-seqs must be at least 1, got 0"),
        (["--max-input", "0"], "--max-input must be at least 1, got 0"),
        (["--max-output", "-1"], "--max-output must be at least 1, got -1"),
        (
            ["--num-seqs", "1", "--request-rate", "0"],
            "--request-rate must be above 0 requests per second, got 0.0",
        ),
        (["--num-seqs", "1", "--num-warmup", "-1"], "--num-warmup must be at least 0, got -1"),
        (
            ["--max-input", "40", "--max-output", "25"],
            "--max-input 40 and --max-output 25 make 65 tokens, more than max_model_len 64",
        ),
        (
            ["--num-seqs", "1"],
            "--max-input 1024 and --max-output 1024 make 2048 tokens, more than max_model_len 64",
        ),
        (
            ["--max-input", "9", "--max-output", "9", "--temperature", "-1"],
            "temperature must be a number between",
        ),
    ],
)
def test_bad_arguments_are_one_message_and_exit_code_2(
    model_dir: Path, arguments: list[str], message: str
) -> None:
    result = CliRunner().invoke(launch.app, ["bench", "--model", str(model_dir), *arguments])
    assert result.exit_code == 2, result.stderr
    assert result.stdout == ""
    assert (
        result.stderr.startswith("error: ")
        and message in result.stderr
        and result.stderr.count("\n") == 1
    )


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "x", "--shape", "qwen3-8b"], "give --model or --shape, not both"),
        (["--shape", "qwen4"], "--shape 'qwen4' is not known; possible are qwen3-60m, qwen3-0.6b,"),
        (["--num-layers", "4"], "--num-layers is for --shape"),
        (
            ["--shape", "qwen3-30b-a3b", "--num-layers", "49"],
            "--num-layers must be between 1 and 48 for qwen3-30b-a3b, got 49",
        ),
        (
            ["--shape", "qwen3-coder-480b-a35b"],
            "random weights in the shape qwen3-coder-480b-a35b take 960.3 GB, and",
        ),
    ],
)
def test_bad_shapes_are_one_message_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    class Usage:
        free = 10**9

    monkeypatch.setattr("cluster.commands.bench.shutil.disk_usage", lambda _: Usage)
    result = CliRunner().invoke(launch.app, ["bench", "--num-seqs", "1", *arguments])
    assert result.exit_code == 2, result.stderr
    assert message in result.stderr and result.stderr.count("\n") == 1


# The command


def run_bench(*arguments: object) -> dict[str, Any]:
    """The output line of a run in its own process, as a user starts it."""
    command = [sys.executable, "launch.py", "bench", "--device", "cpu", *map(str, arguments)]
    done = subprocess.run(command, cwd=SOURCE_ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "start: " in done.stderr
    line: dict[str, Any] = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    return line


def run_bench_here(*arguments: object) -> dict[str, Any]:
    """The output line of a run in this process, in the Ray that is already running."""
    done = CliRunner().invoke(launch.app, ["bench", "--device", "cpu", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    line: dict[str, Any] = json.loads(done.stdout)
    return line


@pytest.mark.engine
def test_a_run_prints_one_line_of_what_was_asked_and_measured() -> None:
    arguments = "--num-seqs 4 --max-input 40 --max-output 12 --request-rate 40 --seed=3"
    line = run_bench(*arguments.split())
    requests = synthetic_requests(4, 40, 12, seed=3, temperature=0.6, vocab_size=512)
    num_output = sum(r.params.max_tokens or 0 for r in requests)
    assert list(line) == [
        "engine",
        "model",
        "dtype",
        "quantization",
        "tp",
        "device",
        "requests",
        "input_tokens",
        "output_tokens",
        "cached_tokens",
        "total_s",
        "output_tokens_per_s",
        "ttft_s",
        "inter_token_s",
        "preemptions",
        "num_steps",
        "start_s",
        "roofline",
    ]
    assert (line["engine"], line["tp"], line["device"], line["requests"]) == (
        "eagleray",
        1,
        "cpu",
        4,
    )
    assert line["input_tokens"] == sum(len(r.prompt["prompt_token_ids"]) for r in requests)
    assert (line["output_tokens"], line["cached_tokens"], line["preemptions"]) == (num_output, 0, 0)
    assert line["output_tokens_per_s"] == pytest.approx(num_output / line["total_s"], rel=0.01)
    assert 0 < line["ttft_s"]["p50"] <= line["ttft_s"]["p99"] < line["total_s"]
    assert 0 <= line["inter_token_s"]["p50"] <= line["inter_token_s"]["p99"] < line["total_s"]
    longest = max(r.params.max_tokens or 0 for r in requests)
    assert longest <= line["num_steps"] <= num_output
    assert {"ray", "processes", "load", "all"} <= set(line["start_s"]) and line["start_s"][
        "all"
    ] > 0
    assert 0 < line["roofline"]["floor_s"] < line["total_s"] and 0 < line["roofline"]["share"] < 1


@pytest.mark.engine
@pytest.mark.usefixtures("users_ray", "restored")
def test_a_file_of_requests_is_timed_with_several_outputs_each_and_its_shared_prefix(
    model_dir: Path, tmp_path: Path
) -> None:
    params = {"max_tokens": 5, "ignore_eos": True, "n": 2}
    lines = [
        {"prompt_token_ids": [*range(40), 50 + i], "sampling_params": params} for i in range(2)
    ]
    path = tmp_path / "work.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    line = run_bench_here(
        "--input", path, "--model", model_dir, "--block-size", "4", "--num-warmup", "0"
    )
    assert (line["requests"], line["input_tokens"], line["output_tokens"]) == (2, 82, 20)
    assert line["dtype"] == "float32" and line["cached_tokens"] > 0


@pytest.mark.engine
@pytest.mark.usefixtures("users_ray", "restored")
def test_an_engine_of_two_tokens_a_sequence_is_warmed_up_within_them(model_dir: Path) -> None:
    arguments = "--num-seqs 1 --max-input 1 --max-output 1 --max-model-len 2 --model"
    line = run_bench_here(*arguments.split(), model_dir)
    assert (line["input_tokens"], line["output_tokens"]) == (1, 1)


@pytest.mark.engine
@pytest.mark.usefixtures("users_ray", "restored")
def test_a_shape_is_timed_without_a_checkpoint_and_named_in_the_result() -> None:
    arguments = "--shape qwen3-60m --num-layers 2 --num-seqs 2 --max-input 9 --max-output 3"
    line = run_bench_here(*arguments.split(), "--spares", "off")
    assert line["model"] == "qwen3-60m, 2 layers" and line["requests"] == 2
