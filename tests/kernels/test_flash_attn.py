"""The flash-attn backend against the reference: on stand-ins everywhere, on the library itself
where one is installed.

Then which library is chosen, what is refused, and that the stand-ins refuse what the libraries do.
"""

from __future__ import annotations

import logging
import re
import sys
import warnings
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
from kernels.metadata import AttentionMetadata
from kernels.reference.attention import paged_attention_reference
from kernels.reference.capabilities import REFERENCE_CAPABILITIES
from tests.kernels import flash_attn_stand_in as stand_in
from tests.kernels.gpu_device import DEVICE
from tests.kernels.test_attention import Case, make_case

with warnings.catch_warnings():
    # warnings that a library emits while it is imported are not ours
    warnings.simplefilter("ignore")
    INSTALLED = find_flash_attn()
needs_library = pytest.mark.skipif(INSTALLED is None, reason="needs a GPU and a flash-attn library")

FA2, FA3, WHEEL = "flash_attn", "flash_attn_interface", "fa3_fwd_interface"
STAND_INS: dict[str, Callable[[], dict[str, ModuleType]]] = {
    FA2: stand_in.flash_attn_2,
    FA3: lambda: stand_in.flash_attn_3(FA3),
    # As reported by the configuration of version 0.0.3.
    WHEEL: lambda: stand_in.flash_attn_3(WHEEL, left_out=("BACKWARD", "PAGEDKV", "FP16", "LOCAL")),
}
HOPPER = (9, 0)

# (lengths of the sequences, of their queries); a row without tokens is padding in the batch of a
# graph.
BATCHES = {
    "prefill": ([300, 31, 1, 64], [300, 31, 1, 64]),
    "cached prefix": ([300, 129, 64, 257], [20, 128, 1, 2]),
    "mixed": ([300, 7, 513, 0, 16, 29], [1, 7, 12, 0, 16, 1]),
    "decode": ([300, 31, 1, 0, 257], [1, 1, 1, 1, 1]),
}
GROUPS = (1, 2, 4, 8)


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


@pytest.fixture(params=[*STAND_INS, pytest.param("installed", marks=needs_library)])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FlashAttn:
    if request.param == "installed":
        assert INSTALLED is not None
        return INSTALLED
    return find(monkeypatch, request.param)


def to_device(attn: AttentionMetadata, device: torch.device) -> AttentionMetadata:
    return replace(
        attn,
        query_start_B1=attn.query_start_B1.to(device),
        seq_start_B1=attn.seq_start_B1.to(device),
        seq_lens_B=attn.seq_lens_B.to(device),
        block_table_BW=attn.block_table_BW.to(device),
        kv_places_T=attn.kv_places_T.to(device),
    )


def make_device_case(seq_lens: list[int], query_lens: list[int], **options: Any) -> Case:
    q, k_cache, v_cache, attn = make_case(
        seq_lens, query_lens, **{"head_dim": 64, "dtype": torch.bfloat16, **options}
    )
    return q.to(DEVICE), k_cache.to(DEVICE), v_cache.to(DEVICE), to_device(attn, DEVICE)


def assert_matches_reference(library: FlashAttn, case: Case) -> None:
    scale = case[0].shape[-1] ** -0.5
    out, want = library.paged_attention(*case, scale), paged_attention_reference(*case, scale)
    assert (out.dtype, out.shape) == (want.dtype, want.shape)
    # A stand-in rounds as the reference does, up to the last bit; a library rounds softmax weights
    # to its dtype too.
    atol, rtol = (2e-2, 0.0) if library is INSTALLED else (1e-5, 2 * torch.finfo(out.dtype).eps)
    torch.testing.assert_close(out.float(), want.float(), atol=atol, rtol=rtol)


# Against the reference


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("batch", BATCHES)
def test_equals_reference(library: FlashAttn, batch: str, group: int) -> None:
    """Every batch with every group; each head dim, dtype and block size occurs with every batch and
    every group.
    """
    turn = list(BATCHES).index(batch) + GROUPS.index(group)
    case = make_device_case(
        *BATCHES[batch],
        group=group,
        head_dim=(64, 128)[turn % 2],
        dtype=getattr(torch, library.dtypes[turn // 2 % len(library.dtypes)]),
        block_size=library.default_block_size * (1 + turn // 3 % 2),
    )
    assert case[3].is_decode == (batch == "decode")
    assert_matches_reference(library, case)


def test_bounds_above_what_is_reached_change_nothing(library: FlashAttn) -> None:
    q, k_cache, v_cache, attn = make_device_case(
        *BATCHES["mixed"], block_size=library.default_block_size
    )
    assert_matches_reference(
        library, (q, k_cache, v_cache, replace(attn, max_query_len=500, max_seq_len=4096))
    )


@pytest.mark.parametrize("block_size", [1, 16, 100])
@pytest.mark.parametrize("batch", BATCHES)
def test_flash_attn_3_takes_blocks_of_any_size(
    monkeypatch: pytest.MonkeyPatch, batch: str, block_size: int
) -> None:
    library = find(monkeypatch, FA3)
    library.check(128, block_size)
    assert_matches_reference(library, make_device_case(*BATCHES[batch], block_size=block_size))


@pytest.mark.parametrize("group", [1, 3, 8, 192, 200])
def test_build_without_paged_kv_reads_pages_whatever_the_group(
    monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    library = find(monkeypatch, WHEEL)
    assert_matches_reference(
        library, make_device_case([30, 5], [1, 1], kv_heads=1, group=group, block_size=128)
    )


@pytest.mark.parametrize("name", STAND_INS)
@pytest.mark.parametrize("batch", BATCHES)
def test_no_tensor_is_read_by_the_host(
    monkeypatch: pytest.MonkeyPatch, name: str, batch: str
) -> None:
    """A meta tensor has no data that could be read."""
    install(monkeypatch, name)
    for function in ("flash_attn_with_kvcache", "flash_attn_varlen_func") if name == FA2 else ():
        monkeypatch.setattr(
            sys.modules[name], function, lambda q, *args, **kwargs: torch.empty_like(q)
        )
    library = find_flash_attn()
    assert library is not None
    meta = torch.device("meta")
    q, k_cache, v_cache, attn = make_case(*BATCHES[batch])
    out = library.paged_attention(
        q.to(meta), k_cache.to(meta), v_cache.to(meta), to_device(attn, meta), 0.25
    )
    assert out.shape == q.shape


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


@pytest.mark.parametrize(("num_tokens", "num_splits"), [(1, 0), (512, 0), (513, 1)])
def test_flash_attn_3_splits_no_keys_where_the_parts_would_be_large(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int, num_splits: int
) -> None:
    install(monkeypatch, FA3)
    asked: list[int] = []
    operator = flash_attn._operator(FA3)

    def recorded(*args: Any, **options: Any) -> None:
        asked.append(options["num_splits"])
        operator(*args, **options)

    monkeypatch.setattr(flash_attn, "_operator", lambda name: recorded)
    library = find_flash_attn()
    assert library is not None
    library.paged_attention(
        *make_device_case([num_tokens], [num_tokens], kv_heads=1, block_size=128), 0.125
    )
    assert asked == [num_splits]


@needs_library
def test_graph_of_a_decode_step_replays_on_other_lengths() -> None:
    assert INSTALLED is not None
    case = make_device_case([1024, 700, 1, 300], [1] * 4, block_size=INSTALLED.default_block_size)
    INSTALLED.paged_attention(*case, 0.125)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = INSTALLED.paged_attention(*case, 0.125)
    for lens in ([1024, 700, 1, 300], [3, 700, 0, 299], [0, 0, 0, 0]):
        case[3].seq_lens_B.copy_(torch.tensor(lens))
        graph.replay()
        torch.testing.assert_close(out, paged_attention_reference(*case, 0.125), atol=2e-2, rtol=0)


# The choice


@pytest.mark.parametrize(
    ("capability", "installed", "chosen"),
    [
        ((9, 0), (FA2, FA3, WHEEL), "FlashAttention-3, flash_attn_interface "),
        ((9, 0), (FA2, WHEEL), "FlashAttention-3, fa3_fwd_interface "),
        ((9, 0), (WHEEL,), "FlashAttention-3, fa3_fwd_interface "),
        ((9, 0), (FA2,), "FlashAttention-2, flash_attn "),
        ((8, 0), (FA2, FA3, WHEEL), "FlashAttention-2, flash_attn "),
        ((8, 9), (FA2,), "FlashAttention-2, flash_attn "),
        ((10, 0), (FA2, FA3, WHEEL), "FlashAttention-2, flash_attn "),
        ((9, 0), (), None),
        ((8, 0), (FA3, WHEEL), None),
        ((10, 0), (FA3, WHEEL), None),
        ((7, 5), (FA2, FA3, WHEEL), None),
        ((0, 0), (FA2, FA3, WHEEL), None),
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


def test_version_is_that_of_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"fa3_fwd": "0.0.3"}
    install(monkeypatch, WHEEL)
    monkeypatch.setattr("importlib.metadata.version", versions.__getitem__)
    library = find_flash_attn()
    assert library is not None
    assert library.version == "FlashAttention-3, fa3_fwd_interface 0.0.3"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "raise ImportError('x.so: undefined symbol: y')",
            "ImportError: x.so: undefined symbol: y",
        ),
        ("raise OSError('libcudart.so.12: cannot open')", "OSError: libcudart.so.12: cannot open"),
        (
            "import a_part_that_was_not_built",
            "ModuleNotFoundError: No module named 'a_part_that_was_not_built'",
        ),
        ("", "AttributeError: .*'no_such_library' object has no attribute 'fwd'"),
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
    if not source:
        monkeypatch.setattr(flash_attn, "_NAMESPACES", {FA3: "no_such_library"})
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_no_capability() -> None:
    assert flash_attn._capability() == (0, 0)


# What a library cannot compute


@pytest.mark.parametrize("name", STAND_INS)
def test_own_block_size_is_possible(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    library = find(monkeypatch, name)
    library.check(128, library.default_block_size)
    library.check(128, 3 * library.default_block_size)


@pytest.mark.parametrize(
    ("name", "block_size", "message"),
    [
        (
            FA2,
            16,
            r"block_size 16 is .* FlashAttention-2, .*; possible are multiples of 256\. Choose 256",
        ),
        (FA2, 384, "block_size 384 .* multiples of 256"),
        (FA2, 0, "block_size 0 .* multiples of 256"),
        (FA3, 0, r"block_size 0 .* FlashAttention-3, .*; possible are multiples of 1\. Choose 128"),
        (WHEEL, 16, "block_size 16 .* fa3_fwd_interface .*; possible are multiples of 128"),
    ],
)
def test_block_size_that_cannot_be_is_refused_with_what_can(
    monkeypatch: pytest.MonkeyPatch, name: str, block_size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        find(monkeypatch, name).check(128, block_size)


@pytest.mark.parametrize(
    ("name", "head_dim", "message"),
    [
        (
            FA2,
            264,
            (
                "head_dim 264 is .* FlashAttention-2, .*; possible are 8 to 256 in steps of 8."
                " Choose another"
            ),
        ),
        (FA3, 20, "head_dim 20 .*; possible are 8 to 256 in steps of 8"),
        (WHEEL, 96, "head_dim 96 .*; possible are 64 to 128 in steps of 64"),
    ],
)
def test_head_dim_that_cannot_be_is_refused_with_what_can(
    monkeypatch: pytest.MonkeyPatch, name: str, head_dim: int, message: str
) -> None:
    library = find(monkeypatch, name)
    library.check(128, library.default_block_size)
    with pytest.raises(ValueError, match=message):
        library.check(head_dim, library.default_block_size)
    with pytest.raises(ValueError, match="block_size 0 "):
        library.check(128, 0)


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [(FA2, ("bfloat16", "float16")), (FA3, ("bfloat16", "float16")), (WHEEL, ("bfloat16",))],
)
def test_dtypes_are_those_the_library_was_built_for(
    monkeypatch: pytest.MonkeyPatch, name: str, dtypes: tuple[str, ...]
) -> None:
    assert find(monkeypatch, name).dtypes == dtypes


# The stand-ins refuse what the libraries do

Arguments = dict[str, Any]
MISSING = object()


def valid_call(call: str) -> tuple[Callable[..., torch.Tensor], Arguments]:
    """A correct call of a stand-in: a function and its arguments by name."""
    q, k, v, attn = make_case(
        [40, 7, 300], [1, 1, 1], block_size=256, head_dim=64, dtype=torch.bfloat16
    )
    options: Arguments = {"softmax_scale": 0.125, "causal": True}
    starts, lens, table = attn.query_start_B1, attn.seq_lens_B, attn.block_table_BW
    if call == "varlen 2":
        return stand_in.flash_attn_2()[FA2].flash_attn_varlen_func, options | {
            "q": q,
            "k": k,
            "v": v,
            "cu_seqlens_q": starts,
            "cu_seqlens_k": attn.seq_start_B1,
            "max_seqlen_q": 1,
            "max_seqlen_k": 300,
            "block_table": table,
        }
    if call == "kvcache 2":
        function = stand_in.flash_attn_2()[FA2].flash_attn_with_kvcache
        options |= {"q": q.unsqueeze(1), "k_cache": k, "v_cache": v, "cache_seqlens": lens}
        return function, options | {"block_table": table}
    name = FA3 if call == "fwd 3" else WHEEL
    return getattr(torch.ops, STAND_INS[name]()[name].namespace).fwd.default, {
        "q": q,
        "k": k,
        "v": v,
        "out": torch.empty_like(q),
        "cu_seqlens_q": starts,
        "seqused_k": lens,
        "max_seqlen_q": 1 if name == FA3 else 97,
        "page_table": table,
        "softmax_scale": 0.125,
        "is_causal": True,
    }


ALL = ("varlen 2", "kvcache 2", "fwd 3", "fwd 3 by TMA")
# Names of arguments that differ from call to call.
NAMES = {
    "varlen 2": {"keys": "k", "values": "v", "table": "block_table"},
    "kvcache 2": {
        "keys": "k_cache",
        "values": "v_cache",
        "table": "block_table",
        "lens": "cache_seqlens",
    },
    "fwd 3": {
        "keys": "k",
        "values": "v",
        "table": "page_table",
        "lens": "seqused_k",
        "causal": "is_causal",
    },
}
NAMES["fwd 3 by TMA"] = NAMES["fwd 3"]


def wide_block(tensor: torch.Tensor) -> torch.Tensor:
    """An id outside the cache, in an entry that the first row uses."""
    changed = tensor.clone()
    changed[0, 0] = 1000
    return changed


# (calls, argument, its wrong value, message): one for each thing that the stand-ins check
WRONG: list[tuple[tuple[str, ...], str, Callable[[Any], Any], str]] = [
    (ALL, "q", lambda q: q.float(), "q must be float16 or bfloat16"),
    (ALL, "q", lambda q: q.repeat_interleave(2, -1)[..., ::2], "q must have a contiguous last"),
    (ALL, "q", lambda q: q[..., :3, :], "query heads must be a multiple"),
    (ALL, "q", lambda q: q[..., :56], "q must have the head dim"),
    (ALL, "q", lambda q: q.unsqueeze(0), "q must have . dimensions"),
    (ALL, "keys", lambda k: k.half(), "k_cache must have the dtype of q"),
    (ALL, "keys", lambda k: k[:-1], "caches must have the same shape"),
    (ALL, "table", lambda table: table.long(), "table must be int32"),
    (ALL, "table", lambda table: table.to("meta"), "must be on the device of q"),
    (ALL, "table", lambda table: table[:2], "table must have a row for each"),
    (ALL, "table", lambda table: table[:, :1], "must fit in its row"),
    (ALL, "table", wide_block, "used blocks must lie in the cache"),
    (ALL, "causal", lambda _: MISSING, "causal must be True"),
    (ALL[:2], "softmax_scale", lambda _: torch.tensor(0.125), "softmax_scale must be a float"),
    (ALL[2:], "softmax_scale", lambda _: MISSING, "softmax_scale must be a float"),
    (ALL[:2], "window_size", lambda _: (128, 0), "window_size is not"),
    (ALL[2:], "window_size_left", lambda _: 128, "window_size_left is not"),
    (ALL[2:], "out", lambda _: MISSING, "out must be given"),
    (ALL[2:], "out", lambda out: out[1:], "out must have the shape of q"),
    (ALL[2:], "out", lambda out: out.float(), "out must have the dtype of q"),
    (ALL[1:], "lens", lambda lens: lens.long(), "(cache_seqlens|seqused_k) must be int32"),
    (ALL[1:], "lens", lambda lens: lens[:2], "(cache_seqlens|seqused_k) must have shape"),
    (ALL[1:], "lens", lambda lens: lens.repeat_interleave(2)[::2], "must be contiguous"),
    (ALL[1:], "num_splits", lambda _: 1000, "num_splits must be from 0"),
    (ALL[2:], "max_seqlen_q", lambda _: None, "max_seqlen_q must be an int"),
    (("varlen 2", "fwd 3"), "max_seqlen_q", lambda _: 0, "max_seqlen_q must bound"),
    (("varlen 2",), "max_seqlen_k", lambda _: 299, "max_seqlen_k must bound"),
    (ALL[:1], "cu_seqlens_k", lambda starts: starts.flip(0), "cu_seqlens_k must ascend from 0"),
    (ALL[:1], "cu_seqlens_q", lambda starts: starts * 2, "cu_seqlens_q must end with 3"),
    (ALL[2:], "cu_seqlens_q", lambda starts: starts + 1, "must lie within 3 tokens"),
    (("fwd 3 by TMA",), "max_seqlen_q", lambda _: 96, "does not support paged KV"),
]


@pytest.mark.parametrize("call", ALL)
def test_stand_in_takes_the_call_that_the_wrong_ones_are_made_of(call: str) -> None:
    function, arguments = valid_call(call)
    answer: Any = function(**arguments)
    out = answer[0] if isinstance(answer, tuple) else answer
    assert out.shape == arguments["q"].shape
    assert out is arguments.get("out", out)


@pytest.mark.parametrize(
    ("call", "argument", "change", "message"),
    [
        pytest.param(call, argument, change, message, id=f"{call}-{argument}-{message}")
        for calls, argument, change, message in WRONG
        for call in calls
    ],
)
def test_stand_in_refuses_a_wrong_call(
    call: str, argument: str, change: Callable[[Any], Any], message: str
) -> None:
    function, arguments = valid_call(call)
    name = NAMES[call].get(argument, argument)
    wrong = arguments | {name: change(arguments.get(name))}
    with pytest.raises(RuntimeError, match=message):
        function(**{name: value for name, value in wrong.items() if value is not MISSING})


@pytest.mark.parametrize(
    ("call", "block_size", "message"),
    [
        ("varlen 2", 128, "block size must be a multiple of 256"),
        ("kvcache 2", 64, "block size must be a multiple of 256"),
        ("fwd 3 by TMA", 64, "does not support paged KV"),
    ],
)
def test_stand_in_refuses_a_block_size(call: str, block_size: int, message: str) -> None:
    function, arguments = valid_call(call)
    _, k, v, attn = make_case(
        [40, 7, 300], [1, 1, 1], block_size=block_size, head_dim=64, dtype=torch.bfloat16
    )
    names = NAMES[call]
    with pytest.raises(RuntimeError, match=message):
        function(
            **arguments
            | {names["keys"]: k, names["values"]: v, names["table"]: attn.block_table_BW}
        )


def test_stand_in_of_the_wheel_refuses_float16() -> None:
    function, arguments = valid_call("fwd 3 by TMA")
    halves = {name: arguments[name].half() for name in ("q", "k", "v", "out")}
    with pytest.raises(RuntimeError, match="does not support FP16"):
        function(**arguments | halves)


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
