"""The harness that runs client programs: scripts, recorded bodies, the matrix."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients import matrix
from tests.clients.environments import Environment
from tests.clients.programs import PROGRAMS, Program
from tests.clients.recording import MAX_TOOLS, Neutral
from tests.clients.running import DRIVERS, Outcome, outcome_of, run
from tests.clients.scripts import answer
from tests.cluster.api.scripted import wait_until
from tests.cluster.processes import command_of

QUESTION = '<|im_start|>user\n[[call add {"a": 1}]] [[say It is 2.]]<|im_end|>\n'
TOOLS = '<tools>\n{"type": "function", "function": {"name": "add"}}\n</tools>\n'
BEGUN = "<|im_start|>assistant\n"
RESULT = "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n"
CALLED = f"{BEGUN}I call.<|im_end|>\n{RESULT}"


def tool(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "name": name, "description": "Reads /home/me", "parameters": schema}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_every_program_has_a_driver(program: Any) -> None:
    assert (DRIVERS / program.driver).is_file()


def test_a_script_calls_the_tools_that_are_offered_and_then_answers() -> None:
    assert '{"name": "add", "arguments": {"a": 1}}' in answer(TOOLS + QUESTION + BEGUN)
    assert answer(TOOLS + QUESTION + CALLED + BEGUN).endswith("It is 2.")
    assert answer(QUESTION + BEGUN).endswith("It is 2.")


def test_a_script_thinks_unless_the_prompt_has_closed_the_thinking() -> None:
    assert answer(QUESTION + BEGUN).startswith("<think>\n")
    assert answer(QUESTION + BEGUN + "<think>\n\n</think>\n\n") == "It is 2."


def test_recorded_bodies_keep_their_form_and_not_what_they_say() -> None:
    body = {
        "model": "tiny",
        "stream": True,
        "input": [
            {"type": "message", "role": "user", "content": "in /home/me"},
            {"type": "function_call", "call_id": "call_9f", "arguments": '{"path": "/home/me"}'},
            {"type": "function_call_output", "call_id": "call_9f", "output": ""},
        ],
        "metadata": {"user_id": "me"},
    }
    assert Neutral().of(body) == {
        "model": "tiny",
        "stream": True,
        "input": [
            {"type": "message", "role": "user", "content": "Some words."},
            {"type": "function_call", "call_id": "id_1", "arguments": '{"path": "Some words."}'},
            {"type": "function_call_output", "call_id": "id_1", "output": ""},
        ],
        "metadata": {"user_id": "Some words."},
    }


def test_of_many_tools_those_are_recorded_that_differ_in_form() -> None:
    number: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "number"}}}
    choice: dict[str, Any] = {"type": "object", "properties": {"b": {"enum": ["c"]}}}
    tools = [tool("first", number), tool("like_first", number), tool("other", choice)]
    assert [kept["name"] for kept in Neutral().of({"tools": tools})["tools"]] == ["first", "other"]
    many = [{"type": f"kind_{i}"} for i in range(MAX_TOOLS + 5)]
    assert len(Neutral().of({"tools": many})["tools"]) == MAX_TOOLS


def test_a_driver_that_ends_early_has_failed() -> None:
    log = "noise\nok stream\nleft tool it has none\n"
    assert not outcome_of(log, None).has_failed
    assert outcome_of(log, "took more than 120 s").has_failed
    assert outcome_of(log + "failed thinking AssertionError: no\n", None).has_failed
    assert outcome_of("noise", None).has_failed


def test_what_a_program_leaves_running_is_ended(tmp_path: Path) -> None:
    folder = tmp_path / "program"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    left = "import subprocess; print(subprocess.Popen(['sleep', '60'], start_new_session=True).pid)"
    (tmp_path / "left.py").write_text(f"{left}\nprint('ok start')\n")
    program = Program(name="program", kind="python", packages=("a==1",), does="")
    outcome = run(Environment(tmp_path, program), "http://127.0.0.1:1", tmp_path / "left.py")
    assert outcome.checks == {"start": "ok"}
    pid = int(outcome.log.split()[0])
    wait_until(lambda: command_of(pid) is None)


def test_the_matrix_keeps_the_rows_of_programs_that_were_not_run(tmp_path: Path) -> None:
    page = tmp_path / "clients.md"
    page.write_text("# Clients\n\n<!-- table -->\n\n<!-- end -->\n")
    first, second, *_ = PROGRAMS
    matrix.update({first.name: Outcome(checks={"stream": "ok"})}, page)
    matrix.update({second.name: Outcome(checks={"stream": "ok", "tool": "a | b"})}, page)
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows[1:]] == [
        f"| {first.version}",
        f"| {second.version}",
    ]
    assert rows[1].count("yes") == 1 and "**no**" in rows[2] and "a \\| b" in rows[2]
