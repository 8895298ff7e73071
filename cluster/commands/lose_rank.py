"""Kill a rank while text streams, and see it continue: `python -m cluster.commands.lose_rank
[--tp 2]`.

At the end the tokens are compared with those of the same request without the kill. Exit code 1 if
they differ.
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
KILL_AFTER_TOKENS = 100
SPARES_TIMEOUT_S = 60.0


def processes_of(llm: LLM) -> dict[str, ProcessId]:
    """The engine's processes by name."""
    processes: dict[str, ProcessId] = ray.get(
        llm._engine_processes.driver.processes.remote(), timeout=10
    )
    return processes


def main() -> None:
    """Stream, and kill the last rank meanwhile."""
    parser = argparse.ArgumentParser(description="A rank is killed while its text streams.")
    parser.add_argument("--tp", type=int, default=2, help="number of ranks")
    last_rank = parser.parse_args().tp - 1
    logging.getLogger("eagleray").setLevel(logging.ERROR)
    with LLM(tensor_parallel_size=last_rank + 1, dtype="float32", log_level="error") as llm:
        expected_token_ids = llm.generate(PROMPT, PARAMS)[0].token_ids
        print("[waiting for the spares, which are made when an engine has served for 2 s]")
        deadline_s = time.monotonic() + SPARES_TIMEOUT_S
        while f"spare {last_rank}" not in processes_of(llm) and time.monotonic() < deadline_s:
            time.sleep(0.2)
        token_ids: list[int] = []
        longest_gap_s, last_chunk_s = 0.0, time.monotonic()
        for chunk in llm.stream(PROMPT, PARAMS):
            now_s = time.monotonic()
            longest_gap_s, last_chunk_s = max(longest_gap_s, now_s - last_chunk_s), now_s
            print(chunk.text, end="", flush=True)
            token_ids += chunk.token_ids
            if len(token_ids) == KILL_AFTER_TOKENS:
                process = processes_of(llm)[f"rank {last_rank}"]
                os.kill(process.pid, signal.SIGKILL)
                print(f"\n[process {process.pid}, rank {last_rank}, was killed]", flush=True)
        comparison = "the same" if token_ids == expected_token_ids else "NOT the same"
        print(
            f"\n[{len(token_ids)} tokens; the longest wait for one took {longest_gap_s:.2f} s;"
            f" {comparison} tokens as without]"
        )
    if token_ids != expected_token_ids:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
