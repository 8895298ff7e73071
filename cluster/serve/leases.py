"""Leases of engines: which engine a request is sent to, and for how long it counts as open there.

A call that Ray Serve is asked to cancel before it has been answered may keep running, with nothing
left that could cancel it. So a caller that no longer wants a lease does not wait, but the call is
canceled only once the lease has been granted. Until then it must not keep the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from cluster.client.frontend import Frontend
from cluster.client.outputs import Generation
from cluster.serve.engine import Lease
from cluster.serve.prefixes import PrefixTable, prefix_hashes, session_hash
from cluster.serve.router import LeaseRequest
from scheduler.errors import EaglerayError

RETRY_PAUSE_S = 0.2

logger = logging.getLogger("eagleray")


class LeaseCall:
    """A call of `EngineReplica.lease`, on the event loop. lease_future: the lease, or the error.

    The call may only be canceled once it has been answered; see the top of this file.
    """

    def __init__(self, stream: Any) -> None:
        """stream: the response that the deployment handle has returned."""
        self._stream = stream
        self.lease_future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        self._answer_task = asyncio.ensure_future(anext(stream))
        self._answer_task.add_done_callback(self._handle_answer)

    def end(self) -> None:
        """Give the lease back, or stop waiting for it: then `lease_future` is canceled."""
        self.lease_future.cancel()
        if self._answer_task.done():
            self._stream.cancel()

    def _handle_answer(self, answer: asyncio.Task[Lease]) -> None:
        error = None if answer.cancelled() else answer.exception()
        if self.lease_future.done():
            self._stream.cancel()
        elif answer.cancelled():
            self.lease_future.cancel()
        elif error is not None:
            self.lease_future.set_exception(error)
        else:
            self.lease_future.set_result(answer.result())


@dataclass(slots=True, eq=False, weakref_slot=True)
class RoutedRequest:
    """A request and the engine it is sent to. replica_id: of the engine that it last had, "" before
    the first. frontend: to its driver, None before the first and while it moves to another engine.
    lost_replica_ids: of the engines that were lost, or did not answer, while they had it.
    """

    generation: Generation
    lease_call: LeaseCall | None = None
    replica_id: str = ""
    frontend: Frontend | None = None
    lost_replica_ids: list[str] = field(default_factory=list)

    def has_ended(self) -> bool:
        return self.generation.done_future.done()


class EngineLeases:
    """Leases engines of a deployment for requests. Any thread, except `lease`."""

    def __init__(
        self,
        engines: DeploymentHandle[Any],
        block_size: int,
        holder: Any | None = None,
        *,
        is_only_chooser: bool = True,
    ) -> None:
        """`holder`: the actor in which this is, if it is one. `is_only_chooser`: see `PrefixTable`.
        Made on the event loop of `lease`.
        """
        self._lease_method = engines.options(method_name="lease", stream=True)
        self._block_size = block_size
        self._holder = holder
        self._loop = asyncio.get_running_loop()
        self._table = PrefixTable(is_only_chooser=is_only_chooser)
        self._table_lock = threading.Lock()

    async def lease(self, routed_request: RoutedRequest) -> Lease | None:
        """Lease an engine that has a driver; asks until there is one. None if the request ends."""
        request = routed_request.generation.requests[0]
        prompt = request.token_ids[: request.num_prompt_tokens]
        session_id = routed_request.generation.session_id
        avoided_replica_ids = list(routed_request.lost_replica_ids)
        hashes = prefix_hashes(prompt, self._block_size, request.cache_salt)
        hashed_session = session_hash(session_id) if session_id is not None else None
        while not routed_request.has_ended():
            self.stop_counting(routed_request)  # at the engine of an earlier lease
            choose = functools.partial(
                self._choose,
                weakref.ref(routed_request),
                hashes,
                hashed_session,
                tuple(avoided_replica_ids),
            )
            lease_request = LeaseRequest(tuple(avoided_replica_ids), choose, self._holder)
            call = routed_request.lease_call = LeaseCall(self._lease_method.remote(lease_request))
            if routed_request.has_ended():  # `give_back` may have been called just before
                call.end()
            try:
                lease = await call.lease_future
            except (RayError, RayServeException, EaglerayError) as error:
                # The lease or its engine is lost; another engine is asked.
                logger.warning("a lease failed: %s", str(error).split("\n")[0])
                call.end()
                await asyncio.sleep(RETRY_PAUSE_S)
            except asyncio.CancelledError:
                call.end()
                if not routed_request.has_ended():
                    raise
            else:
                if lease.driver is not None:
                    return lease
                call.end()
                is_last_resort = lease.replica_id in avoided_replica_ids
                await asyncio.sleep(RETRY_PAUSE_S if is_last_resort else RETRY_PAUSE_S / 10)
                avoided_replica_ids.append(lease.replica_id)
        return None

    def give_back(self, routed_request: RoutedRequest) -> None:
        """End the lease of a request, or the wait for one."""
        if (call := routed_request.lease_call) is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and all else with it
                self._loop.call_soon_threadsafe(call.end)

    def stop_counting(self, routed_request: RoutedRequest) -> None:
        """A request is no longer open at the engine that was chosen for it."""
        with self._table_lock:
            self._table.end(routed_request)

    def _choose(
        self,
        request_ref: weakref.ref[RoutedRequest],
        hashes: Seq[int],
        hashed_session: int | None,
        avoided_replica_ids: Seq[str],
        replica_ids: Collection[str],
    ) -> str:
        """The replica id of the engine for a request, any if it is gone. On the router's thread."""
        routed_request = request_ref()
        if routed_request is None:
            return next(iter(replica_ids))
        with self._table_lock:
            chosen_id = self._table.choose(
                routed_request, replica_ids, hashes, hashed_session, avoided_replica_ids
            )
            if routed_request.has_ended():  # `stop_counting` may have been called just before
                self._table.end(routed_request)
        return chosen_id
