"""The API of a served application: over an engine of its own, one that it shares with other API
processes, or several engines.

A replica with its own engine runs in bundle 0 of a placement group that has one bundle per rank;
the driver and the ranks run in the same group. HTTP requests reach `Api` directly or through
Serve's proxy, calls of a handle reach the methods below; both count against the same limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import sys
from collections.abc import AsyncGenerator
from collections.abc import Sequence as Seq
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.api.access import Access
from cluster.api.admission import ApiLimits
from cluster.api.app import SWITCH_INTERVAL_S, Api
from cluster.api.endpoints import ServedModel
from cluster.api.metrics import MetricFamily, engine_families
from cluster.client.allocator import return_large_allocations
from cluster.client.client import Client
from cluster.client.outputs import Chunk, RequestOutput
from cluster.client.prompts import (
    Message,
    Prompt,
    as_prompt_list,
    broadcast_params,
    conversations,
)
from cluster.client.setup import EngineSetup, make_engine_setup
from cluster.engine.start import EngineProcesses
from cluster.ranks.processes import end_with_parent
from cluster.serve.calls import answers_in_time
from cluster.serve.engine import EngineStatus, status_of
from cluster.serve.gathered import GatheredCounters, ProcessCounters, counters_of_engine
from cluster.serve.health import DriverHealth
from cluster.serve.listener import HttpListener
from cluster.serve.pool import EnginePool
from cluster.serve.ray_metrics import report_periodically
from cluster.serve.shared_engine import SharedEngine
from cluster.timeouts import GATHER_TIMEOUT_S, POOL_STATS_TIMEOUT_S, Timeouts
from configs.serve import ServeConfig
from scheduler.errors import EaglerayError, EngineDeadError
from scheduler.limits import SchedulerLimits
from scheduler.params import SamplingParams


def installed_version() -> str:
    """Version of the package; "not installed" where Eagleray runs from a checkout."""
    try:
        return importlib.metadata.version("eagleray")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


class ApiReplica:
    """Run by Ray Serve. Other programs call `generate`, `chat`, `stream` and `stream_chat`."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: ServeConfig, engines: DeploymentHandle[Any] | None = None
    ) -> None:
        """`engines`: a deployment whose engines to share or lease; without it, this starts one."""
        self._listener: HttpListener | None = None  # Serve may end this replica before it has one
        end_with_parent()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        return_large_allocations()
        sampling = SamplingParams.from_dict(config.sampling)
        self._model_name = config.model_name
        setup = await asyncio.to_thread(make_engine_setup, config.engine, sampling)
        self._own_engine: EngineProcesses | None = None
        self._health: DriverHealth | None = None
        self._pool: EnginePool | None = None
        self._engines = engines
        if engines is None:
            self._client = await self._start_engine(config, setup)
        else:
            self._client = await self._connect_to_engines(config, setup, engines)
        self._api = _make_api(config, setup, self._client)
        self._api.gather_metrics = self._gather_metrics
        self._drain_limit_s = config.drain_timeout_s
        replica_id = serve.get_replica_context().replica_id.unique_id
        self._counters = GatheredCounters(replica_id, self._api.metrics.families)
        self._metrics_task = asyncio.create_task(
            report_periodically(replica_id, self._families_for_ray)
        )
        if config.listens_itself:
            self._listener = HttpListener(self._api, config)

    async def _start_engine(self, config: ServeConfig, setup: EngineSetup) -> Client:
        """Start this replica's own engine; returns a client of it."""
        placement_group = ray.util.get_current_placement_group()
        self._own_engine = engine = await asyncio.to_thread(EngineProcesses, setup, placement_group)
        replacement_timeout_s = Timeouts.from_options(config.engine).replacement_timeout_s
        self._health = DriverHealth(engine.frontend.driver_handle, replacement_timeout_s)
        return Client(setup.request_builder(engine.report.limits), engine.frontend)

    async def _connect_to_engines(
        self, config: ServeConfig, setup: EngineSetup, engines: DeploymentHandle[Any]
    ) -> Client:
        """Wait for the first engine of a deployment; returns a client of all its engines. Raises
        `EngineDeadError` if none comes in time.
        """
        timeouts = Timeouts.from_options(config.engine)
        limit_s = timeouts.first_engine_wait_s
        try:
            limits: Any = await asyncio.wait_for(engines.limits.remote(), limit_s)
        except TimeoutError:
            raise EngineDeadError(
                f"no engine came within {limit_s:g} s. If the log or 'launch.py status' says that"
                " there is no room for one, make room, or give a longer wait_for_nodes_s; if one"
                " takes that long to start, give a longer start_timeout_s"
            ) from None
        assert isinstance(limits, SchedulerLimits)
        if config.has_single_engine:
            shared_engine = await asyncio.to_thread(SharedEngine, engines, timeouts)
            return Client(setup.request_builder(limits), shared_engine.frontend)
        self._pool = EnginePool(
            engines,
            limits.block_size,
            timeouts.stuck_after_s,
            timeouts.lease_wait_s,
            holder=ray.get_runtime_context().current_actor,
            is_only_chooser=config.api_replicas == 1,
        )
        return Client(setup.request_builder(limits), self._pool, self._pool.send)

    def __serve_build_asgi_app__(self) -> Api:
        return self._api

    async def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """As `LLM.generate`."""
        prompt_list = as_prompt_list(prompts)
        params_per_prompt = broadcast_params(sampling_params, len(prompt_list))
        with self._api.admission.admit(sum(map(_num_outputs, params_per_prompt))):
            return await self._client.wait_async(
                await self._client.submit_async(prompt_list, sampling_params)
            )

    async def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """As `LLM.chat`."""
        return await self.generate(conversations(messages), sampling_params)

    async def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """As `LLM.stream`, for handles with `stream=True`. A chat is streamed with the prompt
        `{"messages": ...}`.
        """
        [params] = broadcast_params(sampling_params, 1)
        with self._api.admission.admit(_num_outputs(params)):
            async with self._client.stream([prompt], params) as (_, chunks):
                while items := await chunks.next():
                    for _, chunk in items:
                        yield chunk

    async def stream_chat(
        self, messages: Seq[Message], sampling_params: SamplingParams | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """`stream` for one conversation."""
        async for chunk in self.stream({"messages": messages}, sampling_params):
            yield chunk

    async def drain(self, limit_s: float) -> int:
        """As `Api.drain`: returns how many outputs, or else answers, are left."""
        return await self._api.drain(limit_s)

    async def counters(self) -> ProcessCounters:
        """The counters of this process, and what it knows of those of others."""
        return self._counters.known_counters()

    async def engine_statuses(self) -> list[EngineStatus]:
        """The engines that answer, and where they run."""
        if self._engines is not None:
            return await answers_in_time(self._engines, "status", limit_s=POOL_STATS_TIMEOUT_S)
        assert self._own_engine is not None
        return [await status_of(self._own_engine, self._model_name, await self._api.stats())]

    async def check_health(self) -> None:
        """Raises when nothing listens any more, or when this replica's own engine is dead for good,
        so that Serve replaces the replica. Engines of a separate deployment are replaced there.
        """
        if self._listener is not None:
            self._listener.check()
        if self._health is not None:
            self._health.check()

    async def __del__(self) -> None:
        """Serve awaits this before it ends the replica. Waits for the requests that came past
        Serve's proxy, which Serve does not know of.
        """
        if self._listener is not None:
            self._listener.stop_accepting()
            await self._api.drain(self._drain_limit_s)

    async def _families_for_ray(self) -> list[MetricFamily]:
        """The counters of this replica, and of its own engine if it has one."""
        return self._api.metrics.families() if self._engines else await self._api.families()

    async def _gather_metrics(self) -> list[list[MetricFamily]]:
        """The families of all processes of the API, and of all engines. Those of a single engine
        begin anew with its driver: a sum of one is read correctly without a memory.
        """
        context = serve.get_replica_context()
        handle = serve.get_deployment_handle(context.deployment, context.app_name)
        answers = await answers_in_time(handle, "counters", limit_s=GATHER_TIMEOUT_S)
        if self._pool is not None:
            answers += map(counters_of_engine, await self._pool.all_stats())
            return self._counters.families_of_all(answers)
        families = self._counters.families_of_all(answers)
        with contextlib.suppress(EaglerayError):  # the engine does not answer at the moment
            families.append(engine_families(await self._api.stats()))
        return families


def _make_api(config: ServeConfig, setup: EngineSetup, client: Client) -> Api:
    return Api(
        client,
        ServedModel(
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
            allowed_hosts=config.split_names(config.allowed_hosts),
            allowed_origins=config.split_names(config.allowed_origins),
        ),
        adds_request_id=config.listens_itself,  # Serve's proxy adds it itself
        limits=ApiLimits(
            max_open_outputs=config.max_open_outputs,
            max_body_bytes=config.max_body_bytes,
            slow_reader_timeout_s=config.slow_reader_timeout_s,
        ),
    )


def _num_outputs(params: SamplingParams | None) -> int:
    return (params.n if params is not None else None) or 1
