"""One tensor-parallel rank, as a plain class that runs in any process.

Owns the rank's group, model and cache. Never imports Ray or transformers, never decides what runs:
plans come from the driver. One thread calls `launch`, which starts steps in order; any number may
call `result`, which waits for one (`step_mailbox.py`). An error that a step raises
is kept under the step's id and raised by `result`; later steps are not run. Life: `open_rendezvous`
(rank 0), `start`, `allocate_cache`, then the steps of one epoch; every later epoch has new workers.
One that stands by waits for `take_over` first.
"""

from __future__ import annotations

import logging
import subprocess
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from configs.engine import ResolvedConfig
from kernels.interface import Kernels
from scheduler.errors import ConfigError, EaglerayError, WorkerError
from scheduler.messages import StepMask, StepPlan, StepResult
from workers import faults
from workers.batch.kv_cache import gpu_budget
from workers.batch.kv_plan import KVCacheLedger, plan_kv_cache
from workers.compilation import compile_first_step, load_first_step, start_background_compilation
from workers.configuration import find_kernels
from workers.device import Device, open_device
from workers.loading import LoadedModel, adopt_model, load_model
from workers.memory.idle_collapse import IdleCollapse
from workers.memory.inheritance import InheritedMemory, RankMemoryHandles, handle_of
from workers.memory.lasting import SharedMemfd
from workers.model_runner import ModelRunner, run_largest_step, warm_up
from workers.parallel.backend import Address, Rendezvous, open_rendezvous
from workers.parallel.group import TensorParallelGroup
from workers.processor import compute_platform_of
from workers.progress import Progress
from workers.report import WorkerReport
from workers.step_mailbox import Outcome, StepMailbox

logger = logging.getLogger(__name__)


class Worker:
    """Rank `rank` of the engine `config` describes."""

    def __init__(
        self, config: ResolvedConfig, rank: int, inherited_memory: InheritedMemory | None = None
    ) -> None:
        """`inherited_memory`: of the rank whose place this one may have to take."""
        self.config = config
        self._inherited_memory = inherited_memory or InheritedMemory()
        self.rank = rank
        self.epoch = 0
        self.progress = Progress()
        self._device: Device | None = None  # opened on the thread that will launch
        self._rendezvous: Rendezvous | None = None
        self._group: TensorParallelGroup | None = None
        self._kernels: Kernels | None = None
        self._loaded_model: LoadedModel | None = None
        self._runner: ModelRunner | None = None
        self._seconds: dict[str, float] = {}
        self._is_replacement = False  # the engine began with other ranks, which had as much memory
        self._next_step_id = 0
        self._failure: str | None = None  # why no further step runs
        self._mailbox = StepMailbox(rank)
        self._finish_lock = threading.Lock()
        self._idle_collapse = IdleCollapse(self.progress)
        # It ends when this object does.
        self._compiler_process: subprocess.Popen[bytes] | None = None

    # -- start -------------------------------------------------------------------------------------

    def open_rendezvous(self, host: str = "127.0.0.1") -> Address:
        """Rank 0: listen on `host`, an address of this machine that the other ranks can reach, on a
        port the system picks.
        """
        self._rendezvous = open_rendezvous(host, self.config.engine.start_timeout_s)
        return self._rendezvous.address

    def warm_up_spare(self) -> None:
        """Prepare a spare process, which may have to take over a rank: load compiled kernels and,
        on a CPU, map the weights of the rank. Needs no peers and no GPU.
        """
        kernels = find_kernels(self.config)
        kernels.set_num_threads(1)
        load_first_step(kernels, self.config)
        if self.config.device == "cpu" and self.has_weights:
            self._kernels = kernels
            self._group = self._new_group(torch.device("cpu"))
            self._loaded_model = self._load_model(self._group, kernels)

    @property
    def has_weights(self) -> bool:
        """Whether `start` need not load weights: those of the rank are there."""
        return self._inherited_memory.weights is not None

    def start(
        self,
        address: Address | None,
        num_threads: int | None = None,
        epoch: int = 0,
        gpu_index: int = 0,
        num_kv_blocks: int | None = None,
    ) -> WorkerReport:
        """Meet the other ranks at `address` (None: there are none), load the weights and see how
        many KV blocks fit. All ranks at the same time, on the thread that will launch; the steps of
        `epoch` follow, or `take_over`. `num_threads`: to begin with (see `set_num_threads`); None
        leaves it as it is. `gpu_index`: which of the GPUs that this process sees is the rank's.
        `num_kv_blocks`: how many blocks the engine began with, so that nothing is measured; None if
        it begins now. Raises `ConfigError` or `WorkerError`.
        """
        self.epoch = epoch
        self._is_replacement = num_kv_blocks is not None
        engine_config = self.config.engine
        device = open_device(self.config.device, gpu_index)
        kernels = self._kernels or find_kernels(self.config)
        if num_threads is not None:
            kernels.set_num_threads(num_threads)
        group = self._group or self._new_group(device.torch_device)
        with self._phase("rendezvous"):
            group.join(address, engine_config.start_timeout_s)
        with self._phase("compile"):
            compile_first_step(kernels, group, self.config)
            if self.config.device == "cuda":
                _launch_test_kernel(kernels, device.torch_device)
        group.share_memory(engine_config.start_timeout_s, engine_config.shared_memory)
        with self._phase("load"):
            loaded_model = self._loaded_model or self._load_model(group, kernels)
        if self.config.device == "cuda":
            with self._phase("warm_up"), self._convert_memory_errors():
                warm_up(self.config, loaded_model.model)
        with self._phase("kv_cache"):
            ledger = self._plan_kv_cache(device, loaded_model, num_kv_blocks)
        with self._phase("wait_for_peers"):
            group.wait_until_loaded()
        if self.config.device == "cpu":
            self._rendezvous = None  # nobody meets there any more; NCCL may ask its store later
        group.set_timeout(engine_config.step_timeout_s)
        self._device = device
        self._group = group
        self._kernels = kernels
        self._loaded_model = loaded_model
        return WorkerReport(
            rank=self.rank,
            backend=kernels.capabilities.description,
            seconds=dict(self._seconds),
            num_kv_blocks=ledger.num_blocks,
            ledger=ledger,
            checkpoint_hash=loaded_model.checkpoint_hash,
            weights_hash=loaded_model.weights_hash,
            compute_platform=compute_platform_of(device.torch_device),
        )

    def _load_model(self, group: TensorParallelGroup, kernels: Kernels) -> LoadedModel:
        inherited_memory = self._inherited_memory
        if inherited_memory.weights is None:
            return load_model(self.config, group, kernels, self.progress)
        return adopt_model(inherited_memory, inherited_memory.weights, self.config, group, kernels)

    def _plan_kv_cache(
        self, device: Device, loaded_model: LoadedModel, num_kv_blocks: int | None
    ) -> KVCacheLedger:
        model, memory = loaded_model.model, loaded_model.memory
        measure_budget = partial(
            gpu_budget,
            self.config,
            device,
            run_step=partial(run_largest_step, self.config, model),
            make_runner=partial(ModelRunner, self.config, model, device, num_blocks=1),
            lasting_bytes=0 if memory is None else memory.num_bytes,
        )
        return plan_kv_cache(self.config, self.rank, measure_budget, num_kv_blocks)

    def set_num_threads(self, num_threads: int) -> None:
        """Compute on `num_threads` threads from now on. Call it on the thread that launches."""
        if self._kernels is not None:
            self._kernels.set_num_threads(num_threads)

    def allocate_cache(self, num_blocks: int, *, is_standby: bool = False) -> None:
        """Allocate a KV cache of `num_blocks` blocks, the minimum over the ranks, and the batch.
        One that `is_standby` may not write to the cache, which others use, before `take_over`.
        Raises `ConfigError` if there is not enough memory; `WorkerError` if there was when the
        engine began.
        """
        device, loaded_model = self._device, self._loaded_model
        if device is None or loaded_model is None:
            raise WorkerError(f"rank {self.rank}: allocate_cache before start")
        with self._phase("allocate_cache"), self._convert_memory_errors():
            self._idle_collapse.stop()
            self._runner = None  # frees the memory of an earlier one first
            device.release_unused_memory()  # only torch itself can use what its allocator holds
            self._runner = ModelRunner(
                self.config, loaded_model.model, device, num_blocks, self._inherited_memory.cache
            )
        if is_standby:
            device.release_unused_memory()
        else:
            self.take_over(self.epoch, keeps_cache=False)
        self.progress.phase = "steps"

    def memory(self) -> RankMemoryHandles:
        """What this rank will leave. After `allocate_cache`."""
        assert self._runner is not None and self._loaded_model is not None
        return RankMemoryHandles(
            weights=handle_of(self._loaded_model.memory),
            cache=handle_of(self._runner.cache.memory),
            checkpoint_hash=self._loaded_model.checkpoint_hash,
            weights_hash=self._loaded_model.weights_hash,
        )

    def take_over(self, epoch: int, *, keeps_cache: bool) -> None:
        """After `allocate_cache`, which calls this unless the rank stands by: the steps of `epoch`
        follow. Unless it `keeps_cache`, they need nothing of what an inherited one holds.
        """
        assert self._runner is not None and self._loaded_model is not None
        self.epoch = epoch
        cache = self._runner.cache
        cache.allow_writing()
        if not keeps_cache:
            cache.forget()
        memories = (self._loaded_model.memory, cache.memory)  # steps read all of the weights
        self._idle_collapse.start([each for each in memories if isinstance(each, SharedMemfd)])

    def start_background_compilation(self) -> None:
        """On the first CPU rank: start a process that compiles what no greedy step needs."""
        if self.rank == 0 and self.config.attention_backend == "cpu":
            self._compiler_process = start_background_compilation(self.config.dtype)

    # -- steps -------------------------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> None:
        """Run the host's part of a step; on a CPU, all of it. Never raises: see `result`."""
        self.progress.num_launches += 1
        try:
            self._check_turn(plan)
            assert self._runner is not None
            self.progress.step_id = plan.step_id
            faults.reach("step", self.rank)
            wait_for_mask = partial(
                self._mailbox.take_mask, plan, self.config.engine.step_timeout_s
            )
            outcome: Outcome = self._runner.run(plan, wait_for_mask)
        except Exception as error:
            outcome = error
            if plan.epoch == self.epoch and self._failure is None:
                self._failure = f"step {plan.step_id} failed with {type(error).__name__}: {error}"
        if plan.epoch == self.epoch:
            self._next_step_id = plan.step_id + 1
        self.progress.num_launches_ended += 1
        self._mailbox.put_outcome(plan, outcome)

    def put_mask(self, step_mask: StepMask) -> None:
        """Take the mask of a step, which may be launched later. Any thread may call."""
        self._mailbox.put_mask(step_mask)

    def result(self, step_id: int, epoch: int) -> StepResult:
        """Wait for the tokens of a step, which may be launched later. Rank 0's result has the
        logprobs.

        Raises what the step raised (wrapped in a `WorkerError` if it is not one of our own errors),
        and `StepTimeoutError` when it is not launched in time (see `StepMailbox.take_outcome`), or
        when the device is not done with it within `step_timeout_s`.
        """
        limit_s = self.config.engine.step_timeout_s
        outcome = self._mailbox.take_outcome(step_id, epoch, limit_s)
        try:
            if isinstance(outcome, Exception):
                raise outcome
            faults.reach("reply", self.rank)
            # One after another, as the device runs them: a step's time starts when its turn comes.
            with self._finish_lock:
                began_s = time.perf_counter()
                token_ids, logprobs = outcome.finish(
                    limit_s, f"rank {self.rank}: step {step_id} of epoch {epoch}"
                )
            return StepResult(
                step_id=step_id,
                epoch=epoch,
                token_ids=token_ids,
                rank=self.rank,
                digest=zlib.crc32(token_ids.tobytes()),
                logprobs=logprobs if self.rank == 0 else None,
                prompt_logprobs=outcome.prompt_logprobs() if self.rank == 0 else (),
                seconds=outcome.seconds | {"wait": time.perf_counter() - began_s},
                device_s=outcome.device_s(),
            )
        except EaglerayError:
            raise
        except Exception as error:  # the driver could not read torch's without importing it
            raise WorkerError(
                f"rank {self.rank}: step {step_id}: {type(error).__name__}: {error}"
            ) from error

    def check(self) -> None:
        """Raise unless the laws of this rank's batch state hold. Not while a step runs."""
        if self._runner is not None:
            self._runner.check()

    def close(self) -> None:
        """Leave the group and drop model and cache. Never waits for a peer."""
        self._idle_collapse.stop()
        self._runner = None  # first, because NCCL would wait for graphs that hold its operations
        if self._group is not None:
            self._group.close()
        self._group = self._loaded_model = self._kernels = self._rendezvous = None

    # -- inside ------------------------------------------------------------------------------------

    def _check_turn(self, plan: StepPlan) -> None:
        step_label = f"rank {self.rank}: step {plan.step_id} of epoch {plan.epoch}"
        if plan.epoch != self.epoch:
            raise WorkerError(f"{step_label} came in epoch {self.epoch}")
        if self._failure is not None:
            raise WorkerError(f"{step_label} was not run: {self._failure}")
        if plan.step_id != self._next_step_id:
            raise WorkerError(f"{step_label} came when step {self._next_step_id} was due")
        if self._runner is None:
            raise WorkerError(f"{step_label} came before allocate_cache")

    @contextmanager
    def _convert_memory_errors(self) -> Iterator[None]:
        """Turns a lack of memory into a `WorkerError` in a replacement: the options are good, since
        the engine began with them, and the next attempt may find the memory free.
        """
        try:
            yield
        except ConfigError as error:
            if not self._is_replacement:
                raise
            raise WorkerError(
                f"rank {self.rank}: {error}. The engine had this memory when it began, so something"
                " else uses the device now: end that, or start an engine that needs less"
            ) from error

    def _new_group(self, device: torch.device) -> TensorParallelGroup:
        size = self.config.engine.tensor_parallel_size
        return TensorParallelGroup(self.rank, size, device, self.progress)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        began_s = time.perf_counter()
        self.progress.phase = name
        faults.reach(name, self.rank)
        try:
            yield
        finally:
            self._seconds[name] = time.perf_counter() - began_s
            logger.info("rank %d: %s took %.2f s", self.rank, name, self._seconds[name])


def _launch_test_kernel(kernels: Kernels, device: torch.device) -> None:
    """Run one small kernel, so that a machine that cannot compile or launch kernels is noticed
    before weights are read.
    """
    row = torch.ones(1, 64, device=device)
    kernels.rms_norm(row, row[0], 1e-6)
    torch.cuda.synchronize(device)
