"""How many parameters a model has, and how many of them one rank holds and one token uses."""

from __future__ import annotations

from dataclasses import dataclass

from configs.model import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCounts:
    """Numbers of parameters. `active`: those that one token uses. `expert_parameters` are part of
    `total`; `vocabulary`, the embedding and the head (one if tied), of `total` and `active`.
    """

    total: int
    active: int
    expert_parameters: int
    vocabulary: int


def count_parameters(model: ModelConfig, num_ranks: int = 1) -> ParameterCounts:
    """Those of one of `num_ranks` ranks; by default, of the whole model."""
    hidden_size, dim = model.hidden_size, model.head_dim
    q = model.num_attention_heads * dim // num_ranks
    kv = max(1, model.num_key_value_heads // num_ranks) * dim
    bias = q + 2 * kv + hidden_size if model.attention_bias else 0
    attention = hidden_size * (q + 2 * kv) + q * hidden_size + bias + 2 * hidden_size + 2 * dim
    num_expert_layers = sum(map(model.has_experts, range(model.num_hidden_layers)))
    num_dense_layers = model.num_hidden_layers - num_expert_layers
    vocabulary = hidden_size * -(-model.vocab_size // num_ranks) * (2 - model.tie_word_embeddings)
    non_expert_parameters = model.num_hidden_layers * attention + hidden_size + vocabulary
    non_expert_parameters += (
        num_dense_layers * 3 * hidden_size * (model.intermediate_size // num_ranks)
    )
    expert_parameters = active_expert_parameters = 0
    if (experts_config := model.experts) is not None:
        non_expert_parameters += num_expert_layers * hidden_size * experts_config.num_experts
        parameters_per_expert = 3 * hidden_size * (experts_config.intermediate_size // num_ranks)
        expert_parameters = num_expert_layers * experts_config.num_experts * parameters_per_expert
        active_expert_parameters = (
            num_expert_layers * experts_config.num_experts_per_token * parameters_per_expert
        )
    return ParameterCounts(
        total=non_expert_parameters + expert_parameters,
        active=non_expert_parameters + active_expert_parameters,
        expert_parameters=expert_parameters,
        vocabulary=vocabulary,
    )


def parameters_line(model: ModelConfig) -> str:
    """For a person who asks what the model needs."""
    counts = count_parameters(model)
    if model.experts is None:
        return f"{format_count(counts.total)} parameters"
    return (
        f"{format_count(counts.total)} parameters, {format_count(counts.active)} of them for each"
        f" token; {format_count(counts.expert_parameters)} are of experts, of which a layer has"
        f" {model.experts.num_experts} and a token uses {model.experts.num_experts_per_token}"
    )


def format_count(count: int) -> str:
    """To three digits, also of millions."""
    return f"{count / 1e9:.3g} billion" if count >= 1e8 else f"{count / 1e6:.3g} million"
