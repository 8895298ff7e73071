"""Fills and packs models part by part, as `load_model` does, or only one of the two."""

from __future__ import annotations

from pathlib import Path

from configs.model import ModelConfig
from workers.models.loader import load_weights
from workers.models.qwen3 import Qwen3
from workers.models.weights import WeightSlice


def slices_of(model: Qwen3) -> list[WeightSlice]:
    """Where every parameter of a rank comes from."""
    return [piece for part in model.parts() for piece in part.slices()]


def fill_parts(model: Qwen3, model_dir: Path, config: ModelConfig) -> None:
    """Load a model whose slices are looked at afterwards: nothing is packed."""
    load_weights(model.parts(), model_dir, config, lambda part: None)


def fill_and_pack_parts(model: Qwen3, model_dir: Path, config: ModelConfig) -> None:
    load_weights(model.parts(), model_dir, config, lambda part: part.pack())


def pack_parts(model: Qwen3) -> None:
    """Pack a model that a test has filled itself."""
    for part in model.parts():
        part.pack()
