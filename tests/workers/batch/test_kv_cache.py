"""The number of blocks that a rank gets, and the tensor that holds them."""

from __future__ import annotations

import dataclasses
import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.engine import ResolvedConfig
from configs.paths import DEFAULT_MODEL_DIR
from kernels.interface import GapRows, SamplingKernels
from kernels.reference.backend import REFERENCE_KERNELS as REFERENCE
from kernels.select import select_backend
from scheduler.errors import ConfigError
from tests.kernels.replaced import Replaced, functions_of
from tests.workers.conftest import config_of
from tests.workers.fake_gpu import FakeGpu
from tests.workers.models.parts import fill_parts, slices_of
from workers.batch.kv_cache import KVCache, gpu_budget
from workers.batch.kv_plan import KVCacheLedger, block_bytes, plan_kv_cache
from workers.device import Device
from workers.memory.lasting import has_memfds
from workers.model_runner import ModelRunner, run_largest_step, warm_up
from workers.models.qwen3 import Qwen3
from workers.parallel.group import TensorParallelGroup

KERNELS = select_backend("cpu")
BLOCK_BYTES = 2 * 2 * 4 * 2 * 16 * 4  # keys and values, layers, tokens, KV heads, head_dim, float32


def plan(
    config: ResolvedConfig, budget_terms: list[tuple[str, int]] | None = None
) -> KVCacheLedger:
    def measure() -> list[tuple[str, int]]:
        assert budget_terms is not None, "measured where nothing is to be measured"
        return budget_terms

    return plan_kv_cache(config, 0, measure)


@pytest.fixture
def make(small_checkpoint: Path) -> Any:
    def config(**options: Any) -> ResolvedConfig:
        return config_of(small_checkpoint, **{"num_kv_blocks": None, "max_num_seqs": 4} | options)

    return config


def test_block_bytes_follow_heads_of_the_rank_and_dtype(make: Any) -> None:
    assert block_bytes(make()) == BLOCK_BYTES
    assert block_bytes(make(tensor_parallel_size=2)) == BLOCK_BYTES // 2
    assert block_bytes(make(tensor_parallel_size=4)) == BLOCK_BYTES // 2, "KV heads are replicated"
    assert block_bytes(make(dtype="bfloat16")) == BLOCK_BYTES // 2


def test_without_a_budget_a_cpu_gets_no_more_tokens_than_are_of_use() -> None:
    def num_tokens(**options: Any) -> int:
        wanted = {"num_kv_blocks": None, "max_num_seqs": 64, "max_model_len": 40960}
        wanted |= {"dtype": "float32"} | options
        ledger = plan(config_of(DEFAULT_MODEL_DIR, **wanted))
        return ledger.num_blocks * ledger.block_size

    assert num_tokens() == 65536
    assert num_tokens(max_model_len=131072) == 131072, "one sequence fits"
    assert num_tokens(max_model_len=512) == 64 * 512
    assert num_tokens(kv_cache_bytes=2**30) > 200_000


def test_cpu_budget_is_split_over_the_ranks(make: Any) -> None:
    assert plan(make(kv_cache_bytes=10 * BLOCK_BYTES + 5)).num_blocks == 10
    assert plan(make(kv_cache_bytes=10 * BLOCK_BYTES, tensor_parallel_size=2)).num_blocks == 10
    assert plan(make(kv_cache_bytes=10 * BLOCK_BYTES, tensor_parallel_size=4)).num_blocks == 5


def test_never_more_than_the_longest_batch_uses(make: Any) -> None:
    assert plan(make(max_model_len=63)).num_blocks == 4 * 16  # a gigabyte would hold many more


def test_override_is_taken_as_it_is(make: Any) -> None:
    assert plan(make(num_kv_blocks=3)).num_blocks == 3
    assert plan(make(num_kv_blocks=1000)).num_blocks == 1000


def test_too_little_memory_is_refused_with_the_numbers(make: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(make(kv_cache_bytes=2 * BLOCK_BYTES - 1, tensor_parallel_size=4))
    message = str(caught.value)
    for part in (
        f"{BLOCK_BYTES // 2} bytes",
        f"{(2 * BLOCK_BYTES - 1) // 4} bytes",
        "over 4 ranks",
        "kv_cache_bytes",
    ):
        assert part in message
    assert "lower block_size to at most 3, or " in message
    assert message.endswith(f"raise kv_cache_bytes to at least {2 * BLOCK_BYTES}")


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_a_refusal_of_too_little_memory_advises_is_enough(make: Any, ranks: int) -> None:
    for most in (2, 3):
        num_bytes = most * block_bytes(make(tensor_parallel_size=ranks, block_size=1)) * ranks
        options = {"tensor_parallel_size": ranks, "kv_cache_bytes": num_bytes}
        with pytest.raises(
            ConfigError, match=f"lower block_size to at most {most}, or raise"
        ) as caught:
            plan(make(**options))
        assert plan(make(**options, block_size=most)).num_blocks == 1
        enough = int(str(caught.value).rsplit(" ", 1)[1])
        assert plan(make(**options | {"kv_cache_bytes": enough})).num_blocks == 1
        with pytest.raises(ConfigError, match=f"raise kv_cache_bytes to at least {enough}"):
            plan(make(**options | {"kv_cache_bytes": enough - 1}))


def test_gpu_blocks_are_the_share_less_what_is_held(make: Any) -> None:
    config = dataclasses.replace(make(), device="cuda")
    budget_terms = [
        ("share of the device", 30 * BLOCK_BYTES),
        ("weights and state", 9 * BLOCK_BYTES),
        ("largest step", 1),
    ]
    ledger = plan(config, budget_terms)
    assert ledger.num_blocks == 20
    assert "share of the device" in ledger.line() and "20 blocks of 4 tokens" in ledger.line()
    with pytest.raises(
        ConfigError,
        match=r"less 9 bytes \(weights and state\).*not one token fits.*gpu_memory_util",
    ):
        plan(config, [("share of the device", 5), ("weights and state", 9)])


def test_cache_is_one_zeroed_tensor_with_views_per_layer(make: Any) -> None:
    cache = KVCache(make(), KERNELS, 7, 2, torch.device("cpu"))
    assert [tuple(view.shape) for view in cache.layers[0]] == list(
        KERNELS.kv_cache_shapes(7, 4, 2, 16)
    )
    assert cache.tensor.is_contiguous() and not cache.tensor.any()
    assert cache.tensor.nbytes == 7 * BLOCK_BYTES
    cache.layers[1][0].fill_(3)
    assert (
        (cache.tensor[0, 1] == 3).all()
        and not cache.tensor[1].any()
        and not cache.tensor[0, 0].any()
    )


@pytest.mark.skipif(not has_memfds(), reason="memory files need Linux")
def test_allocating_a_cache_that_outlives_its_rank_counts_as_progress(make: Any) -> None:
    config, group = make(), TensorParallelGroup(0, 1, torch.device("cpu"))
    model = Qwen3(config.model, group, KERNELS, torch.float32, config.max_model_len)
    ModelRunner(config, model, Device(group.device), 7)
    assert group.progress.allocated_bytes == 7 * BLOCK_BYTES


@pytest.mark.parametrize(
    ("num_blocks", "max_model_len", "message"),
    [
        (
            2**40,
            64,
            (
                rf"a KV cache of {2**40} blocks of 4 tokens needs {2**20 * BLOCK_BYTES:.1f} MiB,"
                r" .*: lower num_kv_.* was given \(.*only \d+ bytes of memory are available, not"
            ),
        ),
        (
            1,
            2**46,
            (
                r"a batch of 4 sequences needs .* MiB, which is not available: lower max_num_seqs"
                r" or max_model_len \(.*alloc"
            ),
        ),
    ],
)
def test_memory_that_cannot_be_had_is_refused_with_its_size_and_what_to_lower(
    make: Any, num_blocks: int, max_model_len: int, message: str
) -> None:
    config, group = make(), TensorParallelGroup(0, 1, torch.device("cpu"))
    model = Qwen3(config.model, group, KERNELS, torch.float32, config.max_model_len)
    config = dataclasses.replace(config, max_model_len=max_model_len)
    with pytest.raises(ConfigError, match=message):
        ModelRunner(config, model, Device(group.device), num_blocks)


@pytest.mark.parametrize(
    ("number", "raised"),
    [(errno.ENOMEM, ConfigError), (errno.ENOSPC, ConfigError), (errno.EMFILE, OSError)],
)
def test_only_a_lack_of_memory_is_called_one(
    number: int, raised: type[Exception], make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, "said by the system")

    monkeypatch.setattr("workers.batch.kv_cache.has_memfds", lambda: True)
    monkeypatch.setattr("workers.batch.kv_cache.SharedMemfd.create", fail)
    with pytest.raises(raised, match="said by the system"):
        KVCache(make(), KERNELS, 7, 2, torch.device("cpu"), outlives_ranks=True)


@pytest.mark.parametrize(
    "options", [{}, {"max_num_seqs": 1, "max_num_batched_tokens": 1000}, {"max_num_seqs": 64}]
)
def test_largest_step_runs_within_every_limit(make: Any, options: dict[str, int]) -> None:
    """This step is profiled on a GPU: it must fit the rotary table and the block size, whatever the
    limits are.
    """
    config = make(**options)
    group = TensorParallelGroup(0, 1, torch.device("cpu"))
    model = Qwen3(config.model, group, KERNELS, torch.float32, config.max_model_len)
    fill_parts(model, Path(config.model_dir), config.model)
    run_largest_step(config, model)


def test_warming_up_runs_every_kernel_that_requests_can_need(make: Any) -> None:
    seen: set[tuple[Any, ...]] = set()

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn: Any, scale: float
    ) -> torch.Tensor:
        seen.add(("paged_attention", len(q), attn.max_query_len, attn.max_seq_len))
        return REFERENCE.paged_attention(q, k, v, attn, scale)

    def noted(name: str, kernel: Any) -> Any:
        def call(*args: Any) -> Any:
            logits = args[0].logits_BV if isinstance(args[0], GapRows) else args[0]
            seen.add((name, logits.dtype, *(arg for arg in args if isinstance(arg, bool))))
            return kernel(*args)

        return call

    noting = {
        name: noted(name, getattr(REFERENCE.sampling, name))
        for name in functions_of(SamplingKernels)
    }
    tables = {
        name: noted(name, getattr(REFERENCE, name)) for name in ("look_up_tokens", "write_tokens")
    }
    kernels: Any = Replaced(
        REFERENCE, paged_attention=attend, sampling=Replaced(REFERENCE.sampling, **noting), **tables
    )
    config = make(dtype="bfloat16", attention_backend="reference", max_num_batched_tokens=150)
    group = TensorParallelGroup(0, 1, torch.device("cpu"))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=300))
    model = Qwen3(config.model, group, kernels, torch.bfloat16, config.max_model_len)
    for piece in slices_of(model):
        piece.target.normal_()
    warm_up(config, model)
    attention = {(128, 64, 64), (2, 2, 64), (1, 1, 1), (1, 1, 64)}
    assert {key[1:] for key in seen if key[0] == "paged_attention"} == attention
    for dtype in (torch.bfloat16, torch.float32):
        for name in ("row_best", "block_weights", "pick_column", "list_nearest"):
            assert (name, dtype) in seen
        assert {("gap_histogram", dtype, by_weight) for by_weight in (False, True)} <= seen
    assert {"target_weight", "gap_limits_from_lists", "look_up_tokens", "write_tokens"} <= {
        key[0] for key in seen
    }


MIB = 2**20


class RunnerOf:
    """Holds this many bytes of a fake GPU, in torch's allocator and in the driver, until it is
    dropped.
    """

    def __init__(self, gpu: FakeGpu, reserved: int, driver: int) -> None:
        self.gpu, self.reserved, self.driver = gpu, reserved, driver
        gpu.reserved += reserved
        gpu.free -= reserved + driver

    def __del__(self) -> None:
        self.gpu.reserved -= self.reserved
        self.gpu.free += self.reserved + self.driver


@pytest.mark.parametrize(("driver", "others"), [(0, 0), (30 * MIB, 0), (30 * MIB, 50 * MIB)])
def test_gpu_ledger_counts_what_this_process_holds_and_what_graphs_take(
    make: Any, driver: int, others: int
) -> None:
    """100 GiB, of which weights take 10. Memory that others hold matters only if the share does not
    fit into the rest.
    """
    config = dataclasses.replace(make(gpu_memory_utilization=0.5), device="cuda")
    weights, total = 10 * 1024 * MIB, 100 * 1024 * MIB
    gpu = FakeGpu(
        total=total, free=total - weights - 768 * MIB - others, reserved=weights, peak=7 * MIB
    )
    steps: list[str] = []
    budget_terms = gpu_budget(
        config, gpu, lambda: steps.append("largest"), lambda: RunnerOf(gpu, 20 * MIB, driver)
    )
    assert steps == ["largest"]
    assert dict(budget_terms) == {
        "share of the device": total // 2,
        "weights and CUDA context": weights + 768 * MIB,
        "largest step": 7 * MIB,
        "batch state and graphs": 20 * MIB + driver,
    }


def test_gpu_ledger_counts_a_spare_that_stands_by_and_weights_that_it_shares(make: Any) -> None:
    """It has a context, graphs and the largest step of its own."""
    config = make(gpu_memory_utilization=0.5, spares="standby")
    config = dataclasses.replace(config, device="cuda")
    gpu = FakeGpu(total=100 * 1024 * MIB, free=90 * 1024 * MIB, reserved=2 * MIB, peak=7 * MIB)
    terms = dict(
        gpu_budget(
            config,
            gpu,
            run_step=lambda: None,
            make_runner=lambda: RunnerOf(gpu, 20 * MIB, 0),
            lasting_bytes=9 * 1024 * MIB,
        )
    )
    assert terms["weights and CUDA context"] == (2 + 9 * 1024 + 768) * MIB
    assert terms["a spare that stands by"] == (768 + 7 + 20) * MIB


def test_gpu_ledger_takes_off_what_others_hold_of_the_share(make: Any) -> None:
    config = dataclasses.replace(make(gpu_memory_utilization=0.9), device="cuda")
    gpu = FakeGpu(total=1000 * MIB, free=50 * MIB, reserved=10 * MIB)
    budget_terms = dict(gpu_budget(config, gpu, lambda: None, lambda: None))
    assert budget_terms["used by others"] == (900 - 10 - 768 - 50) * MIB


def test_gpu_ledger_with_nothing_left_says_so(make: Any) -> None:
    config = dataclasses.replace(make(gpu_memory_utilization=0.9), device="cuda")
    gpu = FakeGpu(total=1000 * MIB, free=100 * MIB, reserved=100 * MIB, peak=100 * MIB)
    with pytest.raises(
        ConfigError, match=r"\(largest step\).*\(batch state and graphs\).*gpu_memory_utilization"
    ):
        plan(config, gpu_budget(config, gpu, lambda: None, lambda: None))
