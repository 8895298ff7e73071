"""Make the small Qwen3 model that ships with Eagleray.

The script writes its own text, trains the tokenizer and the model on it, measures the model on sums
it was never shown, and writes a checkpoint in the Hugging Face form:

    python -m tests.default_model.train [--out DIR] [--minutes M] [--seed 0]

Many questions are packed into one conversation, so that an answer after a long preamble is as good
as one asked alone.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from configs.paths import DEFAULT_MODEL_DIR
from tests.default_model.measure import as_table, measure, quick_check
from tests.default_model.questions import (
    END_OF_TEXT,
    TURN_END,
    TURN_START,
    question_text,
    random_turn,
)
from tests.default_model.tokenizer import (
    POSITIONS,
    SYSTEM_MESSAGES,
    VOCAB_SIZE,
    tokenizer_settings,
    train_tokenizer,
)

IGNORED = -100  # the label of a token that carries no loss


class Batches:
    """Endless training batches; only the answers and the marks that end them carry loss."""

    TOKENS = 4096
    # (length of a row, its weight at the start of training, its weight at the end)
    LENGTHS = (
        (64, 0.5, 0.2),
        (128, 0.3, 0.2),
        (256, 0.15, 0.2),
        (512, 0.05, 0.3),
        (1024, 0.0, 0.1),
    )

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.tokenizer = tokenizer
        self.rng = random.Random(f"batches {seed}")
        self.cache: dict[str, list[int]] = {}
        pad_id = tokenizer.token_to_id(END_OF_TEXT)
        assert pad_id is not None
        self.pad = pad_id

    def ids(self, text: str) -> list[int]:
        if text not in self.cache:
            self.cache[text] = self.tokenizer.encode(text).ids
        return self.cache[text]

    def turn(self) -> list[tuple[int, int]]:
        """One random turn, as (token, label) pairs."""
        turn = random_turn(self.rng)
        prompt = [(token_id, IGNORED) for token_id in self.ids(question_text(turn.question))]
        answer = [(token_id, token_id) for token_id in self.ids(f"{turn.answer}{TURN_END}")]
        return prompt + answer + [(token_id, IGNORED) for token_id in self.ids("\n")]

    def conversation(self, length: int) -> list[tuple[int, int]]:
        """As many turns as fit, sometimes after a system message, padded to the length."""
        row: list[tuple[int, int]] = []
        if self.rng.random() < 0.15:
            text = f"{TURN_START}system\n{self.rng.choice(SYSTEM_MESSAGES)}{TURN_END}\n"
            row = [(token_id, IGNORED) for token_id in self.ids(text)]
        while len(row) + len(turn := self.turn()) <= length:
            row += turn
        return row + [(self.pad, IGNORED)] * (length - len(row))

    def batch(self, progress: float) -> tuple[Tensor, Tensor]:
        """Tokens and labels, in rows of equal length; short rows are more frequent at the start."""
        weights = [
            start_weight + (end_weight - start_weight) * progress
            for _, start_weight, end_weight in self.LENGTHS
        ]
        length = self.rng.choices([row_length for row_length, _, _ in self.LENGTHS], weights)[0]
        rows = torch.tensor([self.conversation(length) for _ in range(self.TOKENS // length)])
        return rows[..., 0], rows[..., 1]


def model_config(tokenizer: Tokenizer) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(TURN_END),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
    )


class Trainer:
    """Muon for the matrices, AdamW for the embedding and the norms, one shared schedule."""

    WARMUP = 0.02  # share of the run
    DECAY = 0.45  # share of the run over which the learning rate falls to zero
    LEARNING_RATE = 4e-3

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        self.model = model
        matrices: list[Tensor] = []
        other_parameters: list[Tensor] = []
        for name, parameter in model.named_parameters():
            is_matrix = parameter.ndim == 2 and "embed" not in name
            (matrices if is_matrix else other_parameters).append(parameter)
        self.optimizers = [
            torch.optim.Muon(matrices, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(other_parameters, betas=(0.9, 0.98), weight_decay=0.0),
        ]

    def set_rate(self, progress: float) -> None:
        rate_share = min(1.0, progress / self.WARMUP, (1.0 - progress) / self.DECAY)
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = self.LEARNING_RATE * max(rate_share, 1e-3)

    def step(self, tokens: Tensor, labels: Tensor) -> float:
        """One update; the loss is averaged over the tokens of the answers."""
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.model.model(input_ids=tokens).last_hidden_state[:, :-1]
            targets = labels[:, 1:]
            has_loss = targets != IGNORED
            logits = self.model.lm_head(hidden[has_loss])
        loss = torch.nn.functional.cross_entropy(logits.float(), targets[has_loss])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return float(loss.detach())


def train(model: Qwen3ForCausalLM, tokenizer: Tokenizer, args: argparse.Namespace) -> None:
    """Run the requested number of steps, or as many as fit into the minutes."""
    batches, trainer = Batches(tokenizer, args.seed), Trainer(model)
    start_s, loss_sum = time.monotonic(), 0.0
    for step in range(1, args.steps + 1):
        seconds = time.monotonic() - start_s
        progress = max(step / args.steps, seconds / (60 * args.minutes))
        if progress > 1.0:
            break
        trainer.set_rate(progress)
        loss_sum += trainer.step(*batches.batch(progress))
        if step % 100 == 0:
            check_result = quick_check(model, tokenizer)
            print(
                f"{seconds:6.0f} s  step {step}  loss {loss_sum / 100:.4f}  {check_result}",
                flush=True,
            )
            loss_sum = 0.0


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save_checkpoint(model: Qwen3ForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write everything to a folder next to the target, in bfloat16, then move it into place."""
    out.mkdir(parents=True, exist_ok=True)
    staging_dir = Path(tempfile.mkdtemp(dir=out.parent))
    bfloat16_model: Any = Qwen3ForCausalLM(model.config)
    bfloat16_model.to(torch.bfloat16)
    bfloat16_model.load_state_dict(model.state_dict())
    bfloat16_model.save_pretrained(staging_dir)
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    end_ids = [tokenizer.token_to_id(TURN_END), end_of_text]
    generation = {"do_sample": False, "eos_token_id": end_ids, "pad_token_id": end_of_text}
    write_json(staging_dir / "generation_config.json", generation)
    tokenizer.save(str(staging_dir / "tokenizer.json"))
    write_json(staging_dir / "tokenizer_config.json", tokenizer_settings(tokenizer))
    shutil.copy(DEFAULT_MODEL_DIR / "chat_template.jinja", staging_dir)
    for file in staging_dir.iterdir():
        file.chmod(0o644)
        file.replace(out / file.name)
    shutil.rmtree(staging_dir)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=DEFAULT_MODEL_DIR)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop by then")
    parser.add_argument("--steps", type=int, default=3600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    start_s = time.monotonic()
    tokenizer = train_tokenizer(args.seed)
    model = Qwen3ForCausalLM(model_config(tokenizer))
    print(f"{model.num_parameters() / 1e6:.2f} million parameters", flush=True)
    train(model, tokenizer, args)
    save_checkpoint(model, tokenizer, args.out)
    print(f"trained in {(time.monotonic() - start_s) / 60:.1f} minutes", flush=True)
    saved_model = Qwen3ForCausalLM.from_pretrained(args.out, dtype=torch.bfloat16)
    print(as_table(measure(saved_model, tokenizer)), flush=True)


if __name__ == "__main__":
    main()
