"""How far a rank has come, as counters that only grow: a rank whose counters move is not stuck."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Progress:
    """What one rank is doing. Written by the thread that computes, read from any thread."""

    phase: str = "start"  # then those that `Worker` names, at last "steps"
    step_id: int = -1  # begun last, in this rank's epoch
    num_launches: int = 0  # of steps, begun; on a CPU, all of a step
    num_launches_ended: int = 0  # also of steps that failed
    layer: int = 0  # begun last
    num_layers_run: int = 0  # layers begun, over all steps; not by replays of CUDA graphs
    num_all_reduces: int = 0  # sums begun; not maxima, nor by replays of CUDA graphs
    num_download_updates: int = 0  # how often a part of a file has come
    loaded_bytes: int = 0  # of weights, as this rank holds them
    allocated_bytes: int = 0  # of memory that outlives the rank
    num_packed_parts: int = 0  # of the model (`Qwen3.parts`)
    num_warmup_calls: int = 0  # of kernels, which are compiled or found in the cache

    def enter_layer(self, layer: int) -> None:
        """A layer of the forward pass begins."""
        self.layer = layer
        self.num_layers_run += 1

    def describe(self) -> str:
        """For a message."""
        if self.phase == "load":
            loaded_text = f"load, {self.loaded_bytes / 2**20:.0f} MiB read"
            return f"{loaded_text}, {self.num_packed_parts} parts packed"
        if self.phase == "steps":
            return f"step {self.step_id}, layer {self.layer}"
        return self.phase
