"""Rollouts for reinforcement learning: many answers per question, with the log probability of every
token under the model that sampled it, and a reward.

    python examples/rollouts.py --questions 20 --samples 8 --output rollouts.npz

The file holds arrays, padded at the end of each row: `token_ids` int32 [rollouts, longest],
`logprobs` float32 of the same shape (NaN where there is no token), `reward` and `advantage` float32
[rollouts]. The advantage is that of GRPO (Shao et al. 2024, arXiv:2402.03300): the reward less the
mean of its question, over the standard deviation.
"""

import argparse

import numpy as np

from eagleray import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a directory or hub id; by default the small model")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--samples", type=int, default=8, help="answers per question")
    parser.add_argument("--output", required=True)
    args = parser.parse_args()
    pairs = [(37 * i % 90 + 1, 53 * i % 90 + 1) for i in range(args.questions)]
    asked = [[{"role": "user", "content": f"What is {a} + {b}?"}] for a, b in pairs]
    params = SamplingParams(temperature=1.5, max_tokens=16, n=args.samples, logprobs=0)
    with LLM(args.model, tensor_parallel_size=args.tp) as llm:
        outputs = llm.chat(asked, params, progress=True)

    answers = [answer for output in outputs for answer in output.outputs]
    shape = (len(answers), max(len(answer.token_ids) for answer in answers))
    token_ids, logprobs = np.zeros(shape, np.int32), np.full(shape, np.nan, np.float32)
    for row, answer in enumerate(answers):
        token_ids[row, : len(answer.token_ids)] = answer.token_ids
        logprobs[row, : len(answer.token_ids)] = [t.logprob for t in answer.logprobs or [] if t]
    reward = np.array(
        [
            [float(answer.text.strip() == str(a + b)) for answer in output.outputs]
            for (a, b), output in zip(pairs, outputs, strict=True)
        ],
        np.float32,
    )
    advantage = (reward - reward.mean(1, keepdims=True)) / (reward.std(1, keepdims=True) + 1e-6)
    np.savez(
        args.output,
        token_ids=token_ids,
        logprobs=logprobs,
        reward=reward.ravel(),
        advantage=advantage.ravel(),
    )
    print(f"{len(answers)} rollouts, {reward.mean():.0%} right")


if __name__ == "__main__":
    main()
