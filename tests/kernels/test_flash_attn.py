"""The flash-attn backend over stand-ins of the libraries: what they are called with, which one is
chosen, what is refused, and that the stand-ins refuse what the libraries do. `make gpu-check`
compares FlashAttention-3 itself with the reference.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from configs.engine import EngineConfig
from kernels.cpu.capabilities import CPU_CAPABILITIES
from kernels.gpu import flash_attn
from kernels.gpu.capabilities import TRITON_CAPABILITIES
from kernels.gpu.flash_attn import FlashAttn, find_flash_attn, may_split
from kernels.reference.attention import paged_attention_reference
from kernels.reference.capabilities import REFERENCE_CAPABILITIES
from tests.kernels import flash_attn_stand_in as stand_in
from tests.kernels.test_attention import Case, make_case

FA2, FA3, WHEEL = "flash_attn", "flash_attn_interface", "fa3_fwd_interface"
STAND_INS: dict[str, Callable[[], dict[str, ModuleType]]] = {
    FA2: stand_in.flash_attn_2,
    FA3: lambda: stand_in.flash_attn_3(FA3),
    # As reported by the configuration of version 0.0.3.
    WHEEL: lambda: stand_in.flash_attn_3(WHEEL, left_out=("BACKWARD", "PAGEDKV", "FP16", "LOCAL")),
}
HOPPER = (9, 0)

# (lengths of the sequences, of their queries), with query heads per KV head; a row without tokens
# is padding in the batch of a graph.
BATCHES = {
    "prefill": ([300, 31, 1, 64], [300, 31, 1, 64], 1),
    "cached prefix": ([300, 129, 64, 257], [20, 128, 1, 2], 2),
    "mixed": ([300, 7, 513, 0, 16, 29], [1, 7, 12, 0, 16, 1], 4),
    "decode": ([300, 31, 1, 0, 257], [1, 1, 1, 1, 1], 8),
}


def install(
    monkeypatch: pytest.MonkeyPatch, *names: str, capability: tuple[int, int] = HOPPER
) -> None:
    """Pretend that there is a GPU, with stand-ins for exactly these libraries."""
    monkeypatch.setattr(flash_attn, "_capability", lambda: capability)
    for name in STAND_INS:
        for module in (name, name.replace("_interface", "_config")):
            monkeypatch.setitem(sys.modules, module, None)
    for name in names:
        for module, stand_in_module in STAND_INS[name]().items():
            monkeypatch.setitem(sys.modules, module, stand_in_module)
            if hasattr(stand_in_module, "namespace"):
                monkeypatch.setitem(flash_attn._NAMESPACES, name, stand_in_module.namespace)


def find(monkeypatch: pytest.MonkeyPatch, name: str) -> FlashAttn:
    install(monkeypatch, name)
    library = find_flash_attn()
    assert library is not None
    return library


@pytest.fixture(params=STAND_INS)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FlashAttn:
    return find(monkeypatch, request.param)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of each call of FlashAttention-3."""
    calls: list[dict[str, Any]] = []
    find_operator: Callable[[str], Callable[..., object]] = flash_attn._operator

    def recording(name: str) -> Callable[..., object]:
        def operator(*tensors: torch.Tensor, **options: Any) -> object:
            calls.append(options)
            return find_operator(name)(*tensors, **options)

        return operator

    monkeypatch.setattr(flash_attn, "_operator", recording)
    return calls


def make_half_case(seq_lens: list[int], query_lens: list[int], **options: Any) -> Case:
    options = {"head_dim": 64, "dtype": torch.bfloat16, **options}
    return make_case(seq_lens, query_lens, **options)


def assert_matches_reference(library: FlashAttn, case: Case) -> None:
    """To the bit, since that is what a stand-in computes with."""
    scale = case[0].shape[-1] ** -0.5
    assert torch.equal(
        library.paged_attention(*case, scale), paged_attention_reference(*case, scale)
    )


# Against the reference


@pytest.mark.parametrize("batch", BATCHES)
def test_equals_reference(library: FlashAttn, batch: str) -> None:
    """Each head dim, dtype and block size occurs."""
    *lens, group = BATCHES[batch]
    turn = list(BATCHES).index(batch)
    case = make_half_case(
        *lens,
        group=group,
        head_dim=(64, 128)[turn % 2],
        dtype=getattr(torch, library.dtypes[turn // 2 % len(library.dtypes)]),
        block_size=library.default_block_size * (1 + turn // 3 % 2),
    )
    assert case[3].is_decode == (batch == "decode")
    assert_matches_reference(library, case)


def test_bounds_above_what_is_reached_change_nothing(library: FlashAttn) -> None:
    seq_lens, query_lens, _ = BATCHES["mixed"]
    q, k, v, attn = make_half_case(seq_lens, query_lens, block_size=library.default_block_size)
    assert_matches_reference(library, (q, k, v, replace(attn, max_query_len=500, max_seq_len=4096)))


@pytest.mark.parametrize("group", [1, 3, 192])
def test_build_without_paged_kv_reads_pages_whatever_the_group(
    monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    library = find(monkeypatch, WHEEL)
    assert_matches_reference(
        library, make_half_case([30, 5], [1, 1], kv_heads=1, group=group, block_size=128)
    )


@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "bound", "splits"),
    [
        (1, 1, 97, True),
        (512, 1, 512, True),
        (513, 1, 513, False),  # the parts would take too much memory
        (16, 16, 97, True),
        (17, 17, 97, False),  # enough programs without splits
        (256, 65, 256, False),  # a graph with room for 64 prompts: 33,280 programs to join
    ],
)
def test_keys_are_split_only_where_that_pays(
    num_tokens: int, num_rows: int, bound: int, splits: bool
) -> None:
    """Of the 0.6B shape."""
    assert may_split(num_tokens, num_rows, bound, num_heads=16, num_kv_heads=8) is splits


@pytest.mark.parametrize("name", STAND_INS)
@pytest.mark.parametrize("batch", BATCHES)
def test_no_tensor_is_read_by_the_host(
    monkeypatch: pytest.MonkeyPatch, name: str, batch: str
) -> None:
    """A meta tensor has no data that could be read."""
    monkeypatch.setattr(stand_in, "_attend", lambda *arguments: arguments[-1])
    install(monkeypatch, name)
    for function in ("flash_attn_with_kvcache", "flash_attn_varlen_func") if name == FA2 else ():
        monkeypatch.setattr(
            sys.modules[name], function, lambda q, *args, **kwargs: torch.empty_like(q)
        )
    library = find_flash_attn()
    assert library is not None
    meta = torch.device("meta")
    *lens, group = BATCHES[batch]
    block_size = library.default_block_size
    q, k_cache, v_cache, attn = make_half_case(*lens, group=group, block_size=block_size)
    values = {each.name: getattr(attn, each.name) for each in fields(attn)}
    tensors: dict[str, Any] = {
        name: value for name, value in values.items() if isinstance(value, torch.Tensor)
    }
    meta_attn = replace(attn, **{name: tensor.to(meta) for name, tensor in tensors.items()})
    out = library.paged_attention(q.to(meta), k_cache.to(meta), v_cache.to(meta), meta_attn, 0.25)
    assert out.shape == q.shape


@pytest.mark.parametrize(("num_tokens", "num_splits"), [(512, 0), (513, 1)])
def test_flash_attn_3_splits_no_keys_where_the_parts_would_be_large(
    monkeypatch: pytest.MonkeyPatch, calls: list[dict[str, Any]], num_tokens: int, num_splits: int
) -> None:
    library = find(monkeypatch, FA3)
    case = make_half_case([num_tokens], [num_tokens], kv_heads=1, block_size=128)
    library.paged_attention(*case, 0.125)
    assert [options["num_splits"] for options in calls] == [num_splits]


# The choice


@pytest.mark.parametrize(
    ("capability", "installed", "chosen"),
    [
        ((9, 0), (FA2, FA3, WHEEL), "FlashAttention-3, flash_attn_interface "),
        ((9, 0), (FA2, WHEEL), "FlashAttention-3, fa3_fwd_interface "),
        ((9, 0), (FA2,), "FlashAttention-2, flash_attn "),
        ((8, 0), (FA2, FA3, WHEEL), "FlashAttention-2, flash_attn "),
        ((9, 0), (), None),
        ((10, 0), (FA3, WHEEL), None),
        ((7, 5), (FA2, FA3, WHEEL), None),
    ],
)
def test_best_library_for_the_gpu_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capability: tuple[int, int],
    installed: tuple[str, ...],
    chosen: str | None,
) -> None:
    install(monkeypatch, *installed, capability=capability)
    library = find_flash_attn()
    if chosen is None:
        assert library is None
    else:
        assert library is not None
        assert library.version.startswith(chosen)
    assert not caplog.records  # an absent library is not worth a warning


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise OSError('libcudart.so.12: cannot open')", "OSError: libcudart.so.12: cannot open"),
        (
            "import a_part_that_was_not_built",
            "ModuleNotFoundError: No module named 'a_part_that_was_not_built'",
        ),
    ],
)
def test_library_that_is_installed_but_broken_is_told_of_and_passed_over(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    source: str,
    reason: str,
) -> None:
    install(monkeypatch, FA2)
    monkeypatch.delitem(sys.modules, FA3)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / f"{FA3}.py").write_text(source)
    library = find_flash_attn()
    assert library is not None
    assert library.version == "FlashAttention-2, flash_attn 2.8.3"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert re.fullmatch(f"{FA3} is installed but cannot be used: {reason}.*", record.getMessage())


def test_build_that_does_not_tell_what_it_is_without_has_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, WHEEL)
    monkeypatch.setitem(sys.modules, "fa3_fwd_config", None)
    library = find_flash_attn()
    assert library is not None
    assert library.dtypes == ("bfloat16", "float16")
    library.check(128, 16)


# What a library cannot compute


@pytest.mark.parametrize(
    ("name", "head_dim", "block_size", "message"),
    [
        (
            FA2,
            128,
            16,
            r"block_size 16 is .* FlashAttention-2, .*; possible are multiples of 256\. Choose 256",
        ),
        (FA3, 128, 0, r"block_size 0 .* FlashAttention-3, .* multiples of 1\. Choose 128"),
        (WHEEL, 128, 16, "block_size 16 .* fa3_fwd_interface .*; possible are multiples of 128"),
        (
            FA2,
            264,
            256,
            "head_dim 264 is .* FlashAttention-2, .* 8 to 256 in steps of 8. Choose another",
        ),
        (FA3, 20, 128, "head_dim 20 .*; possible are 8 to 256 in steps of 8"),
        (WHEEL, 96, 128, "head_dim 96 .*; possible are 64 to 128 in steps of 64"),
    ],
)
def test_shape_that_cannot_be_is_refused_with_what_can(
    monkeypatch: pytest.MonkeyPatch, name: str, head_dim: int, block_size: int, message: str
) -> None:
    library = find(monkeypatch, name)
    library.check(128, 3 * library.default_block_size)
    with pytest.raises(ValueError, match=message):
        library.check(head_dim, block_size)


# The stand-ins refuse what the libraries do

# (argument, its wrong value, message)
WRONG: list[tuple[str, Callable[[Any], Any], str]] = [
    ("q", lambda q: q.float(), "float16 or bfloat16"),
    ("q", lambda q: q.half(), "FP16"),
    ("k", lambda k: k.half(), "one dtype"),
    ("k", lambda k: k.unflatten(1, (4, 64)).flatten(0, 1), "paged KV"),
    ("page_table", lambda table: table.long(), "must be int32"),
    ("page_table", lambda table: table[:2], "one number of rows"),
    ("cu_seqlens_q", lambda starts: starts * 98, "must bound the lengths"),
    ("max_seqlen_q", lambda _: 96, "paged KV"),
    ("is_causal", lambda _: False, "causal, with a scale"),
    ("window_size_left", lambda _: 128, "window_size_left is not used"),
]


@pytest.mark.parametrize(("argument", "change", "message"), WRONG)
def test_stand_in_refuses_a_wrong_call(
    argument: str, change: Callable[[Any], Any], message: str
) -> None:
    q, k, v, attn = make_case(
        [40, 7, 300], [1, 1, 1], block_size=256, head_dim=64, dtype=torch.bfloat16
    )
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "out": torch.empty_like(q),
        "cu_seqlens_q": attn.query_start_B1,
        "seqused_k": attn.seq_lens_B,
        "max_seqlen_q": 97,
        "page_table": attn.block_table_BW,
        "softmax_scale": 0.125,
        "is_causal": True,
    }
    operator = getattr(torch.ops, STAND_INS[WHEEL]()[WHEEL].namespace).fwd.default
    assert operator(**arguments)[0] is arguments["out"]
    with pytest.raises(AssertionError, match=message):
        operator(**arguments | {argument: change(arguments.get(argument))})


def test_the_help_says_the_default_block_size_of_each_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    defaults = {
        "cpu": CPU_CAPABILITIES.default_block_size,
        "triton": TRITON_CAPABILITIES.default_block_size,
        "FlashAttention-3": find(monkeypatch, WHEEL).default_block_size,
        "FlashAttention-2": find(monkeypatch, FA2).default_block_size,
        "reference": REFERENCE_CAPABILITIES.default_block_size,
    }
    [option] = [each for each in fields(EngineConfig) if each.name == "block_size"]
    stated: dict[str, int] = {}
    for part in option.metadata["help"].partition("by default ")[2].split(", "):
        size, _, backends = part.partition(" with ")
        stated |= {name: int(size) for name in defaults if name in backends}
    assert stated == defaults
