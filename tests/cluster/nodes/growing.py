"""Engines that are added under load and removed after it, each on a node that the autoscaler adds.

The program below serves from a cluster as `autoscaling.py` describes it. Every request has to be
answered, whatever comes and goes. `python -m tests.cluster.nodes.growing ADDRESS`
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import httpx
import ray
from ray import serve

from cluster.serve.application import build

PORT = 8000
NUM_CLIENTS = 12
LIMIT_S = 120.0
SUMS = [(47, 38), (12, 9), (30, 45), (61, 17)]
OPTIONS: dict[str, Any] = {
    "engine": {
        "device": "cpu",
        "tensor_parallel_size": 1,  # the other core is for what starts beside the load
        "wait_for_nodes_s": 120,
        "spares": "off",  # they would be made beside the load that the next engine is to take
    },
    "replicas": 1,
    "max_replicas": 2,
    "target_ongoing_requests": 3,
    "upscale_delay_s": 1.0,
    "downscale_delay_s": 1.0,
    "served_model_name": "tiny",
}


class Clients:
    """Each client sends sums one after another, streamed and whole, while `wanted` exceeds its
    number.
    """

    def __init__(self) -> None:
        self.wanted = 0
        self.num_answered = 0
        self.failures: list[str] = []
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True)
            for number in range(NUM_CLIENTS)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self.wanted = -1
        for thread in self._threads:
            thread.join(60.0)

    def _run(self, number: int) -> None:
        turn = number
        while self.wanted >= 0:
            if number >= self.wanted:
                time.sleep(0.05)
                continue
            turn += 1
            a, b = SUMS[turn % len(SUMS)]
            body = {
                "model": "tiny",
                "messages": [{"role": "user", "content": f"What is {a} + {b}?"}],
                "temperature": 0,
                "stream": turn % 2 == 0,
                "min_tokens": 2,
            }
            url = f"http://127.0.0.1:{PORT}/v1/chat/completions"
            try:
                answer = httpx.post(url, json=body, timeout=60.0)
                is_right = answer.status_code == 200 and (
                    str(a + b) in answer.text if turn % 2 else "[DONE]" in answer.text
                )
                if not is_right:
                    self.failures.append(f"{answer.status_code}: {answer.text[:300]}")
            except httpx.HTTPError as error:
                self.failures.append(repr(error))
            self.num_answered += 1


def num_running() -> int:
    """Replicas that take requests."""
    deployment = serve.status().applications["eagleray"].deployments["engine"]
    by_state: dict[Any, int] = {**deployment.replica_states}  # strings, unlike their annotation
    return by_state.get("RUNNING", 0)


def wait_for_replicas(count: int) -> float:
    """Wait until exactly this many run; the seconds that took."""
    began = time.monotonic()
    while num_running() != count:
        assert time.monotonic() - began < LIMIT_S, serve.status()
        time.sleep(0.2)
    return round(time.monotonic() - began, 1)


def main() -> None:
    ray.init(f"{sys.argv[1]}:6379", log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT}, proxy_location="HeadOnly")
    serve.run(build(OPTIONS), name="eagleray")
    clients = Clients()
    assert num_running() == 1
    clients.wanted = NUM_CLIENTS
    up_s = wait_for_replicas(2)
    busy = clients.num_answered
    time.sleep(1.5)
    assert clients.num_answered > busy
    clients.wanted = 1
    down_s = wait_for_replicas(1)
    time.sleep(0.5)
    clients.stop()
    assert not clients.failures, clients.failures[:5]
    print(f"up {up_s} s, down {down_s} s, {clients.num_answered} requests, none failed", flush=True)
    serve.shutdown()


if __name__ == "__main__":
    main()
