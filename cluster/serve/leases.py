"""One lease, as its caller sees it. Used only on the event loop.

A call that Ray Serve is asked to cancel before it has been answered may keep running anyway, with
nothing left that could cancel it. So a caller that no longer wants a lease does not wait, but the
call is canceled only once the lease has been granted.
"""

from __future__ import annotations

import asyncio
from typing import Any

from cluster.serve.engine import Lease


class LeaseCall:
    """A call of `EngineReplica.lease`. granted: the lease, or why there is none."""

    def __init__(self, stream: Any) -> None:
        """stream: the response that the handle has returned."""
        self._stream = stream
        self.granted: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        self._answer = asyncio.ensure_future(anext(stream))
        self._answer.add_done_callback(self._answered)

    def end(self) -> None:
        """Give the lease back, or stop waiting for it: then `granted` is canceled."""
        self.granted.cancel()
        if self._answer.done():
            self._stream.cancel()

    def _answered(self, answer: asyncio.Task[Lease]) -> None:
        error = None if answer.cancelled() else answer.exception()
        if self.granted.done():
            self._stream.cancel()
        elif answer.cancelled():
            self.granted.cancel()
        elif error is not None:
            self.granted.set_exception(error)
        else:
            self.granted.set_result(answer.result())
