"""Batch inference over a Ray Data dataset: each worker of the dataset has an engine of its own.

    python examples/batch_over_dataset.py --rows 200 --engines 2 --output answers/

The dataset streams: rows are read, answered and written while others wait, so it may be larger than
memory. `--engines` times `--tp` GPUs (or CPUs, where there are none) are used.
"""

import argparse
from typing import Any

import ray

from eagleray import LLM, SamplingParams


class Answerer:
    """A worker: one engine, which answers a batch of rows at a time."""

    def __init__(self, model: str | None, tensor_parallel_size: int) -> None:
        self.llm = LLM(model, tensor_parallel_size=tensor_parallel_size, log_level="warning")

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        conversations = [[{"role": "user", "content": text}] for text in batch["question"]]
        outputs = self.llm.chat(conversations, SamplingParams(max_tokens=64, temperature=0))
        return {**batch, "answer": [output.text for output in outputs]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a directory or hub id; by default the small model")
    parser.add_argument("--tp", type=int, default=1, help="ranks per engine")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--output", required=True, help="folder for Parquet files")
    args = parser.parse_args()
    ray.init()
    # Here could stand ray.data.read_parquet("s3://..."), or any other source.
    rows = [{"question": f"What is {i % 90 + 1} + {i % 9 + 1}?"} for i in range(args.rows)]
    answered = ray.data.from_items(rows).map_batches(
        Answerer,
        fn_constructor_args=(args.model, args.tp),
        batch_size=64,
        concurrency=args.engines,
        num_cpus=0,  # the ranks ask for what they compute on
    )
    answered.write_parquet(args.output)


if __name__ == "__main__":
    main()
