"""llama.cpp on one sequence: run by the interpreter that has llama-cpp-python and gguf.

    PYTHON benchmarks/peer_llama_cpp_run.py write MODEL_DIR FILE.gguf --type BF16
    PYTHON benchmarks/peer_llama_cpp_run.py time FILE.gguf --prompt 128 --output 64 --threads 2

`write` makes a GGUF file of a Qwen3 checkpoint in bfloat16; `time` prints one JSON line. Imports
nothing of this project, since it runs outside of its environment.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_OTHER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def main() -> None:
    """Write or time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write")
    writing.add_argument("model", type=Path)
    writing.add_argument("file", type=Path)
    writing.add_argument("--type", choices=("BF16", "Q8_0", "Q4_0"), required=True)
    timing = commands.add_parser("time")
    timing.add_argument("file", type=Path)
    timing.add_argument("--prompt", type=int, required=True)
    timing.add_argument("--output", type=int, required=True)
    timing.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    if args.command == "write":
        write(args.model, args.file, getattr(gguf.GGMLQuantizationType, args.type))
    else:
        print(json.dumps(measure(args.file, args.prompt, args.output, args.threads)))


def write(model: Path, file: Path, kind: gguf.GGMLQuantizationType) -> None:
    """All matrices in the type, embedding too; norms in float32."""
    config = json.loads((model / "config.json").read_text())
    writer = gguf.GGUFWriter(file, "qwen3")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-6))
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    with (model / "model.safetensors").open("rb") as checkpoint:
        header_bytes = int.from_bytes(checkpoint.read(8), "little")
        header = json.loads(checkpoint.read(header_bytes))
        for name, tensor in header.items():
            first, end = tensor["data_offsets"]
            checkpoint.seek(8 + header_bytes + first)
            bits = np.frombuffer(checkpoint.read(end - first), np.uint16).astype(np.uint32)
            values = (bits << 16).view(np.float32).reshape(tensor["shape"])
            if values.ndim == 1:
                writer.add_tensor(gguf_name(name), values)
            else:
                quantized = gguf.quants.quantize(values, kind)
                writer.add_tensor(gguf_name(name), quantized, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    """From the name of a tensor in a checkpoint."""
    if name in _OTHER_NAMES:
        return _OTHER_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[rest.removesuffix('.weight')]}.weight"


def measure(file: Path, num_prompt: int, num_output: int, num_threads: int) -> dict[str, float]:
    """Tokens per second of the prompt and of the output, greedy; the second of two runs."""
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(
        str(file).encode(), llama_cpp.llama_model_default_params()
    )
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = num_prompt + num_output + 8
    params.n_batch = max(512, num_prompt)
    params.n_threads = params.n_threads_batch = num_threads
    context = llama_cpp.llama_init_from_model(model, params)
    vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def decode(token_ids: list[int]) -> None:
        array = (ctypes.c_int32 * len(token_ids))(*token_ids)
        batch: Any = llama_cpp.llama_batch_get_one(array, len(token_ids))
        if llama_cpp.llama_decode(context, batch) != 0:
            raise RuntimeError("llama.cpp could not decode")
        llama_cpp.llama_synchronize(context)

    def run() -> dict[str, float]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        began_s = time.perf_counter()
        decode([i * 7919 % vocab_size for i in range(num_prompt)])
        prompt_s = time.perf_counter() - began_s
        began_s = time.perf_counter()
        for _ in range(num_output):
            pointer = llama_cpp.llama_get_logits_ith(context, -1)
            logits = np.ctypeslib.as_array(pointer, shape=(vocab_size,))
            decode([int(logits.argmax())])
        output_s = time.perf_counter() - began_s
        return {
            "prompt_tokens_per_s": round(num_prompt / prompt_s, 1),
            "output_tokens_per_s": round(num_output / output_s, 2),
        }

    run()
    return run()


if __name__ == "__main__":
    main()
