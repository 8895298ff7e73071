"""lm-evaluation-harness: a task of chats, answered by the default model."""

from __future__ import annotations

import json
from pathlib import Path

from checks import KEY, MODEL, V1, equal, output_of, run

TASK = """
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: sums.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "What is {{a}} + {{b}}?"
doc_to_target: "{{sum}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 16, temperature: 0}
metric_list: [{metric: exact_match}]
"""


def chat() -> None:
    sums = [{"a": a, "b": 38, "sum": str(a + 38)} for a in range(40, 48)]
    Path("sums.jsonl").write_text("".join(json.dumps(sum_) + "\n" for sum_ in sums))
    Path("sums.yaml").write_text(TASK)
    model = f"model={MODEL},base_url={V1}/chat/completions,num_concurrent=4,max_retries=1"
    output_of(
        *("lm-eval", "run", "--model", "local-chat-completions", "--model_args", model),
        *("--tasks", "sums", "--include_path", ".", "--apply_chat_template"),
        *("--output_path", "results"),
        OPENAI_API_KEY=KEY,
        HF_HUB_OFFLINE="1",
    )
    [path] = Path("results").rglob("results*.json")
    results = json.loads(path.read_text())["results"]["sums"]
    equal(results["exact_match,none"], 1.0)


run(chat)
