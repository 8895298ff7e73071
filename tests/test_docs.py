"""The Markdown pages: tables that are tables, and tests that exist."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pages import fields, limits, metrics, options

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINKING = [*PAGES, ROOT / "benchmarks" / "results" / "README.md"]
TEST_PATH = r"\btests/[\w/]+\.py"
DELIMITERS = re.compile(r"\|(:?-+:?\|)+")


def blocks(text: str) -> Iterator[list[tuple[int, str]]]:
    """Runs of lines without an empty line among them, as (number, line). Leaves out code."""
    block: list[tuple[int, str]] = []
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        is_fence = line.lstrip().startswith("```")
        is_code ^= is_fence
        if line.strip() and not is_fence and not is_code:
            block.append((number, line.strip()))
        elif block:
            yield block
            block = []
    if block:
        yield block


def num_cells(row: str) -> int:
    """Only a backslash keeps a `|` from ending a cell: GitHub splits in code spans too."""
    return len(re.findall(r"(?<!\\)\|", row)) - 1


def faults_of_tables(text: str) -> list[str]:
    """What keeps lines that begin with `|` from being rows of a table, each with its line."""
    faults = []
    for block in blocks(text):
        starts = [i for i, (_, line) in enumerate(block) if line.startswith("|")]
        if not starts:
            continue
        table = block[starts[0] :]
        number, header = table[0]
        if len(table) < 2 or not DELIMITERS.fullmatch(table[1][1].replace(" ", "")):
            faults.append(f"line {number}: this row has no header above it")
            continue
        for number, row in table:
            if not (row.startswith("|") and row.endswith("|") and not row.endswith("\\|")):
                faults.append(f"line {number}: a row is one line from | to |: {row}")
            elif num_cells(row) != num_cells(header):
                faults.append(f"line {number}: {num_cells(row)} cells under {num_cells(header)}")
    return faults


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_row_of_a_table_is_one_line_with_a_cell_per_column(page: Path) -> None:
    assert faults_of_tables(page.read_text()) == []


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"(?m)^#+ (.+)$", page.read_text())
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    lost = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text().replace("\n", " ")):
        path, _, anchor = link.partition("#")
        if path.startswith(("http:", "https:")):
            continue
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            lost.append(link)
    assert lost == []


def test_the_page_of_options_is_made_from_them() -> None:
    """To write it: `python -m tests.pages.options > docs/options.md`."""
    assert (ROOT / "docs" / "options.md").read_text() == options.page()


def test_the_page_of_fields_shows_the_models_and_the_tables_of_the_api() -> None:
    """To write it: `python -m tests.pages.fields > docs/fields.md`."""
    assert (ROOT / "docs" / "fields.md").read_text(encoding="utf-8") == fields.page()


def test_the_page_of_limits_shows_the_table_of_bounds() -> None:
    """To write it: `python -m tests.pages.limits > docs/limits.md`."""
    assert (ROOT / "docs" / "limits.md").read_text(encoding="utf-8") == limits.page()


def test_the_page_of_metrics_lists_what_is_counted() -> None:
    """To write it: `python -m tests.pages.metrics > docs/metrics.md`."""
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == metrics.page()


def test_every_test_that_a_page_names_exists_once() -> None:
    files = list((ROOT / "tests").rglob("test_*.py"))
    num_defined = Counter(path.stem for path in files)
    for path in files:
        num_defined.update(re.findall(r"def (test_\w+)", path.read_text()))
    texts = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES}
    paths = [path for text in texts.values() for path in re.findall(TEST_PATH, text)]
    assert [path for path in paths if not (ROOT / path).is_file()] == []
    named = {
        (page, name)
        for page, text in texts.items()
        for name in re.findall(r"\btest_\w+", re.sub(TEST_PATH, "", text).replace("test_NAME", ""))
    }
    assert [(page, name) for page, name in sorted(named) if num_defined[name] != 1] == []
    assert len(named) > 20, "the pages name tests"


def test_every_kernel_of_the_table_is_in_the_file_beside_it() -> None:
    page = (ROOT / "docs" / "kernels.md").read_text()
    rows = re.findall(r"(?m)^\| (`[^|]+) \| `([\w/]+\.py)`", page)
    kernels = [(file, name) for names, file in rows for name in re.findall(r"`(\w+)`", names)]
    assert len(kernels) > 20
    sources = {file: (ROOT / "kernels" / file).read_text() for file, _ in kernels}
    assert [
        (file, name)
        for file, name in kernels
        if not re.search(rf"(?m)^def _?{name}\(", sources[file])
    ] == []


def test_everything_that_is_promised_after_a_fault_is_held_by_a_test() -> None:
    """Each row of the table, and each paragraph that says how."""
    parts = (ROOT / "docs" / "recovery.md").read_text().split("\n## ")
    sections = {title: text for title, _, text in (part.partition("\n") for part in parts)}
    rows = [line for line in sections["What is promised"].splitlines() if line.startswith("| ")][1:]
    assert [row for row in rows if "`test_" not in row.split("|")[-2]] == []
    paragraphs = [
        " ".join(line for _, line in block)
        for title in ("Nodes", "How")
        for block in blocks(sections[title])
    ]
    assert [each for each in paragraphs if "`test_" not in each] == []
    assert len(rows) > 15 and len(paragraphs) > 8


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ("| 1 | 2 |\n| 3 | 4 |", ""),
        (r"| `a \| b` | 2 |", ""),
        ("| 1 | 2\nthe rest |", "line 3: a row is one line"),
        ("| 1 | 2 | | 3 | 4 |", "line 3: 5 cells under 2"),
        ("| 1 |", "line 3: 1 cells under 2"),
        ("| `a | b` | 2 |", "line 3: 3 cells under 2"),
        ("| 1 | 2 |\n\n| 3 | 4 |", "line 5: this row has no header"),
    ],
)
def test_a_row_that_is_broken_joined_or_cut_off_is_found(rows: str, fault: str) -> None:
    faults = faults_of_tables(f"| a | b |\n|---|---|\n{rows}\n")
    assert faults[0].startswith(fault) if fault else faults == []


def test_files_of_a_decode_step_have_about_as_many_lines_as_the_page_says() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.split("## How much there is to read")[1].split("\n## ")[0]
    rows = re.findall(r"(?m)^\| (.+?) \| (`.+`) \| ([\d,]+) \|$", section)
    assert len(rows) > 5
    for part, files, stated in rows:
        num_lines = sum(
            len((ROOT / name).read_text().splitlines()) for name in re.findall("`(.+?)`", files)
        )
        ratio = num_lines / int(stated.replace(",", ""))
        assert 6 / 7 < ratio < 7 / 6, f"{part}: {num_lines} lines, the page says {stated}"
