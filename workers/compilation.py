"""Compiles the CPU kernels: those of the first step at the start, the rest in the background.

The ranks share the work of the start and load what the others compiled from the cache. A process of
low priority compiles what only other kinds of sampling need; whichever process is first compiles a
kernel, and the other finds it in the cache. `python -m workers.compilation first-step`, and
`other-steps`, fill the cache before anything is served (`make` runs them after installing).
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from configs.engine import ResolvedConfig
from configs.paths import SOURCE_ROOT, module_command
from configs.quantization import Quantization
from kernels.interface import Kernels
from kernels.select import select_backend
from workers.batch.kv_cache import torch_dtype
from workers.parallel.group import TensorParallelGroup

FIRST_STEP, OTHER_STEPS = "first-step", "other-steps"
_LOWEST_PRIORITY = 19

logger = logging.getLogger(__name__)


def compile_first_step(
    kernels: Kernels, group: TensorParallelGroup, config: ResolvedConfig
) -> None:
    """Make the kernels of a greedy step and of the all-reduce ready. Every rank calls this at the
    same time.
    """
    calls = _first_step_calls(kernels, config)
    for call in group.claim_tasks("compile", calls):  # the slowest come first
        call()
        group.progress.num_warmup_calls += 1
    group.barrier()
    for call in calls:
        call()
        group.progress.num_warmup_calls += 1


def load_first_step(kernels: Kernels, config: ResolvedConfig) -> None:
    """Load the same kernels, which are cached by now, in a process without a group."""
    for call in _first_step_calls(kernels, config):
        call()


def _first_step_calls(kernels: Kernels, config: ResolvedConfig) -> list[Callable[[], object]]:
    return _warmup_calls(
        kernels,
        config.engine.tensor_parallel_size,
        config.dtype,
        config.weight_dtype,
        config.quantization,
        has_experts=config.model.experts is not None,
    )


def _warmup_calls(
    kernels: Kernels,
    num_ranks: int,
    dtype: str,
    weight_dtype: str,
    quantization: Quantization | None = None,
    has_experts: bool = False,
) -> list[Callable[[], object]]:
    calls = kernels.warmup_calls(torch_dtype(dtype))
    if weight_dtype != dtype and kernels.mixed_precision is not None:
        calls[1:1] = kernels.mixed_precision.warmup_calls()
    if quantization is not None:
        calls[1:1] = kernels.quantized[quantization.name].warmup_calls(torch_dtype(dtype))
    if has_experts:
        calls[:0] = kernels.experts.warmup_calls(torch_dtype(dtype), torch_dtype(weight_dtype))
    if num_ranks > 1 and calls:
        calls.insert(1, compile_all_reduce)
    return calls


def compile_all_reduce() -> None:
    """Make the loop of the shared-memory all-reduce ready."""
    # Imports numba, which a rank on a GPU does not need.
    from workers.parallel.advance import compile_advance

    compile_advance()


def start_background_compilation(dtype: str) -> subprocess.Popen[bytes] | None:
    """Start a process that fills the cache, if it is not full already. It ends with this process,
    or before. None, too, if the system has no room for it: steps compile what they need themselves.
    """
    if _marker(dtype).exists():
        return None
    command = [*module_command(__name__), OTHER_STEPS, "--dtype", dtype, "--while-stdin-is-open"]
    try:
        return subprocess.Popen(
            command,
            cwd=SOURCE_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except OSError as error:
        logger.warning("no kernels are compiled in the background: %s", error)
        return None


def main() -> None:
    """Compile, in this process, what the arguments name."""
    parser = argparse.ArgumentParser(description="Fill the cache of compiled CPU kernels.")
    parser.add_argument("steps", choices=(FIRST_STEP, OTHER_STEPS))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"))
    parser.add_argument(
        "--while-stdin-is-open", action="store_true", help="stop when the parent process ends"
    )
    args = parser.parse_args()
    if args.while_stdin_is_open:
        os.nice(_LOWEST_PRIORITY)  # after the imports: a process that gets no core cannot end
        threading.Thread(target=_exit_with_parent, daemon=True).start()
    gc.disable()  # compiling creates many objects and leaves none that matter
    kernels = select_backend("cpu", "cpu")
    kernels.set_num_threads(1)
    dtype = args.dtype or kernels.capabilities.fast_dtypes[-1]
    if args.steps == FIRST_STEP:
        weight_dtype = dtype
        if dtype == "float32" and kernels.capabilities.weight_dtypes:
            weight_dtype = kernels.capabilities.weight_dtypes[-1]
        for call in _warmup_calls(kernels, 2, dtype, weight_dtype):
            call()
    else:
        from kernels.cpu.sampling import run_each_once  # imports numba

        for logits_dtype in (torch_dtype(dtype), torch.float32):  # that of adjusted logits
            run_each_once(logits_dtype)
        marker = _marker(dtype)
        try:
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()
        except OSError as error:
            parser.exit(1, f"the cache of compiled kernels cannot be written: {error}\n")
    if args.while_stdin_is_open:
        os._exit(0)  # the thread must not wake up while the interpreter ends


def _marker(dtype: str) -> Path:
    """A file that exists if the kernels of other steps are cached for this dtype and processor."""
    from kernels.cpu.cache import version_dir

    return version_dir() / f"other-steps-{dtype}"


def _exit_with_parent() -> None:
    os.read(0, 1)  # not through `sys.stdin`, whose lock the end of the interpreter needs
    os._exit(0)


if __name__ == "__main__":
    main()
