"""Where a decode step's time goes on the ranks of a CPU: `python -m benchmarks.step_profile`.

Plain processes run a batch, one per rank; a clock around each kernel of rank 0, and around its
all-reduces, adds up the calls. `other` is what is left of the rank's step: Python, allocation,
embedding, the batch's tables. The floor of a part is the larger of two times: reading its weights,
or keys and values, at the memory's speed, and computing its products at the processor's, as torch
reaches them; `share` is the sum of the floors over the time of the step. A virtual machine's
memory can be faster at one time than at another, so the speeds are measured just before the steps
and just after, and the faster one counts.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from benchmarks.common import model_or_random, write_result
from benchmarks.rank_pool import PoolExecutor, WorkerPool
from cluster.resources.placement import HUGE_PAGES_VARIABLE
from cluster.scheduler_limits import limits_of
from configs.engine import EngineConfig, ResolvedConfig
from configs.model import ModelConfig
from configs.shapes import SHAPES
from scheduler.engine import Engine
from scheduler.messages import Request, int32_array
from scheduler.params import ResolvedSampling
from scheduler.scheduler import Scheduler
from workers.batch.kv_cache import torch_dtype
from workers.configuration import resolve_config
from workers.models.size import count_parameters
from workers.roofline import Machine, probe_cpu


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", help="directory; random weights in the shape of --shape if left out"
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--num-layers", type=int, help="of the shape; by default all")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--quantization")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--context", type=int, default=192)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--name", default="step_profile", help="of the result")
    args = parser.parse_args()
    raw = dict(SHAPES[args.shape])
    raw["num_hidden_layers"] = args.num_layers or raw["num_hidden_layers"]
    with model_or_random(args.model, raw) as model:
        options = EngineConfig(
            model=model,
            tensor_parallel_size=args.tp,
            quantization=args.quantization,
            max_num_seqs=args.batch_size,
            max_model_len=4096,
            enable_prefix_caching=False,
        )
        config = resolve_config(options, ModelConfig.from_dir(Path(model)), Path(model), "cpu")
        os.environ.setdefault(HUGE_PAGES_VARIABLE, "1")  # as in the actors of an engine
        pool = WorkerPool(args.tp)
        try:
            ms, machines, num_experts = measure(pool, config, args)
        finally:
            pool.close()
    step_ms = ms.pop("step")
    fastest = Machine(
        memory_bytes_per_s=max(m.memory_bytes_per_s for m in machines),
        flops_per_s=max(m.flops_per_s for m in machines),
    )
    limits = floors(config, args.batch_size, args.context, fastest, num_experts)
    values = {
        "batch_size": args.batch_size,
        "context": args.context,
        "tp": args.tp,
        "threads_per_rank": threads_of(config),
        "quantization": args.quantization,
        "model": f"{args.shape} shape" if args.model is None else Path(args.model).name,
        "layers": config.model.num_hidden_layers,
        "experts_per_layer": round(num_experts, 1),
        "memory_bytes_per_s": [round(m.memory_bytes_per_s) for m in machines],
        "flops_per_s": [round(m.flops_per_s) for m in machines],
        "ms_per_step": round(step_ms, 2),
        "ms": {name: round(value, 2) for name, value in sorted(ms.items(), key=_by_time)},
        "floor_ms": {name: round(value, 2) for name, value in limits.items()},
        "share": round(sum(limits.values()) / step_ms, 3),
    }
    limit = __doc__.split("\n\n")[1].replace("\n", " ")
    write_result(args.name, limit, values, module="step_profile")


def _by_time(item: tuple[str, float]) -> float:
    return -item[1]


def threads_of(config: ResolvedConfig) -> int:
    """Threads of a rank when all cores are shared evenly."""
    return max(1, (os.cpu_count() or 1) // config.engine.tensor_parallel_size)


def measure(
    pool: WorkerPool, config: ResolvedConfig, args: argparse.Namespace
) -> tuple[dict[str, float], list[Machine], float]:
    """Milliseconds per step by part, on rank 0, and of the whole step; the machine's speeds before
    and after; the experts that have tokens, per layer with experts.
    """
    executor = PoolExecutor(pool, config, threads_of(config))
    scheduler = Scheduler(limits_of(config, executor.num_kv_blocks))
    engine = Engine(scheduler, executor, num_steps_ahead=0)
    for row in range(args.batch_size):
        tokens = int32_array([row + 1] * (args.context - args.steps // 2))
        engine.add(
            Request(
                request_id=str(row),
                token_ids=tokens,
                num_prompt_tokens=len(tokens),
                sampling=ResolvedSampling(seed=row, max_tokens=args.steps + 40, temperature=0.6),
            )
        )
    while any(seq.num_output_tokens < 2 for seq in (*scheduler.running, *scheduler.waiting)):
        engine.step()
    before = probe_cpu(config.dtype, config.quantization)
    pool.call_all(args.tp, "start_clocks")
    began = time.perf_counter()
    for _ in range(args.steps):
        engine.step()
    total = time.perf_counter() - began
    seconds: dict[str, float] = pool.call_all(args.tp, "read_clocks")[0]
    seconds["between steps"] = total - seconds.pop("launch")
    after = probe_cpu(config.dtype, config.quantization)
    seconds |= {"step": total}
    num_experts: float = pool.call_all(args.tp, "experts_per_layer")[0]
    ms = {name: 1000 * value / args.steps for name, value in seconds.items()}
    return ms, [before, after], num_experts


def floors(
    config: ResolvedConfig, batch_size: int, context: int, machine: Machine, num_experts: float
) -> dict[str, float]:
    """The least milliseconds for each part that reads or computes much. Of the experts of a layer,
    `num_experts` are read.
    """
    model, held = config.model, config.quantization
    item, of_weights = (torch_dtype(name).itemsize for name in (config.dtype, config.weight_dtype))

    def least_ms(num_bytes: float, flops: float) -> float:
        return 1000 * max(num_bytes / machine.memory_bytes_per_s, flops / machine.flops_per_s)

    of_codes = held.bytes_per_weight if held else of_weights
    parameters, head = count_parameters(model), model.vocab_size * model.hidden_size
    layers = parameters.total - parameters.expert_parameters - parameters.vocabulary
    of_chosen = parameters.active - parameters.total + parameters.expert_parameters
    share_read = num_experts / model.experts.num_experts if model.experts else 0.0
    kv_elements_per_token = 2 * model.num_key_value_heads * model.head_dim * model.num_hidden_layers
    return {
        "products": least_ms(layers * of_codes, 2 * layers * batch_size),
        "experts": least_ms(
            parameters.expert_parameters * share_read * of_weights, 2 * of_chosen * batch_size
        ),
        "vocabulary head": least_ms(
            head * (of_weights if held and not held.includes_vocabulary else of_codes),
            2 * head * batch_size,
        ),
        "paged_attention": least_ms(item * kv_elements_per_token * batch_size * context, 0),
    }


if __name__ == "__main__":
    main()
