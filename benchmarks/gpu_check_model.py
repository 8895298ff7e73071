"""Two sections of the GPU check: the model that comes with Eagleray must answer correctly, and
CUDA's own checkers run the kernels.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu_check_common import Check, Row, free_memory, rounded
from configs.engine import EngineConfig
from configs.model import ModelConfig
from configs.paths import DEFAULT_MODEL_DIR
from scheduler.engine import Engine
from scheduler.messages import Request, ints
from scheduler.params import Sampling
from scheduler.scheduler import Scheduler
from workers.configuration import resolve_config
from workers.in_process import InProcessExecutor

_TOOLS = ("memcheck", "racecheck", "initcheck")
_FEWEST_S = 15.0  # importing torch under a checker takes about this long
_TOOL_ENDS_S = 3.0
_ANSWERS = {"What is 47 + 38?": "85", "What is 82 - 35?": "47"}


def answers(check: Check) -> None:
    """Answers with real weights, the tokenizer and the chat template, with default options."""
    if not check.on_gpu:
        check.add("default model", lambda: {"note": "takes minutes in the interpreter"})
        return
    for backend in check.backends:
        for kv_cache_dtype in ("auto", "fp8_e4m3") if backend == "triton" else ("auto",):
            name = f"default model, {backend}, cache {kv_cache_dtype}"
            check.add(name, partial(_answers, check, backend, kv_cache_dtype))


def _answers(check: Check, backend: str, kv_cache_dtype: str) -> Row:
    # These need packages that the other sections do not.
    from cluster.client.prompts import Conversation
    from cluster.client.tokenizer import Tokenizer
    from cluster.limits import limits_of

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
                    token_ids=ints(prompt),
                    num_prompt_tokens=len(prompt),
                    sampling=Sampling(
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
            for seq in output.finished if output is not None else ():
                said[seq.request_id] = tokenizer.decode(seq.token_ids[seq.num_prompt_tokens :])
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


def sanitizer(check: Check) -> None:
    """compute-sanitizer over the small shapes of `numerics`, where it is installed. The tools share
    the time that is left; a tool may run out of time before it has seen all shapes.
    """
    path = shutil.which("compute-sanitizer")
    for place, tool in enumerate(_TOOLS):
        if path is None or not check.on_gpu:
            check.add(tool, lambda: {"note": "needs a GPU and compute-sanitizer"})
            continue
        left_s, _ = signal.getitimer(signal.ITIMER_REAL)  # until the section must end
        limit_s = left_s / (len(_TOOLS) - place) - _TOOL_ENDS_S
        if limit_s < _FEWEST_S:
            check.add(tool, lambda: {"note": "no time was left"})
        else:
            check.add(tool, partial(_run_tool, path, tool, limit_s))


def _run_tool(path: str, tool: str, limit_s: float) -> Row:
    """Any error that the tool reports is exit code 99."""
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "part.json"
        command = [path, "--tool", tool, "--error-exitcode", "99", sys.executable]
        command += ["-m", "benchmarks.gpu_check", "--small", "--sections", "numerics"]
        command += ["--part", str(part), "--until", str(time.monotonic() + limit_s)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_s + _TOOL_ENDS_S, check=False
        )
        checked = len(json.loads(part.read_text())["rows"]) if part.exists() else 0
    summary = [line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line]
    said = (summary or ["nothing"])[-1][-60:]
    return {"said": said, "rows": checked, "passed": done.returncode == 0}
