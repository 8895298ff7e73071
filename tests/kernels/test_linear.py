"""Products with float32 weights that oneDNN has packed."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu.linear import linear, pack_weight, packs_dtype
from kernels.select import select_backend

pytestmark = pytest.mark.skipif(
    not packs_dtype(torch.float32), reason="float32 is packed on x86 only"
)
SHAPES = [(384, 256), (320, 96), (1024, 2048), (3000, 1024)]
ROUTER_SHAPE = (128, 2048)  # of 30B-A3B


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("size_out", "size_in"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_are_exact_to_rounding(size_out: int, size_in: int, with_bias: bool) -> None:
    weight, bias = normal(size_out, size_in), normal(size_out, seed=1) if with_bias else None
    packed = pack_weight(weight)
    assert packed.is_mkldnn
    for rows in (0, 1, 3, 16, 33):
        x = normal(rows, 2 * size_in, seed=2)[:, ::2]  # not contiguous
        wanted = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
        torch.testing.assert_close(
            linear(x, packed, bias).double(), wanted, rtol=1e-5, atol=1e-6 * size_in
        )


@pytest.mark.parametrize(("size_out", "size_in"), SHAPES)
def test_a_row_has_the_same_bits_in_any_batch_on_any_number_of_threads(
    size_out: int, size_in: int
) -> None:
    """Engines on one machine may take cores from each other at any time."""
    packed, x = pack_weight(normal(size_out, size_in)), normal(64, size_in, seed=1)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found += [linear(x[:rows], packed, None) for rows in (1, 2, 7, 16, 33, 64)]
    finally:
        torch.set_num_threads(before)
    whole = found[-1]
    assert all(torch.equal(part, whole[: len(part)]) for part in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_router_gives_the_same_bits_on_any_number_of_threads(dtype: torch.dtype) -> None:
    """Ranks that choose experts may compute on different numbers of threads."""
    if not packs_dtype(dtype):
        pytest.skip("bfloat16 is packed where the processor multiplies in it")
    kernels = select_backend("cpu", "cpu")
    packed, x = pack_weight(normal(*ROUTER_SHAPE).to(dtype)), normal(32, 2048, seed=1).to(dtype)
    before = torch.get_num_threads()
    try:
        for rows in range(1, 33):
            found = []
            for threads in range(1, 9):
                kernels.set_num_threads(threads)
                found.append(linear(x[:rows], packed, None))
            assert all(torch.equal(logits, found[0]) for logits in found), f"{rows} rows"
    finally:
        kernels.set_num_threads(1)
        torch.set_num_threads(before)
