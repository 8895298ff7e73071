"""`LLM` over real Ray actors: outputs, streams, aborts, event loops, and what is left
afterwards.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from cluster import LLM, Chunk, SamplingParams
from cluster.commands.lose_rank import processes_of
from cluster.ranks.group import RankHandle, RankMaker
from cluster.resources.placement import Place
from scheduler.errors import ConfigError, EngineDeadError, RequestError, WorkerError
from tests.cluster.conftest import OPTIONS, SmallModel
from tests.cluster.interpreted_rank import InterpretingDriver
from tests.cluster.processes import OURS, listening, processes, wait_until
from tests.workers.test_engine_exactness import NEAR_TIE, NUM_OUTPUT, first_difference, prompts

pytestmark = pytest.mark.engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True)
ENDLESS = SamplingParams(temperature=1.0, max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(users_ray: None, small_model: SmallModel) -> Iterator[LLM]:
    """One engine at tp 2 for all tests that do not stop it."""
    with LLM(small_model.path, tensor_parallel_size=2, **OPTIONS) as engine:
        yield engine


@pytest.fixture(scope="module")
def waiting_llm(users_ray: None, small_model: SmallModel) -> Iterator[LLM]:
    """One at tp 1 that waits for the result of each step."""
    with LLM(small_model.path, tensor_parallel_size=1, num_steps_ahead=0, **OPTIONS) as engine:
        yield engine


def check_against_transformers(
    model: Any, outputs: list[Any], of: list[list[int]] | None = None
) -> None:
    for prompt, output in zip(of or prompts(), outputs, strict=True):
        gap = first_difference(model, prompt, output.token_ids)
        assert gap is None or gap <= NEAR_TIE, (prompt, output.token_ids, gap)


def test_greedy_tokens_of_real_actors_equal_transformers(llm: LLM, small_model: SmallModel) -> None:
    check_against_transformers(small_model.model, llm.generate(prompts(), GREEDY))


def test_four_ranks_with_a_tight_cache_equal_transformers(
    users_ray: None, small_model: SmallModel
) -> None:
    options = OPTIONS | {
        "num_kv_blocks": 24,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 9,
        "num_steps_ahead": 1,
    }
    with LLM(small_model.path, tensor_parallel_size=4, **options) as engine:
        check_against_transformers(small_model.model, engine.generate(prompts(), GREEDY))
        stats = engine.stats()
    assert stats.num_preemptions > 0 and stats.num_cached_tokens > 0


def test_triton_kernels_on_two_ranks_equal_transformers(
    users_ray: None, small_model: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton's interpreter, which is slow: the same kernels, layers and plans as on GPUs, with
    all features on, for every third prompt.
    """
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("cluster.engine.start.Driver", InterpretingDriver)
    some = prompts()[::3]
    options = OPTIONS | {
        "attention_backend": "triton",
        "max_num_seqs": 6,
        "max_num_batched_tokens": 40,
    }
    with LLM(small_model.path, tensor_parallel_size=2, dtype="float32", **options) as engine:
        assert "kernels: triton" in engine.report.log_lines
        outputs = engine.generate(some, GREEDY)
        check_against_transformers(small_model.model, outputs, some)
        assert engine.stats().num_cached_tokens > 0


@pytest.mark.parametrize("tp", [1, 2])
def test_engine_on_gpus_equals_transformers(
    users_ray: None, small_model: SmallModel, tp: int
) -> None:
    if torch.cuda.device_count() < tp:
        pytest.skip(f"needs {tp} GPUs")
    options = OPTIONS | {"device": "cuda", "max_num_seqs": 6, "max_num_batched_tokens": 40}
    with LLM(small_model.path, tensor_parallel_size=tp, dtype="float32", **options) as engine:
        check_against_transformers(small_model.model, engine.generate(prompts(), GREEDY))
        assert engine.stats().num_cached_tokens > 0


def test_waiting_for_each_result_gives_the_same_tokens_as_running_ahead(
    llm: LLM, waiting_llm: LLM
) -> None:
    params = [
        SamplingParams(temperature=0.9, top_p=0.9, seed=i, max_tokens=20)
        for i in range(len(prompts()))
    ]
    ahead = llm.generate(prompts(), params)
    waiting = waiting_llm.generate(prompts(), params)
    assert [o.token_ids for o in waiting] == [o.token_ids for o in ahead]


def test_a_second_request_with_the_same_prompt_reports_its_cached_tokens(llm: LLM) -> None:
    prompt = list(range(600, 620))
    first, second = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 19)
    assert first.token_ids == second.token_ids


def test_a_cache_salt_keeps_prompts_apart(llm: LLM) -> None:
    prompt = {"prompt_token_ids": list(range(700, 720)), "cache_salt": "a"}
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 0
    assert llm.generate(prompt | {"cache_salt": "b"}, GREEDY)[0].num_cached_tokens == 0
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 19


def test_n_outputs_differ_and_repeat_with_the_seed(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=10, ignore_eos=True)
    first, second = (llm.generate([9, 8, 7], params)[0] for _ in range(2))
    assert [c.index for c in first.outputs] == [0, 1, 2]
    assert len({tuple(c.token_ids) for c in first.outputs}) == 3
    assert [c.token_ids for c in first.outputs] == [c.token_ids for c in second.outputs]


def test_logprobs_come_with_every_token(llm: LLM) -> None:
    output = llm.generate(
        [1, 2, 3], SamplingParams(temperature=0.0, logprobs=2, max_tokens=5, ignore_eos=True)
    )[0]
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None and len(logprobs) == 5
    for token, entry in zip(output.token_ids, logprobs, strict=True):
        assert entry is not None and entry.top_token_ids[0] == token
        assert entry.logprob == pytest.approx(entry.top_logprobs[0])


def test_end_of_sequence_ids_stop_unless_ignored(llm: LLM) -> None:
    bias = {2: 100.0}
    stopped = llm.generate([5, 6], SamplingParams(logit_bias=bias, max_tokens=8))[0]
    assert (stopped.token_ids, stopped.finish_reason) == ([2], "stop")
    ignored = llm.generate([5, 6], SamplingParams(logit_bias=bias, max_tokens=8, ignore_eos=True))[
        0
    ]
    assert (len(ignored.token_ids), ignored.finish_reason) == (8, "length")


def test_a_bad_request_is_refused_before_any_of_its_batch_runs(llm: LLM) -> None:
    steps = llm.stats().num_steps
    for bad, match in (
        ([], "empty"),
        ([1] * 300, "at most 255"),
        ([1, 2000], "vocabulary of 1003"),
        ([-1, 1], "vocabulary of 1003"),
        ([5_000_000_000], "vocabulary of 1003"),
    ):
        with pytest.raises(RequestError, match=match):
            llm.generate([[1, 2], bad], GREEDY)
    with pytest.raises(RequestError, match="needs a tokenizer"):
        llm.generate("text", GREEDY)
    assert llm.stats().num_steps == steps


def test_a_stream_and_a_check_refuse_parameters_that_are_a_dict(llm: LLM) -> None:
    params: Any = {"temperature": 0}

    async def stream() -> None:
        await anext(llm.astream([1, 2], params))

    for use in (lambda: next(llm.stream([1, 2], params)), lambda: asyncio.run(stream())):
        with pytest.raises(
            RequestError, match="a SamplingParams or a list with one per prompt, got dict"
        ):
            use()
    with pytest.raises(
        RequestError, match="a SamplingParams or a list with one per prompt, got dict"
    ):
        llm.check_prompt([1, 2], params)


def test_a_stream_brings_the_tokens_of_the_whole_output(llm: LLM) -> None:
    params = SamplingParams(seed=3, max_tokens=15, ignore_eos=True)
    chunks = list(llm.stream([4, 5, 6], params))
    assert [t for c in chunks for t in c.token_ids] == llm.generate([4, 5, 6], params)[0].token_ids
    assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == "length"


def test_a_stream_may_bring_several_tokens_at_a_time(llm: LLM) -> None:
    params = SamplingParams(seed=3, max_tokens=15, ignore_eos=True, logprobs=1)
    chunks = list(llm.stream([4, 5, 6], dataclasses.replace(params, stream_interval=6)))
    assert [len(chunk.token_ids) for chunk in chunks] == [1, 6, 6, 2]
    whole = llm.generate([4, 5, 6], params)[0].outputs[0]
    assert [t for chunk in chunks for t in chunk.token_ids] == whole.token_ids
    assert [entry for chunk in chunks for entry in chunk.logprobs or []] == whole.logprobs


def idle(llm: LLM) -> bool:
    stats = llm.stats()
    return stats.num_running == stats.num_waiting == 0 and stats.num_free_blocks == stats.num_blocks


def test_a_stream_left_early_frees_its_blocks(llm: LLM) -> None:
    stream = llm.stream([4, 5, 6], ENDLESS)
    next(stream)
    assert not idle(llm)
    stream.close()
    wait_until(lambda: idle(llm), "freeing the blocks", 8.0)


def test_aborting_by_name_ends_the_stream_with_abort(llm: LLM) -> None:
    stream = llm.stream([4, 5, 6], ENDLESS, request_id="mine")
    next(stream)
    assert llm.abort("mine")
    assert sum(len(chunk.token_ids) for chunk in stream) < 200
    assert not llm.abort("mine")
    wait_until(lambda: idle(llm), "freeing the blocks", 8.0)


def test_a_name_belongs_to_one_stream_while_that_runs(llm: LLM) -> None:
    stream = llm.stream([4, 5, 6], ENDLESS, request_id="mine")
    next(stream)
    with pytest.raises(RequestError, match="request_id 'mine' is in use"):
        next(llm.stream([1, 2, 3], GREEDY, request_id="mine"))
    stream.close()
    assert len(list(llm.stream([1, 2, 3], GREEDY, request_id="mine"))) > 0
    assert not llm.abort("mine")


def test_of_two_streams_that_begin_at_once_one_has_the_name(llm: LLM) -> None:
    async def read() -> int:
        return len([c async for c in llm.astream([4, 5, 6], GREEDY, request_id="mine")])

    async def read_both() -> list[int | BaseException]:
        return list(await asyncio.gather(read(), read(), return_exceptions=True))

    refused, num_chunks = sorted(asyncio.run(read_both()), key=lambda each: isinstance(each, int))
    assert isinstance(refused, RequestError) and isinstance(num_chunks, int) and num_chunks > 0
    with pytest.raises(RequestError, match="must be"):
        next(
            llm.stream([4, 5, 6], SamplingParams(top_p=0.5, prompt_logprobs=99), request_id="mine")
        )
    assert len(list(llm.stream([1, 2, 3], GREEDY, request_id="mine"))) > 0


def test_an_interrupted_submission_is_aborted_though_its_requests_come_after_the_abort(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[Any] = []

    def interrupt(ref: Any, *_: Any) -> None:
        submitted.append(ref)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("cluster.client.driver_handle.result_of", interrupt)
        # Too large to go inline.
        llm.generate([[i % 1000] * 200 for i in range(600)], SamplingParams(max_tokens=1))
    ray.get(submitted[0])
    wait_until(lambda: idle(llm), "freeing the blocks", 8.0)


def test_async_twins_run_inside_a_running_event_loop(llm: LLM) -> None:
    async def main() -> tuple[Any, list[Chunk], Any]:
        whole = asyncio.create_task(llm.agenerate([[1, 2, 3], [4, 5]], GREEDY))
        chunks = [chunk async for chunk in llm.astream([1, 2, 3], GREEDY)]
        blocking = llm.generate([1, 2, 3], GREEDY)  # the plain call works here, too
        return await whole, chunks, blocking

    whole, chunks, blocking = asyncio.run(main())
    assert whole[0].token_ids == [t for c in chunks for t in c.token_ids] == blocking[0].token_ids
    assert len(whole[1].token_ids) == NUM_OUTPUT


def test_canceling_an_async_call_frees_its_blocks(llm: LLM) -> None:
    async def main() -> None:
        task = asyncio.create_task(llm.agenerate([[1, 2, 3]], ENDLESS))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stream = llm.astream([1, 2, 3], ENDLESS)
        await anext(stream)
        await stream.aclose()

    asyncio.run(main())
    wait_until(lambda: idle(llm), "freeing the blocks", 8.0)


def test_a_frontend_that_stops_polling_has_its_requests_aborted(
    users_ray: None, small_model: SmallModel
) -> None:
    with LLM(small_model.path, frontend_timeout_s=1.0, **OPTIONS) as engine:
        params = SamplingParams(max_tokens=240, ignore_eos=True)
        silent = engine.client.builder.build(list(range(8)), params, lambda _: None)
        ray.get(engine._engine_processes.driver.submit.remote("silent", silent.requests))
        wait_until(lambda: not idle(engine), "the request's first block", 8.0)
        wait_until(lambda: idle(engine), "the abort", 8.0)


def test_shutdown_leaves_the_users_ray_running_and_nothing_of_ours(
    users_ray: None, small_model: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program creates the first ranks, beside the driver, which creates no others."""
    # Kept in a variable, because Ray ends actors that nobody refers to.
    created: dict[int, RankHandle] = {}

    class Noting(RankMaker):
        def create(self, place: Place, *arguments: Any) -> RankHandle:
            created[place.rank] = super().create(place, *arguments)
            return created[place.rank]

    monkeypatch.setattr("cluster.engine.start.RankMaker", Noting)
    before = processes(*OURS)
    engine = LLM(small_model.path, tensor_parallel_size=2, **OPTIONS)
    assert list(created) == [0, 1] and len(processes(*OURS) - before) == 3
    engine.shutdown()
    engine.shutdown()
    with pytest.raises(EngineDeadError, match="was shut down"):
        engine.generate([1, 2, 3], GREEDY)
    with pytest.raises(EngineDeadError, match="was shut down"):
        engine.stats()
    assert ray.is_initialized()
    wait_until(lambda: processes(*OURS) <= before, "the end of our actors", 5.0)


def test_two_engines_run_at_once_without_touching_each_other(llm: LLM, waiting_llm: LLM) -> None:
    alone = llm.generate(prompts(), GREEDY)

    async def both() -> list[Any]:
        first, other = llm.agenerate(prompts(), GREEDY), waiting_llm.agenerate(prompts(), GREEDY)
        return list(await asyncio.gather(first, other))

    results = asyncio.run(both())
    for outputs in (*results, llm.generate(prompts(), GREEDY)):
        check_equal_but_for_near_ties(outputs, alone)


def check_equal_but_for_near_ties(outputs: list[Any], expected: list[Any]) -> None:
    same = sum(a.token_ids == b.token_ids for a, b in zip(outputs, expected, strict=True))
    assert same >= len(expected) - 1, "float32 near ties are rare"


def test_a_cluster_with_too_few_cpus_is_refused_with_what_each_node_has(
    users_ray: None, small_model: SmallModel
) -> None:
    from configs.model import ModelConfig

    assert 16 not in ModelConfig.from_dir(small_model.path).possible_tensor_parallel_sizes()
    from cluster.resources.placement import Placement

    with pytest.raises(ConfigError, match=r"needed 16 CPU; nodes have \[.*12 CPU"):
        Placement(16, "cpu", "test").reserve()


def test_ranks_do_not_come_back_with_another_checkpoint(
    users_ray: None, small_model: SmallModel, tmp_path: Path
) -> None:
    model = shutil.copytree(small_model.path, tmp_path / "model")
    with LLM(model, tensor_parallel_size=2, **OPTIONS) as engine:
        stream = engine.stream([1, 2, 3], ENDLESS)
        next(stream)
        weights = next(model.glob("*.safetensors"))
        # Another file, as after a download, because the old one is mapped.
        (model / "new").write_bytes(weights.read_bytes()[:-1000] + bytes(1000))
        (model / "new").replace(weights)
        os.kill(processes_of(engine)["rank 1"].pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(EngineDeadError, match=r"the files of the checkpoint have changed"):
            list(stream)
        with pytest.raises(EngineDeadError):
            engine.generate([1, 2, 3], GREEDY)
        assert time.monotonic() - began < 20


def test_processes_of_an_engine_on_one_host_listen_nowhere_but_where_ray_does(llm: LLM) -> None:
    """Ray listens on one port in each of its processes. Where the ranks met is closed by now."""
    ours = processes_of(llm)
    assert {"driver", "rank 0", "rank 1"} <= set(ours)
    num_ports = {name: len(listening(process.pid)) for name, process in ours.items()}
    assert set(num_ports.values()) == {1}, num_ports


def test_a_failed_start_names_the_rank_and_leaves_no_actor(
    users_ray: None, small_model: SmallModel
) -> None:
    before = processes(*OURS)
    with pytest.raises((ConfigError, WorkerError), match="block"):
        LLM(small_model.path, device="cpu", kv_cache_bytes=10, tensor_parallel_size=2)
    wait_until(lambda: processes(*OURS) <= before, "the end of our actors", 5.0)


def test_a_start_that_takes_too_long_names_the_ranks(
    users_ray: None, small_model: SmallModel
) -> None:
    with pytest.raises(
        WorkerError, match=r"did not start within 0.1 s \(start_timeout_s\): .*rank 0 .*rank 1 "
    ):
        LLM(small_model.path, tensor_parallel_size=2, start_timeout_s=0.1, **OPTIONS)
