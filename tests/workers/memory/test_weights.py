"""Weights that a rank shares with its standby. Both are processes here, forked from one that has
torch and numba loaded.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels.cpu import torch_c
from kernels.cpu.capabilities import has_int8
from kernels.cpu.linear import packs_dtype
from kernels.select import select_backend
from tests.cluster.processes import open_files, opened_by
from tests.workers.memory import holder
from tests.workers.memory.holder import Form, Holder
from workers.memory import lasting
from workers.memory.huge_pages import HUGE_PAGE_BYTES
from workers.memory.weights import WeightsFile
from workers.models.qwen3 import Qwen3
from workers.parallel.group import TensorParallelGroup

pytestmark = pytest.mark.skipif(
    not lasting.has_memfds(), reason="only Linux has memory that outlives a process"
)
FLOAT32, BFLOAT16 = Form(dtype=torch.float32), Form(dtype=torch.bfloat16)
FORMS = {
    "float32": FLOAT32,
    "bfloat16": BFLOAT16,
    "mixed": Form(dtype=torch.float32, weight_dtype=torch.bfloat16),
    "int8": Form(dtype=torch.bfloat16, quantization="int8"),
    "int4": Form(dtype=torch.bfloat16, quantization="int4"),
    "fp8": Form(dtype=torch.bfloat16, quantization="fp8"),
    "experts_float32": Form(dtype=torch.float32, experts=8),
    "experts_bfloat16": Form(dtype=torch.bfloat16, experts=8),
    "experts_mixed": Form(dtype=torch.float32, weight_dtype=torch.bfloat16, experts=8),
}
LARGE = Form(dtype=torch.float32, hidden=512, layers=4, vocab=8192)  # 71 MiB
MIB = 2**20
NAME = f"eagleray-test-{os.getpid()}"


@pytest.fixture(scope="module")
def rank() -> Iterator[Holder]:
    with Holder() as process:
        yield process


@pytest.fixture(scope="module")
def standby() -> Iterator[Holder]:
    with Holder() as process:
        yield process


@pytest.fixture
def mortal_rank() -> Iterator[Holder]:
    """A process of one test, which ends it."""
    with Holder() as process:
        yield process


@pytest.fixture
def mortal_standby() -> Iterator[Holder]:
    with Holder() as process:
        yield process


def share(rank: Holder, standby: Holder, form: Form = BFLOAT16, name: str = NAME) -> list[bytes]:
    """The rank loads a model and the standby adopts it; the logits of the rank before that."""
    rank.tell(holder.load, form)
    logits: list[bytes] = rank.tell(holder.logits)
    standby.tell(holder.adopt, rank.tell(holder.keep, name), form.config)
    return logits


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_both_processes_have_the_logits_of_the_loaded_model(
    rank: Holder, standby: Holder, form: Form, tied: bool
) -> None:
    if form.quantization == "int8" and not has_int8():
        pytest.skip("no dot products of 8-bit numbers here")
    logits = share(rank, standby, replace(form, tied=tied))
    assert rank.tell(holder.logits) == logits
    assert standby.tell(holder.logits) == logits


def test_a_standby_goes_on_when_the_rank_is_killed_and_has_a_standby_in_turn(
    mortal_rank: Holder, mortal_standby: Holder
) -> None:
    mortal_rank.tell(holder.load, BFLOAT16)
    logits = mortal_rank.tell(holder.logits)
    handle = mortal_standby.tell(holder.adopt, mortal_rank.tell(holder.keep, NAME), BFLOAT16.config)
    mortal_rank.kill()
    assert mortal_standby.tell(holder.logits) == logits
    with Holder() as next_standby:
        next_standby.tell(holder.adopt, handle, BFLOAT16.config)
        mortal_standby.kill()
        assert next_standby.tell(holder.logits) == logits


def test_nothing_is_left_when_both_are_dead(mortal_rank: Holder, mortal_standby: Holder) -> None:
    name = f"{NAME}-of-two"
    share(mortal_rank, mortal_standby, name=name)
    pids = {mortal_rank.process.pid, mortal_standby.process.pid}
    assert holders_of(name) == pids
    mortal_rank.kill()
    assert holders_of(name) == {mortal_standby.process.pid}
    mortal_standby.kill()
    assert holders_of(name) == set()


def test_a_dead_rank_cannot_be_adopted(mortal_rank: Holder, standby: Holder) -> None:
    mortal_rank.tell(holder.load, BFLOAT16)
    handle = mortal_rank.tell(holder.keep, NAME)
    mortal_rank.kill()
    with pytest.raises(OSError, match=f"/proc/{mortal_rank.process.pid}/"):
        standby.tell(holder.adopt, handle, BFLOAT16.config)


def test_the_file_cannot_be_written(rank: Holder, standby: Holder) -> None:
    share(rank, standby)
    for process in (rank, standby):
        with pytest.raises(PermissionError):
            process.tell(holder.write_to_file)


@pytest.mark.parametrize("behind_onednn", [False, True])
def test_a_process_that_writes_over_the_weights_ends_and_the_other_has_them_still(
    mortal_rank: Holder, standby: Holder, behind_onednn: bool
) -> None:
    logits = share(mortal_rank, standby, FLOAT32)
    with pytest.raises((EOFError, ConnectionResetError)):
        mortal_rank.tell(write_over_packed_weights if behind_onednn else write_over_norm)
    mortal_rank.process.join()
    assert mortal_rank.process.exitcode == -signal.SIGSEGV
    assert standby.tell(holder.logits) == logits


def test_both_processes_have_the_weights_in_huge_pages(rank: Holder, standby: Holder) -> None:
    share(rank, standby, LARGE)
    assert rank.tell(holder.uncounted_bytes) == 0
    for process in (rank, standby):
        process.tell(holder.logits)
    huge = [process.tell(holder.huge_bytes) for process in (rank, standby)]
    if not holder.makes_huge_pages():
        pytest.skip("this system makes no huge pages of memory files")
    assert min(huge) > 0.9 * stored_bytes(LARGE)


def test_two_processes_hold_one_copy(rank: Holder, standby: Holder) -> None:
    both = (rank, standby)
    for process in both:  # so that it has what it takes to compute at all
        process.tell(holder.load, LARGE)
        process.tell(holder.logits)
        process.tell(holder.forget)
    weights = stored_bytes(LARGE)
    before = sum(process.tell(holder.memory_bytes) for process in both)
    share(rank, standby, LARGE)
    assert rank.tell(holder.logits) == standby.tell(holder.logits)
    added = sum(process.tell(holder.memory_bytes) for process in both) - before
    for process in both:
        process.tell(holder.forget)
    left = sum(process.tell(holder.memory_bytes) for process in both) - before
    said = f"{added / MIB:.1f} MiB for both, of weights of {weights / MIB:.1f} MiB"
    assert 0.95 * weights < added < 1.1 * weights, said
    assert left < 0.1 * weights, f"{said}; {left / MIB:.1f} MiB are left"


def test_an_embedding_that_is_also_the_packed_head_is_kept_once(rank: Holder) -> None:
    rank.tell(holder.load, replace(LARGE, weight_dtype=torch.bfloat16, tied=True))
    kept = rank.tell(holder.keep, NAME).num_bytes
    assert kept < 1.05 * rank.tell(holder.weight_bytes)


def test_another_model_or_rank_is_refused(rank: Holder, standby: Holder) -> None:
    rank.tell(holder.load, BFLOAT16)
    handle = rank.tell(holder.keep, NAME)
    with pytest.raises(ValueError, match=r"num_hidden_layers=2.*, not of .*num_hidden_layers=3"):
        standby.tell(holder.adopt, handle, replace(BFLOAT16, layers=3).config)
    with pytest.raises(ValueError, match=r"of rank 0 of 1 with .*, not of rank 1 of 2 with"):
        standby.tell(holder.adopt, handle, BFLOAT16.config, 1)
    standby.tell(holder.adopt, handle, BFLOAT16.config)


def test_a_model_works_on_where_its_weights_cannot_be_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not packs_dtype(torch.float32):
        pytest.skip("weights are not packed on this processor")
    state = holder.State()
    holder.load(state, FLOAT32)
    logits, files = holder.logits(state), open_files()

    def fail(*_: object) -> torch.Tensor:
        raise OSError(errno.ENOSYS, "not here")

    with monkeypatch.context() as patch:
        patch.setattr("kernels.cpu.tensor_bytes.packed_tensor", fail)
        with pytest.raises(OSError, match="not here"):
            holder.keep(state, NAME)
    assert holder.logits(state) == logits
    with monkeypatch.context() as patch:
        patch.setattr(torch_c, "_torch_library", object)
        with pytest.raises(OSError, match="does not say where a packed weight lies"):
            holder.keep(state, NAME)
    # That of the mapping stays, because what was moved before the failure lies there.
    assert len(open_files() - files) <= 1
    assert holder.logits(state) == logits


def test_weights_for_which_there_are_no_addresses_are_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that have moved by then stay where they are."""
    state = holder.State()
    holder.load(state, LARGE)
    logits = holder.logits(state)
    monkeypatch.setattr("workers.memory.weight_stores.physical_bytes", lambda: 2 * HUGE_PAGE_BYTES)
    with pytest.raises(OSError, match="larger than the machine's memory"):
        holder.keep(state, NAME)
    assert holder.logits(state) == logits


def test_weights_of_another_device_are_not_kept() -> None:
    kernels, group = select_backend("cpu", "cpu"), TensorParallelGroup(0, 1, torch.device("meta"))
    with pytest.raises(OSError, match="bytes of meta cannot be read here"):
        model = Qwen3(FLOAT32.config, group, kernels, torch.float32, 16)
        WeightsFile(NAME, group, kernels).finish(model)


def write_over_packed_weights(state: holder.State) -> None:
    holder.write_over_weights(state, behind_onednn=True)


def write_over_norm(state: holder.State) -> None:
    holder.write_over_weights(state, behind_onednn=False)


def stored_bytes(form: Form) -> int:
    """The bytes of the weights in the float32 of the form."""
    config = form.config
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    layer = config.hidden_size * (
        config.head_dim * (heads + config.num_attention_heads) + 3 * config.intermediate_size
    )
    return 4 * (config.num_hidden_layers * layer + 2 * config.vocab_size * config.hidden_size)


def holders_of(name: str) -> set[int]:
    """The processes that have the file of this name open or mapped."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            text = (process / "maps").read_text() + "\n".join(opened_by(int(process.name)))
        except OSError:
            continue  # ended meanwhile, or another user's
        if f"/memfd:{name} (deleted)" in text:
            found.add(int(process.name))
    return found
