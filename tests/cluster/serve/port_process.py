"""A process of the API at a shared port, over a scripted engine:
`python -m tests.cluster.serve.port_process PATH MAX_OPEN`. Prints a line when it listens.
"""

from __future__ import annotations

import asyncio
import sys

from cluster.api.admission import ApiLimits
from cluster.serve.listener import HttpListener
from configs.serve import ServeConfig
from tests.cluster.api.scripted import ScriptedEngine, make_api

NUM_TOKENS = 200  # of each answer
STEP_S = 0.05


async def _serve(path: str, max_open_outputs: int) -> None:
    engine = ScriptedEngine(lambda _: "word " * NUM_TOKENS, STEP_S)
    listener = HttpListener(
        make_api(engine, ApiLimits(max_open_outputs=max_open_outputs)),
        ServeConfig(shared_port_path=path),
    )
    print("it listens", flush=True)
    while True:
        await asyncio.sleep(1.0)
        listener.check()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2])))
