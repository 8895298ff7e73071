"""Constrained output on a larger scale: every complete answer must be valid, and the tokens must be
the same at every tensor-parallel size, streamed and whole, with thinking on and off.

`python -m tests.cluster.grammar.many`. The model is the default one in float32, once with a chat
template of a model that thinks.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from cluster import LLM, SamplingParams, StructuredOutputs
from cluster.api.parser import AnswerParser
from cluster.client.outputs import RequestOutput
from cluster.grammar.markers import answer_state_after
from configs.paths import DEFAULT_MODEL_DIR
from tests.cluster.grammar.test_grammars import CHOICES, REGEXES, random_schema
from tests.cluster.test_structured_outputs import validate

USER = {"role": "user", "content": "What is 12 + 35?"}
WITHOUT_THINKING = (
    "{%- if enable_thinking is false -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}"
)
ASSISTANT = "{{- '<|im_start|>assistant\\n' -}}\n{%- endif -%}"
NUM_STREAMED = 20


def thinking_model(folder: Path) -> Path:
    """The default model with a template that closes the reasoning when thinking is off, as Qwen3's
    does; with thinking on, the model may think or not.
    """
    target = folder / "thinks"
    shutil.copytree(DEFAULT_MODEL_DIR, target)
    template = target / "chat_template.jinja"
    text = template.read_text()
    assert text.rstrip().endswith(ASSISTANT)
    head = text.rstrip().removesuffix("{%- endif -%}")
    template.write_text(head + WITHOUT_THINKING + "\n{%- endif -%}\n")
    return target


def structures(count: int) -> list[StructuredOutputs]:
    """Random schemas, and every regular expression and choice of the tests."""
    rng = random.Random(23)
    others = [
        *(StructuredOutputs(regex=regex) for regex in REGEXES),
        *(StructuredOutputs(choice=choice) for choice in CHOICES),
        StructuredOutputs(json_object=True),
    ]
    schemas = [StructuredOutputs(json=random_schema(rng)) for _ in range(count - len(others))]
    return [*schemas, *others]


def answer_of(output: RequestOutput) -> str:
    """The text after the reasoning."""
    parser = AnswerParser(answer_state_after(output.prompt or ""), looks_for_calls=False)
    return parser.push(output.text).content + parser.finish().content


def run(model: Path, size: int, wanted: list[StructuredOutputs]) -> tuple[list[list[int]], str]:
    """(the tokens of every answer, the counts of outcomes)"""
    counts: Counter[str] = Counter()
    tokens: list[list[int]] = []
    options: dict[str, Any] = {"num_kv_blocks": 60, "max_num_seqs": 16, "max_model_len": 256}
    with LLM(
        str(model),
        tensor_parallel_size=size,
        device="cpu",
        dtype="float32",
        block_size=16,
        **options,
    ) as llm:
        each = [
            SamplingParams(structured_outputs=s, temperature=1.0, seed=5, max_tokens=100)
            for s in wanted
        ]
        for thinks in (False, True):
            prompt: Any = {"messages": [USER], "chat_template_kwargs": {"enable_thinking": thinks}}
            outputs = llm.generate([prompt] * len(wanted), each)
            for output, structure in zip(outputs, wanted, strict=True):
                assert output.finish_reason in ("stop", "length"), output
                counts[output.finish_reason] += 1
                counts["thought"] += "</think>" in output.text
                if output.finish_reason == "stop":
                    validate(answer_of(output), structure)
            tokens += [output.token_ids for output in outputs]
            for place in range(0, len(wanted), max(1, len(wanted) // NUM_STREAMED)):
                chunks = list(llm.stream(prompt, each[place]))
                streamed = [token for chunk in chunks for token in chunk.token_ids]
                assert streamed == outputs[place].token_ids, wanted[place]
        counts["preemptions"] = llm.stats().num_preemptions
    return tokens, f"tp {size}: {dict(counts)}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Many structures at several sizes.")
    parser.add_argument("--count", type=int, default=210)
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2, 4])
    arguments = parser.parse_args()
    wanted = structures(arguments.count)
    with tempfile.TemporaryDirectory() as folder:
        model = thinking_model(Path(folder))
        first: list[list[int]] = []
        for size in arguments.tp:
            tokens, said = run(model, size, wanted)
            print(said, flush=True)
            first = first or tokens
            different = sum(a != b for a, b in zip(first, tokens, strict=True))
            assert not different, f"{different} answers differ from those at tp {arguments.tp[0]}"
    print(f"{2 * len(wanted)} answers per size: all that ended validate, the same at every size")


if __name__ == "__main__":
    main()
