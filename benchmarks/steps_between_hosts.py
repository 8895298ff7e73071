"""What a decode step sends from one host to another: `python -m benchmarks.steps_between_hosts`.

An engine over two hosts made of network namespaces (`tests.cluster.nodes.hosts`), driver and first
ranks on one: per step, the packets and bytes that leave it, without those of an idle cluster. Two
models that differ only in their layers tell what a layer adds, which is two sums over the ranks,
from the rest, which is Ray's calls and the sums of the embedding and the sampler. Needs root. There
is no limit with which to compare the counts. Times would be those of two hosts on the same cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import QWEN3_0_6B, write_result
from benchmarks.transports import sent
from configs.paths import SOURCE_ROOT
from kernels.cpu.cache import cache_dir
from tests.cluster.nodes.hosts import hosts, why_not
from workers.models.random_checkpoint import write_random_checkpoint

LAYERS = (2, 10)
ROWS = (1, 16)
TOKENS = 60
IDLE_S = 5.0
LIMIT_S = 240.0
RAY = str(Path(sys.executable).with_name("ray"))


def count(model: str, head: str, tp: int, *, share: bool) -> list[dict[str, Any]]:
    """The counts per number of rows; run on the host `head`, in its Ray cluster."""
    from cluster import LLM, SamplingParams

    options: dict[str, Any] = {"device": "cpu", "kv_cache_bytes": 2**27, "spares": "off"}
    found = []
    with LLM(
        model,
        tensor_parallel_size=tp,
        ray_address=f"{head}:6379",
        log_level="error",
        shared_memory=share,
        **options,
    ) as llm:
        before = sent()
        time.sleep(IDLE_S)
        idle_per_s = [(b - a) / IDLE_S for a, b in zip(before, sent(), strict=True)]
        for rows in ROWS:
            params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
            for _ in range(2):  # the first time, kernels are compiled
                steps, before, began = llm.stats().num_steps, sent(), time.perf_counter()
                llm.generate([[1, 2, 3 + row] for row in range(rows)], params)
                seconds, after = time.perf_counter() - began, sent()
                steps = llm.stats().num_steps - steps
            packets, size = (
                (end - begin - idle * seconds) / steps
                for begin, end, idle in zip(before, after, idle_per_s, strict=True)
            )
            found.append({"rows": rows, "packets": packets, "bytes": size})
    return found


def measure(model: str, tp: int, *, share: bool) -> list[dict[str, Any]]:
    """Run `count` in a cluster of two hosts with the ranks divided between them."""
    environment = os.environ | {
        "EAGLERAY_CACHE_DIR": str(cache_dir()),
        "PYTHONPATH": str(SOURCE_ROOT),
        "RAY_AUTH_MODE": "disabled",
    }
    with hosts(2) as made:
        head = made[0].address
        for host in made:
            where = [f"--address={head}:6379"]
            if host is made[0]:
                where = ["--head", "--port=6379", "--include-dashboard=false"]
            own = [f"--node-ip-address={host.address}", "--disable-usage-stats"]
            host.run(RAY, "start", *where, *own, f"--num-cpus={tp // 2}", env=environment)
        command = [sys.executable, "-m", "benchmarks.steps_between_hosts", "--model", model]
        command += ["--head", head, "--tp", str(tp), *([] if share else ["--alone"])]
        program = made[0].start(*command, cwd=SOURCE_ROOT, env=environment, stdout=subprocess.PIPE)
        said, _ = program.communicate(timeout=LIMIT_S)
    assert program.returncode == 0
    found: list[dict[str, Any]] = json.loads(said.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Count what a step sends to another host.")
    parser.add_argument("--model")
    parser.add_argument("--head")
    parser.add_argument("--tp", type=int)
    parser.add_argument("--alone", action="store_true", help="no memory shared within a host")
    args = parser.parse_args()
    if args.head is not None:
        print(json.dumps(count(args.model, args.head, args.tp, share=not args.alone)))
        return
    if (reason := why_not()) is not None:
        sys.exit(reason)
    lines = []
    for tp, share, transport in (
        (2, True, "gloo"),
        (4, False, "gloo"),
        (4, True, "shared memory within hosts, gloo between them"),
    ):
        by_layers = {}
        for layers in LAYERS:
            raw = QWEN3_0_6B | {"num_hidden_layers": layers, "vocab_size": 4096}
            with tempfile.TemporaryDirectory(dir="/var/tmp") as model:  # each host has its own /tmp
                write_random_checkpoint(Path(model), raw, torch.bfloat16)
                by_layers[layers] = measure(model, tp, share=share)
        few, many = (by_layers[layers] for layers in LAYERS)
        for less, more in zip(few, many, strict=True):
            line: dict[str, Any] = {"tp": tp, "transport": transport, "rows": less["rows"]}
            for unit in ("packets", "bytes"):
                per_layer = (more[unit] - less[unit]) / (LAYERS[1] - LAYERS[0])
                line[f"{unit}_per_layer"] = round(per_layer, 1)
                line[f"{unit}_besides"] = round(less[unit] - LAYERS[0] * per_layer, 1)
            lines.append(line)
            print(json.dumps(line), file=sys.stderr, flush=True)
    write_result("steps_between_hosts", "none: counts", {"steps": lines})


if __name__ == "__main__":
    main()
