"""Which launch of Triton's attention is fastest on this GPU: `python -m benchmarks.gpu_sweep [--out
FILE] [--kernels prefill decode] [--within SECONDS]`.

    prefill   sizes of tiles and stages, for blocks of 16, 64 and 128 tokens
    decode    programs per processor, for the same blocks; over a cache of 8-bit numbers also the
              size of tiles and the way of reading

for the heads of Qwen3-0.6B and of Qwen3-8B. Each row is one launch of one batch: microseconds of
device time, the floor as in `benchmarks.gpu_check_speed` at the speeds of an H200's data sheet, and
its share of the time. The launch that is used today is the row "as chosen"; to change it, see
`kernels/gpu/attention_launch.py`. Each other launch must give what that one gives on the same
inputs, within rounding, else it is marked WRONG. The last table is the best launch of each batch.
Exit code 1 if a launch is wrong or raised an error. `--within`: after so many seconds no further
launch is timed, and the last table is of those that were.
`--small`: tiny shapes on any device, including a CPU with TRITON_INTERPRET=1; times mean nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton

from benchmarks.common import RESULTS, commit
from benchmarks.common import machine as describe_machine
from benchmarks.gpu_check_attention import tuned_attention
from benchmarks.gpu_check_common import (
    Check,
    Row,
    attention_of,
    free_memory,
    rounded,
    share,
    with_parts,
)
from benchmarks.gpu_check_process import write_json
from benchmarks.gpu_check_speed import Pool, attention_bytes, attention_us
from benchmarks.gpu_check_verdicts import judge, poisoned
from kernels import decode_parts
from kernels.gpu.attention_launch import LaunchConfig
from kernels.gpu.fp8 import Fp8Widening
from kernels.select import select_backend

Tune = Callable[[LaunchConfig], LaunchConfig]
Attend = Callable[..., torch.Tensor]
Heads = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One batch, which every launch is timed with."""

    name: str
    heads: Heads
    block_size: int
    seq_lens: list[int]
    query_lens: list[int]


def _batch(seq_lens: list[int], query_lens: list[int]) -> dict[str, list[int]]:
    return {"seq_lens": seq_lens, "query_lens": query_lens}


# Query heads, KV heads, head dim: of Qwen3-0.6B and of Qwen3-8B.
_HEADS: tuple[Heads, ...] = ((16, 8, 128), (32, 8, 128))
_SMALL_HEADS: tuple[Heads, ...] = ((2, 1, 64),)
_BLOCK_SIZES = (64, 128)
# Programs of decode to start per multiprocessor, of which three run at once: more of them are
# shorter, so the last ones leave less idle, but more parts are joined.
_PROGRAMS_PER_SM = (3, 6, 9, 12)
# Lengths of rows and of their queries.
_PREFILLS = {
    "1 x 2048": _batch([2048], [2048]),
    "4 x 4096": _batch([4096] * 4, [4096] * 4),
    "512 behind 7680": _batch([8192], [512]),
}
_DECODES = {
    f"{batch} x {context}": _batch([context] * batch, [1] * batch)
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


# Between outputs of which each may be off by two roundings.
_ROUNDINGS = 4
_AS_CHOSEN = "as chosen"


def prefill(check: Check, until_s: float) -> None:
    """The rows of the first table."""
    pool = Pool.allocate(check)
    batches = {"20": _batch([20], [20])} if check.small else _PREFILLS
    for heads, block_size, batch in _shapes(check, batches):
        case = Case(name=f"prefill {batch}", heads=heads, block_size=block_size, **batches[batch])
        _add_launches(check, pool, case, _prefill_launches(check), [], until_s)


def decode(check: Check, until_s: float) -> None:
    """The rows of the second table."""
    batches = {"3 x 40": _batch([40] * 3, [1] * 3)} if check.small else _DECODES
    for cache in ("16 bits", "fp8"):
        free_memory(check)
        pool = Pool.of_codes(check) if cache == "fp8" else Pool.allocate(check)
        for heads, block_size, batch in _shapes(check, batches):
            name = f"decode {cache} {batch}"
            case = Case(name=name, heads=heads, block_size=block_size, **batches[batch])
            chosen: list[torch.Tensor] = []
            launches = _decode_launches(check, cache == "fp8")
            _add_launches(check, pool, case, launches, chosen, until_s)
            for programs in _PROGRAMS_PER_SM:
                with mock.patch.object(decode_parts, "_PROGRAMS_PER_SM", programs):
                    label = f"{programs} programs per processor"
                    _add_launches(check, pool, case, {label: _as_chosen}, chosen, until_s)


def _shapes(check: Check, batches: dict[str, Any]) -> Iterator[tuple[Heads, int, str]]:
    for heads in _SMALL_HEADS if check.small else _HEADS:
        for block_size in (16,) if check.small else _BLOCK_SIZES:
            for batch in batches:
                yield heads, block_size, batch


def _prefill_launches(check: Check) -> dict[str, Tune]:
    launches: dict[str, Tune] = {_AS_CHOSEN: _as_chosen}
    for tile_m, tile_c, warps, stages in _SMALL_TILES if check.small else _PREFILL_TILES:
        launches[f"M {tile_m}, C {tile_c}, {warps} warps, {stages} stages"] = _changed(
            tile_m=tile_m, tile_c=tile_c, num_warps=warps, num_stages=stages
        )
    return launches


def _decode_launches(check: Check, is_fp8: bool) -> dict[str, Tune]:
    launches: dict[str, Tune] = {_AS_CHOSEN: _as_chosen}
    if is_fp8:
        ways: tuple[Fp8Widening, ...] = ("pairs", "instructions") if check.on_gpu else ("singly",)
        for way in ways:
            for tile_c in (64, 128):
                launches[f"{way}, C {tile_c}"] = _changed(fp8_widening=way, tile_c=tile_c)
    for warps, stages in ((4, 4), (8, 5), (4, 7)):
        launches[f"{warps} warps, {stages} stages"] = _changed(num_warps=warps, num_stages=stages)
    return launches


def _as_chosen(launch: LaunchConfig) -> LaunchConfig:
    return launch


def _changed(**fields: Any) -> Tune:
    return partial(dataclasses.replace, **fields)


def _add_launches(
    check: Check,
    pool: Pool,
    case: Case,
    launches: dict[str, Tune],
    chosen: list[torch.Tensor],
    until_s: float,
) -> None:
    """Add the row of each launch, unless the cache is larger than the pool; of none after
    `until_s`. `chosen`: what the launch as chosen gives, which this puts there if it is one of
    them.
    """
    _, kv_heads, dim = case.heads
    cached = sum(seq_len + case.block_size for seq_len in case.seq_lens)
    if kv_heads * dim * cached > pool.keys.numel():
        return
    for label, tune in launches.items():
        if time.monotonic() > until_s:
            return
        attend = tuned_attention(tune)
        check.add(case.name, partial(_measure, check, pool, case, label, attend, chosen))
        print(line_of(check.rows[-1]), flush=True)


def _measure(
    check: Check, pool: Pool, case: Case, label: str, attend: Attend, chosen: list[torch.Tensor]
) -> Row:
    heads, seq_lens, query_lens = case.heads, case.seq_lens, case.query_lens
    num_heads, kv_heads, dim = heads
    num_bytes = attention_bytes(
        heads, seq_lens, query_lens, check.dtype.itemsize, pool.keys.dtype.itemsize
    )
    seen = sum(q * (s - q) + q * (q + 1) // 2 for s, q in zip(seq_lens, query_lens, strict=True))
    floor = check.floor_us(num_bytes, 4 * num_heads * dim * seen)
    row: Row = {"heads": f"{num_heads}/{kv_heads} x {dim}", "block": case.block_size}
    row |= {"launch": label, **_compared(check, pool, case, label, attend, chosen)}
    kernels = check.backends["triton"]
    us = attention_us(
        check, pool, kernels, case.block_size, heads, seq_lens, query_lens, None, num_bytes, attend
    )
    row |= {"us": rounded(us), "floor_us": rounded(floor)}
    return row | share(check, num_bytes, floor, us)


def _compared(
    check: Check, pool: Pool, case: Case, label: str, attend: Attend, chosen: list[torch.Tensor]
) -> Row:
    """Whether a launch gives what the one as chosen has given, which this puts into `chosen`."""
    out_THD = _output(check, pool, case, attend)
    if label == _AS_CHOSEN:
        chosen.append(out_THD)
    if not chosen:  # that launch raised an error
        return {}
    verdict = judge(out_THD, chosen[0].float(), _ROUNDINGS)
    return {"roundings": verdict["roundings"], "passed": verdict["passed"]}


def _output(check: Check, pool: Pool, case: Case, attend: Attend) -> torch.Tensor:
    """Of inputs that are the same for every launch of a case."""
    num_heads, kv_heads, dim = case.heads
    num_blocks = sum(-(-seq_len // case.block_size) for seq_len in case.seq_lens)
    torch.manual_seed(0)
    block_ids = torch.randperm(num_blocks)
    attn = attention_of(case.seq_lens, case.query_lens, block_ids, case.block_size, check.device)
    attn = with_parts(attn, case.query_lens, check.backends["triton"], kv_heads)
    keys, values = pool.caches(num_blocks, case.block_size, kv_heads, dim)
    q_THD = check.normal(sum(case.query_lens), num_heads, dim)
    with poisoned():
        return attend(q_THD, keys, values, attn, dim**-0.5)


def line_of(row: Row) -> str:
    """One line of the table."""
    if "error" in row:
        return f"{row['name']:28} {row['error']}"
    shape = f"{row['name']:28} {row['heads']:>12} {row['block']:5}"
    times = f"{row['us']:>9} {row['floor_us']:>9} {row.get('share', '')}"
    wrong = "" if row.get("passed", True) else f"  WRONG: off by {row['roundings']} roundings"
    return f"{shape}  {row['launch']:44} {times}{wrong}"


def best_of(rows: list[Row]) -> list[str]:
    """A line for each batch and heads: its fastest launch that is not wrong, and how much longer
    the one as chosen takes with blocks of the same size.
    """
    right = [row for row in rows if row.get("passed", True)]
    lines = []
    for name, heads in dict.fromkeys((row["name"], row["heads"]) for row in right):
        of_case = [row for row in right if (row["name"], row["heads"]) == (name, heads)]
        best = min(of_case, key=lambda row: row["us"])
        chosen = (
            row["us"]
            for row in of_case
            if (row["block"], row["launch"]) == (best["block"], _AS_CHOSEN)
        )
        times = "".join(f"  {_AS_CHOSEN}: x {us / best['us']:.2f}" for us in chosen)
        lines.append(line_of(best) + times)
    return lines


_KERNELS: dict[str, Callable[[Check, float], None]] = {"prefill": prefill, "decode": decode}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_sweep.json")
    parser.add_argument("--kernels", nargs="+", choices=list(_KERNELS), default=list(_KERNELS))
    parser.add_argument("--within", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("--small", action="store_true", help="tiny shapes, on any device")
    args = parser.parse_args()
    until_s = time.monotonic() + args.within
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
        _KERNELS[name](check, until_s)
    print("\nbest", *best_of(check.rows), sep="\n")
    sys.exit(any(not row.get("passed", True) for row in check.rows))


if __name__ == "__main__":
    main()
