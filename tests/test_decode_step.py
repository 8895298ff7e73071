"""What one decode step runs: no file that the architecture page does not name."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from benchmarks.in_process import InProcessExecutor
from cluster.engine.frontends import FrontendRecords
from cluster.engine.loop import StepLoop, Submit
from configs.engine import ResolvedConfig
from scheduler.engine import Engine
from scheduler.limits import SchedulerLimits
from scheduler.messages import Request, int32_array
from scheduler.params import ResolvedSampling
from scheduler.scheduler import Scheduler
from tests.checkpoints import Shape, make_checkpoint
from tests.workers.conftest import config_of

ROOT = Path(__file__).parents[1]
PACKAGES = ("cluster", "configs", "kernels", "scheduler", "workers")
SECTION = "How much there is to read"


def files_on_the_page() -> set[str]:
    """The files that the section on reading names."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.split(f"## {SECTION}")[1].split("\n## ")[0]
    return set(re.findall(r"`(\w+/[\w/]+\.py)`", section))


@contextmanager
def recorded_files() -> Iterator[set[str]]:
    """The product's files of which a function is called, by their paths below the root."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            name = str(path.relative_to(ROOT))
            if name.startswith(PACKAGES):
                files.add(name)

    sys.setprofile(note)
    try:
        yield files
    finally:
        sys.setprofile(None)


def fail(error: Exception) -> None:
    raise error


def engine_of(config: ResolvedConfig, executor: InProcessExecutor) -> Engine:
    limits = SchedulerLimits(
        num_blocks=8,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        vocab_size=config.model.vocab_size,
    )
    return Engine(Scheduler(limits), executor, num_steps_ahead=1)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_decode_step_runs_no_file_that_the_page_does_not_name(
    tmp_path: Path, backend: str
) -> None:
    make_checkpoint(tmp_path, Shape(name="small"))
    config = dataclasses.replace(config_of(tmp_path), attention_backend=backend)
    executor = InProcessExecutor(config)
    engine = engine_of(config, executor)
    frontends = FrontendRecords(timeout_s=100.0)
    loop = StepLoop(engine, frontends.deliver, fail)
    request = Request(
        request_id="a",
        token_ids=int32_array([5, 6, 7]),
        num_prompt_tokens=3,
        sampling=ResolvedSampling(seed=0, max_tokens=20, top_k=20, top_p=0.9),
    )
    frontends.register_requests("frontend", [request], engine.scheduler.limits)
    loop.post(Submit(registration_number=0, requests=[request]))
    for _ in range(4):
        loop.run_once()
    with recorded_files() as files:
        loop.run_once()
        news = asyncio.run(frontends.collect("frontend", 0, wait_s=0.0))
    executor.close()
    assert news is not None and len(news.token_ids) >= 1
    assert {"scheduler/scheduler.py", "workers/models/qwen3.py"} <= files
    assert files - files_on_the_page() == set()
