"""A section of the GPU check: the model that comes with Eagleray must answer correctly."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.gpu_check_common import Check, Row, free_memory, refusal, rounded
from benchmarks.in_process import InProcessExecutor
from configs.engine import EngineConfig
from configs.model import ModelConfig
from configs.paths import DEFAULT_MODEL_DIR
from scheduler.engine import Engine
from scheduler.messages import Request, int32_array
from scheduler.params import ResolvedSampling
from scheduler.scheduler import Scheduler
from workers.configuration import resolve_config

_ANSWERS = {"What is 47 + 38?": "85", "What is 82 - 35?": "47"}


def answers(check: Check) -> None:
    """Answers with real weights, the tokenizer and the chat template, with default options. A
    backend that does not take the head dim of the model is left out, with its reason.
    """
    if not check.on_gpu:
        check.add("default model", lambda: {"note": "takes minutes in the interpreter"})
        return
    model = ModelConfig.from_dir(DEFAULT_MODEL_DIR)
    for backend, kernels in check.backends.items():
        for kv_cache_dtype in ("auto", *kernels.capabilities.kv_cache_dtypes):
            name = f"default model, {backend}, cache {kv_cache_dtype}"
            if reason := refusal(kernels, model.head_dim):
                check.add(name, partial(dict, note=reason))
            else:
                check.add(name, partial(_answers, check, backend, kv_cache_dtype))


def _answers(check: Check, backend: str, kv_cache_dtype: str) -> Row:
    # These need packages that the other sections do not.
    from cluster.client.prompts import Conversation
    from cluster.client.tokenizer import Tokenizer
    from cluster.scheduler_limits import limits_of

    free_memory(check)
    free_before = torch.cuda.mem_get_info(check.device)[0] if check.on_gpu else 0
    engine_config = EngineConfig(
        device=check.device.type,
        attention_backend=backend,
        kv_cache_dtype=kv_cache_dtype,
        gpu_memory_utilization=0.5,
        max_num_seqs=8,
    )
    model = ModelConfig.from_dir(DEFAULT_MODEL_DIR)
    config = resolve_config(engine_config, model, DEFAULT_MODEL_DIR, check.device.type)
    tokenizer = Tokenizer(DEFAULT_MODEL_DIR)
    executor = InProcessExecutor(config)
    try:
        limits = limits_of(config, executor.num_kv_blocks)
        engine = Engine(Scheduler(limits), executor, num_steps_ahead=config.num_steps_ahead)
        for question in _ANSWERS:
            text = tokenizer.render_chat(
                Conversation(messages=[{"role": "user", "content": question}])
            )
            prompt = tokenizer.encode_rendered(text)
            engine.add(
                Request(
                    request_id=question,
                    token_ids=int32_array(prompt),
                    num_prompt_tokens=len(prompt),
                    sampling=ResolvedSampling(
                        seed=0,
                        max_tokens=24,
                        temperature=0.0,
                        stop_token_ids=frozenset(model.eos_token_ids),
                    ),
                )
            )
        said = {}
        while engine.has_work:
            output = engine.step()
            for seq in output.finished_sequences if output is not None else ():
                output_ids = seq.token_ids[seq.num_prompt_tokens :].tolist()
                said[seq.request_id] = tokenizer.decode(output_ids)
        row: Row = {"answers": " | ".join(said.values())[:60]}
        if check.on_gpu:
            free, total = torch.cuda.mem_get_info(check.device)
            # What the ledger says, beside the memory really in use, without what others use.
            row |= {
                "promised_gib": rounded(total * engine_config.gpu_memory_utilization / 2**30),
                "taken_gib": rounded((free_before - free) / 2**30),
            }
        return row | {"passed": all(end in said[q] for q, end in _ANSWERS.items())}
    finally:
        executor.close()
        free_memory(check)
