"""How many parameters a model has, and how many of them one rank holds and one token uses."""

from __future__ import annotations

from dataclasses import dataclass

from configs.model import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Numbers of parameters. `active`: those that one token uses. `of_experts` are part of
    `total`; `vocabulary`, the embedding and the head, part of both.
    """

    total: int
    active: int
    of_experts: int
    vocabulary: int


def count_parameters(model: ModelConfig, num_ranks: int = 1) -> Parameters:
    """Those of one of `num_ranks` ranks; by default, of the whole model."""
    hidden, dim = model.hidden_size, model.head_dim
    q = model.num_attention_heads * dim // num_ranks
    kv = max(1, model.num_key_value_heads // num_ranks) * dim
    bias = q + 2 * kv + hidden if model.attention_bias else 0
    attention = hidden * (q + 2 * kv) + q * hidden + bias + 2 * hidden + 2 * dim
    num_sparse = sum(map(model.has_experts, range(model.num_hidden_layers)))
    num_dense = model.num_hidden_layers - num_sparse
    vocabulary = hidden * -(-model.vocab_size // num_ranks) * (2 - model.tie_word_embeddings)
    shared = model.num_hidden_layers * attention + hidden + vocabulary
    shared += num_dense * 3 * hidden * (model.intermediate_size // num_ranks)
    of_experts = active_of_experts = 0
    if (experts := model.experts) is not None:
        shared += num_sparse * hidden * experts.num_experts
        of_one = 3 * hidden * (experts.intermediate_size // num_ranks)
        of_experts = num_sparse * experts.num_experts * of_one
        active_of_experts = num_sparse * experts.num_per_token * of_one
    return Parameters(
        total=shared + of_experts,
        active=shared + active_of_experts,
        of_experts=of_experts,
        vocabulary=vocabulary,
    )


def parameters_line(model: ModelConfig) -> str:
    """For a person who asks what the model needs."""
    whole = count_parameters(model)
    if model.experts is None:
        return f"{short(whole.total)} parameters"
    return (
        f"{short(whole.total)} parameters, {short(whole.active)} of them for each token;"
        f" {short(whole.of_experts)} are of experts, of which a layer has"
        f" {model.experts.num_experts} and a token uses {model.experts.num_per_token}"
    )


def short(count: int) -> str:
    """To three digits, also of millions."""
    return f"{count / 1e9:.3g} billion" if count >= 1e8 else f"{count / 1e6:.3g} million"
