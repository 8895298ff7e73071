"""Whether what a kernel gives is what its reference gives: part of the section `numerics`.

A kernel rounds what it computes in float32 to 16 bits as often as its reference does, and rounding
moves a number by at most half a unit in its last place: `2**-8` of it in bfloat16. A row (a token,
or a head where heads are normalized) passes if no number in it is off by more than this many such
units of the row's largest number. Rows of long contexts are small, so with the largest number of
the whole tensor anything would pass. Kernels that only copy, count or compare must be equal bit by
bit.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from benchmarks.gpu_check_common import Row, rounded

# Set by a checker of reads of memory that nothing has written: to it, poison is something written.
UNPOISONED = "EAGLERAY_GPU_CHECK_UNPOISONED"
# float32's own roundings, in units of one rounding to 16 bits.
_SLACK = 0.05
# For a weight: the rounding of two exponentials, and one more if that moves it across an integer.
_WEIGHT_TOLERANCE = 1e-6


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill what is allocated here and not initialized with NaN, or with the largest integer; not
    where `UNPOISONED` is set.
    """
    if os.environ.get(UNPOISONED):
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about operations without a deterministic form
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


def judge(out: torch.Tensor, exact: torch.Tensor, roundings: int) -> Row:
    """`out` [T, ...] against `exact`, float32: the worst row's error as a multiple of one rounding,
    see the top.
    """
    error_T, largest_T = (
        value.abs().flatten(1).amax(dim=1) for value in (out.float() - exact, exact)
    )
    one_T = torch.finfo(out.dtype).eps / 2 * largest_T
    worst = float((error_T / one_T.clamp(min=torch.finfo(torch.float32).tiny)).max())
    return {
        "max_error": rounded(float(error_T.max())),
        "roundings": rounded(worst, 3),
        "limit": roundings,
        "passed": out.shape == exact.shape and worst <= roundings + _SLACK,
    }


def equal(*pairs: tuple[torch.Tensor, torch.Tensor]) -> Row:
    same = all(got.dtype == want.dtype and torch.equal(got, want) for got, want in pairs)
    return {"max_error": 0.0 if same else "not equal", "limit": "bits", "passed": same}


def near(got: torch.Tensor, want: torch.Tensor, num_tokens: int) -> Row:
    """Whether sums of weights are near: they may differ by the rounding of the exponential, plus
    one for each token whose weight that moves across an integer.
    """
    error, largest = (got - want).abs().double(), want.double()
    passed = got.dtype == want.dtype and bool(
        (error <= _WEIGHT_TOLERANCE * largest + num_tokens).all()
    )
    relative = float((error / largest.clamp(min=1.0)).max())
    return {"max_error": rounded(relative), "limit": f"{_WEIGHT_TOLERANCE:g}", "passed": passed}


def worst_of(*rows: Row) -> Row:
    """The first row that has not passed; otherwise the row that came closest to its limit, or the
    last one.
    """
    failed = [row for row in rows if not row["passed"]]
    return (
        failed[0]
        if failed
        else max(rows, key=lambda row: row["roundings"] / row["limit"] if "roundings" in row else 0)
    )
