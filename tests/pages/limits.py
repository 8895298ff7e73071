"""Prints docs/limits.md from the table of bounds: `python -m tests.pages.limits`."""

from __future__ import annotations

import textwrap

from scheduler.bounds import BOUND_TABLES

INTRODUCTION = (
    "Every input has a bound, and what exceeds it is refused before anything is built from it, so"
    " that one request cannot hurt others. Requests within the bounds queue: prompts are computed"
    " in order of arrival, so a request waits for the prompts before it, while outputs that have"
    " begun go on. The bounds are in [one table](../scheduler/bounds.py), from which this page is"
    " made; those of its fields hold in Python too, as far as they are sampling parameters. What is"
    " not listed, such as the text of a message, is bounded by the size of the body and by the"
    " context."
)


def page() -> str:
    """docs/limits.md."""
    lines = ["# What a request may hold", "", *textwrap.wrap(INTRODUCTION, 120)]
    for title, bounds in BOUND_TABLES.items():
        lines += ["", f"## {title}", "", "| what | at most | why not more |", "|---|---|---|"]
        lines += [
            f"| {bound.scope} | {bound.maximum:,} {bound.unit} | {bound.reason} |"
            for bound in bounds.values()
        ]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    print(page(), end="")
