"""What constrained output costs: `python -m benchmarks.structured [--tp 2]`.

Sixteen sequences of the 0.6B shape decode in alternating runs: unconstrained, all constrained to a
JSON schema, or half and half. The tokenizer is made here: 151,000 random words, as bytes. Then the
gaps between tokens of eight free streams, alone and while `--hostile` grammars are refused one
after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import shutil
import statistics
import string
import tempfile
import time
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.common import QWEN3_0_6B, alternate, model_or_random, write_result
from cluster import LLM, SamplingParams, StructuredOutputs
from scheduler.errors import RequestError

ROWS, PROMPT = 16, 24
VOCABULARY, EOS = 151_000, 150_999
TEXT = StructuredOutputs(
    json={
        "type": "object",
        "properties": {"text": {"type": "string"}, "more": {"type": "string"}},
        "required": ["text", "more"],
    }
)
HOSTILE = "(" * 12 + "a{1,60}" + "){1,60}" * 12


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="directory; random weights in the 0.6B shape if left out")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=int, default=96, help="tokens per sequence")
    parser.add_argument("--hostile", type=int, default=4)
    args = parser.parse_args()
    with model_or_random(args.model, QWEN3_0_6B) as model, tempfile.TemporaryDirectory() as made:
        with_tokenizer(Path(model), Path(made))
        options: dict[str, Any] = {"tensor_parallel_size": args.tp, "device": "cpu"}
        with LLM(
            made, max_num_seqs=ROWS, max_model_len=1024, spares="off", log_level="error", **options
        ) as llm:
            run(llm, [TEXT] * ROWS, args.output)  # starts the helpers
            runs = alternate(
                {
                    "free": lambda: run(llm, [None] * ROWS, args.output),
                    "constrained": lambda: run(llm, [TEXT] * ROWS, args.output),
                    "half": lambda: run(llm, [TEXT, None] * (ROWS // 2), args.output),
                },
                args.repeats,
            )
            calm, stormy, refusals = asyncio.run(beside_hostile(llm, args.hostile, 3 * args.output))
    speeds = {name: statistics.median(values) for name, values in runs.items()}
    write_result(
        "structured",
        "tokens per second of the free runs",
        {
            "rows": ROWS,
            "output_tokens": args.output,
            "tp": args.tp,
            "tokens_per_s": {name: [round(v, 1) for v in values] for name, values in runs.items()},
            "share_of_free": {name: round(v / speeds["free"], 3) for name, v in speeds.items()},
            "inter_token_p99_ms": {"alone": round(calm, 1), "beside_hostile": round(stormy, 1)},
            "refused_after_s": [round(seconds, 2) for seconds in refusals],
        },
    )


def run(llm: LLM, structures: list[StructuredOutputs | None], max_tokens: int) -> float:
    """Output tokens per second, with one sequence per structure."""
    prompts = [[row * 7 + place + 300 for place in range(PROMPT)] for row in range(len(structures))]
    params = [
        SamplingParams(
            temperature=1.0,
            seed=row,
            max_tokens=max_tokens,
            structured_outputs=structure,
            ignore_eos=None if structure else True,
        )
        for row, structure in enumerate(structures)
    ]
    began = time.perf_counter()
    outputs = llm.generate(prompts, params)
    return sum(len(output.token_ids) for output in outputs) / (time.perf_counter() - began)


async def beside_hostile(
    llm: LLM, number: int, max_tokens: int
) -> tuple[float, float, list[float]]:
    """(99th percentile of gaps in ms alone, beside hostile grammars, seconds until each of those
    was refused)
    """
    refusals: list[float] = []

    async def refuse() -> None:
        for i in range(number):
            params = SamplingParams(structured_outputs=StructuredOutputs(regex=HOSTILE + "b" * i))
            began = time.perf_counter()
            try:
                await llm.agenerate([400 + i], params)
            except RequestError:
                refusals.append(time.perf_counter() - began)

    alone = await gaps(llm, max_tokens)
    stormy, _ = await asyncio.gather(gaps(llm, max_tokens), refuse())
    return _p99(alone), _p99(stormy), refusals


async def gaps(llm: LLM, max_tokens: int) -> list[float]:
    """Milliseconds between the tokens of eight streams."""

    async def one(row: int) -> list[float]:
        params = SamplingParams(temperature=1.0, seed=row, max_tokens=max_tokens, ignore_eos=True)
        moments = []
        async for _ in llm.astream([row * 7 + place + 300 for place in range(PROMPT)], params):
            moments.append(time.perf_counter())
        return [1000 * (b - a) for a, b in itertools.pairwise(moments[1:])]

    return [gap for found in await asyncio.gather(*map(one, range(8))) for gap in found]


def _p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


def with_tokenizer(model: Path, made: Path) -> None:
    """A checkpoint with the same weights and a byte-level tokenizer of `VOCABULARY` tokens."""
    rng = random.Random(0)
    words = set(pre_tokenizers.ByteLevel.alphabet())
    while len(words) < VOCABULARY:
        word = "".join(rng.choices(string.ascii_letters, k=rng.randint(2, 9)))
        words.add(rng.choice(("\u0120", "")) + word)  # a space, as byte-level tokens spell it
    vocabulary = {word: token for token, word in enumerate(sorted(words))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(made / "tokenizer.json"))
    config = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    (made / "tokenizer_config.json").write_text(config)
    (made / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    shutil.copy(model / "config.json", made)
    for weights in model.glob("*.safetensors"):
        (made / weights.name).symlink_to(weights.resolve())


if __name__ == "__main__":
    main()
