"""The hybrid backend against the reference: Triton's decode kernel, in its interpreter where there
is no GPU, beside a stand-in for FlashAttention-3. The two of them themselves are compared with the
reference by `make gpu-check`.

Then which rows each of the two gets, how the backend is chosen, and what is refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.gpu.capabilities import TRITON_CAPABILITIES
from kernels.gpu.flash_attn import find_flash_attn
from kernels.interface import Kernels
from kernels.reference.attention import paged_attention_reference
from kernels.select import choose_capabilities, select_backend
from tests.kernels import flash_attn_stand_in as stand_in
from tests.kernels.test_attention import Case, make_case
from tests.kernels.test_flash_attn import (
    FA2,
    STAND_INS,
    WHEEL,
    calls,  # noqa: F401
    install,
)
from tests.kernels.test_gpu_attention import (
    TOLERANCE,
    divided,
    new_memory_is_nan,  # noqa: F401
    on_device,
)

# (lengths of the sequences, of their queries); those of one query at the front are decode rows.
BATCHES = {
    "decode and chunks": ([300, 7, 129, 64, 290, 31], [1, 1, 1, 20, 130, 31]),
    "decode only": ([300, 31, 1, 0, 257], [1, 1, 1, 1, 1]),
    "chunks only": ([300, 31, 2, 64], [150, 31, 2, 64]),
    "rows without tokens": ([150, 0, 16, 0, 29], [1, 1, 16, 12, 1]),
    "padding between decode rows and chunks": ([150, 0, 0, 0, 200, 64], [1, 1, 0, 0, 20, 64]),
    "nothing but padding behind decode rows": ([150, 31, 0, 0], [1, 1, 0, 0]),
}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Pages by TMA alone as in fa3-fwd 0.0.3, but with float16: Triton's interpreter computes
    bfloat16 products incorrectly.
    """
    monkeypatch.setitem(STAND_INS, WHEEL, lambda: stand_in.flash_attn_3(WHEEL, ("PAGEDKV",)))
    install(monkeypatch, WHEEL)
    return select_backend("cuda", "hybrid")


def make_device_case(batch: str, dtype: torch.dtype = torch.float16, **options: Any) -> Case:
    """A batch with its decode rows divided."""
    options = {"head_dim": 64, "block_size": 128, "dtype": dtype, **options}
    return divided(on_device(make_case(*BATCHES[batch], **options)))


# Against the reference


@pytest.mark.usefixtures("new_memory_is_nan")
@pytest.mark.parametrize("batch", BATCHES)
def test_equals_reference(kernels: Kernels, batch: str) -> None:
    """Memory that neither of the two kernels writes, or one reads first, shows as NaN."""
    turn = list(BATCHES).index(batch)
    shape: dict[str, Any] = {"group": (1, 2, 4)[turn % 3], "head_dim": 64 + 64 * (turn % 2)}
    case = make_device_case(batch, kv_heads=1 + turn % 2, **shape)
    out, want = kernels.paged_attention(*case, 0.1), paged_attention_reference(*case, 0.1)
    torch.testing.assert_close(out, want, atol=TOLERANCE[torch.float16], rtol=0)


@pytest.mark.skipif(
    getattr(find_flash_attn(), "attend_rows", None) is None, reason="needs FlashAttention-3"
)
def test_graph_of_a_mixed_step_replays_on_other_lengths() -> None:
    kernels = select_backend("cuda", "hybrid")
    q, k, v, attn = make_device_case("padding between decode rows and chunks", torch.bfloat16)
    case = q, k, v, replace(attn, max_query_len=84, max_seq_len=200)
    kernels.paged_attention(*case, 0.125)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels.paged_attention(*case, 0.125)
    for starts, lens in (
        ([0, 1, 2, 2, 2, 22, 86], [150, 0, 0, 0, 200, 64]),
        ([0, 1, 2, 2, 22, 42, 86], [100, 31, 0, 60, 200, 120]),
        ([0, 1, 2, 2, 2, 2, 86], [1, 0, 0, 0, 0, 130]),
    ):
        attn.query_start_B1.copy_(torch.tensor(starts))
        attn.seq_lens_B.copy_(torch.tensor(lens))
        graph.replay()
        torch.testing.assert_close(out, paged_attention_reference(*case, 0.125), atol=2e-2, rtol=0)


# Which rows each of the two gets


def test_flash_attn_3_gets_the_rows_behind_those_that_are_divided(
    calls: list[dict[str, Any]],  # noqa: F811
    kernels: Kernels,
) -> None:
    for batch in ("decode only", "decode and chunks"):
        kernels.paged_attention(*make_device_case(batch), 0.125)
    (options,) = calls
    assert options["cu_seqlens_q"].tolist() == [3, 23, 153, 184]
    assert options["seqused_k"].tolist() == [64, 290, 31]
    assert len(options["page_table"]) == 3


# The choice


def test_its_capabilities_are_those_of_flash_attn_3(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, WHEEL)
    capabilities = choose_capabilities("cuda", "hybrid")
    assert capabilities.name == "hybrid"
    assert capabilities.description.startswith("hybrid (FlashAttention-3, fa3_fwd_interface")
    assert (capabilities.default_block_size, capabilities.dtypes) == (128, ("bfloat16",))
    assert capabilities.quantizations == TRITON_CAPABILITIES.quantizations == ("int4", "fp8")


def test_decode_rows_are_divided_as_for_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, WHEEL)
    shape = 4, 1, 4096, torch.device("cpu")
    hybrid, triton = (select_backend("cuda", name) for name in ("hybrid", "triton"))
    assert hybrid.max_decode_parts(*shape) == triton.max_decode_parts(*shape) > 4


def test_auto_takes_it_where_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, WHEEL)
    assert choose_capabilities("cuda").name == "hybrid"
    assert choose_capabilities("cuda", dtype="float32").name == "triton"
    assert choose_capabilities("cuda", kv_cache_dtype="fp8_e4m3").name == "triton"
    assert choose_capabilities("cuda", head_dim=32).name == "triton"


@pytest.mark.parametrize(
    ("capability", "installed", "reason"),
    [
        ((9, 0), (FA2,), "the package cannot be imported here; install it, or choose 'triton'"),
        ((8, 0), (FA2, WHEEL), "the GPU here has 8.0; run it on one, or choose 'triton'"),
        ((0, 0), (WHEEL,), "there is no GPU here; run it on one, or choose 'triton'"),
    ],
)
def test_without_flash_attn_3_it_is_refused_with_what_it_needs(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    installed: tuple[str, ...],
    reason: str,
) -> None:
    install(monkeypatch, *installed, capability=capability)
    with pytest.raises(
        ValueError, match=rf"'hybrid' needs the package fa3-fwd .*9\.x\), and {reason}"
    ):
        select_backend("cuda", "hybrid")
