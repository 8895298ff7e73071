"""Prints docs/limits.md from the table of bounds: `python -m tests.pages.limits`."""

from __future__ import annotations

from scheduler.bounds import BOUND_TABLES


def page() -> str:
    """docs/limits.md."""
    lines = [
        "# What a request may hold",
        "",
        "Every input has a bound, and what exceeds it is refused before anything is built from it,"
        " so that one request",
        "cannot hurt others. The bounds are in [one table](../scheduler/bounds.py), from which this"
        " page is made; those of its",
        "fields hold in Python too, as far as they are sampling parameters. What is not listed,"
        " such as the text of a message,",
        "is bounded by the size of the body and by the context.",
    ]
    for title, bounds in BOUND_TABLES.items():
        lines += ["", f"## {title}", "", "| what | at most | why not more |", "|---|---|---|"]
        lines += [
            f"| {bound.scope} | {bound.maximum:,} {bound.unit} | {bound.reason} |"
            for bound in bounds.values()
        ]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    print(page(), end="")
