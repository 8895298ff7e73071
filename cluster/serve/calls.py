"""Calls to every replica of a deployment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle


async def answers_in_time(
    handle: DeploymentHandle[Any], method: str, *args: Any, limit_s: float
) -> list[Any]:
    """What the replicas answer that do so within `limit_s`, without an error. Ray Serve's own
    `broadcast` has no answers at all if one of them hangs.
    """
    deadline_s = asyncio.get_running_loop().time() + limit_s

    async def in_time(result: Awaitable[Any]) -> Any:
        async with asyncio.timeout_at(deadline_s):
            return await result

    try:
        # The handle waits until it has heard of replicas.
        calls = await in_time(handle.broadcast(method, *args)._fetch_replica_results_async())
    except (DeploymentUnavailableError, TimeoutError):  # there is no replica at the moment
        return []
    answers = (in_time(call.get_async()) for call in calls)
    answers_or_errors = await asyncio.gather(*answers, return_exceptions=True)
    return [answer for answer in answers_or_errors if not isinstance(answer, BaseException)]
