"""Structured extraction: a JSON object of a given form from every text in a folder.

    python examples/extract.py --model Qwen/Qwen3-8B --tp 2 letters/ > records.jsonl

The answers cannot have another form: every token is one that the schema allows. With the small
default model they have the form, and nothing more.
"""

import argparse
import json
from pathlib import Path

from eagleray import LLM, SamplingParams, StructuredOutputs

SCHEMA = {
    "type": "object",
    "properties": {
        "sender": {"type": "string", "maxLength": 60},
        "topic": {"enum": ["order", "complaint", "question", "other"]},
        "urgent": {"type": "boolean"},
        "amounts": {"type": "array", "items": {"type": "integer"}, "maxItems": 5},
    },
    "required": ["sender", "topic", "urgent", "amounts"],
    "additionalProperties": False,
}
INSTRUCTION = "Extract the sender, the topic, whether it is urgent, and all amounts of money."


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", help="a directory or hub id; by default the small model")
    parser.add_argument("--tp", type=int, default=1)
    args = parser.parse_args()
    paths = sorted(args.folder.glob("*.txt"))
    if not paths:
        parser.error(f"there is no .txt file in {args.folder}")
    conversations = [
        [
            {"role": "system", "content": INSTRUCTION},
            {"role": "user", "content": path.read_text(encoding="utf-8")},
        ]
        for path in paths
    ]
    params = SamplingParams(
        temperature=0, max_tokens=300, structured_outputs=StructuredOutputs(json=SCHEMA)
    )
    with LLM(args.model, tensor_parallel_size=args.tp) as llm:
        for path, output in zip(paths, llm.chat(conversations, params, progress=True), strict=True):
            # An answer that was cut off by max_tokens is only the beginning of an object.
            is_whole = output.finish_reason == "stop"
            record = json.loads(output.text) if is_whole else None
            print(json.dumps({"file": path.name, "record": record}))


if __name__ == "__main__":
    main()
