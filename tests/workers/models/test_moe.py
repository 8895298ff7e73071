"""The MLP of experts equals transformers' on any number of ranks, and so does the routing of whole
models; what could be wrong with it is noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from configs.experts import ExpertsConfig
from configs.model import ModelConfig
from kernels.interface import ExpertWeights, Kernels
from kernels.metadata import AttentionMetadata
from kernels.reference.activation import silu_and_mul_reference
from kernels.reference.experts import ReferenceExperts, route_reference
from kernels.select import select_backend
from scheduler.errors import ConfigError
from tests.checkpoints import Shape, make_checkpoint
from tests.kernels.replaced import Replaced
from tests.workers.models.parts import fill_and_pack_parts, slices_of
from tests.workers.models.ranks import on_every_rank
from tests.workers.parallel.test_group import HERE, TRANSPORTS, on_ranks
from workers.models.checkpoint import SINGLE_FILE_NAME, check_checkpoint, expected_tensors
from workers.models.loader import held_dtype, load_weights
from workers.models.moe import MoE
from workers.models.qwen3 import Qwen3
from workers.models.weights import WeightFormat
from workers.parallel import segment
from workers.parallel.group import TensorParallelGroup
from workers.progress import Progress

CPU = select_backend("cpu", "cpu")
REFERENCE = select_backend("cpu", "reference")
HIDDEN, NUM_TOKENS = 64, 40
TOLERANCE = 1e-5  # of the largest number
SHAPES = {
    "8_top_1": ExpertsConfig(
        num_experts=8, num_experts_per_token=1, intermediate_size=48, normalizes_weights=True
    ),
    "8_top_2_raw": ExpertsConfig(
        num_experts=8, num_experts_per_token=2, intermediate_size=48, normalizes_weights=False
    ),
    "16_top_16": ExpertsConfig(
        num_experts=16, num_experts_per_token=16, intermediate_size=40, normalizes_weights=True
    ),
    "128_top_8": ExpertsConfig(
        num_experts=128, num_experts_per_token=8, intermediate_size=64, normalizes_weights=True
    ),
    "160_top_8_raw": ExpertsConfig(
        num_experts=160, num_experts_per_token=8, intermediate_size=24, normalizes_weights=False
    ),
}


def model_of(experts: ExpertsConfig) -> ModelConfig:
    raw = {
        "model_type": "qwen3_moe",
        "vocab_size": 16,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_experts_per_token,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.normalizes_weights,
    }
    return ModelConfig.from_dict(raw)


def block_of(experts: ExpertsConfig) -> Any:
    """transformers' block with random weights."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    given: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_experts_per_token,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.normalizes_weights,
        "experts_implementation": "eager",
    }
    config: Any = Qwen3MoeConfig(**given)
    block: Any = Qwen3MoeSparseMoeBlock(config)
    generator = torch.Generator().manual_seed(1)
    for parameter in block.parameters():
        parameter.requires_grad_(False)
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(2 * noise / parameter.shape[-1] ** 0.5)
    return block


def stored_tensors(block: Any) -> dict[str, Tensor]:
    """The block's weights, one tensor per expert and matrix."""
    tensors = {"mlp.gate.weight": block.gate.weight}
    for expert, (gate_up, down) in enumerate(
        zip(block.experts.gate_up_proj, block.experts.down_proj, strict=True)
    ):
        gate, up = gate_up.chunk(2)
        for name, tensor in (("gate", gate), ("up", up), ("down", down)):
            tensors[f"mlp.experts.{expert}.{name}_proj.weight"] = tensor
    return tensors


def tokens() -> Tensor:
    return torch.randn(NUM_TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2))


Fill = Callable[[MoE, dict[str, Tensor]], None]


def fill(moe: MoE, stored: dict[str, Tensor]) -> None:
    for piece in moe.slices():
        assert stored[piece.name].shape == piece.shape
        length = piece.target.shape[piece.dim]
        piece.target.copy_(stored[piece.name].narrow(piece.dim, piece.start, length))


def load(
    experts: ExpertsConfig,
    stored: dict[str, Tensor],
    group: TensorParallelGroup,
    kernels: Kernels = CPU,
    fill: Fill = fill,
) -> MoE:
    form = WeightFormat(
        kernels=kernels, group=group, dtype=torch.float32, weight_dtype=torch.float32
    )
    moe = MoE("mlp", model_of(experts), form)
    fill(moe, stored)
    moe.pack()
    return moe


def largest_difference(
    experts: ExpertsConfig, size: int, kernels: Kernels = CPU, fill: Fill = fill
) -> float:
    """Between our block on `size` ranks and transformers', as a part of the largest number."""
    block, x_TE = block_of(experts), tokens()
    stored = stored_tensors(block)
    with torch.inference_mode():
        expected = block(x_TE.unsqueeze(0))[0]
        outputs = on_every_rank(
            size, lambda group: load(experts, stored, group, kernels, fill)(x_TE)
        )
    return float((outputs[0] - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("kernels", [CPU, REFERENCE], ids=["cpu", "reference"])
@pytest.mark.parametrize("experts", SHAPES.values(), ids=SHAPES.keys())
def test_block_equals_transformers_on_any_number_of_ranks(
    experts: ExpertsConfig, kernels: Kernels, size: int
) -> None:
    assert largest_difference(experts, size, kernels) < TOLERANCE


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton is not interpreted here")
@pytest.mark.parametrize("name", ["8_top_2_raw", "128_top_8"])
def test_block_in_triton_equals_transformers(name: str) -> None:
    """In the interpreter, which runs one kernel at a time: no ranks in threads."""
    assert largest_difference(SHAPES[name], 1, select_backend("cpu", "triton")) < TOLERANCE


@pytest.mark.parametrize("experts", SHAPES.values(), ids=SHAPES.keys())
def test_a_token_alone_gets_what_it_gets_among_others(experts: ExpertsConfig) -> None:
    group = TensorParallelGroup(0, 1, torch.device("cpu"))
    moe, x_TE = load(experts, stored_tensors(block_of(experts)), group), tokens()
    together = moe(x_TE)
    alone = torch.cat([moe(row.unsqueeze(0)) for row in x_TE])
    assert torch.equal(alone, together)
    order = torch.randperm(NUM_TOKENS, generator=torch.Generator().manual_seed(3))
    assert torch.equal(moe(x_TE[order]), together[order])


# -- what could be wrong ---------------------------------------------------------------------------


class Faulty(ReferenceExperts):
    """The reference with a fault of this name."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.last_ids: Tensor | None = None

    def route(
        self,
        logits_TX: Tensor,
        num_experts_per_token: int,
        normalizes_weights: bool,
        num_live_tokens_1: Tensor | None = None,
        /,
    ) -> tuple[Tensor, Tensor]:
        if self.fault == "weights that are not normalized":
            return route_reference(logits_TX, num_experts_per_token, False)
        if self.fault == "softmax after the choice":
            chosen = logits_TX.topk(num_experts_per_token)
            return chosen.values.softmax(1), chosen.indices.int()
        weights_TK, ids_TK = route_reference(logits_TX, num_experts_per_token, normalizes_weights)
        if self.fault == "an expert off by one":
            ids_TK = (ids_TK + 1) % logits_TX.shape[1]
        if self.fault == "an expert counted twice":
            ids_TK[:, -1] = ids_TK[:, 0]
        return weights_TK, ids_TK

    def mlp(
        self, x_TE: Tensor, weights_TK: Tensor, ids_TK: Tensor, experts: ExpertWeights, /
    ) -> Tensor:
        num_tokens, num_experts_per_token = ids_TK.shape
        order_P = ids_TK.flatten().sort(stable=True).indices
        if self.fault == "a sort of another batch":
            order_P = ids_TK.roll(1, 0).flatten().sort(stable=True).indices
        ids_P = ids_TK.flatten()[order_P]
        if self.fault == "a sort of another batch":
            ids_P = ids_TK.flatten().sort(stable=True).values
        if self.fault == "a token lost in sorting":
            order_P, ids_P = order_P[:-1], ids_P[:-1]
        out_PE = torch.zeros(num_tokens * num_experts_per_token, x_TE.shape[1])
        for pair, expert in zip(order_P.tolist(), ids_P.tolist(), strict=True):
            hidden = functional.linear(x_TE[pair // num_experts_per_token], experts.gate_up[expert])
            out_PE[pair] = functional.linear(silu_and_mul_reference(hidden), experts.down[expert])
        weighted = out_PE.view(num_tokens, num_experts_per_token, -1) * weights_TK.unsqueeze(2)
        return weighted.sum(1)


def fill_of_next_rank(moe: MoE, stored: dict[str, Tensor]) -> None:
    """Up is that of the next rank."""
    for piece in moe.slices():
        length = piece.target.shape[piece.dim]
        start = piece.start
        if "up_proj" in piece.name:
            start = (start + length) % piece.shape[0]
        piece.target.copy_(stored[piece.name].narrow(piece.dim, start, length))


FAULTS = (
    "weights that are not normalized",
    "softmax after the choice",
    "an expert off by one",
    "an expert counted twice",
    "a token lost in sorting",
    "a sort of another batch",
)
NORMALIZING, RAW = SHAPES["128_top_8"], SHAPES["8_top_2_raw"]


@pytest.mark.parametrize("fault", ("none", *FAULTS))
def test_faults_are_noticed(fault: str) -> None:
    experts = RAW if fault == "softmax after the choice" else NORMALIZING
    kernels = cast(Kernels, Replaced(REFERENCE, experts=Faulty(fault)))
    assert (largest_difference(experts, 2, kernels) < TOLERANCE) == (fault == "none")


def test_a_slice_of_another_rank_is_noticed() -> None:
    assert largest_difference(NORMALIZING, 2, REFERENCE, fill_of_next_rank) > 100 * TOLERANCE


# -- routing of whole models -----------------------------------------------------------------------

SHAPE = Shape(
    name="routing",
    heads=8,
    kv_heads=4,
    layers=4,
    max_positions=128,
    extra={
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "experts_implementation": "eager",
    },
)
LENGTH = 96
TIMEOUT_S = 60.0
OnRanks = Callable[[int, Callable[[TensorParallelGroup], Any]], list[Any]]


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    model_dir = tmp_path_factory.mktemp("routing")
    return model_dir, make_checkpoint(model_dir, SHAPE)


def choices_of(
    model_dir: Path, size: int, dtype: torch.dtype, on_ranks: OnRanks = on_every_rank
) -> tuple[list[list[Tensor]], Tensor]:
    """(experts [T, K] of each layer as each rank chooses them, logits of the whole vocabulary)"""

    def run(group: TensorParallelGroup) -> tuple[list[Tensor], Tensor]:
        chosen: list[Tensor] = []

        class Recorded(Replaced):
            def route(self, *args: Any) -> tuple[Tensor, Tensor]:
                weights_TK, ids_TK = self._base.route(*args)
                chosen.append(ids_TK.clone())
                return weights_TK, ids_TK

        kernels = cast(Kernels, Replaced(CPU, experts=Recorded(CPU.experts)))
        config = ModelConfig.from_dir(model_dir)
        model = Qwen3(config, group, kernels, dtype, LENGTH)
        fill_and_pack_parts(model, model_dir, config)
        return chosen, logits_of(model)

    results = on_ranks(size, run)
    logits = torch.cat([logits_TV for _, logits_TV in results], 1)
    return [chosen for chosen, _ in results], logits


def logits_of(model: Qwen3) -> Tensor:
    kernels = model.kernels
    shapes = kernels.kv_cache_shapes(1, 128, model.num_kv_heads, model.model_config.head_dim)
    kv = [
        (torch.zeros(shapes[0], dtype=model.dtype), torch.zeros(shapes[1], dtype=model.dtype))
        for _ in model.layers
    ]
    starts = torch.tensor([0, LENGTH], dtype=torch.int32)
    attn = AttentionMetadata(
        query_start_B1=starts,
        seq_start_B1=starts,
        seq_lens_B=torch.tensor([LENGTH], dtype=torch.int32),
        block_table_BW=torch.zeros(1, 1, dtype=torch.int32),
        kv_places_T=torch.arange(LENGTH),
        max_query_len=LENGTH,
        max_seq_len=LENGTH,
    )
    positions_T = torch.arange(LENGTH, dtype=torch.int32)
    with torch.inference_mode():
        return model.logits(model.forward(token_ids(), positions_T, attn, kv))


def token_ids() -> Tensor:
    return torch.randint(512, (LENGTH,), generator=torch.Generator().manual_seed(4))


def flips(ours: list[Tensor], theirs: list[Tensor]) -> int:
    """How many (layer, token) have other experts."""
    return sum(
        int((a.sort(1).values != b.sort(1).values).any(1).sum())
        for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_float32_models_choose_the_experts_that_transformers_chooses(
    routed: tuple[Path, Any], size: int
) -> None:
    model_dir, reference = routed
    theirs: list[Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _m, _i, out: theirs.append(out[2].int()))
        for layer in reference.model.layers
    ]
    with torch.inference_mode():
        expected = reference(token_ids().unsqueeze(0)).logits[0]
    for hook in hooks:
        hook.remove()
    [chosen, *_], logits = choices_of(model_dir, size, torch.float32)
    print(f"tp {size}: {flips(chosen, theirs)} of {len(chosen) * LENGTH} choices differ")
    assert flips(chosen, theirs) == 0
    assert float((logits - expected).abs().max()) < 4e-4  # of 20


@pytest.mark.parametrize("size", [2, 4])
def test_in_bfloat16_a_part_of_the_choices_depends_on_the_number_of_ranks(
    routed: tuple[Path, Any], size: int
) -> None:
    """Rounding decides where the k-th and the next expert are nearly equal."""
    model_dir, _ = routed
    [alone], _ = choices_of(model_dir, 1, torch.bfloat16)
    [chosen, *_], _ = choices_of(model_dir, size, torch.bfloat16)
    count = flips(chosen, alone)
    print(f"bfloat16, tp {size}: {count} of {len(chosen) * LENGTH} choices differ from tp 1")
    assert count < 0.25 * len(chosen) * LENGTH


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_all_ranks_choose_the_same_experts(
    routed: tuple[Path, Any],
    transport: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rank chooses by its own copy of the sum that this transport gives it."""
    monkeypatch.setattr(segment, "host_id", lambda: HERE.host)
    model_dir, _ = routed
    on_transport = partial(on_ranks, timeout_s=TIMEOUT_S, transport=transport)
    choices_by_rank, _ = choices_of(model_dir, 4, dtype, on_transport)
    for chosen in choices_by_rank:
        assert flips(chosen, choices_by_rank[0]) == 0


# -- checkpoints -----------------------------------------------------------------------------------

SMALL = replace(
    SHAPE,
    layers=2,
    extra={**SHAPE.extra, "num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [0]},
)


def merge(model_dir: Path) -> None:
    """Store the experts as transformers 5 holds them."""
    path = model_dir / SINGLE_FILE_NAME
    tensors = load_file(path)
    prefix = "model.layers.1.mlp.experts"

    def take(expert: int, matrix: str) -> Tensor:
        return tensors.pop(f"{prefix}.{expert}.{matrix}_proj.weight")

    gate_up = [torch.cat([take(expert, "gate"), take(expert, "up")]) for expert in range(8)]
    tensors[f"{prefix}.gate_up_proj"] = torch.stack(gate_up)
    tensors[f"{prefix}.down_proj"] = torch.stack([take(expert, "down") for expert in range(8)])
    save_file(tensors, path)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_both_ways_of_storing_experts_load_the_same_weights(tmp_path: Path, size: int) -> None:
    make_checkpoint(tmp_path, SMALL)
    config, stored = ModelConfig.from_dir(tmp_path), load_file(tmp_path / SINGLE_FILE_NAME)
    assert expected_tensors(config).keys() == stored.keys()
    merged_dir = tmp_path / "merged"
    merged_dir.mkdir()
    (merged_dir / SINGLE_FILE_NAME).write_bytes((tmp_path / SINGLE_FILE_NAME).read_bytes())
    merge(merged_dir)
    for rank in range(size):
        group = TensorParallelGroup(rank, size, torch.device("cpu"))
        for model_dir in (tmp_path, merged_dir):
            model = Qwen3(config, group, CPU, torch.float32, 64)
            progress = Progress()
            load_weights(model.parts(), model_dir, config, lambda part: None, progress)
            assert progress.loaded_bytes == sum(piece.nbytes for piece in slices_of(model))
            for piece in slices_of(model):
                length = piece.target.shape[piece.dim]
                expected = stored[piece.name].narrow(piece.dim, piece.start, length)
                assert torch.equal(piece.target, expected), piece.name


def test_transformers_loads_merged_experts_too(tmp_path: Path) -> None:
    from transformers import Qwen3MoeForCausalLM

    model = make_checkpoint(tmp_path, SMALL)
    merge(tmp_path)
    loaded: Any = Qwen3MoeForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(
        loaded.model.layers[1].mlp.experts.gate_up_proj,
        model.model.layers[1].mlp.experts.gate_up_proj,
    )


@pytest.mark.parametrize("merged", [False, True])
def test_a_missing_expert_is_named(tmp_path: Path, merged: bool) -> None:
    make_checkpoint(tmp_path, SMALL)
    if merged:
        merge(tmp_path)
    tensors = load_file(tmp_path / SINGLE_FILE_NAME)
    name = "model.layers.1.mlp.experts." + ("down_proj" if merged else "3.down_proj.weight")
    del tensors[name]
    save_file(tensors, tmp_path / SINGLE_FILE_NAME)
    with pytest.raises(ConfigError, match=f"lacks {name}"):
        check_checkpoint(tmp_path, ModelConfig.from_dir(tmp_path))


def test_merged_experts_in_float32_are_not_held_in_bfloat16(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, SMALL)
    merge(tmp_path)
    path = tmp_path / SINGLE_FILE_NAME
    halved = {
        name: tensor if tensor.dim() == 3 else tensor.bfloat16()
        for name, tensor in load_file(path).items()
    }
    save_file(halved, path)
    config = ModelConfig.from_dir(tmp_path)
    assert held_dtype(tmp_path, config, torch.float32, torch.bfloat16) is torch.float32
    save_file({name: tensor.bfloat16() for name, tensor in halved.items()}, path)
    assert held_dtype(tmp_path, config, torch.float32, torch.bfloat16) is torch.bfloat16
