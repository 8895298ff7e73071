"""An application of two engines, and an event loop on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cluster.serve.served import Program, free_port


@pytest.fixture(scope="package")
def served(users_ray: None) -> Iterator[tuple[str, Any]]:
    """URL and handle of an application of two replicas in the user's Ray."""
    from ray import serve

    from cluster.serve.application import build

    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
    arguments = {
        "engine": {"device": "cpu", "kv_cache_bytes": 2**26, "stuck_after_s": 5, "spares": "off"},
        "replicas": 2,
        "served_model_name": "tiny",
    }
    handle = serve.run(build(arguments), name="eagleray")
    yield f"http://127.0.0.1:{port}", handle
    serve.shutdown()


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop

    async def tasks_end() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=5)

    asyncio.run_coroutine_threadsafe(tasks_end(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Program]]:
    """Starts programs, and kills those of a test that failed."""
    programs: list[Program] = []

    def start(*arguments: str, **variables: str) -> Program:
        programs.append(Program(*arguments, **variables))
        return programs[-1]

    yield start
    for program in programs:
        program.kill()
