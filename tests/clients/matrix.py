"""docs/clients.md: which program did what."""

from __future__ import annotations

import re
from pathlib import Path

from tests.clients.programs import PROGRAMS, Program
from tests.clients.running import Outcome

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
_COLUMNS = ("stream", "tool", "history", "thinking")
_HEADER = """\
| program | what was run | stream | tool | two turns | thinking | also | left out, or what failed |
|---|---|---|---|---|---|---|---|
"""
_TABLE = re.compile(r"<!-- table -->\n.*<!-- end -->", re.DOTALL)


def row_of(program: Program, outcome: Outcome) -> str:
    """One row of the table."""
    checks = outcome.checks
    cells = [program.version, program.does, *(_cell(checks.get(name)) for name in _COLUMNS)]
    also = [name for name in checks if name not in _COLUMNS and checks[name] == "ok"]
    cells.append(", ".join(also).replace("_", " "))
    faults = [f"{name}: {result}" for name, result in checks.items() if result != "ok"]
    faults += [f"{name}: {reason}" for name, reason in outcome.left.items()]
    cells.append("; ".join(faults))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _cell(result: str | None) -> str:
    return "–" if result is None else "yes" if result == "ok" else "**no**"


def update(outcomes: dict[str, Outcome], page: Path = PAGE) -> None:
    """Replace the rows of the programs that were run; other rows stay as they are."""
    text = page.read_text()
    rows = {line.split(" | ")[0]: line for line in text.splitlines() if line.startswith("| ")}
    new = []
    for program in PROGRAMS:
        outcome = outcomes.get(program.name)
        row = row_of(program, outcome) if outcome else rows.get(f"| {program.version}")
        if row:
            new.append(row + "\n")
    table = "".join(("<!-- table -->\n\n", _HEADER, *new, "\n<!-- end -->"))
    page.write_text(_TABLE.sub(lambda _: table, text))
