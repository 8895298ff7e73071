"""The command line without an engine: flags, exit codes, one clear message for each mistake, and
what can be imported.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

import cluster
import cluster.commands.bench
import cluster.commands.chat
import cluster.commands.doctor
import cluster.commands.generate
import cluster.serve.run
import launch
from cluster.commands.bench import BenchJob
from cluster.resources.session import SESSION
from cluster.serve.run import ServeJob
from configs.engine import EngineConfig
from configs.serve import ServeConfig
from configs.shapes import SHAPES
from scheduler.errors import ConfigError, EngineError
from scheduler.params import SamplingParams
from tests.workers.test_grouped import FORMATS
from workers.models.random_checkpoint import write_random_checkpoint

SOURCE_ROOT = Path(launch.__file__).resolve().parent
RAW: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint without a tokenizer."""
    path = tmp_path_factory.mktemp("model")
    write_random_checkpoint(path, RAW, torch.float32)
    return path


class Run:
    """The result of a command."""

    def __init__(self, exit_code: int, stdout: str, stderr: str) -> None:
        self.exit_code, self.stdout, self.stderr = exit_code, stdout, stderr

    def check_refused(self, *parts: str) -> None:
        """Exit code 2, nothing on standard output, and a message with all of `parts`."""
        assert self.exit_code == 2, self.stderr
        assert self.stdout == ""
        assert "Traceback" not in self.stderr
        for part in parts:
            assert part in self.stderr

    def check_one_message(self, *parts: str) -> None:
        """Refused, in one line."""
        self.check_refused(*parts)
        assert self.stderr.startswith("error: ") and self.stderr.count("\n") == 1, self.stderr


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch, restored: None) -> None:
    """Makes the test fail if anything starts Ray; restores signal handlers and loggers."""

    def refuse(*_: object) -> None:
        raise AssertionError("the command would have started an engine")

    monkeypatch.setattr(SESSION, "connect", refuse)


def invoke(*arguments: str | int | Path) -> Run:
    """Run the command line in this process."""
    result = CliRunner().invoke(launch.app, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Run(result.exit_code, result.stdout, result.stderr)


def run_process(*arguments: str | bytes | Path, cwd: Path = SOURCE_ROOT) -> Run:
    """Run the command line as a user does."""
    command = [sys.executable, str(SOURCE_ROOT / "launch.py"), *arguments]
    done = subprocess.run(
        command,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"COLUMNS": "200"},
    )
    return Run(done.returncode, done.stdout, done.stderr)


def write_lines(path: Path, *lines: object) -> Path:
    file = path / "requests.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


# Mistakes


def test_a_wrong_path_is_one_message_and_exit_code_2(tmp_path: Path) -> None:
    run = run_process("generate", "Hi", "--model", "/no/such/model", cwd=tmp_path)
    run.check_one_message("model '/no/such/model' is neither an existing directory nor a hub id")


def test_an_unknown_flag_is_refused_by_name() -> None:
    run_process("generate", "Hi", "--max-token", "5").check_refused("No such option", "--max-token")


def test_an_unknown_subcommand_is_refused_by_name() -> None:
    invoke("serv").check_refused("No such command", "serv")


@pytest.mark.usefixtures("no_engine")
def test_an_impossible_size_is_refused_with_the_possible_ones(model_dir: Path) -> None:
    run = invoke("generate", "Hi", "--model", model_dir, "--tp", "3")
    run.check_one_message(
        "tensor_parallel_size 3 does not split this model", "possible are 1, 2, 4"
    )


@pytest.mark.usefixtures("no_engine")
def test_a_truncated_checkpoint_is_refused_with_its_file_and_sizes(
    model_dir: Path, tmp_path: Path
) -> None:
    data = (model_dir / "model.safetensors").read_bytes()
    (tmp_path / "config.json").write_text((model_dir / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(data[:-100])
    run = invoke("generate", "Hi", "--model", tmp_path)
    run.check_one_message(
        f"{tmp_path / 'model.safetensors'} has {len(data) - 100} bytes, but its header describes"
        f" {len(data)}"
    )


@pytest.mark.usefixtures("no_engine")
def test_an_unknown_key_in_an_input_file_is_refused_with_its_line(
    model_dir: Path, tmp_path: Path
) -> None:
    file = write_lines(
        tmp_path, {"prompt_token_ids": [1]}, {"prompt_token_ids": [1], "max_tokens": 5}
    )
    run = invoke("generate", "--model", model_dir, "--input", file)
    run.check_one_message(
        f"{file}, line 2: unknown key 'max_tokens'; known are prompt, prompt_token_ids, messages"
    )


@pytest.mark.usefixtures("no_engine")
def test_an_input_file_that_is_not_there_is_refused(model_dir: Path, tmp_path: Path) -> None:
    run = invoke("generate", "--model", model_dir, "--input", tmp_path / "nothing.jsonl")
    run.check_one_message("nothing.jsonl' cannot be read")


@pytest.mark.usefixtures("no_engine")
def test_an_empty_prompt_is_refused(model_dir: Path) -> None:
    invoke("generate", "Hi", "", "--model", model_dir).check_one_message(
        "a prompt is empty; give at least one token"
    )


def test_an_argument_that_is_not_utf8_is_refused_before_ray_starts() -> None:
    run = run_process("generate", b"\xff\xfe")
    run.check_one_message("the argument '\\udcff\\udcfe' of this program is not UTF-8")


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--max-tokens", "0", "max_tokens must be a whole number between 1 and"),
        ("--temperature", "-1", "temperature must be a number between 0.0 and 100.0, got -1.0"),
        ("--top-p", "1.5", "top_p must be a number between 0.0 and 1.0"),
        ("--n", "0", "n must be a whole number between 1 and 128, got 0"),
        ("--tp", "0", "tensor_parallel_size must be a whole number of at least 1, got 0"),
        ("--device", "tpu", "device must be one of auto, cpu, cuda, got 'tpu'"),
        ("--max-num-batched-tokens", "0", "max_num_batched_tokens must be a whole number of at"),
        (
            "--gpu-memory-utilization",
            "2",
            "gpu_memory_utilization must be above 0 and at most 1, got 2.0",
        ),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(
    model_dir: Path, flag: str, value: str, message: str
) -> None:
    invoke("generate", "Hi", "--model", model_dir, flag, value).check_one_message(message)


@pytest.mark.usefixtures("no_engine")
def test_a_value_that_is_no_number_is_refused_by_flag() -> None:
    invoke("generate", "Hi", "--max-tokens", "many").check_refused(
        "Invalid value for '--max-tokens'", "integer"
    )


@pytest.mark.usefixtures("no_engine")
def test_no_prompt_at_all_is_refused_with_what_is_possible() -> None:
    invoke("generate").check_one_message("give either PROMPTs or --input FILE.jsonl")


@pytest.mark.usefixtures("no_engine")
def test_prompts_beside_an_input_file_are_refused(tmp_path: Path) -> None:
    file = write_lines(tmp_path, {"prompt": "Hi"})
    invoke("generate", "Hi", "--input", file).check_one_message(
        "give either PROMPTs or --input FILE.jsonl"
    )


@pytest.mark.usefixtures("no_engine")
def test_a_missing_output_folder_is_refused_before_anything_runs(
    model_dir: Path, tmp_path: Path
) -> None:
    run = invoke(
        "generate", "Hi", "--model", model_dir, "--output", tmp_path / "nowhere" / "answers.jsonl"
    )
    run.check_one_message("the folder of --output", "nowhere/answers.jsonl' does not exist")


@pytest.mark.usefixtures("no_engine")
def test_an_output_that_cannot_be_written_is_refused(model_dir: Path, tmp_path: Path) -> None:
    run = invoke("generate", "Hi", "--model", model_dir, "--output", tmp_path / ("l" * 300))
    run.check_one_message("--output", "cannot be written: ", "too long")


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize("link", [None, os.symlink, os.link])
def test_the_input_is_no_output_under_whatever_name(
    model_dir: Path, tmp_path: Path, link: Any
) -> None:
    file = write_lines(tmp_path, {"prompt_token_ids": [1]})
    output = tmp_path / "answers.jsonl" if link else tmp_path / ".." / tmp_path.name / file.name
    if link:
        link(file, output)
    run = invoke("generate", "--model", model_dir, "--input", file, "--output", output)
    run.check_one_message("is the file of --input", "name another")
    assert "prompt_token_ids" in file.read_text()


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(
    ("line", "tp", "message"),
    [("{}", 1, "line 1: a prompt needs"), ('{"prompt": "Hi"}', 3, "possible are")],
)
def test_a_refused_run_leaves_no_output_behind(
    model_dir: Path, tmp_path: Path, line: str, tp: int, message: str
) -> None:
    (tmp_path / "in.jsonl").write_text(line)
    output = tmp_path / "new.jsonl"
    run = invoke(
        "generate",
        "--model",
        model_dir,
        "--input",
        tmp_path / "in.jsonl",
        "--output",
        output,
        "--tp",
        tp,
    )
    run.check_one_message(message)
    assert not output.exists()


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(
    ("flags", "limit"),
    [
        (["--num-kv-blocks", "4", "--block-size", "4"], "at most 15 .*KV cache"),
        (["--max-model-len", "12"], "at most 11 .*max_model_len"),
    ],
)
def test_a_prompt_too_long_names_its_line_and_the_limit(
    model_dir: Path, tmp_path: Path, flags: list[str], limit: str
) -> None:
    lines = [{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": list(range(40, 60))}]
    file = write_lines(tmp_path, *lines)
    run = invoke("generate", "--model", model_dir, "--input", file, *flags)
    run.check_one_message("line 2: the prompt has 20 tokens; ")
    assert re.search(limit, run.stderr), run.stderr


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/nowhere"], "/nowhere"),
        (["--tp", "3"], "tensor_parallel_size"),
        (["--replicas", "0"], "replicas must be a whole number of at least 1"),
        (["--api-key", ""], "api_key (--api-key or EAGLERAY_API_KEY) must not be empty"),
        (["--host", "256.0.0.1"], "cannot listen on 256.0.0.1"),
        (["--port", "0"], "--port 0 must be from 1 to 65535"),
        (["--port", "99999"], "--port 99999 must be from 1 to 65535"),
        (["--name", "a#b"], "--name 'a#b' must consist of letters"),
        (["--route-prefix", "chat/"], "--route-prefix 'chat/' must be a path such as /chat"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(arguments: list[str], message: str) -> None:
    invoke("serve", "--ray-address", "local", *arguments).check_one_message(message)


@pytest.mark.usefixtures("no_engine")
def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = invoke("serve", "--ray-address", "local", "--port", port)
    run.check_one_message(f"cannot listen on 127.0.0.1:{port}")


# Exit codes of errors that are not the user's mistake


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(
    ("error", "exit_code", "message"),
    [
        (EngineError("rank 1 died"), 1, "error: rank 1 died\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_a_fault_of_ours_is_1_and_an_interruption_130(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, exit_code: int, message: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(cluster.commands.generate, "run_generate", fail)
    run = invoke("generate", "Hi")
    assert (run.exit_code, run.stderr) == (exit_code, message)


# Standard streams


def run_shell(arguments: str) -> Run:
    """Run the command line with what a shell redirects."""
    command = f"{sys.executable} launch.py {arguments}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=SOURCE_ROOT, capture_output=True, text=True, timeout=120
    )
    return Run(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize(
    "command",
    [
        "generate Hi >/dev/full",
        "generate Hi >&-",
        "chat >&-",
        "bench >&-",
        "doctor >/dev/full",
        "--help >&-",
    ],
)
def test_standard_output_that_cannot_be_written_is_named(command: str) -> None:
    """Where answers go there, before anything runs."""
    run_shell(command).check_one_message("standard output cannot be written: ")


@pytest.mark.parametrize("is_unbuffered", [True, False])
def test_output_is_as_unbuffered_as_before(is_unbuffered: bool) -> None:
    program = (
        "import os; from cluster.commands import standard_streams;"
        " standard_streams.prepare_standard_streams(); print('said'); os._exit(0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=SOURCE_ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1" if is_unbuffered else ""},
    )
    assert done.stdout == ("said\n" if is_unbuffered else "")


@pytest.mark.parametrize("closed", ["2>&-", "<&-", "<&- 2>&-"])
def test_closed_streams_get_a_stand_in(closed: str) -> None:
    program = (
        "import os, sys; from cluster.commands.standard_streams import prepare_standard_streams;"
        " prepare_standard_streams(); assert not sys.stdin.isatty();"
        " assert os.open('.', os.O_RDONLY) > 2; print('ignored', file=sys.stderr, flush=True);"
        " print('printed')"
    )
    command = f'{sys.executable} -c "{program}" {closed}'
    done = subprocess.run(
        ["bash", "-c", command], cwd=SOURCE_ROOT, stdin=subprocess.DEVNULL, capture_output=True
    )
    assert (done.returncode, done.stdout) == (0, b"printed\n"), done.stderr


def test_a_reader_that_ends_early_gets_no_message() -> None:
    run = run_shell("doctor | true")
    assert (run.exit_code, run.stderr) == (1, "")


# The surface

ENGINE_FLAGS = {
    "--max-decode-slowdown",
    "--quantization",
    "--kv-cache-dtype",
    "--model",
    "--tp",
    "--tokenizer",
    "--revision",
    "--device",
    "--dtype",
    "--attention-backend",
    "--block-size",
    "--num-kv-blocks",
    "--kv-cache-bytes",
    "--max-num-seqs",
    "--max-num-batched-tokens",
    "--max-model-len",
    "--gpu-memory-utilization",
    "--prefix-caching",
    "--no-prefix-caching",
    "--enforce-eager",
    "--shared-memory",
    "--no-shared-memory",
    "--num-steps-ahead",
    "--spares",
    "--wait-for-nodes-s",
    "--stuck-after-s",
    "--seed",
    "--ray-address",
    "--log-level",
}
SAMPLING_FLAGS = {
    "--max-tokens",
    "--temperature",
    "--top-k",
    "--top-p",
    "--min-p",
    "--repetition-penalty",
    "--presence-penalty",
    "--frequency-penalty",
    "--stop",
    "--min-tokens",
    "--ignore-eos",
    "--n",
    "--stream-interval",
}
FLAGS = {
    "generate": ENGINE_FLAGS | SAMPLING_FLAGS | {"--input", "--output", "--raw"},
    "chat": ENGINE_FLAGS | SAMPLING_FLAGS,
    "serve": (
        ENGINE_FLAGS
        | SAMPLING_FLAGS
        | {
            "--host",
            "--port",
            "--replicas",
            "--max-replicas",
            "--api-replicas",
            "--target-ongoing-requests",
            "--served-model-name",
            "--unknown-fields",
            "--api-key",
            "--allowed-hosts",
            "--allowed-origins",
            "--keep-billing-header",
            "--max-open-requests",
            "--drain-timeout-s",
            "--name",
            "--route-prefix",
            "--detach",
        }
    ),
    "status": {"--ray-address"},
    "down": {"--ray-address"},
    "top": {"--url", "--once"},
    "trace": {"--url", "--seconds", "--output"},
    "bench": (
        ENGINE_FLAGS
        | {
            "--input",
            "--num-seqs",
            "--max-input",
            "--max-output",
            "--temperature",
            "--request-rate",
            "--num-warmup",
            "--shape",
            "--num-layers",
        }
    ),
    "doctor": {"--model"},
}
ENGINE_FLAGS_AND_VALUES = {
    "--model": "m",
    "--tp": 2,
    "--tokenizer": "t",
    "--revision": "r",
    "--device": "cpu",
    "--dtype": "float32",
    "--quantization": "int8",
    "--kv-cache-dtype": "fp8_e4m3",
    "--attention-backend": "reference",
    "--block-size": 8,
    "--num-kv-blocks": 9,
    "--kv-cache-bytes": 10,
    "--max-num-seqs": 11,
    "--max-num-batched-tokens": 12,
    "--max-decode-slowdown": 2.5,
    "--max-model-len": 13,
    "--gpu-memory-utilization": 0.5,
    "--num-steps-ahead": 0,
    "--spares": "off",
    "--wait-for-nodes-s": 7,
    "--stuck-after-s": 15.0,
    "--seed": 14,
    "--ray-address": "a:1",
    "--log-level": "error",
}
ENGINE_SWITCHES = ["--no-prefix-caching", "--enforce-eager", "--no-shared-memory"]
ENGINE = EngineConfig(
    model="m",
    tensor_parallel_size=2,
    tokenizer="t",
    revision="r",
    device="cpu",
    dtype="float32",
    quantization="int8",
    kv_cache_dtype="fp8_e4m3",
    attention_backend="reference",
    block_size=8,
    num_kv_blocks=9,
    kv_cache_bytes=10,
    max_num_seqs=11,
    max_num_batched_tokens=12,
    max_decode_slowdown=2.5,
    max_model_len=13,
    gpu_memory_utilization=0.5,
    num_steps_ahead=0,
    seed=14,
    spares="off",
    wait_for_nodes_s=7,
    stuck_after_s=15.0,
    ray_address="a:1",
    log_level="error",
    enable_prefix_caching=False,
    enforce_eager=True,
    shared_memory=False,
)
SAMPLING_FLAGS_AND_VALUES = {
    "--max-tokens": 15,
    "--temperature": 0.5,
    "--top-k": 16,
    "--top-p": 0.75,
    "--min-p": 0.25,
    "--repetition-penalty": 1.5,
    "--presence-penalty": 0.5,
    "--frequency-penalty": 0.25,
    "--min-tokens": 3,
    "--n": 2,
    "--stream-interval": 4,
}


def commands() -> dict[str, Any]:
    group: Any = get_command(launch.app)
    return dict(group.commands)


def test_the_subcommands_are_these() -> None:
    assert set(commands()) == set(FLAGS)


@pytest.mark.parametrize("command", FLAGS)
def test_the_flags_of_a_command_are_these(command: str) -> None:
    parameters = commands()[command].params
    flags = {
        flag
        for p in parameters
        if p.param_type_name == "option"
        for flag in (*p.opts, *p.secondary_opts)
    }
    assert flags - {"--help"} == FLAGS[command]


def words(flags_and_values: dict[str, Any]) -> list[str]:
    return [str(word) for pair in flags_and_values.items() for word in pair]


def test_the_flags_of_serve_reach_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[ServeJob] = []
    monkeypatch.setattr(cluster.serve.run, "run_serve", jobs.append)
    monkeypatch.setenv("EAGLERAY_API_KEY", "from the environment\n")
    flags = {
        "--host": "::1",
        "--port": 81,
        "--replicas": 3,
        "--max-replicas": 4,
        "--api-replicas": 2,
        "--target-ongoing-requests": 7,
        "--served-model-name": "name",
        "--allowed-hosts": "a.example,b.example",
        "--allowed-origins": "https://a.example",
        "--unknown-fields": "refuse",
        "--max-open-requests": 5,
        "--drain-timeout-s": 6.5,
        "--name": "chat",
        "--route-prefix": "/chat",
        "--temperature": 0.5,
    }
    switches = [*ENGINE_SWITCHES, "--keep-billing-header"]
    values = [*words(ENGINE_FLAGS_AND_VALUES), *switches, *words(flags)]
    assert invoke("serve", *values).exit_code == 0
    assert invoke("serve", *values, "--api-key", "given").exit_code == 0
    config = ServeConfig(
        engine=ENGINE,
        sampling={"temperature": 0.5},
        replicas=3,
        max_replicas=4,
        api_replicas=2,
        target_ongoing_requests=7,
        served_model_name="name",
        api_key="from the environment",
        allowed_hosts="a.example,b.example",
        allowed_origins="https://a.example",
        unknown_fields="refuse",
        keep_billing_header=True,
        max_open_requests=5,
        drain_timeout_s=6.5,
    )
    job = ServeJob(config=config, host="::1", port=81, name="chat", route_prefix="/chat")
    assert jobs[0] == job
    assert jobs[1].config.api_key == "given"


def recorded(monkeypatch: pytest.MonkeyPatch, module: object, name: str) -> list[tuple[Any, ...]]:
    """The calls of a function of a module, as their arguments and a dict of those with names."""
    calls: list[tuple[Any, ...]] = []

    def record(*arguments: object, **named: object) -> None:
        calls.append((*arguments, named))

    monkeypatch.setattr(module, name, record)
    return calls


def test_every_flag_reaches_the_engine_or_the_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = recorded(monkeypatch, cluster.commands.generate, "run_generate")
    values = [*words(ENGINE_FLAGS_AND_VALUES), *words(SAMPLING_FLAGS_AND_VALUES), *ENGINE_SWITCHES]
    switches = ["--raw", "--ignore-eos", "--stop", "x", "--stop", "y", "--output", "answers.jsonl"]
    run = invoke("generate", "one", "two", *values, *switches)
    assert run.exit_code == 0, run.stderr
    assert calls == [
        (
            ENGINE,
            SamplingParams(
                max_tokens=15,
                temperature=0.5,
                top_k=16,
                top_p=0.75,
                min_p=0.25,
                repetition_penalty=1.5,
                presence_penalty=0.5,
                frequency_penalty=0.25,
                min_tokens=3,
                ignore_eos=True,
                n=2,
                stream_interval=4,
                stop=["x", "y"],
            ),
            {
                "prompts": ["one", "two"],
                "input": None,
                "output": Path("answers.jsonl"),
                "raw": True,
            },
        )
    ]


@pytest.mark.parametrize("command", [["chat"], []])
def test_flags_without_a_command_are_those_of_a_chat(
    monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    chats: list[tuple[EngineConfig, SamplingParams]] = []
    monkeypatch.setattr(
        cluster.commands.chat, "run_chat", lambda config, params: chats.append((config, params))
    )
    result = invoke(*command, "--tp", "2", "--temperature", "0.5")
    assert result.exit_code == 0
    assert chats == [(EngineConfig(tensor_parallel_size=2), SamplingParams(temperature=0.5))]


def test_every_flag_reaches_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[BenchJob] = []
    monkeypatch.setattr(cluster.commands.bench, "run_bench", jobs.append)
    workload = {
        "--num-seqs": 3,
        "--max-input": 4,
        "--max-output": 5,
        "--temperature": 0.25,
        "--request-rate": 6.5,
        "--num-warmup": 7,
        "--input": "x.jsonl",
    }
    run = invoke("bench", *words(ENGINE_FLAGS_AND_VALUES), *ENGINE_SWITCHES, *words(workload))
    assert run.exit_code == 0, run.stderr
    assert jobs == [
        BenchJob(
            config=ENGINE,
            input=Path("x.jsonl"),
            num_seqs=3,
            max_input=4,
            max_output=5,
            temperature=0.25,
            request_rate=6.5,
            num_warmup=7,
        )
    ]


def test_without_flags_a_benchmark_has_an_engine_of_seed_0(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[BenchJob] = []
    monkeypatch.setattr(cluster.commands.bench, "run_bench", jobs.append)
    assert invoke("bench").exit_code == 0
    nothing = dict.fromkeys(
        ("input", "num_seqs", "max_input", "max_output", "temperature", "request_rate")
    )
    assert jobs == [BenchJob(config=EngineConfig(seed=0), num_warmup=1, **nothing)]


def test_without_flags_engine_and_sampling_have_their_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = recorded(monkeypatch, cluster.commands.generate, "run_generate")
    assert invoke("generate", "Hi").exit_code == 0
    assert calls[0][:2] == (EngineConfig(), SamplingParams())


def test_the_names_to_import_from_cluster_are_these() -> None:
    assert set(cluster.__all__) == {
        "LLM",
        "Chunk",
        "CompletionOutput",
        "EngineStats",
        "RequestOutput",
        "SamplingParams",
        "StructuredOutputs",
    }
    assert all(hasattr(cluster, name) for name in cluster.__all__)


def test_the_public_names_of_an_llm_are_these() -> None:
    assert {name for name in vars(cluster.LLM) if not name.startswith("_")} == {
        "generate",
        "chat",
        "stream",
        "agenerate",
        "achat",
        "astream",
        "abort",
        "shutdown",
        "stats",
        "report",
        "has_chat_template",
        "check_prompt",
    }


def test_the_options_of_an_engine_are_these() -> None:
    assert set(EngineConfig.__dataclass_fields__) == {
        "model",
        "tokenizer",
        "revision",
        "tensor_parallel_size",
        "device",
        "dtype",
        "quantization",
        "kv_cache_dtype",
        "attention_backend",
        "block_size",
        "num_kv_blocks",
        "kv_cache_bytes",
        "gpu_memory_utilization",
        "enable_prefix_caching",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_decode_slowdown",
        "max_model_len",
        "enforce_eager",
        "shared_memory",
        "num_steps_ahead",
        "seed",
        "ray_address",
        "start_timeout_s",
        "spares",
        "wait_for_nodes_s",
        "stuck_after_s",
        "step_timeout_s",
        "frontend_timeout_s",
        "log_level",
    }


# doctor and the machine


def test_doctor_names_what_is_installed_and_which_backend_would_run() -> None:
    run = run_process("doctor")
    wrong = [line for line in run.stdout.splitlines() if line.startswith("PROBLEM: ")]
    # The shared memory of a container may be small.
    assert all("/dev/shm" in line for line in wrong), wrong
    assert run.exit_code == (2 if wrong else 0), run.stderr
    assert f"torch {torch.__version__}" in run.stdout
    assert "\nray 2." in run.stdout
    assert "on cpu the kernels would be cpu (numba and oneDNN), block size 64" in run.stdout


def test_doctor_names_what_clashes_and_exits_with_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cluster.commands.doctor, "_name_clashes", lambda: ["the moon is in the way"]
    )
    run = invoke("doctor")
    assert run.exit_code == 2
    assert run.stdout.endswith("PROBLEM: the moon is in the way\n1 problem found\n")


def test_doctor_says_what_a_model_needs_and_whether_this_machine_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "cluster.commands.doctor.os.sysconf",
        {"SC_PAGE_SIZE": 1000, "SC_PHYS_PAGES": 24 * 10**6}.__getitem__,
    )
    lines, problems = cluster.commands.doctor._examine_model("qwen3-30b-a3b")
    [problem] = problems
    assert "qwen3-30b-a3b fits neither the memory of this machine nor its GPUs" in problem
    assert "30.5 billion parameters, 3.35 billion of them for each token" in lines[0]
    assert "a rank with --tp 4: 15.3 GB of weights in bfloat16, 14.5 GB of experts" in lines
    assert "memory of this machine, 24.0 GB: too little for such weights of all ranks" in lines
    dense, problems = cluster.commands.doctor._examine_model("qwen3-8b")
    assert not problems
    [memory] = [line for line in dense if line.startswith("memory of this machine")]
    assert "enough for such weights of all ranks with --spares off" in memory
    assert "experts" not in "".join(dense)


def test_doctor_counts_weights_in_the_form_in_which_they_are_kept(tmp_path: Path) -> None:
    raw = SHAPES["qwen3-8b"] | {"quantization_config": FORMATS["awq_128"][0]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    lines, _ = cluster.commands.doctor._examine_model(str(tmp_path))
    # 6.95 billion parameters in 4 bits, with 3 bytes per 128; 1.24 billion of the vocabulary.
    assert "has no *.safetensors: the sizes are those that config.json tells of" in lines[1]
    assert lines[2].startswith("a rank with --tp 1: 6.1 GB of weights in int4, as they are stored,")


def test_doctor_says_how_many_gpus_a_model_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(total_memory=85 * 10**9)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: gpu)
    lines, problems = cluster.commands.doctor._examine_model("qwen3-235b-a22b")
    assert len(problems) == 1
    assert (
        "memory of cuda:1, 85.0 GB: enough with --tp 8, on 8 GPUs like this one; there are 2"
        in [line.strip() for line in lines]
    )
    lines, _ = cluster.commands.doctor._examine_model("qwen3-8b")
    assert "memory of cuda:0, 85.0 GB: enough with --tp 1" in lines


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("qwen4", "'qwen4' is neither a directory nor a shape; shapes are qwen3-60m,"),
        ("", "'' is neither a directory nor a shape; shapes are qwen3-60m,"),
        ("launch.py", "'launch.py' is a file; give the directory that holds it"),
        ("~nobody-here/model", "'~nobody-here/model' is not a usable path: "),
    ],
)
def test_doctor_refuses_what_is_no_model(model: str, message: str) -> None:
    invoke("doctor", "--model", model).check_one_message(f"error: --model {message}")


def test_doctor_refuses_a_folder_that_may_not_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", refuse)
    with pytest.raises(ConfigError, match="'/root/x' is not a usable path"):
        cluster.commands.doctor._examine_model("/root/x")


@pytest.mark.skipif(not Path("/dev/shm").exists(), reason="this system has no /dev/shm")
def test_too_little_shared_memory_is_a_clash(monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 64 * 2**20

    monkeypatch.setattr("cluster.commands.doctor.shutil.disk_usage", lambda _: Usage)
    assert any("/dev/shm has 64 MiB free" in line for line in cluster.commands.doctor._problems())


def test_a_full_disk_below_ray_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    usage_of = shutil.disk_usage
    free_bytes = {str(tmp_path): 3 * 2**20}

    def usage(path: Path) -> Any:
        return SimpleNamespace(free=free_bytes.get(str(path)) or usage_of(path).free)

    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr("cluster.commands.doctor.shutil.disk_usage", usage)
    said = [line for line in cluster.commands.doctor._problems() if str(tmp_path) in line]
    assert len(said) == 1 and "has 3 MiB free" in said[0] and "RAY_TMPDIR" in said[0]


def test_transformers_imports_beside_our_kernels() -> None:
    program = "import kernels, transformers.integrations.hub_kernels; print(kernels.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=SOURCE_ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == SOURCE_ROOT / "kernels" / "__init__.py"


@pytest.mark.parametrize(
    ("command", "flag"), [("generate", "--max-tokens"), ("bench", "--num-seqs")]
)
def test_help_needs_neither_torch_nor_ray(command: str, flag: str) -> None:
    program = (
        "import sys, launch\n"
        "try: launch.app([sys.argv[1], '--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "sys.exit([name for name in ('torch', 'ray', 'transformers') if name in sys.modules] or 0)"
    )
    command_line = [sys.executable, "-c", program, command]
    done = subprocess.run(
        command_line, cwd=SOURCE_ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert flag in done.stdout


def test_a_flag_out_of_range_is_refused_before_torch_is_imported() -> None:
    program = (
        "import sys, launch\n"
        "try: launch.app(['generate', 'Hi', '--max-tokens', '0'])\n"
        "except SystemExit as end: assert end.code == 2\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == 0
