"""An engine over several hosts, one of which is cut off while it runs, and comes back.

The program below runs on the first host; it asks for changes to the cables on standard output, by
`cut ADDRESS` and `plug ADDRESS`, and waits for a line in return.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from cluster import LLM
from tests.cluster.recovery.load import Load, cases, compare

CASES = cases(16, tokens=60)
LIMIT_S = 120.0


def ask(what: str) -> None:
    """Ask for something to be done outside."""
    print(what, flush=True)
    assert sys.stdin.readline() == "done\n"


def main() -> None:
    head = sys.argv[1]
    options: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "stuck_after_s": 5.0,
        "log_level": "error",
    }
    with LLM(tensor_parallel_size=2, ray_address=f"{head}:6379", **options) as llm:
        before = [place.host for place in llm._engine_processes.places()]
        assert len(set(before)) == 2, before
        expected = Load(llm, CASES).wait(LIMIT_S)
        away = next(host for host in before if host != head)
        load = Load(llm, CASES)
        load.wait_for_news(LIMIT_S)
        ask(f"cut {away}")
        began = time.monotonic()
        load.wait_for_news(LIMIT_S)
        seconds = time.monotonic() - began
        assert compare(CASES, load.wait(LIMIT_S), expected) == []
        after = [place.host for place in llm._engine_processes.places()]
        assert away not in after, after
        load = Load(llm, CASES)  # while what is left over there comes back
        ask(f"plug {away}")
        assert compare(CASES, load.wait(LIMIT_S), expected) == []
        ask(f"look at {away}")
        assert compare(CASES, Load(llm, CASES).wait(LIMIT_S), expected) == []
        print(f"ranks on {before}, then {after}; tokens again after {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
