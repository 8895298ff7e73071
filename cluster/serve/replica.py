"""The API of a served application, over its own engine or over several engines in other replicas.

A replica with its own engine runs in bundle 0 of a placement group that has one bundle per rank;
the driver and the ranks run in the same group. HTTP requests reach `Api` directly or through
Serve's proxy, calls of a handle reach the methods below; both count against the same limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import socket
import sys
from collections.abc import AsyncGenerator
from collections.abc import Sequence as Seq
from typing import Any

import ray
import uvicorn
from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.api.access import Access
from cluster.api.app import SWITCH_INTERVAL_S, Api
from cluster.api.connections import server_config
from cluster.api.endpoints import Served
from cluster.api.limits import ApiLimits
from cluster.api.metrics import Family, engine_families
from cluster.client.allocator import return_large_blocks
from cluster.client.client import Client
from cluster.client.outputs import Chunk, RequestOutput
from cluster.client.prompts import Message, Prompt, as_list, conversations
from cluster.client.setup import EngineSetup, prepare
from cluster.engine.start import EngineProcesses
from cluster.ranks.processes import end_with_parent
from cluster.serve.engine import EngineStatus, status_of
from cluster.serve.health import DriverHealth
from cluster.serve.pool import EnginePool
from cluster.serve.ray_metrics import report_periodically
from cluster.timeouts import GATHER_TIMEOUT_S, Timeouts
from configs.serve import ServeConfig
from scheduler.limits import SchedulerLimits
from scheduler.params import SamplingParams


def installed_version() -> str:
    """Version of the package; "not installed" where Eagleray runs from a checkout."""
    try:
        return importlib.metadata.version("eagleray")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


class ApiReplica:
    """Run by Ray Serve. The methods have the arguments and results of those of `LLM`."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: ServeConfig, engines: DeploymentHandle[Any] | None = None
    ) -> None:
        """`engines`: the deployment whose engines are leased; without it, this replica starts its
        own engine.
        """
        end_with_parent()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        return_large_blocks()
        sampling = SamplingParams.from_dict(config.sampling)
        self._model_name = config.model_name
        setup = await asyncio.to_thread(prepare, config.engine, sampling)
        self._engine: EngineProcesses | None = None
        self._health: DriverHealth | None = None
        self._pool: EnginePool | None = None
        if engines is None:
            self._client = await self._start_engine(config, setup)
        else:
            self._client = await self._connect_to_engines(config, setup, engines)
        self._api = _api(config, setup, self._client)
        self._api.gather_metrics = self._gather_metrics
        self._listens_itself = config.listen is not None
        self._drain_limit_s = config.drain_timeout_s
        replica_id = serve.get_replica_context().replica_id.unique_id
        self._metrics_task = asyncio.create_task(
            report_periodically(replica_id, self.metric_families)
        )
        self._http_server = asyncio.create_task(_serve_http(self._api, config.listen))

    async def _start_engine(self, config: ServeConfig, setup: EngineSetup) -> Client:
        """Start this replica's own engine; returns a client of it."""
        placement_group = ray.util.get_current_placement_group()
        self._engine = engine = await asyncio.to_thread(EngineProcesses, setup, placement_group)
        replaced_s = Timeouts.of(config.engine).replaced_s
        self._health = DriverHealth(engine.frontend, replaced_s)
        return Client(setup.request_builder(engine.report.limits), engine.frontend)

    async def _connect_to_engines(
        self, config: ServeConfig, setup: EngineSetup, engines: DeploymentHandle[Any]
    ) -> Client:
        """Wait for the first engine of a deployment; returns a client of all its engines."""
        timeouts = Timeouts.of(config.engine)
        limits: Any = await asyncio.wait_for(engines.limits.remote(), timeouts.first_engine_s)
        assert isinstance(limits, SchedulerLimits)
        self._pool = EnginePool(
            engines,
            limits.block_size,
            timeouts.stuck_s,
            timeouts.lease_wait_s,
            holder=ray.get_runtime_context().current_actor,
        )
        return Client(setup.request_builder(limits), self._pool, self._pool.send)

    def __serve_build_asgi_app__(self) -> Api:
        return self._api

    async def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | None = None,
    ) -> list[RequestOutput]:
        """As `LLM.generate`."""
        prompt_list = as_list(prompts)
        with self._api.admission.admit(len(prompt_list) * _num_outputs(sampling_params)):
            return await self._client.wait_async(
                await self._client.submit_async(prompt_list, sampling_params)
            )

    async def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        sampling_params: SamplingParams | None = None,
    ) -> list[RequestOutput]:
        """As `LLM.chat`."""
        return await self.generate(conversations(messages), sampling_params)

    async def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """As `LLM.stream`, for handles with `stream=True`. A chat is streamed with the prompt
        `{"messages": ...}`.
        """
        with self._api.admission.admit(_num_outputs(sampling_params)):
            async with self._client.stream([prompt], sampling_params) as (_, chunks):
                while prompts_and_chunks := await chunks.next():
                    for _, chunk in prompts_and_chunks:
                        yield chunk

    async def stream_chat(
        self, messages: Seq[Message], sampling_params: SamplingParams | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """`stream` for one conversation."""
        async for chunk in self.stream({"messages": messages}, sampling_params):
            yield chunk

    async def drain(self, limit_s: float) -> int:
        """Refuse new requests and wait for the running ones; returns how many outputs still run."""
        return await self._api.drain(limit_s)

    async def metric_families(self) -> list[Family]:
        """The counters of this replica, and of its own engine if it has one."""
        return self._api.metrics.families() if self._pool else await self._api.families()

    async def engine_statuses(self) -> list[EngineStatus]:
        """The engines, and where they run."""
        if self._pool is not None:
            return await self._pool.statuses()
        assert self._engine is not None
        return [await status_of(self._engine, self._model_name, await self._api.stats())]

    async def check_health(self) -> None:
        """Raises when this replica's own engine is dead for good, so that Serve replaces the
        replica. Engines of a separate deployment are replaced there.
        """
        if self._http_server.done():
            self._http_server.result()
        if self._health is not None:
            self._health.check()

    async def __del__(self) -> None:
        """Serve awaits this before it ends the replica. Waits for the requests that came past
        Serve's proxy, which Serve does not know of.
        """
        if self._listens_itself:
            await self._api.drain(self._drain_limit_s)

    async def _gather_metrics(self) -> list[list[Family]]:
        """The families of all replicas, and of all engines."""
        context = serve.get_replica_context()
        handle = serve.get_deployment_handle(context.deployment, context.app_name)
        families: list[list[Family]] = await asyncio.wait_for(
            handle.broadcast("metric_families").results_async(), GATHER_TIMEOUT_S
        )
        if self._pool is not None:
            families += [engine_families(stats) for stats in await self._pool.all_stats()]
        return families


def _api(config: ServeConfig, setup: EngineSetup, client: Client) -> Api:
    return Api(
        client,
        Served(
            name=config.model_name,
            builder=client.builder,
            tokenizer=setup.tokenizer,
            max_messages=config.max_messages,
            keep_billing_header=config.keep_billing_header,
            refuse_unknown=config.unknown_fields == "refuse",
        ),
        version=installed_version(),
        access=Access(
            api_key=config.api_key,
            bound_host=config.bound_host,
            allowed_hosts=config.names(config.allowed_hosts),
            allowed_origins=config.names(config.allowed_origins),
        ),
        echo_request_id=config.listen is not None,  # Serve's proxy adds it itself
        limits=ApiLimits(
            max_open=config.max_open_per_api,
            max_body_bytes=config.max_body_bytes,
            slow_reader_timeout_s=config.slow_reader_timeout_s,
        ),
    )


async def _serve_http(api: Api, address: tuple[str, int] | None) -> None:
    """Serve HTTP from this process, if there is an address. Serve's proxy would handle each event
    of a stream as a Ray object, which takes as much of the processor as a small model does.
    """
    if address is None:
        return
    host, port = address
    server = uvicorn.Server(server_config(api, host=host, port=port, log_level="warning"))
    setattr(server, "capture_signals", contextlib.nullcontext)  # noqa: B010 (Serve has its own)
    if host == "::":  # all addresses, as from Serve's proxy; uvicorn would leave out those of IPv4
        listener = socket.create_server(
            address, family=socket.AF_INET6, dualstack_ipv6=socket.has_dualstack_ipv6()
        )
        await server.serve(sockets=[listener])
    else:
        await server.serve()


def _num_outputs(params: SamplingParams | None) -> int:
    return (params.n if params is not None else None) or 1
