"""The APIs as an ASGI application over one client of an engine; no Ray, no torch.

Starlette's table of routes says what answers a path, once `access.py` has let the request in. Every
answer, even to an unforeseen error, has a JSON body from `errors.py`. What generates is in
`runner.py`: a request that waits or streams is watched, and aborted when its client leaves, so that
its blocks are free a step later.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from cluster.api import page
from cluster.api.access import Access
from cluster.api.admission import ApiLimits
from cluster.api.document import MESSAGES_PATH, POST_ENDPOINTS, openapi
from cluster.api.endpoints import ServedModel, model_card
from cluster.api.errors import HttpError, anthropic_error_body, http_error, openai_error_body
from cluster.api.exchange import ClientDisconnected, Exchange, JsonResponse, json_response
from cluster.api.metrics import (
    CONTENT_TYPE,
    ApiMetrics,
    MetricFamily,
    engine_families,
    merge,
    render,
)
from cluster.api.runner import Runner
from cluster.api.threads import BoundedThreadPool
from cluster.api.trace import chrome_trace
from cluster.client.client import Client
from cluster.timeouts import API_STATS_TIMEOUT_S
from scheduler.errors import EaglerayError, OverloadedError, RequestError
from scheduler.messages import EngineStats

# Python's, in processes that serve: the polling thread must not keep the event loop waiting.
SWITCH_INTERVAL_S = 0.0005
MAX_STATS_AGE_S = 0.1  # callers within this time share one answer of the engine
MAX_WAITING_TRACES = 4  # requests for traces that may wait, for one thread
PUBLIC_PATHS = ("/health", "/live", "/version", "/metrics", "/openapi.json", *page.FILES)


class Api:
    """The ASGI application. Used from one event loop only."""

    def __init__(
        self,
        client: Client,
        served_model: ServedModel,
        *,
        version: str,
        access: Access | None = None,
        limits: ApiLimits | None = None,
        adds_request_id: bool = True,
    ) -> None:
        """`access`: by default without a key. `adds_request_id`: off where a proxy in front adds
        `x-request-id` itself.
        """
        self.limits = limits or ApiLimits()
        self.metrics = ApiMetrics()
        self.runner = Runner(client, served_model, self.limits, self.metrics)
        self.admission = self.runner.admission
        self.metrics.open_outputs.set_function(lambda: self.admission.num_open_outputs)
        # Of all processes that serve and all engines; None: of this process and its engine alone.
        self.gather_metrics: Callable[[], Awaitable[list[list[MetricFamily]]]] | None = None
        # How many connections have a part of an answer that the system has not taken yet.
        self.count_unsent: Callable[[], int] = lambda: 0
        self._client, self._served_model = client, served_model
        self._adds_request_id = adds_request_id
        self._access = access or Access()
        self._trace_threads = BoundedThreadPool("traces", 1, MAX_WAITING_TRACES)
        self._stats_threads = BoundedThreadPool("stats", 1)
        self._stats_future: asyncio.Future[EngineStats] | None = None
        self._stats_asked_at_s = 0.0
        self._router = self._make_router(version)
        self._paths = [
            route.path_format for route in self._router.routes if isinstance(route, Route)
        ]

    def _make_router(self, version: str) -> Router:
        """The table of paths; those that are asked for most often come first."""
        fixed_responses: dict[str, Response] = {
            "/live": JsonResponse({}),
            "/version": JsonResponse({"version": version}),
            "/v1/models": JsonResponse(
                {"object": "list", "data": [model_card(self._served_model)]}
            ),
            "/openapi.json": JsonResponse(openapi(version)),
        }
        for path, (body, media_type) in page.load().items():
            fixed_responses[path] = Response(body, headers=page.HEADERS, media_type=media_type)
        handlers = {
            "/health": self._health,
            "/metrics": self._show_metrics,
            "/debug/trace": self._trace,
            "/v1/models/{name:path}": self._model,
        }
        routes = [Route(path, self.runner, methods=["POST"]) for path in POST_ENDPOINTS]
        answers = handlers | fixed_responses
        routes += [Route(path, answer, methods=["GET"]) for path, answer in answers.items()]
        return Router(routes, redirect_slashes=False, default=self._refuse_path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            return await self._router(scope, receive, send)
        exchange = Exchange(scope, receive, send, adds_request_id=self._adds_request_id)
        status = 499
        try:
            await self._dispatch(exchange)
            status = exchange.status or 500
        except ClientDisconnected:
            pass
        except Exception as error:
            refusal = http_error(error)
            status = refusal.status
            if exchange.writer is not None and exchange.status is not None:
                await exchange.send_events(exchange.writer.error(refusal), has_more=False)
            else:
                is_messages = exchange.path.startswith(MESSAGES_PATH)
                body = anthropic_error_body(refusal) if is_messages else openai_error_body(refusal)
                await exchange.answer(JsonResponse(body, status, refusal.headers))
        finally:
            route = exchange.scope.get("route")
            path = exchange.path if route is None else route.path_format
            self.metrics.request_counter(path if path in self._paths else "other", status).inc()
            del exchange.scope["exchange"]  # or they would keep each other, and all of the request

    async def _dispatch(self, exchange: Exchange) -> None:
        self._access.check(exchange.headers, is_public=exchange.path in PUBLIC_PATHS)
        try:
            await self._router(exchange.scope, exchange.receive, exchange.send)
        except HTTPException as refusal:  # by Starlette's route: of its methods, this is none
            methods = sorted((refusal.headers or {})["Allow"].split(", "))
            allow = {"allow": ", ".join([*methods, "OPTIONS"])}
            if exchange.method != "OPTIONS":
                reason = f"{exchange.path[:200]} takes {methods[0]}, not {exchange.method}"
                raise HttpError(405, reason, headers=allow) from None
            await exchange.answer(Response(status_code=204, headers=allow))

    async def _refuse_path(self, scope: Scope, receive: Receive, send: Send) -> None:
        paths = ", ".join(self._paths)
        raise HttpError(404, f"there is nothing at {scope['path'][:200]!r}; paths are {paths}")

    async def _model(self, request: Request) -> Response:
        self._served_model.check_name(request.path_params["name"])
        return JsonResponse(model_card(self._served_model))

    async def _health(self, _: Request) -> Response:
        """Ready means that the ranks answer, work makes progress, and requests are accepted."""
        if self.admission.is_draining:
            raise OverloadedError("the server is shutting down")
        stats = await self.stats()
        if not stats.is_ready:
            reason = stats.recovery_waits_for
            raise OverloadedError(
                f"the ranks are {stats.state}, and the last result came {stats.step_age_s:.1f} s"
                f" ago; requests are kept and will continue. {reason}".rstrip(". ")
            )
        return JsonResponse({"state": stats.state, "step_age_s": round(stats.step_age_s, 3)})

    async def _trace(self, request: Request) -> Response:
        """The steps of the last `?seconds=10` as a Chrome trace, those of one engine."""
        text = request.query_params.get("seconds", "10")
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not seconds > 0:
            raise RequestError(f"seconds must be a number above 0, got {text[:50]!r}", "seconds")
        return await json_response(
            lambda: chrome_trace(self._client.records(seconds)), self._trace_threads
        )

    async def _show_metrics(self, _: Request) -> Response:
        family_lists = (
            await self.gather_metrics() if self.gather_metrics else [await self.families()]
        )
        return Response(render(merge(family_lists)), media_type=CONTENT_TYPE)

    async def families(self) -> list[MetricFamily]:
        """The metrics of this process, and those of its engine if it answers."""
        families = self.metrics.families()
        with contextlib.suppress(EaglerayError):
            families += engine_families(await self.stats())
        return families

    async def stats(self) -> EngineStats:
        """The engine's counters, at most `MAX_STATS_AGE_S` old; it is asked once at a time. Raises
        `EaglerayError` for an engine that is dead or does not answer.
        """
        now_s = time.monotonic()
        is_old = now_s - self._stats_asked_at_s > MAX_STATS_AGE_S
        if self._stats_future is None or (is_old and self._stats_future.done()):
            self._stats_asked_at_s = now_s
            self._stats_future = asyncio.ensure_future(self._stats_threads.run(self._client.stats))
        try:
            return await asyncio.wait_for(asyncio.shield(self._stats_future), API_STATS_TIMEOUT_S)
        except TimeoutError:
            raise OverloadedError(
                f"the engine did not answer within {API_STATS_TIMEOUT_S:g} s"
            ) from None

    async def drain(self, limit_s: float) -> int:
        """Refuse new requests and wait until the running ones have ended and their answers are
        sent, for at most `limit_s`; returns how many outputs, or else unsent answers, are left.
        """
        self.admission.is_draining = True
        deadline_s = time.monotonic() + limit_s
        while (num_left := self.admission.num_open_outputs or self.count_unsent()) and (
            time.monotonic() < deadline_s
        ):
            await asyncio.sleep(0.05)
        return num_left
