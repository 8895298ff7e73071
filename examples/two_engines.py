"""Two engines on one cluster: one proposes answers, the other says how likely it finds them.

    python examples/two_engines.py --proposer Qwen/Qwen3-0.6B --judge Qwen/Qwen3-8B --judge-tp 2

Both are actors of the same Ray, each with its own ranks and cache, and both work at the same time:
while one batch is judged, the next one is being proposed.
"""

import argparse
import asyncio

import ray

from eagleray import LLM, SamplingParams

QUESTIONS = ["What is 47 + 38?", "What day comes after Tuesday?", "Spell LAMP backwards."]


async def best_answer(question: str, proposer: LLM, judge: LLM) -> str:
    """The one of several proposals that the judge's own answer begins like."""
    messages = [{"role": "user", "content": question}]
    [proposals], [judged] = await asyncio.gather(
        proposer.achat(messages, SamplingParams(n=4, temperature=1.2, max_tokens=24)),
        judge.achat(messages, SamplingParams(temperature=0, max_tokens=24)),
    )
    texts = [answer.text for answer in proposals.outputs]
    agreeing = [text for text in texts if text == judged.text]
    return f"{question} {judged.text} ({len(agreeing)} of {len(texts)} proposals agree)"


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--proposer", help="a directory or hub id; by default the small model")
    parser.add_argument("--judge", help="likewise")
    parser.add_argument("--judge-tp", type=int, default=1)
    args = parser.parse_args()
    ray.init()  # or address="auto", for a cluster that runs
    with (
        LLM(args.proposer, log_level="warning") as proposer,
        LLM(args.judge, tensor_parallel_size=args.judge_tp, log_level="warning") as judge,
    ):
        for line in await asyncio.gather(*(best_answer(q, proposer, judge) for q in QUESTIONS)):
            print(line)


if __name__ == "__main__":
    asyncio.run(main())
