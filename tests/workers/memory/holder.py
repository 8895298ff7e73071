"""A process that holds a small model as a rank or its standby would, and does what it is told."""

from __future__ import annotations

import ctypes
import gc
import math
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from configs.model import ModelConfig
from configs.quantization import computed_quantization
from kernels.cpu.backend import CPU_KERNELS
from kernels.cpu.tensor_bytes import tensor_address_range
from kernels.interface import Kernels
from kernels.metadata import AttentionMetadata
from tests.workers.models.parts import pack_parts, slices_of
from workers.memory import huge_pages
from workers.memory.lasting import MemoryHandle, SharedMemfd
from workers.memory.weights import WeightsFile, adopt_weights
from workers.models.qwen3 import Qwen3
from workers.models.weights import release_freed_memory
from workers.parallel.group import TensorParallelGroup

ANSWER_TIMEOUT_S = 60.0
BLOCK = 16
LENGTHS = (1, 3, 300)  # our own products of few rows, and oneDNN's of many


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How the weights of a test model are held, and in how large a model."""

    dtype: torch.dtype
    weight_dtype: torch.dtype | None = None
    quantization: str | None = None
    experts: int = 0
    tied: bool = False
    hidden: int = 128
    layers: int = 2
    vocab: int = 1003

    @property
    def config(self) -> ModelConfig:
        raw = {
            "model_type": "qwen3",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": 3 * self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "tie_word_embeddings": self.tied,
            "attention_bias": True,
        }
        if self.experts:
            raw |= {
                "model_type": "qwen3_moe",
                "num_experts": self.experts,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": self.hidden,
                "mlp_only_layers": [0],
            }
        return ModelConfig.from_dict(raw)


class Holder:
    """Calls of `tell` run in the process, one after the other."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def tell(self, function: Callable[..., Any], *args: Any) -> Any:
        """The result of `function(state of the process, *args)`. Raises what it raised, and
        `EOFError` if the process ended.
        """
        self._pipe.send((function, args))
        assert self._pipe.poll(ANSWER_TIMEOUT_S), "no answer"
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def __enter__(self) -> Holder:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._pipe.close()


@dataclass
class State:
    """What the process holds."""

    model: Qwen3 | None = None
    memory: SharedMemfd | None = None
    weight_bytes: int = 0  # as loaded

    def forget(self) -> None:
        if self.memory is not None:
            self.memory.close()
        self.model = self.memory = None


def load(state: State, form: Form, kernels: Kernels = CPU_KERNELS) -> None:
    """Make a model of random weights, which nobody else has."""
    state.forget()
    state.model = model = Qwen3(
        form.config,
        _group(),
        kernels,
        form.dtype,
        max(LENGTHS),
        None if form.quantization is None else computed_quantization(form.quantization),
        form.weight_dtype,
    )
    for piece in slices_of(model):
        if not piece.target.dtype.is_floating_point:
            piece.target.random_(0 if piece.target.dtype is torch.uint8 else -127, 127)
        else:
            piece.target.normal_(0, 0.1)
        if piece.scale is not None:
            piece.scale.uniform_(1e-3, 2e-3)
        if piece.zeros is not None:
            piece.zeros.random_(0, 16)
    state.weight_bytes = sum(piece.nbytes for piece in slices_of(model))
    pack_parts(model)


def keep(state: State, name: str) -> MemoryHandle:
    """Move layers first, as they are moved when they have just been packed."""
    assert state.model is not None
    weights_file = WeightsFile(name, state.model.group, state.model.kernels)
    for layer in state.model.layers:
        weights_file.move(layer)
    memory = weights_file.finish(state.model)
    assert isinstance(memory, SharedMemfd)
    state.memory = memory
    return memory.handle


def weight_bytes(state: State) -> int:
    assert state.model is not None
    return state.weight_bytes


def adopt(state: State, handle: MemoryHandle, config: ModelConfig, rank: int = 0) -> MemoryHandle:
    """The card of the process that has adopted."""
    state.forget()
    state.memory = SharedMemfd.open(handle)
    state.model = adopt_weights(state.memory, config, _group(rank, rank + 1), CPU_KERNELS)
    return state.memory.handle


def logits(state: State) -> list[bytes]:
    """Those of prompts of `LENGTHS` tokens."""
    assert state.model is not None
    return [_logits(state.model, length) for length in LENGTHS]


def write_over_weights(state: State, *, behind_onednn: bool) -> None:
    """As a stray pointer would."""
    assert state.model is not None
    layer = state.model.layers[0]
    weight: Any = layer.attention.qkv.weight
    tensor = weight.values_YX if behind_onednn else layer.input_norm.weight
    ctypes.memset(tensor_address_range(tensor)[0], 0, 64)


def write_to_file(state: State) -> None:
    assert state.memory is not None
    tensor = state.memory.tensor()
    state.memory.allow_writing()
    del tensor


def forget(state: State) -> None:
    state.forget()


def makes_huge_pages() -> bool:
    """Whether this system should make huge pages of memory files when it is asked to."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    version = tuple(int(part) for part in os.uname().release.split(".")[:2])
    return version >= (6, 1) and setting.exists() and "[deny]" not in setting.read_text()


def uncounted_bytes(state: State) -> int:
    """What was taken for the weights and does not count as progress."""
    assert state.memory is not None and state.model is not None
    return state.memory.num_bytes - state.model.group.progress.allocated_bytes


def huge_bytes(state: State) -> int:
    """What this process has of memory files in huge pages."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("ShmemPmdMapped:")) * 1024


def memory_bytes(state: State) -> int:
    """What this process takes of the machine, without its libraries; of memory that n processes
    share, an nth (Pss).
    """
    gc.collect()
    release_freed_memory()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    sizes = [line.split()[1] for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:"))]
    assert len(sizes) == 2, "the kernel does not tell the proportional sizes"
    return sum(map(int, sizes)) * 1024


def _logits(model: Qwen3, length: int) -> bytes:
    kernels, num_blocks = model.kernels, -(-max(LENGTHS) // BLOCK)
    k_shape, v_shape = kernels.kv_cache_shapes(
        num_blocks, BLOCK, model.num_kv_heads, model.model_config.head_dim
    )
    kv = [
        (torch.zeros(k_shape, dtype=model.dtype), torch.zeros(v_shape, dtype=model.dtype))
        for _ in model.layers
    ]
    starts = torch.tensor([0, length], dtype=torch.int32)
    attn = AttentionMetadata(
        query_start_B1=starts,
        seq_start_B1=starts,
        seq_lens_B=torch.tensor([length], dtype=torch.int32),
        block_table_BW=torch.arange(num_blocks, dtype=torch.int32).view(1, -1),
        kv_places_T=torch.arange(length),
        max_query_len=length,
        max_seq_len=length,
    )
    tokens_T = torch.arange(length) * 37 % model.model_config.vocab_size
    with torch.inference_mode():
        hidden_TE = model.forward(tokens_T, torch.arange(length, dtype=torch.int32), attn, kv)
        logits_TV = model.logits(hidden_TE).to(torch.float32)
    assert logits_TV.isfinite().all() and logits_TV.std() > 0
    return logits_TV.numpy().tobytes()


def _group(rank: int = 0, size: int = 1) -> TensorParallelGroup:
    return TensorParallelGroup(rank, size, torch.device("cpu"))


def _serve(pipe: Any) -> None:
    CPU_KERNELS.set_num_threads(1)
    huge_pages._SLOW_PAGE_S = math.inf  # take them at once on every system
    state = State()
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = function(state, *args)
        except Exception as error:
            answer = error
        pipe.send(answer)
        del answer  # before the next call measures memory
