"""Qwen3 on one tensor-parallel rank: pre-norm decoder layers of grouped-query attention with
QK-norm, and SwiGLU, dense or of experts (`moe.py`).

Owns this rank's weights. Keeps nothing of a step: positions, attention metadata and KV cache are
arguments. Numerics follow transformers' `modeling_qwen3` and `modeling_qwen3_moe`. Two all-reduces
per layer, one for the embedding. Legend: T tokens, B rows, E hidden size, H query heads of this
rank, K its KV heads, D head dim, L positions of the rotary table, V its vocabulary shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from configs.model import ModelConfig
from configs.quantization import Quantization
from kernels.interface import Kernels
from kernels.metadata import AttentionMetadata
from workers import faults
from workers.models.layers import (
    MergedColumnParallelLinear,
    ParallelLMHead,
    Part,
    QKVParallelLinear,
    ReplicatedVector,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from workers.models.moe import MoE
from workers.models.rope import cos_sin_table
from workers.models.weights import WeightFormat
from workers.parallel.group import TensorParallelGroup

LayerCache = tuple[Tensor, Tensor]


class Attention:
    """Projections, QK-norm, rotary embedding, KV store, paged attention, output projection."""

    def __init__(self, name: str, model: ModelConfig, weight_format: WeightFormat) -> None:
        self.kernels = weight_format.kernels
        self.eps = model.rms_norm_eps
        self.scale = model.head_dim**-0.5
        self.qkv = QKVParallelLinear(name, model, weight_format)
        self.q_norm = ReplicatedVector(f"{name}.q_norm", model.head_dim, weight_format)
        self.k_norm = ReplicatedVector(f"{name}.k_norm", model.head_dim, weight_format)
        width = model.num_attention_heads * model.head_dim
        self.out = RowParallelLinear(
            f"{name}.o_proj", width, model.hidden_size, model.attention_bias, weight_format
        )

    def __call__(
        self,
        x_TE: Tensor,
        positions_T: Tensor,
        cos_sin_LD: Tensor,
        attn: AttentionMetadata,
        cache: LayerCache,
    ) -> Tensor:
        k_cache, v_cache = cache
        # Stored before anything attends: a row may read blocks that another row of the same step
        # fills.
        q_THD = self.kernels.qk_norm_rope_store(
            self.qkv(x_TE),
            self.q_norm.weight,
            self.k_norm.weight,
            self.eps,
            cos_sin_LD,
            positions_T,
            k_cache,
            v_cache,
            attn.kv_places_T,
        )
        out_THD = self.kernels.paged_attention(q_THD, k_cache, v_cache, attn, self.scale)
        return self.out(out_THD.flatten(1))

    def parts(self) -> tuple[Part, ...]:
        return self.qkv, self.q_norm, self.k_norm, self.out


class MLP:
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, name: str, model: ModelConfig, weight_format: WeightFormat) -> None:
        self.kernels = weight_format.kernels
        names = (f"{name}.gate_proj", f"{name}.up_proj")
        self.gate_up = MergedColumnParallelLinear(
            names, model.hidden_size, model.intermediate_size, weight_format
        )
        self.down = RowParallelLinear(
            f"{name}.down_proj", model.intermediate_size, model.hidden_size, False, weight_format
        )

    def __call__(self, x_TE: Tensor, num_live_tokens_1: Tensor | None = None) -> Tensor:
        return self.down(self.kernels.silu_and_mul(self.gate_up(x_TE)))

    def parts(self) -> tuple[Part, ...]:
        return self.gate_up, self.down


class DecoderLayer:
    """Attention and an MLP of the class `mlp`, each behind a norm and added to the residual
    stream.
    """

    def __init__(
        self, name: str, model: ModelConfig, weight_format: WeightFormat, mlp: type[MLP] | type[MoE]
    ) -> None:
        self.input_norm = ReplicatedVector(
            f"{name}.input_layernorm", model.hidden_size, weight_format
        )
        self.attention = Attention(f"{name}.self_attn", model, weight_format)
        self.post_norm = ReplicatedVector(
            f"{name}.post_attention_layernorm", model.hidden_size, weight_format
        )
        self.mlp = mlp(f"{name}.mlp", model, weight_format)

    def parts(self) -> tuple[Part, ...]:
        return self.input_norm, *self.attention.parts(), self.post_norm, *self.mlp.parts()


class Qwen3:
    """The model of one rank. Its `parts` are uninitialized until each is filled and packed."""

    def __init__(
        self,
        model_config: ModelConfig,
        group: TensorParallelGroup,
        kernels: Kernels,
        dtype: torch.dtype,
        max_model_len: int,
        quantization: Quantization | None = None,
        weight_dtype: torch.dtype | None = None,
    ) -> None:
        """`weight_dtype`: of the matrices that are not quantized; None means `dtype`."""
        weight_format = WeightFormat(
            kernels=kernels,
            group=group,
            dtype=dtype,
            weight_dtype=weight_dtype or dtype,
            quantization=quantization,
        )
        self.model_config = model_config
        self.kernels = kernels
        self.group = group
        self.dtype = dtype
        self.embedding = VocabParallelEmbedding(
            "model.embed_tokens", model_config.vocab_size, model_config.hidden_size, weight_format
        )
        self.layers = [
            DecoderLayer(
                f"model.layers.{index}",
                model_config,
                weight_format,
                MoE if model_config.has_experts(index) else MLP,
            )
            for index in range(model_config.num_hidden_layers)
        ]
        self.norm = ReplicatedVector("model.norm", model_config.hidden_size, weight_format)
        self.head = ParallelLMHead(
            "lm_head", self.embedding, model_config.tie_word_embeddings, weight_format
        )
        self.cos_sin_LD = cos_sin_table(
            model_config.rope, model_config.head_dim, max_model_len, group.device
        )

    @property
    def num_kv_heads(self) -> int:
        """KV heads of this rank."""
        return self.layers[0].attention.qkv.num_kv_heads

    def forward(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        attn: AttentionMetadata,
        kv: Sequence[LayerCache],
    ) -> Tensor:
        """Normalized hidden states [T, E], the same on every rank. Writes the KV of the tokens to
        their KV places.
        """
        return self.run_layers(self.embedding(token_ids_T), positions_T, attn, kv)

    def run_layers(
        self,
        embedded_TE: Tensor,
        positions_T: Tensor,
        attn: AttentionMetadata,
        kv: Sequence[LayerCache],
    ) -> Tensor:
        """`forward` of embedded tokens, which can be recorded (`Kernels.recorder`)."""
        kernels, eps = self.kernels, self.model_config.rms_norm_eps
        residual_TE = embedded_TE
        x_TE = kernels.rms_norm(residual_TE, self.layers[0].input_norm.weight, eps)
        next_norms = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        for i, (layer, next_norm, cache) in enumerate(
            zip(self.layers, next_norms, kv, strict=True)
        ):
            kernels.call(partial(self._enter_layer, i))
            x_TE = layer.attention(x_TE, positions_T, self.cos_sin_LD, attn, cache)
            x_TE, residual_TE = kernels.add_rms_norm(x_TE, residual_TE, layer.post_norm.weight, eps)
            x_TE = layer.mlp(x_TE, attn.num_live_tokens_1)
            x_TE, residual_TE = kernels.add_rms_norm(x_TE, residual_TE, next_norm.weight, eps)
        return x_TE

    def _enter_layer(self, index: int) -> None:
        self.group.progress.enter_layer(index)
        faults.reach("forward", self.group.rank)

    def logits(self, hidden_BE: Tensor) -> Tensor:
        """[B, V], this rank's part of the vocabulary."""
        return self.head(hidden_BE)

    def parts(self) -> Iterator[Part]:
        """All parameters of this rank, part by part."""
        if not self.head.is_tied:
            yield self.embedding
        for layer in self.layers:
            yield from layer.parts()
        yield self.norm
        yield self.head
