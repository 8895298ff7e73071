"""Kernels that are recorded and replayed compute what they compute when they are called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numba
import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.cpu import pool, recording
from kernels.cpu.backend import CPU_KERNELS
from kernels.cpu.capabilities import has_int8
from kernels.cpu.jit import as_array
from kernels.cpu.parallel import parallel_for
from kernels.cpu.recording import Recording
from kernels.cpu.tile import has_dot_products
from kernels.interface import GroupedCodes
from kernels.metadata import AttentionMetadata
from kernels.reference.grouped import pack_codes, quantize_blocks, quantize_groups
from kernels.reference.int8 import quantize_rows

DIM, BFLOAT16 = 128, torch.bfloat16


def needs(instructions: bool) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not instructions, reason="no such instructions here")


@pytest.fixture(autouse=True, params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    pool.set_num_threads(request.param)
    yield
    pool.set_num_threads(1)


def product_of(form: str, values: Tensor) -> Callable[[Tensor], Tensor]:
    """A product with a weight of these values that can be recorded."""
    kernels: Any = CPU_KERNELS.mixed_precision if form == "mixed" else CPU_KERNELS
    kernels = CPU_KERNELS.quantized.get(form, kernels)
    weight: Any
    if form == "int4":
        codes, zeros, scale = quantize_groups(values, 32)
        weight = GroupedCodes(
            words=pack_codes(codes), zeros=zeros, scale=scale, num_rows=len(values)
        )
    elif form == "fp8":
        codes, scale = quantize_blocks(values, 32)
        weight = GroupedCodes(words=codes, zeros=None, scale=scale, num_rows=len(values))
    elif form == "int8":
        codes, scale = quantize_rows(values)
        weight = GroupedCodes(words=codes, zeros=None, scale=scale[:, None], num_rows=len(values))
    else:
        weight = values.to(BFLOAT16)
    packed = kernels.pack_weight(weight)
    biases = {dtype: torch.ones(len(values), dtype=dtype) for dtype in (torch.float32, BFLOAT16)}
    if form == "mixed":
        return lambda x: kernels.linear(x, packed, len(values), biases[x.dtype])
    return lambda x: kernels.linear(x, packed, biases[x.dtype])


def attention_step(
    num_rows: int, form: str, dtype: torch.dtype
) -> tuple[list[Tensor], Callable[[], Tensor]]:
    """What changes between steps, and a step of one attention layer, whose cache holds random
    numbers.
    """
    product = product_of(form, torch.randn(4 * DIM, DIM))
    norm = torch.rand(DIM, dtype=dtype)
    k_shape, v_shape = CPU_KERNELS.kv_cache_shapes(num_rows, 64, 1, DIM)
    k_cache, v_cache = (torch.randn(shape).to(dtype) for shape in (k_shape, v_shape))
    x, residual = (torch.randn(num_rows, DIM).to(dtype) for _ in range(2))
    positions = torch.arange(num_rows, dtype=torch.int32)
    lens = positions + 1
    starts = torch.arange(num_rows + 1, dtype=torch.int32)
    table = torch.arange(num_rows, dtype=torch.int32).unsqueeze(1)
    places = 64 * torch.arange(num_rows) + positions
    attn = AttentionMetadata(
        query_start_B1=starts,
        seq_start_B1=starts,
        seq_lens_B=lens,
        block_table_BW=table,
        kv_places_T=places,
        max_query_len=1,
        max_seq_len=64,
    )
    cos_sin = torch.rand(64, DIM)

    def step() -> Tensor:
        hidden, _ = CPU_KERNELS.add_rms_norm(x, residual, norm, 1e-6)
        heads = product(hidden).view(num_rows, 4, DIM)
        q = CPU_KERNELS.qk_norm_rope_store(
            heads, norm, norm, 1e-6, cos_sin, positions, k_cache, v_cache, places
        )
        out = CPU_KERNELS.paged_attention(q, k_cache, v_cache, attn, 0.1).flatten(1)
        out = CPU_KERNELS.silu_and_mul(out)
        CPU_KERNELS.call(lambda out: out.add_(1), out)
        return out

    return [x, residual, positions, lens, table, places, k_cache, v_cache], step


@numba.njit
def small_array(num_words: int) -> Any:
    return np.full(num_words, -1, np.int32)


def memory_of_small_arrays() -> list[Any]:
    """Arrays of numba and of numpy, in what either has freed of such sizes."""
    return [make(num_words) for num_words in range(1, 100) for make in SMALL_ARRAYS * 20]


SMALL_ARRAYS = [small_array, lambda num_words: np.full(num_words, -1, np.int32)]


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        ("int4", torch.float32),
        ("fp8", torch.float32),
        ("mixed", torch.float32),
        pytest.param("int8", torch.float32, marks=needs(has_int8() and has_dot_products())),
        pytest.param("int4", BFLOAT16, marks=needs(has_dot_products())),
        pytest.param("fp8", BFLOAT16, marks=needs(has_dot_products())),
        pytest.param("int8", BFLOAT16, marks=needs(has_dot_products())),
        pytest.param("plain", BFLOAT16, marks=needs(has_dot_products())),
    ],
)
def test_a_replay_has_the_bits_of_the_calls(num_rows: int, form: str, dtype: torch.dtype) -> None:
    inputs, step = attention_step(num_rows, form, dtype)
    with Recording() as recorded:
        out = step()
    assert recorded.is_complete
    x, residual, positions, lens, table, places, k_cache, v_cache = inputs
    for shift in (1, 2):
        x.copy_(torch.randn(x.shape))
        residual.copy_(torch.randn(x.shape))
        for numbers in (positions, lens, places):
            numbers += shift
        table.copy_(table.roll(1, 0))
        places.copy_(64 * table.flatten() + positions)
        cached = k_cache.clone(), v_cache.clone()
        garbage = memory_of_small_arrays(), [torch.full_like(out, torch.nan) for _ in range(100)]
        recorded.replay()
        replayed, written = out.clone(), (k_cache.clone(), v_cache.clone())
        k_cache.copy_(cached[0])
        v_cache.copy_(cached[1])
        assert torch.equal(replayed, step())
        assert torch.equal(written[0], k_cache) and torch.equal(written[1], v_cache)
        del garbage


def test_calls_are_replayed_in_their_place() -> None:
    x, norm = torch.ones(1, DIM), torch.ones(DIM)
    seen: list[float] = []
    with Recording() as recorded:
        recording.call(lambda: seen.append(-1.0))
        out = CPU_KERNELS.rms_norm(x, norm, 1e-9)
        recording.call(lambda: seen.append(float(out[0, 0])))
    x.zero_()
    out.fill_(7)
    recorded.replay()
    assert seen == [-1.0, 1.0, -1.0, 0.0]


def test_products_of_onednn_are_refused() -> None:
    weight = CPU_KERNELS.pack_weight(torch.randn(64, 64))
    with Recording() as recorded:
        CPU_KERNELS.linear(torch.randn(1, 64), weight, None)
    assert not recorded.is_complete
    CPU_KERNELS.linear(torch.randn(1, 64), weight, None)  # nothing is recorded any more


@numba.njit
def check(index: int, numbers: Any) -> None:
    if numbers[index] < 0:
        raise ValueError("negative")
    numbers[index] += 1


@numba.njit(nogil=True)
def check_all(numbers: Any) -> None:
    parallel_for(len(numbers), check, (numbers,))


def test_a_task_that_raises_in_a_replay_is_an_error() -> None:
    numbers = torch.zeros(4, dtype=torch.int64)
    with Recording() as recorded:
        check_all(as_array(numbers))
    recorded.replay()
    assert numbers.tolist() == [2, 2, 2, 2]
    numbers[2] = -1
    with pytest.raises(RuntimeError, match="a task of a recorded loop"):
        recorded.replay()
    numbers.fill_(0)
    recorded.replay()
    assert numbers.tolist() == [1, 1, 1, 1]


def test_a_call_that_raises_ends_a_recording() -> None:
    def fail() -> None:
        raise ValueError("from a call")

    with pytest.raises(ValueError, match="from a call"), Recording():
        recording.call(fail)
    numbers = torch.zeros(4, dtype=torch.int64)
    with Recording() as recorded:
        check_all(as_array(numbers))
    recorded.replay()
    assert numbers.tolist() == [2, 2, 2, 2]


def test_memory_of_results_is_used_again_though_a_call_was_given_them() -> None:
    first, norm = torch.ones(1, DIM), torch.ones(DIM)
    x = first
    with Recording() as recorded:
        for _ in range(10):
            x = CPU_KERNELS.rms_norm(x, norm, 1e-9)
            recording.call(lambda x: x.add_(1), x)
    assert len(recorded._kept_arrays) < 4
    before = x.clone()
    recorded.replay()
    assert torch.equal(x, before)


def test_too_many_loops_are_an_error() -> None:
    numbers = np.zeros(1, np.int64)
    with pytest.raises(RuntimeError, match="more loops than"), Recording():
        for _ in range(recording._MAX_WORDS // 4):
            check_all(numbers)
    check_all(numbers)  # and nothing is written any more
    with Recording() as recorded:
        check_all(numbers)
    recorded.replay()
