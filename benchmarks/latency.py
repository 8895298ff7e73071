"""Latency under load, and how much arriving prompts delay running decodes: `python -m
benchmarks.latency [--rates 1 2 4]`.

`rates`: time to the first token and between tokens of synthetic requests that arrive at fixed rates
(Poisson).
`chunks`: for each limit of tokens per step, the gaps between tokens of some running decodes alone
and while 1,000-token prompts arrive steadily, in turn; `ratio_p99` is the second's 99th percentile
over the first's. A larger limit processes prompts sooner (`prompt_ttft_p50_s`) and delays decodes
longer. The limit: a ratio of 1.
"""

from __future__ import annotations

import argparse
import math
import random
from typing import Any

from benchmarks.common import alternate, median, model_or_random, write_result
from cluster import LLM, SamplingParams
from cluster.commands.batch import BatchRequest
from cluster.commands.bench import synthetic_requests
from cluster.commands.timing import draw_due_times_s, percentiles, run_timed

DECODE_PROMPT = 16
ARRIVED_PROMPT = 1000
MAX_MODEL_LEN = 2048


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
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[0.5, 1.0, 2.0, 4.0], help="requests per second"
    )
    parser.add_argument("--num-seqs", type=int, default=32, help="requests at each rate")
    parser.add_argument("--max-input", type=int, default=256)
    parser.add_argument("--max-output", type=int, default=64)
    parser.add_argument("--chunk-sizes", type=int, nargs="+", default=[64, 128, 256, 512, 2048])
    parser.add_argument("--num-decodes", type=int, default=8)
    parser.add_argument("--decode-tokens", type=int, default=300)
    parser.add_argument(
        "--prompt-rate", type=float, default=2.0, help="prompts per second beside the decodes"
    )
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    sizes = {
        k: getattr(args, k)
        for k in ("tp", "num_seqs", "max_input", "max_output", "num_decodes", "prompt_rate")
    }
    name = None if args.model is None else args.model.rsplit("/", 1)[-1]
    measured: dict[str, Any] = {"model": name or "60m shape", **sizes}
    with model_or_random(args.model) as model:
        measured["rates"] = at_rates(model, args)
        measured["chunks"] = [beside_prompts(model, args, size) for size in args.chunk_sizes]
    result = "latency" if name is None else f"latency_{name}"
    write_result(
        result, "ratio_p99 of 1: decodes as if no prompt arrived", measured, module="latency"
    )


def at_rates(model: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per rate, all on one engine; each rate has its own prompts."""
    rows = []
    with LLM(model, tensor_parallel_size=args.tp, device="cpu", max_model_len=MAX_MODEL_LEN) as llm:
        vocab_size = llm.report.limits.vocab_size
        for seed, rate in enumerate(args.rates):
            requests = synthetic_requests(
                args.num_seqs,
                args.max_input,
                args.max_output,
                seed=seed,
                temperature=0.6,
                vocab_size=vocab_size,
            )
            timed = run_timed(llm, requests, draw_due_times_s(len(requests), rate, seed))
            rows.append(
                {
                    "rate": rate,
                    "ttft_s": timed.ttft_percentiles(),
                    "inter_token_s": timed.inter_token_percentiles(),
                    "output_tokens_per_s": round(timed.output_tokens_per_s, 2),
                }
            )
    return rows


def beside_prompts(model: str, args: argparse.Namespace, chunk_size: int) -> dict[str, Any]:
    """The row for one limit of tokens per step."""
    numbers = random.Random(chunk_size)
    with LLM(
        model,
        tensor_parallel_size=args.tp,
        device="cpu",
        max_num_seqs=min(32, chunk_size),
        max_num_batched_tokens=chunk_size,
        max_model_len=MAX_MODEL_LEN,
    ) as llm:
        window_s = decode(llm, args, numbers, 0.0)["total_s"]
        runs = {
            "alone": lambda: decode(llm, args, numbers, 0.0),
            "arriving": lambda: decode(llm, args, numbers, window_s),
        }
        values = alternate(runs, args.repeats)
    medians = {
        name: {key: median([v[key] for v in rows]) for key in rows[0]}
        for name, rows in values.items()
    }
    ratio = medians["arriving"]["gap_p99_s"] / medians["alone"]["gap_p99_s"]
    return {"max_num_batched_tokens": chunk_size, **medians, "ratio_p99": round(ratio, 3)}


def decode(
    llm: LLM, args: argparse.Namespace, numbers: random.Random, arriving_s: float
) -> dict[str, float]:
    """Gaps between tokens of the decoding requests, while prompts arrive for `arriving_s` seconds
    after all of them have begun; with 0, until they end and without prompts.
    """
    decodes = [request(numbers, DECODE_PROMPT, args.decode_tokens) for _ in range(args.num_decodes)]
    due_s = [0.0] * len(decodes)
    prompts_due_s = [(i + 1) / args.prompt_rate for i in range(int(arriving_s * args.prompt_rate))]
    prompts = [request(numbers, ARRIVED_PROMPT, 1) for _ in prompts_due_s]
    timed = run_timed(llm, decodes + prompts, due_s + prompts_due_s)
    lines, of_prompts = timed.timelines[: len(decodes)], timed.timelines[len(decodes) :]
    since_s = max(line.due_s + (line.time_to_first_token_s or 0.0) for line in lines)
    until_s = since_s + arriving_s if prompts else math.inf
    gaps = percentiles([gap for line in lines for gap in line.inter_token_gaps_s(since_s, until_s)])
    first = percentiles(
        [
            line.time_to_first_token_s
            for line in of_prompts
            if line.time_to_first_token_s is not None
        ]
    )
    values = {"gap_p50_s": gaps["p50"], "gap_p99_s": gaps["p99"], "prompt_ttft_p50_s": first["p50"]}
    return {name: value for name, value in values.items() if value is not None} | {
        "total_s": timed.total_s
    }


def request(numbers: random.Random, num_prompt: int, num_output: int) -> BatchRequest:
    """A synthetic request that shares nothing with the cache."""
    params = SamplingParams(max_tokens=num_output, ignore_eos=True, temperature=0.0)
    token_ids = [numbers.randrange(500) for _ in range(num_prompt)]
    return BatchRequest(source="", prompt={"prompt_token_ids": token_ids}, params=params)


if __name__ == "__main__":
    main()
