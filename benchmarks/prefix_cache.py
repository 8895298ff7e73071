"""The time that the prefix cache saves: `python -m benchmarks.prefix_cache [--model DIR]`.

Requests that share a prefix, sent all at once, to two engines in turn, one with and one without
prefix caching: time to the first token, total time, and the share of prompt tokens found in the
cache. Each run has its own prefix, so nothing of the run before is reused. The limit: with
everything shared computed once, `cached_share` would be `shareable_share`.
"""

from __future__ import annotations

import argparse
import random
from contextlib import ExitStack
from typing import Any

from benchmarks.common import alternate, median, model_or_random, write_result
from cluster import LLM, SamplingParams
from cluster.commands.batch import BatchRequest
from cluster.commands.timing import run_timed


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        help="directory; random weights in the shape of 60 million parameters if left out",
    )
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--num-seqs", type=int, default=64)
    parser.add_argument("--prefix", type=int, default=2000, help="tokens shared")
    parser.add_argument("--own", type=int, default=20, help="tokens of each request")
    parser.add_argument("--output", type=int, default=16, help="tokens of each output")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    numbers = random.Random(0)
    with model_or_random(args.model) as model, ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                LLM(
                    model,
                    tensor_parallel_size=args.tp,
                    device="cpu",
                    max_num_seqs=args.num_seqs,
                    max_model_len=args.prefix + args.own + args.output,
                    kv_cache_bytes=4 * 2**30,
                    enable_prefix_caching=name == "on",
                )
            )
            for name in ("on", "off")
        }
        runs = {name: (lambda llm=llm: run(llm, args, numbers)) for name, llm in engines.items()}
        values = alternate(runs, args.repeats)
    medians = {
        name: {key: median([v[key] for v in rows]) for key in rows[0]}
        for name, rows in values.items()
    }
    on, off = medians["on"], medians["off"]
    prompts = args.num_seqs * (args.prefix + args.own)
    measured: dict[str, Any] = {
        "model": "60m shape" if args.model is None else args.model.rsplit("/", 1)[-1],
        **{k: getattr(args, k) for k in ("tp", "num_seqs", "prefix", "own", "output", "repeats")},
        **medians,
        "shareable_share": round((args.num_seqs - 1) * args.prefix / prompts, 4),
        "times_faster": {
            key: round(off[key] / on[key], 3) for key in ("ttft_p50_s", "ttft_p99_s", "total_s")
        },
    }
    write_result("prefix_cache", "cached_share at most shareable_share", measured)


def run(llm: LLM, args: argparse.Namespace, numbers: random.Random) -> dict[str, float]:
    """Run one batch with a new prefix."""
    prefix = [numbers.randrange(500) for _ in range(args.prefix)]
    params = SamplingParams(max_tokens=args.output, ignore_eos=True, temperature=0.0)
    requests = [
        BatchRequest(
            source="",
            prompt={"prompt_token_ids": prefix + [numbers.randrange(500) for _ in range(args.own)]},
            params=params,
        )
        for _ in range(args.num_seqs)
    ]
    timed = run_timed(llm, requests, [0.0] * len(requests))
    first = timed.ttft_percentiles()
    assert first["p50"] is not None and first["p99"] is not None
    cached = sum(generation.num_cached_tokens for generation in timed.generations)
    return {
        "ttft_p50_s": first["p50"],
        "ttft_p99_s": first["p99"],
        "total_s": timed.total_s,
        "cached_share": cached / (args.num_seqs * (args.prefix + args.own)),
    }


if __name__ == "__main__":
    main()
