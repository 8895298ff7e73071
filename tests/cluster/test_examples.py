"""The programs in `examples/`, run as a reader runs them. `tool_agent.py`, which needs a server, is
run in `serve/test_serve.py`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from configs.paths import SOURCE_ROOT
from tests.cluster.serve.served import free_port

EXAMPLES = sorted((SOURCE_ROOT / "examples").glob("*.py"))
LIMIT_S = 120.0
MOST_LINES = 60


def run(example: str, *args: str | Path | int, cwd: Path, **variables: str) -> str:
    """What an example prints; it must succeed."""
    done = subprocess.run(
        [sys.executable, SOURCE_ROOT / "examples" / example, *map(str, args)],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(SOURCE_ROOT)} | variables,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MOST_LINES


@pytest.fixture
def in_users_ray(users_ray: None) -> dict[str, str]:
    """Variables with which `ray.init()` joins a cluster, which takes less than to start one. Its
    GPUs do not exist. This process chose `RAY_AUTH_MODE` when it started the cluster.
    """
    import ray

    address = ray.get_runtime_context().gcs_address
    return {"RAY_ADDRESS": address, "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.engine
@pytest.mark.programs
class TestRun:
    def test_a_dataset_is_answered(self, in_users_ray: dict[str, str], tmp_path: Path) -> None:
        parquet = pytest.importorskip("pyarrow.parquet", reason="needs ray[data]")
        args = ("--rows", 30, "--output", tmp_path / "out")
        run("batch_over_dataset.py", *args, cwd=tmp_path, **in_users_ray)
        rows = parquet.read_table(tmp_path / "out").to_pylist()
        answers = {row["question"]: row["answer"] for row in rows}
        assert len(rows) == 30 and answers["What is 10 + 1?"] == "11"

    def test_texts_become_objects_of_the_schema(self, tmp_path: Path) -> None:
        texts = tmp_path / "texts"
        texts.mkdir()
        for name in ("a", "b"):
            (texts / f"{name}.txt").write_text("My order of 40 pieces never came.")
        lines = run("extract.py", texts, cwd=tmp_path).splitlines()
        records = [json.loads(line) for line in lines]
        assert [record["file"] for record in records] == ["a.txt", "b.txt"]
        keys = {"sender", "topic", "urgent", "amounts"}
        assert all(record["record"] is None or set(record["record"]) == keys for record in records)

    def test_rollouts_have_logprobs_and_advantages(self, tmp_path: Path) -> None:
        path = tmp_path / "rollouts.npz"
        shown = run("rollouts.py", "--questions", 3, "--samples", 4, "--output", path, cwd=tmp_path)
        assert "12 rollouts" in shown
        arrays = np.load(path)
        assert arrays["token_ids"].shape == arrays["logprobs"].shape
        assert arrays["reward"].shape == arrays["advantage"].shape == (12,)
        assert np.nanmax(arrays["logprobs"]) <= 0 and set(arrays["reward"]) <= {0.0, 1.0}

    def test_two_engines_agree_on_a_sum(self, in_users_ray: dict[str, str], tmp_path: Path) -> None:
        shown = run("two_engines.py", cwd=tmp_path, **in_users_ray)
        assert "47 + 38? 85" in shown and shown.count("proposals agree") == 3

    def test_answers_vote_in_a_deployment_of_its_own(self, composed: str) -> None:
        with urllib.request.urlopen(f"{composed}/?a=47&b=38", timeout=LIMIT_S) as answer:
            assert json.load(answer) == {"answer": "85", "agreed": "3 of 3"}


@pytest.fixture
def composed(tmp_path: Path) -> Iterator[str]:
    port = free_port()
    with subprocess.Popen(
        [sys.executable, SOURCE_ROOT / "examples" / "compose.py", "--port", str(port)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(SOURCE_ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert any(line.startswith("ready") for line in process.stdout), "it never was ready"
        yield f"http://127.0.0.1:{port}"
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0
