"""Paged attention by a flash-attn library, whichever is installed.

FlashAttention-2 (Dao 2023, arXiv:2307.08691) is the module `flash_attn`, for compute capability 8.0
and above; FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608), for 9.x only, is
`flash_attn_interface` if built from source, or `fa3_fwd_interface` from the wheel fa3-fwd. None is
imported before it is needed. FlashAttention-3 is called by its operator, which writes into a given
output; the Python function around it cannot, and its checks cost the host time in every layer.

Requirements: float16 or bfloat16; a head dim that is a multiple of 8 up to 256; a contiguous last
dimension; int32 tables. FlashAttention-2 needs blocks of a multiple of 256 tokens; FlashAttention-3
takes any block size, and reads multiples of 128 by TMA where many queries attend. In the last tile
of a row, FlashAttention-3 multiplies what lies beyond the end by the weight 0, so the cache must
hold finite numbers everywhere.
Legend: T tokens of the step, B rows (B1: B + 1 entries), H query heads of this rank, K its KV
heads, D head dim, N blocks, P block size, W blocks of a row. Caches are token-major, [N, P, K, D].
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType

import torch
from torch import Tensor

from kernels.gpu.capabilities import QUANTIZATIONS
from kernels.interface import Capabilities
from kernels.metadata import AttentionMetadata

logger = logging.getLogger(__name__)

PagedAttention = Callable[[Tensor, Tensor, Tensor, AttentionMetadata, float], Tensor]
AttendRows = Callable[[Tensor, Tensor, Tensor, Tensor, AttentionMetadata, int, float], None]

# The distribution of each module, best first.
_DISTRIBUTIONS = {
    "flash_attn_interface": "flash_attn_3",
    "fa3_fwd_interface": "fa3_fwd",
    "flash_attn": "flash_attn",
}
# Where a module of FlashAttention-3 registers its operators.
_NAMESPACES = {"flash_attn_interface": "flash_attn_3", "fa3_fwd_interface": "fa3_fwd"}
# FlashAttention-3, causal, head dims 64 and 128: rows (queries times H / K) of the larger tile,
# tokens of both.
_TILE_ROWS = 192
_TILE_TOKENS = 128
# In steps of up to so many tokens FlashAttention-3 may split the keys of a row. With more there are
# enough tiles without splits, and the parts, float32 [splits, H, T, D], which are allocated for the
# largest possible number of splits, would take gigabytes.
_MAX_SPLIT_TOKENS = 512
# Joining the parts takes a program for each 8 queries and heads of each row, counted as if all rows
# were as long as the bound, before most of them find that they have nothing to do.
_HEADS_PER_JOIN_PROGRAM, _MAX_JOIN_PROGRAMS = 8, 8192
_NUM_SMS = 132  # of an H100 or H200


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashAttn:
    """A library that is installed and runs on this GPU.

    version: which one, for logs and errors.
    dtypes, head_dims: what it computes; block sizes are multiples of `block_size_divisor`.
    paged_attention(q_THD, k_cache_NPKD, v_cache_NPKD, attn, scale) -> out_THD, as
    `paged_attention_reference`; 0 for a row without tokens. Never waits for the device.
    attend_rows(q_THD, k_cache_NPKD, v_cache_NPKD, out_THD, attn, first_row, scale): the same for
    the rows from `first_row` on, each written to its place in `out_THD`; the rest of that is left
    as it is. None for FlashAttention-2.
    """

    version: str
    dtypes: tuple[str, ...]
    head_dims: range
    default_block_size: int
    block_size_divisor: int
    paged_attention: PagedAttention
    attend_rows: AttendRows | None = None

    @property
    def capabilities(self) -> Capabilities:
        """What a backend with this attention can do."""
        return Capabilities(
            name="flash_attn",
            description=f"flash_attn ({self.version}), triton for the rest",
            default_block_size=self.default_block_size,
            dtypes=self.dtypes,
            fast_dtypes=self.dtypes,
            quantizations=QUANTIZATIONS,
            check_shape=self.check,
        )

    @property
    def hybrid_capabilities(self) -> Capabilities:
        """What a backend can do that leaves rows of one query to Triton, whose decode kernel takes
        any head dim, block size and dtype.
        """
        return dataclasses.replace(
            self.capabilities,
            name="hybrid",
            description=f"hybrid ({self.version} for rows of several queries), triton for the rest",
        )

    def check(self, head_dim: int, block_size: int) -> None:
        """Raise `ValueError` for a head dim that it cannot compute or a block size that it cannot
        use.
        """
        if head_dim not in self.head_dims:
            head_dims = self.head_dims
            raise ValueError(
                f"head_dim {head_dim} is not possible with {self.version}; possible are"
                f" {head_dims[0]} to {head_dims[-1]} in steps of {head_dims.step}. Choose another"
                " attention_backend"
            )
        if block_size < 1 or block_size % self.block_size_divisor:
            raise ValueError(
                f"block_size {block_size} is not possible with {self.version}; possible are"
                f" multiples of {self.block_size_divisor}. Choose {self.default_block_size}, or"
                " another attention_backend"
            )


def installed_flash_attn() -> FlashAttn:
    """`find_flash_attn`. Raises `ValueError` when nothing that runs on this device can be
    imported.
    """
    library = find_flash_attn()
    if library is None:
        raise ValueError(
            "attention_backend 'flash_attn' needs the package flash-attn (FlashAttention-2) or, on"
            " Hopper, fa3-fwd (FlashAttention-3), and neither can be imported here; install one, or"
            " choose 'triton'"
        )
    return library


def installed_flash_attn_3() -> FlashAttn:
    """`find_flash_attn`, if that is FlashAttention-3. Raises `ValueError` otherwise."""
    library = find_flash_attn()
    if library is None or library.attend_rows is None:
        major, minor = _capability()
        reason = "the package cannot be imported here; install it"
        if major != 9:
            capability = f"the GPU here has {major}.{minor}" if major else "there is no GPU here"
            reason = f"{capability}; run it on one"
        raise ValueError(
            "attention_backend 'hybrid' needs the package fa3-fwd (FlashAttention-3) and a Hopper"
            f" GPU (compute capability 9.x), and {reason}, or choose 'triton'"
        )
    return library


def find_flash_attn() -> FlashAttn | None:
    """The best library installed for the current GPU, None if there is none.

    Logs a warning for each that is installed but cannot be loaded.
    """
    major, _ = _capability()
    for module_name in _DISTRIBUTIONS:
        if major == 9 or (major >= 8 and module_name == "flash_attn"):
            library = _load_library(module_name)
            if library is not None:
                return library
    return None


def _capability() -> tuple[int, int]:
    """Compute capability of the current GPU, (0, 0) without one."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def _load_library(name: str) -> FlashAttn | None:
    load_error: Exception
    try:
        module = importlib.import_module(name)
        return _flash_attn_2(module) if name == "flash_attn" else _flash_attn_3(module)
    except ModuleNotFoundError as error:
        if error.name == name:
            return None
        load_error = error
    except Exception as error:  # an extension built for another torch or CUDA may raise anything
        load_error = error
    logger.warning(
        "%s is installed but cannot be used: %s: %s", name, type(load_error).__name__, load_error
    )
    return None


def _flash_attn_2(module: ModuleType) -> FlashAttn:
    flash_attn_with_kvcache = module.flash_attn_with_kvcache
    flash_attn_varlen = module.flash_attn_varlen_func

    def paged_attention(
        q_THD: Tensor,
        k_cache_NPKD: Tensor,
        v_cache_NPKD: Tensor,
        attn: AttentionMetadata,
        scale: float,
    ) -> Tensor:
        if attn.is_decode:  # the function that can split the keys of a row
            out_B1HD: Tensor = flash_attn_with_kvcache(
                q_THD.unsqueeze(1),
                k_cache_NPKD,
                v_cache_NPKD,
                cache_seqlens=attn.seq_lens_B,
                block_table=attn.block_table_BW,
                softmax_scale=scale,
                causal=True,
            )
            return out_B1HD.squeeze(1)
        out_THD: Tensor = flash_attn_varlen(
            q_THD,
            k_cache_NPKD,
            v_cache_NPKD,
            cu_seqlens_q=attn.query_start_B1,
            cu_seqlens_k=attn.seq_start_B1,
            max_seqlen_q=attn.max_query_len,
            max_seqlen_k=attn.max_seq_len,
            softmax_scale=scale,
            causal=True,
            block_table=attn.block_table_BW,
        )
        return out_THD

    return FlashAttn(
        version=_version("FlashAttention-2", module),
        dtypes=("bfloat16", "float16"),
        head_dims=range(8, 257, 8),
        default_block_size=256,
        block_size_divisor=256,
        paged_attention=paged_attention,
    )


def _flash_attn_3(module: ModuleType) -> FlashAttn:
    """One operator serves every batch. It finds the queries and outputs of a row by
    `cu_seqlens_q`, whose first entry need not be 0.
    A build without paged KV, as fa3-fwd 0.0.3 is, still reads pages by TMA: pages of whole tiles,
    and only if it expects more rows than a tile has. `max_seqlen_q` is a bound, so a larger value
    is always allowed.
    """
    operator = _operator(module.__name__)
    disabled_features = _disabled_features(module)
    requires_tma = "PAGEDKV" in disabled_features

    def attend_rows(
        q_THD: Tensor,
        k_cache_NPKD: Tensor,
        v_cache_NPKD: Tensor,
        out_THD: Tensor,
        attn: AttentionMetadata,
        first_row: int,
        scale: float,
    ) -> None:
        num_heads, num_kv_heads = q_THD.shape[1], k_cache_NPKD.shape[2]
        max_query_len = attn.max_query_len
        if requires_tma:
            max_query_len = max(max_query_len, _TILE_ROWS // (num_heads // num_kv_heads) + 1)
        num_rows = len(attn.seq_lens_B) - first_row
        may_split_keys = may_split(len(q_THD), num_rows, max_query_len, num_heads, num_kv_heads)
        operator(
            q_THD,
            k_cache_NPKD,
            v_cache_NPKD,
            out=out_THD,
            cu_seqlens_q=attn.query_start_B1[first_row:],
            seqused_k=attn.seq_lens_B[first_row:],
            max_seqlen_q=max_query_len,
            page_table=attn.block_table_BW[first_row:],
            softmax_scale=scale,
            is_causal=True,
            num_splits=0 if may_split_keys else 1,
        )

    def paged_attention(
        q_THD: Tensor,
        k_cache_NPKD: Tensor,
        v_cache_NPKD: Tensor,
        attn: AttentionMetadata,
        scale: float,
    ) -> Tensor:
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        attend_rows(q_THD, k_cache_NPKD, v_cache_NPKD, out_THD, attn, 0, scale)
        return out_THD

    return FlashAttn(
        version=_version("FlashAttention-3", module),
        dtypes=("bfloat16",) if "FP16" in disabled_features else ("bfloat16", "float16"),
        head_dims=range(64, 129, 64) if requires_tma else range(8, 257, 8),
        default_block_size=_TILE_TOKENS,
        block_size_divisor=_TILE_TOKENS if requires_tma else 1,
        paged_attention=paged_attention,
        attend_rows=attend_rows,
    )


def may_split(
    num_tokens: int, num_rows: int, max_query_len: int, num_heads: int, num_kv_heads: int
) -> bool:
    """Whether FlashAttention-3 may choose to split the keys of `num_rows` rows of up to
    `max_query_len` queries, in a step of `num_tokens`: where they alone keep few processors busy,
    and joining the parts is cheap.
    """
    num_join_programs = num_rows * -(-max_query_len * num_heads // _HEADS_PER_JOIN_PROGRAM)
    keeps_few_busy = num_tokens <= _MAX_SPLIT_TOKENS and num_rows * num_kv_heads < _NUM_SMS
    return keeps_few_busy and num_join_programs <= _MAX_JOIN_PROGRAMS


def _operator(name: str) -> Callable[..., object]:
    """The forward operator of a FlashAttention-3 whose module has been imported."""
    operator: Callable[..., object] = getattr(torch.ops, _NAMESPACES[name]).fwd.default
    return operator


def _disabled_features(module: ModuleType) -> set[str]:
    """Features that a build of FlashAttention-3 reports as left out; a build too old to report any
    has all.
    """
    try:
        config = importlib.import_module(module.__name__.replace("_interface", "_config"))
    except ModuleNotFoundError:
        return set()
    flag_prefix = "FLASHATTENTION_DISABLE_"
    return {
        flag.removeprefix(flag_prefix)
        for flag, is_set in config.CONFIG["build_flags"].items()
        if is_set
    }


def _version(title: str, module: ModuleType) -> str:
    try:
        version = metadata.version(_DISTRIBUTIONS[module.__name__])
    except metadata.PackageNotFoundError:
        version = getattr(module, "__version__", "of unknown version")
    return f"{title}, {module.__name__} {version}"
