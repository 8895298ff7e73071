"""Calls to every replica of a deployment."""

from __future__ import annotations

import asyncio
from typing import Any

from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle


async def answers_in_time(
    handle: DeploymentHandle[Any], method: str, *args: Any, limit_s: float
) -> list[Any]:
    """What the replicas answer that do so within `limit_s`, without an error. Ray Serve's own
    `broadcast` has no answers at all if one of them hangs.
    """
    try:
        calls: list[Any] = await handle.broadcast(method, *args)._fetch_replica_results_async()
    except DeploymentUnavailableError:  # it has no replica at the moment
        return []
    answers = (asyncio.wait_for(call.get_async(), limit_s) for call in calls)
    answers_or_errors = await asyncio.gather(*answers, return_exceptions=True)
    return [answer for answer in answers_or_errors if not isinstance(answer, BaseException)]
