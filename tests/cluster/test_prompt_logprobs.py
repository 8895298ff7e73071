"""Log probabilities of prompts through real actors, one of which dies on the way."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
import torch

from cluster import LLM, SamplingParams
from cluster.commands.lose_rank import processes_of
from tests.cluster.conftest import OPTIONS, SmallModel
from tests.cluster.processes import wait_until

pytestmark = pytest.mark.engine

TOLERANCE = 1e-4


def test_prompts_are_scored_once_although_a_rank_dies(
    users_ray: None, small_model: SmallModel
) -> None:
    rng = np.random.default_rng(2)
    prompts = [rng.integers(3, 1000, 200).tolist() for _ in range(6)]
    params = SamplingParams(prompt_logprobs=3, max_tokens=0, n=2, temperature=0.0)
    options = OPTIONS | {"max_num_seqs": 4, "max_num_batched_tokens": 8}
    with LLM(small_model.path, tensor_parallel_size=2, **options) as llm:
        generations = llm.client.submit(prompts, params)
        wait_until(lambda: llm.stats().num_steps > 40, "40 steps", 60)
        os.kill(processes_of(llm)["rank 1"].pid, signal.SIGKILL)
        outputs = llm.client.wait(generations)
        assert llm.stats().num_recoveries == 1
        assert llm.stats().num_cached_tokens > 0, "the second output of each reads the cache"
    for prompt, output, generation in zip(prompts, outputs, generations, strict=True):
        assert (output.token_ids, output.finish_reason) == ([], "length")
        with torch.inference_mode():
            logits = small_model.model(torch.tensor([prompt])).logits[0, :-1]
        exact = logits.double().log_softmax(dim=1)
        want = exact.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
        for follower in generation.outputs:
            entries = list(follower.prompt_logprobs or ())
            assert len(entries) == len(prompt) and entries[0] is None
            values = [entry.logprob for entry in entries[1:] if entry is not None]
            np.testing.assert_allclose(values, want, atol=TOLERANCE)
