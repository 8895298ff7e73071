"""KV store: writes the keys and values of a step into the paged cache.

Owns nothing; the cache belongs to the worker. Called once per layer, before the layer attends.
Legend: T tokens of the step, K KV heads of this rank, D head dim, N blocks, P block size. Caches
here are token-major, [N, P, K, D]; a KV place is `block_id * P + offset`, and -1
writes nothing. Places are int64: a cache may hold more than 2**31 elements.
"""

from __future__ import annotations

from torch import Tensor

from kernels.reference.fp8 import to_cache_dtype


def store_kv_reference(
    k_TKD: Tensor, v_TKD: Tensor, k_cache_NPKD: Tensor, v_cache_NPKD: Tensor, kv_places_T: Tensor
) -> None:
    """Write token t to place `kv_places_T[t]` of both caches, in place. On any device, but not
    in a CUDA graph.
    """
    is_written_T = kv_places_T >= 0
    places = kv_places_T[is_written_T]
    blocks = places // k_cache_NPKD.shape[1]
    offsets = places % k_cache_NPKD.shape[1]
    k_cache_NPKD[blocks, offsets] = to_cache_dtype(k_TKD[is_written_T], k_cache_NPKD.dtype)
    v_cache_NPKD[blocks, offsets] = to_cache_dtype(v_TKD[is_written_T], v_cache_NPKD.dtype)
