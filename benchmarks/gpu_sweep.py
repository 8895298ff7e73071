"""Which launch of Triton's attention is fastest on this GPU: `python -m benchmarks.gpu_sweep [--out
FILE] [--kernels prefill decode]`.

    prefill   sizes of tiles and stages, for blocks of 16, 64 and 128 tokens
    decode    the order of programs, for the same blocks; over a cache of 8-bit numbers also the
              size of tiles and the way of reading

for the heads of Qwen3-0.6B and of Qwen3-8B. Each row is one launch of one batch: microseconds of
device time, the floor as in `benchmarks.gpu_check_speed` at the speeds of an H200's data sheet, and
its share of the time. The launch that is used today is the row "as chosen"; to change it, see
`kernels/gpu/attention_launch.py`.
`--small`: tiny shapes on any device, including a CPU with TRITON_INTERPRET=1; times mean nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.common import RESULTS, commit
from benchmarks.common import machine as describe_machine
from benchmarks.gpu_check_common import Check, Row, free_memory, rounded, share
from benchmarks.gpu_check_process import write_json
from benchmarks.gpu_check_speed import Pool, attention_bytes, attention_us
from kernels.gpu.attention import paged_attention
from kernels.gpu.attention_launch import Launch
from kernels.gpu.fp8 import Fp8Read
from kernels.select import select_backend

Tune = Callable[[Launch], Launch]
Heads = tuple[int, int, int]

# Query heads, KV heads, head dim: of Qwen3-0.6B and of Qwen3-8B.
_HEADS: tuple[Heads, ...] = ((16, 8, 128), (32, 8, 128))
_SMALL_HEADS: tuple[Heads, ...] = ((2, 1, 64),)
_BLOCK_SIZES = (16, 64, 128)
# Lengths of rows and of their queries.
_PREFILLS = {
    "1 x 2048": ([2048], [2048]),
    "4 x 4096": ([4096] * 4, [4096] * 4),
    "512 behind 7680": ([8192], [512]),
}
_DECODES = {
    f"{batch} x {context}": ([context] * batch, [1] * batch)
    for batch, context in ((1, 32768), (8, 4096), (64, 512), (64, 4096), (256, 512))
}
# M, C, warps, stages. On Hopper the last two run their matrix instructions one by one, see
# `prefill_launch`.
_PREFILL_TILES = (
    (128, 64, 8, 3),
    (128, 128, 8, 3),
    (64, 32, 4, 3),
    (64, 64, 4, 3),
    (128, 64, 8, 5),
    (64, 32, 4, 5),
)
_SMALL_TILES = ((32, 16, 4, 3),)


def prefill(check: Check) -> None:
    """The rows of the first table."""
    pool = Pool.allocate(check)
    batches = {"20": ([20], [20])} if check.small else _PREFILLS
    for heads, block_size, batch in _shapes(check, batches):
        for label, tune in _prefill_launches(check).items():
            _add(check, pool, f"prefill {batch}", batches[batch], heads, block_size, label, tune)


def decode(check: Check) -> None:
    """The rows of the second table."""
    batches = {"3 x 40": ([40] * 3, [1] * 3)} if check.small else _DECODES
    for cache in ("16 bits", "fp8"):
        free_memory(check)
        pool = Pool.of_codes(check) if cache == "fp8" else Pool.allocate(check)
        for heads, block_size, batch in _shapes(check, batches):
            for label, tune in _decode_launches(check, cache == "fp8").items():
                name = f"decode {cache} {batch}"
                _add(check, pool, name, batches[batch], heads, block_size, label, tune)


def _shapes(check: Check, batches: dict[str, Any]) -> Iterator[tuple[Heads, int, str]]:
    for heads in _SMALL_HEADS if check.small else _HEADS:
        for block_size in (16,) if check.small else _BLOCK_SIZES:
            for batch in batches:
                yield heads, block_size, batch


def _prefill_launches(check: Check) -> dict[str, Tune]:
    launches: dict[str, Tune] = {"as chosen": _as_chosen}
    for tile_m, tile_c, warps, stages in _SMALL_TILES if check.small else _PREFILL_TILES:
        launches[f"M {tile_m}, C {tile_c}, {warps} warps, {stages} stages"] = _changed(
            tile_m=tile_m, tile_c=tile_c, num_warps=warps, num_stages=stages
        )
    return launches


def _decode_launches(check: Check, is_fp8: bool) -> dict[str, Tune]:
    launches: dict[str, Tune] = {"as chosen": _as_chosen}
    for order, heads_adjacent in (("heads", True), ("places", False)):
        if not is_fp8:
            launches[f"{order} adjacent"] = _changed(heads_adjacent=heads_adjacent)
            continue
        ways: tuple[Fp8Read, ...] = ("pairs", "instructions") if check.on_gpu else ("singly",)
        for way in ways:
            for tile_c in (64, 128):
                launches[f"{order} adjacent, {way}, C {tile_c}"] = _changed(
                    heads_adjacent=heads_adjacent, read_fp8=way, tile_c=tile_c
                )
    return launches


def _as_chosen(launch: Launch) -> Launch:
    return launch


def _changed(**fields: Any) -> Tune:
    return partial(dataclasses.replace, **fields)


def _add(
    check: Check,
    pool: Pool,
    name: str,
    batch: tuple[list[int], list[int]],
    heads: Heads,
    block_size: int,
    label: str,
    tune: Tune,
) -> None:
    """Add the row of one launch of one batch, unless the cache is larger than the pool."""
    num_heads, kv_heads, dim = heads
    seq_lens, query_lens = batch
    if kv_heads * dim * sum(seq_len + block_size for seq_len in seq_lens) > pool.keys.numel():
        return
    num_bytes = attention_bytes(
        heads, seq_lens, query_lens, check.dtype.itemsize, pool.keys.dtype.itemsize
    )
    seen = sum(q * (s - q) + q * (q + 1) // 2 for s, q in zip(seq_lens, query_lens, strict=True))
    floor = check.floor_us(num_bytes, 4 * num_heads * dim * seen)
    kernels, attend = check.backends["triton"], partial(paged_attention, tune=tune)

    def measure() -> Row:
        us = attention_us(
            check, pool, kernels, block_size, heads, seq_lens, query_lens, None, num_bytes, attend
        )
        row = {"heads": f"{num_heads}/{kv_heads} x {dim}", "block": block_size, "launch": label}
        row |= {"us": rounded(us), "floor_us": rounded(floor)}
        return row | share(check, num_bytes, floor, us)

    check.add(name, measure)
    print(line_of(check.rows[-1]), flush=True)


def line_of(row: Row) -> str:
    """One line of the table."""
    if "error" in row:
        return f"{row['name']:28} {row['error']}"
    shape = f"{row['name']:28} {row['heads']:>12} {row['block']:5}"
    return f"{shape}  {row['launch']:44} {row['us']:>9} {row['floor_us']:>9} {row.get('share', '')}"


_KERNELS: dict[str, Callable[[Check], None]] = {"prefill": prefill, "decode": decode}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_sweep.json")
    parser.add_argument("--kernels", nargs="+", choices=list(_KERNELS), default=list(_KERNELS))
    parser.add_argument("--small", action="store_true", help="tiny shapes, on any device")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not args.small:
        parser.error("there is no GPU here; --small runs on a CPU, with TRITON_INTERPRET=1")
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    try:
        backends = {"triton": select_backend(device.type, "triton")}
    except ValueError as error:
        parser.error(str(error))
    torch.manual_seed(0)
    check = Check(device=device, small=args.small, backends=backends)
    record: dict[str, Any] = {
        "benchmark": "gpu_sweep",
        "small": args.small,
        "commit": commit(),
        "machine": describe_machine(),
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "times_are_real": on_gpu,
        "rows": check.rows,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    check.on_row = lambda: write_json(args.out, record)
    print(f"{'batch':28} {'heads':>12} {'block':>5}  {'launch':44} {'us':>9} {'floor':>9} share")
    for name in args.kernels:
        _KERNELS[name](check)


if __name__ == "__main__":
    main()
