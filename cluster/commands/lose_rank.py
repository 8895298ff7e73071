"""Watch a rank being killed while its text keeps streaming: `python -m cluster.commands.lose_rank
[--tp 2]`.

At the end the text is compared with that of the same request undisturbed. Exit code 1 if it is
another.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import time

import ray

from cluster.llm import LLM
from cluster.ranks.processes import ProcessId
from scheduler.params import SamplingParams

PROMPT = {"messages": [{"role": "user", "content": "Count on from 17."}]}
PARAMS = SamplingParams(max_tokens=240, ignore_eos=True, temperature=0)
KILL_AT = 100  # tokens
SPARES_LIMIT_S = 60.0


def processes_of(llm: LLM) -> dict[str, ProcessId]:
    """The engine's processes by name."""
    found: dict[str, ProcessId] = ray.get(llm._engine.driver.processes.remote(), timeout=10)
    return found


def main() -> None:
    """Stream with some ranks, and kill the last of them."""
    parser = argparse.ArgumentParser(description="A rank is killed while its text streams.")
    parser.add_argument("--tp", type=int, default=2, help="number of ranks")
    last = parser.parse_args().tp - 1
    logging.getLogger("eagleray").setLevel(logging.ERROR)
    with LLM(tensor_parallel_size=last + 1, dtype="float32", log_level="error") as llm:
        expected = llm.generate(PROMPT, PARAMS)[0].token_ids
        print("[waiting for the spares, which are made when an engine has served for 5 s]")
        until = time.monotonic() + SPARES_LIMIT_S
        while f"spare {last}" not in processes_of(llm) and time.monotonic() < until:
            time.sleep(0.2)
        token_ids: list[int] = []
        worst_s, last_s = 0.0, time.monotonic()
        for chunk in llm.stream(PROMPT, PARAMS):
            now_s = time.monotonic()
            worst_s, last_s = max(worst_s, now_s - last_s), now_s
            print(chunk.text, end="", flush=True)
            token_ids += chunk.token_ids
            if len(token_ids) == KILL_AT:
                process = processes_of(llm)[f"rank {last}"]
                os.kill(process.pid, signal.SIGKILL)
                print(f"\n[process {process.pid}, rank {last}, was killed]", flush=True)
        print(
            f"\n[{len(token_ids)} tokens; the longest wait for one took {worst_s:.2f} s;"
            f" {'the same' if token_ids == expected else 'NOT the same'} tokens as without]"
        )
    if token_ids != expected:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
