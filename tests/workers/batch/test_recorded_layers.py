"""Steps that replay recorded layers give the tokens of steps that call each kernel."""

from __future__ import annotations

from pathlib import Path

from benchmarks.in_process import InProcessExecutor
from benchmarks.rank_pool import PoolExecutor, WorkerPool, executor_of
from cluster.scheduler_limits import limits_of
from configs.engine import ResolvedConfig
from scheduler.engine import Engine
from scheduler.messages import Request, int32_array
from scheduler.params import ResolvedSampling
from scheduler.scheduler import Scheduler
from tests.workers.conftest import config_of
from workers.batch.recorded_layers import MAX_RECORDED_ROWS

NUM_ROWS = MAX_RECORDED_ROWS + 2
NUM_TOKENS = 12


def config(model_dir: Path, tp: int) -> ResolvedConfig:
    """In 4 bits, so no product is oneDNN's, and a row does not depend on others to the bit."""
    options = {"max_num_seqs": NUM_ROWS, "quantization": "int4", "dtype": "float32"}
    return config_of(model_dir, tensor_parallel_size=tp, enable_prefix_caching=False, **options)


def engine_of(config: ResolvedConfig, executor: InProcessExecutor | PoolExecutor) -> Engine:
    scheduler = Scheduler(limits_of(config, executor.num_kv_blocks))
    return Engine(scheduler, executor, num_steps_ahead=0)


def tokens(engine: Engine, rows_at_once: int) -> list[list[int]]:
    """The outputs of `NUM_ROWS` requests of different lengths, so many of them at a time."""
    outputs: list[list[int]] = []
    for first in range(0, NUM_ROWS, rows_at_once):
        requests = [request(row) for row in range(first, first + rows_at_once)]
        sequences = [engine.add(each) for each in requests]
        while engine.scheduler.running or engine.scheduler.waiting:
            engine.step()
        outputs += [list(sequence.token_ids[-NUM_TOKENS:]) for sequence in sequences]
    return outputs


def request(row: int) -> Request:
    prompt = int32_array([(7 * row + i) % 50 for i in range(1 + row % 5)])
    return Request(
        request_id=str(row),
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        sampling=ResolvedSampling(seed=row, max_tokens=NUM_TOKENS, temperature=1.0),
    )


def test_recorded_steps_give_the_same_tokens(small_checkpoint: Path) -> None:
    resolved = config(small_checkpoint, 1)
    executor = InProcessExecutor(resolved)
    engine = engine_of(resolved, executor)
    together = tokens(engine, NUM_ROWS)
    layers = executor.worker._runner.layers  # type: ignore[union-attr]
    for rows_at_once in (1, 3):
        assert tokens(engine, rows_at_once) == together
        assert rows_at_once in layers._recording_by_rows
    assert max(layers._recording_by_rows) <= MAX_RECORDED_ROWS
    executor.close()


def test_recorded_steps_give_the_same_tokens_on_two_ranks(
    pool: WorkerPool, small_checkpoint: Path
) -> None:
    resolved = config(small_checkpoint, 2)
    with executor_of(pool, resolved) as executor:
        engine = engine_of(resolved, executor)
        assert tokens(engine, 1) == tokens(engine, NUM_ROWS)
