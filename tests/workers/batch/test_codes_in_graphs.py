"""Models of codes in groups behind graphs: a replay multiplies the codes that lay there at the
capture, and looks up rows of an embedding of codes.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from configs.quantization import FP8, INT4
from kernels.gpu import grouped
from kernels.gpu.backend import TRITON_KERNELS
from kernels.gpu.grouped import MAX_FUSED_ROWS, choose_tile_config
from kernels.interface import GroupedCodes, Kernels
from kernels.reference.backend import REFERENCE_KERNELS as REFERENCE
from tests.checkpoints import Shape, make_checkpoint
from tests.kernels.replaced import Replaced
from tests.workers.batch.graph_pair import MakeRunner, Pair, admitted
from tests.workers.conftest import config_of
from tests.workers.models.parts import slices_of
from tests.workers.test_grouped import stored_model
from workers.batch import mixed_graphs
from workers.model_runner import warm_up
from workers.models.qwen3 import Qwen3
from workers.parallel.group import TensorParallelGroup

# The second layer's keys and values show what the first one's products gave.
SIZES: dict[str, Any] = {"layers": 2, "intermediate": 256, "head_dim": 32, "vocab": 150}


def make_stored(model_dir: Path) -> dict[str, Any]:
    stored_model(model_dir, "pack_32", Shape(name="stored", **SIZES))
    return {}


def make_stored_fp8(model_dir: Path) -> dict[str, Any]:
    stored_model(model_dir, "fp8_bfloat16", Shape(name="stored", **SIZES))
    return {}


def make_plain(model_dir: Path, form: str = INT4) -> dict[str, Any]:
    make_checkpoint(model_dir, Shape(name="tied", tied=True, **SIZES))
    return {"quantization": form}


def make_plain_for_fp8(model_dir: Path) -> dict[str, Any]:
    return make_plain(model_dir, FP8)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton is not interpreted here")
@pytest.mark.parametrize("make", [make_stored, make_stored_fp8, make_plain, make_plain_for_fp8])
def test_replayed_steps_give_what_eager_ones_give_with_the_reference(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Single rows with sums in several parts, two with codes that are widened in memory."""
    monkeypatch.setattr(mixed_graphs, "_SIZES", ())  # large, so slow in the interpreter
    monkeypatch.setattr(grouped, "MAX_FUSED_ROWS", 1)
    monkeypatch.setattr(grouped, "_MIN_BLOCKS_PER_PART", 1)
    assert grouped.choose_split(1, SIZES["intermediate"] // 128)[1] > 1
    options = make(tmp_path)
    kernels = cast(Kernels, Replaced(REFERENCE, quantized=TRITON_KERNELS.quantized))
    pair = Pair(MakeRunner(tmp_path), 2, kernels, **options)
    rows = admitted(pair, 2)
    pair.step([(row, 10) for row in rows])
    for chosen in (rows[1:], rows):
        assert pair.step([(row, 1) for row in chosen]) == len(chosen)


def warmed_up(model_dir: Path, kernels: Any, quantization: str | None) -> None:
    """Warm up a model as on a GPU."""
    options = {"quantization": quantization, "max_num_batched_tokens": 192}
    config = config_of(model_dir, attention_backend="reference", **options)
    config = dataclasses.replace(config, device="cuda")
    group = TensorParallelGroup(0, 1, torch.device("cpu"))
    model = Qwen3(
        config.model, group, kernels, torch.float32, config.max_model_len, config.quantization
    )
    for piece in slices_of(model):
        piece.target.zero_()
    warm_up(config, model)


@pytest.mark.parametrize("form", [INT4, FP8])
def test_no_kind_of_product_is_compiled_while_a_request_waits(tmp_path: Path, form: str) -> None:
    """Of layers, and of the head, whose kernels are others."""
    make_checkpoint(tmp_path, Shape(name="tied", tied=True, **SIZES))
    rows_of: dict[int, set[int]] = defaultdict(set)  # by output features

    def linear(x_TX: Tensor, weight: GroupedCodes, bias_Y: Tensor | None) -> Tensor:
        rows_of[weight.num_rows].add(len(x_TX))
        return torch.zeros(len(x_TX), weight.num_rows, dtype=x_TX.dtype)

    replaced = Replaced(REFERENCE.quantized[form], linear=linear)
    warmed_up(tmp_path, Replaced(REFERENCE, quantized={form: replaced}), form)
    every = {choose_tile_config(count, 2) for count in range(1, MAX_FUSED_ROWS + 1)}
    for num_rows in rows_of.values():
        assert {
            choose_tile_config(count, 2) for count in num_rows if count <= MAX_FUSED_ROWS
        } == every
    (head,) = (size for size in rows_of if SIZES["vocab"] <= size < SIZES["vocab"] + 64)
    del rows_of[head]  # of no more rows than are sampled
    assert all(max(num_rows) > MAX_FUSED_ROWS for num_rows in rows_of.values())


@pytest.mark.parametrize(("quantization", "is_run"), [(INT4, True), (FP8, True), (None, False)])
def test_a_step_of_some_tokens_is_run_for_codes_in_groups_alone(
    tmp_path: Path, quantization: str | None, is_run: bool
) -> None:
    make_checkpoint(tmp_path, Shape(name="small", **SIZES))
    num_tokens = set()

    def silu_and_mul(x_TX: Tensor) -> Tensor:
        num_tokens.add(len(x_TX))
        return REFERENCE.silu_and_mul(x_TX)

    warmed_up(tmp_path, Replaced(REFERENCE, silu_and_mul=silu_and_mul), quantization)
    assert (64 in num_tokens) is is_run
