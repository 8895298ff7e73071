"""The command line with an engine behind it, as a user runs it: real processes, real signals, and
what is left behind.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.commands import lose_rank
from cluster.resources import room
from configs.paths import SOURCE_ROOT
from tests.cluster.conftest import SmallModel
from tests.cluster.processes import family, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.programs]

LIMIT_S = 90.0
RAY = Path(sys.executable).with_name("ray")
Run = subprocess.Popen[str]


def start(*args: str | Path | int, env: dict[str, str] | None = None) -> Run:
    command = [sys.executable, "launch.py", "generate", *map(str, args)]
    return subprocess.Popen(
        command,
        cwd=SOURCE_ROOT,
        env=os.environ | (env or {}),
        start_new_session=True,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(run: Run) -> tuple[int, str, str]:
    out, err = run.communicate(timeout=LIMIT_S)
    return run.returncode, out, err


def write_requests(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    ids = [[5, 6, 7], list(range(40, 60)), list(range(40, 60))]
    greedy = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
    lines: list[dict[str, Any]] = [{"prompt_token_ids": i, "sampling_params": greedy} for i in ids]
    lines[0]["sampling_params"] = {"n": 2, "seed": 1, "max_tokens": 4, "ignore_eos": True}
    return write_requests(tmp_path / "in.jsonl", lines)


def test_two_engines_beside_each_other_write_output_lines_in_input_order(
    small_model: SmallModel, requests: Path, tmp_path: Path
) -> None:
    outputs = [tmp_path / f"out{i}.jsonl" for i in range(2)]
    runs = [
        start("--model", small_model.path, "--input", requests, "--output", path)
        for path in outputs
    ]
    for run in runs:
        code, _, err = finish(run)
        assert code == 0, err
        assert re.search(r"3 requests in .* tokens/s", err) and "kernels: cpu" in err
    first, second = (
        [json.loads(line) for line in path.read_text().splitlines()] for path in outputs
    )
    assert first == second
    assert [line["index"] for line in first] == [0, 1, 2]
    assert [len(line["token_ids"]) for line in first[0]["outputs"]] == [4, 4]
    assert set(first[1]) == {
        "index",
        "text",
        "token_ids",
        "finish_reason",
        "num_prompt_tokens",
        "num_cached_tokens",
    }
    assert first[1]["num_prompt_tokens"] == 20 and first[1]["finish_reason"] == "length"
    assert first[1]["token_ids"] == first[2]["token_ids"]


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Requests that take minutes."""
    params = {"max_tokens": 230, "ignore_eos": True}
    lines = [{"prompt_token_ids": [i, 2, 3], "sampling_params": params} for i in range(300)]
    return write_requests(tmp_path_factory.mktemp("endless") / "in.jsonl", lines)


NUM_RANKS = {signal.SIGINT: 2, signal.SIGTERM: 1, signal.SIGHUP: 1}


@pytest.fixture(scope="module")
def in_the_middle(small_model: SmallModel, endless: Path) -> Iterator[dict[signal.Signals, Run]]:
    """Runs beside each other that have begun to compute, by the signal that ends each."""
    runs = {
        number: start("--model", small_model.path, "--tp", num_ranks, "--input", endless)
        for number, num_ranks in NUM_RANKS.items()
    }
    for run in runs.values():
        assert run.stderr is not None
        for line in run.stderr:
            if line.startswith("start:"):
                break
    time.sleep(1.0)
    yield runs
    for run in runs.values():
        for pid in family(run.pid) if run.poll() is None else ():
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("number", NUM_RANKS, ids=lambda number: number.name)
def test_a_signal_in_the_middle_ends_everything_within_five_seconds(
    in_the_middle: dict[signal.Signals, Run], number: signal.Signals
) -> None:
    """While the others compute."""
    run = in_the_middle[number]
    assert run.poll() is None and len(family(run.pid)) > 5
    began = time.monotonic()
    if number == signal.SIGINT:
        os.killpg(run.pid, number)  # as a terminal does
    else:
        run.send_signal(number)
    code, _, err = finish(run)
    wait_until(
        lambda: not family(run.pid),
        "the end of all our processes",
        5.0 - (time.monotonic() - began),
    )
    assert code == 130 and "Traceback" not in err


@pytest.mark.parametrize(("number", "delay_s"), [(signal.SIGINT, 2.5), (signal.SIGTERM, 5.0)])
def test_a_signal_during_the_start_leaves_nothing(
    small_model: SmallModel, endless: Path, number: signal.Signals, delay_s: float
) -> None:
    """Ray finishes a start that has begun, so this takes longer on a busy machine."""
    run = start("--model", small_model.path, "--tp", "2", "--input", endless)
    time.sleep(delay_s)
    os.killpg(run.pid, number)
    code, _, err = finish(run)
    assert code == 130 and "Traceback" not in err
    wait_until(lambda: not family(run.pid), "the end of all our processes", 10.0)


def test_a_ray_address_to_nowhere_is_refused_at_once(
    small_model: SmallModel, requests: Path
) -> None:
    began = time.monotonic()
    run = start(
        "--model", small_model.path, "--input", requests, env={"RAY_ADDRESS": "127.0.0.1:1"}
    )
    code, _, err = finish(run)
    assert (
        code == 2
        and "nothing listens at the Ray address '127.0.0.1:1'" in err
        and "Traceback" not in err
    )
    assert time.monotonic() - began < 30


def test_a_folder_in_which_ray_cannot_start_is_refused(
    small_model: SmallModel, requests: Path
) -> None:
    """120 letters are too many for a socket, 300 for a folder."""
    with tempfile.TemporaryDirectory() as folder:
        folders = [f"{folder}/{'l' * length}" for length in (120, 300)]
        arguments = ("--model", small_model.path, "--input", requests)
        runs = [start(*arguments, env={"RAY_TMPDIR": each}) for each in folders]
        for run in runs:
            code, _, err = finish(run)
            assert (
                code == 2
                and "cannot start a local Ray: " in err
                and "RAY_TMPDIR" in err
                and "Traceback" not in err
            )
            wait_until(lambda run=run: not family(run.pid), "the end of all our processes", 5.0)  # type: ignore[misc]


@pytest.fixture(scope="module")
def token(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variable of one for clusters that authenticate."""
    path = tmp_path_factory.mktemp("token") / "auth_token"
    path.write_text(secrets.token_hex(32))
    return {"RAY_AUTH_TOKEN_PATH": str(path)}


@pytest.fixture(params=["token", "disabled"])
def one_cpu_cluster(
    request: pytest.FixtureRequest, token: dict[str, str], tmp_path: Path
) -> Iterator[str]:
    """The address of a Ray cluster from `ray start` with one CPU, with and without token
    authentication.
    """
    # Otherwise Ray would record this cluster in its own folder, and other programs would join it.
    folder = tempfile.mkdtemp(prefix="ray")
    command = [
        str(RAY),
        "start",
        "--head",
        "--num-cpus=1",
        "--port=0",
        "--include-dashboard=false",
        "--block",
        "--disable-usage-stats",
        f"--temp-dir={folder}",
    ]
    env = os.environ | token | {"RAY_ADDRESS": "", "RAY_AUTH_MODE": request.param}
    with (tmp_path / "ray.log").open("w") as log:
        cluster = subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)
    found: list[str] = []

    def ready() -> bool:
        found[:] = re.findall(r"--address='([^']+)'", (tmp_path / "ray.log").read_text())
        return bool(found)

    wait_until(ready, "the start of a Ray cluster", 60.0)
    yield found[0]
    cluster.send_signal(signal.SIGTERM)
    cluster.wait(20)
    wait_until(lambda: not family(cluster.pid), "the end of the Ray cluster", 20.0)
    shutil.rmtree(folder)


def test_a_running_cluster_with_too_few_cpus_is_refused(
    one_cpu_cluster: str, token: dict[str, str], small_model: SmallModel, requests: Path
) -> None:
    arguments = ("--model", small_model.path, "--tp", "2", "--input", requests)
    run = start(*arguments, "--ray-address", one_cpu_cluster, env=token)
    code, out, err = finish(run)
    assert code == 2 and out == "" and "Traceback" not in err
    assert re.search(r"tensor_parallel_size 2: needed 2 CPU; nodes have \[.*1 CPU", err), err
    wait_until(lambda: not family(run.pid), "the end of all our processes", 5.0)


PROGRAM = """
import asyncio, ray, sys
ray.init(
    address="local", num_cpus=3, include_dashboard=False, log_to_driver=False,
    logging_level="error",
)
from cluster import LLM, SamplingParams

async def main():
    with LLM(sys.argv[1], tensor_parallel_size=2, device="cpu", num_kv_blocks=64) as llm:
        whole = llm.generate([1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True))
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        stream = [t async for c in llm.astream([1, 2, 3], params) for t in c.token_ids]
        print(len(whole[0].token_ids), len(stream))

asyncio.run(main())
print("still initialized:", ray.is_initialized(), ray.get(ray.remote(lambda: 7).remote()))
"""


def test_a_program_that_started_ray_and_an_event_loop_itself_keeps_both(
    small_model: SmallModel,
) -> None:
    program = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(small_model.path)],
        cwd=SOURCE_ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=os.environ | {"RAY_AUTH_MODE": ""},
    )
    assert program.returncode == 0, program.stderr
    assert program.stdout.splitlines() == ["5 5", "still initialized: True 7"]


@pytest.mark.usefixtures("users_ray", "restored")
def test_the_demonstration_kills_a_rank_while_its_text_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lose_rank"])
    monkeypatch.setattr(room, "has_cuda", lambda: False)  # the GPUs of this Ray do not exist
    lose_rank.main()
    printed = capsys.readouterr().out
    assert "rank 1, was killed]" in printed
    assert "[240 tokens;" in printed and "; the same tokens as without]" in printed
