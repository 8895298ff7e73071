"""aider: edits of a file, in one and in two turns."""

from __future__ import annotations

from pathlib import Path

from checks import KEY, MODEL, V1, equal, output_of, run

FILE = Path("sum.txt")
OPTIONS = (
    *("--model", f"openai/{MODEL}", "--openai-api-base", V1, "--openai-api-key", KEY),
    *("--edit-format", "whole", "--yes-always", "--no-git", "--no-analytics", "--no-check-update"),
    *("--no-show-model-warnings", "--no-show-release-notes", "--no-pretty", "--no-fancy-input"),
)


def turn(said: str, *options: str) -> str:
    """What one message prints."""
    asked = (f"[[say {said}]]", str(FILE))
    return str(output_of("aider", *OPTIONS, *options, "--message", *asked))


def stream() -> None:
    turn(f"{FILE}\n```\n85\n```")
    equal(FILE.read_text(), "85\n")


def history() -> None:
    turn(f"{FILE}\n```\n86\n```", "--restore-chat-history")
    equal(FILE.read_text(), "86\n")


def thinking() -> None:
    assert "The numbers are small." in turn("Thought.", "--reasoning-effort", "high")


run(stream, history, thinking)
