"""The whole sampler, and the products of the model, at the batch sizes of decoding: part of the
section `speed` of the GPU check.

Legend: B rows, V tokens of the vocabulary, X features in, Y features out.
"""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.gpu_check_common import Call, Check, timed
from scheduler.params import ResolvedSampling
from workers.parallel.group import TensorParallelGroup
from workers.sampling.sampler import Sampler

# The sampling parameters of the rows; "own settings" are those of Qwen3's generation config.
KINDS = {
    "greedy": ResolvedSampling(seed=1, max_tokens=9, temperature=0.0),
    "temperature": ResolvedSampling(seed=1, max_tokens=9, temperature=0.8),
    "own settings": ResolvedSampling(seed=1, max_tokens=9, temperature=0.6, top_k=20, top_p=0.95),
    "top-p": ResolvedSampling(seed=1, max_tokens=9, temperature=0.8, top_p=0.9),
    "penalties": ResolvedSampling(seed=1, max_tokens=9, temperature=0.0, repetition_penalty=1.1),
    "logprobs": ResolvedSampling(seed=1, max_tokens=9, temperature=0.0, logprobs=5),
}
# Features of each product of a layer, in and out, and of the vocabulary.
_PRODUCTS = {
    "0.6B": ((1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024), (1024, 151936)),
    "8B": ((4096, 6144), (4096, 4096), (4096, 24576), (12288, 4096), (4096, 151936)),
}


def whole_sampler(check: Check) -> None:
    """From logits to tokens, all launches; the floor reads the logits once."""
    num_columns = 300 if check.small else 151936
    for num_rows in (2,) if check.small else (1, 64, 256):
        num_bytes = torch.bfloat16.itemsize * num_rows * num_columns
        for kind, sampling in KINDS.items():
            name = f"sampler, {kind}, {num_rows} x {num_columns}"
            make = partial(_sampler_call, check, num_rows, num_columns, sampling)
            timed(check, name, make, num_bytes)


def _sampler_call(
    check: Check, num_rows: int, num_columns: int, sampling: ResolvedSampling
) -> Call:
    group = TensorParallelGroup(0, 1, check.device)
    sampler = Sampler(
        group,
        check.backends["triton"].sampling,
        num_columns,
        0,
        num_columns,
        num_rows,
        check.device,
    )
    for slot in range(num_rows):
        sampler.admit(slot, sampling, [1, 2, 3], 2)
    logits_BV = 3 * check.normal(num_rows, num_columns, dtype=torch.bfloat16)
    return partial(sampler.sample, logits_BV, sampler.state.batch(range(num_rows), [3] * num_rows))


def products(check: Check) -> None:
    """Each product of a layer, against the time to read its weights or to compute it."""
    shapes = {"tiny": ((64, 96),)} if check.small else _PRODUCTS
    for model, features in shapes.items():
        for num_in, num_out in features:
            for num_rows in (2,) if check.small else (1, 64, 256):
                elements = num_in * num_out + num_rows * (num_in + num_out)
                name = f"{model}: {num_rows} x {num_in} to {num_out}"
                make = partial(_product, check, num_rows, num_in, num_out)
                num_bytes = check.dtype.itemsize * elements
                timed(check, name, make, num_bytes, 2 * num_rows * num_in * num_out)


def _product(check: Check, num_rows: int, num_in: int, num_out: int) -> Call:
    linear, scale = check.backends["triton"].linear, num_in**-0.5
    x_BX, weight_YX = check.normal(num_rows, num_in), scale * check.normal(num_out, num_in)
    return partial(linear, x_BX, weight_YX, None)
