"""Makes a Serve application from a configuration: one deployment with its own engine, or an API
apart from its engines.

`serve run` and `serve deploy` call `build` (see `configs/serve.yaml`). Errors in the configuration
are raised here, before Serve starts a replica.
"""

from __future__ import annotations

import logging
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig

from cluster.client.setup import make_engine_setup
from cluster.resources.placement import actor_environment
from cluster.resources.room import bundle_of, check_room, pick_device, placement_strategy
from cluster.serve.engine import DEPLOYMENT_NAME, EngineReplica
from cluster.serve.replica import ApiReplica
from cluster.serve.router import LeaseRouter
from cluster.timeouts import HEALTH_PERIOD_S, Timeouts
from configs.engine import resolve_max_num_seqs
from configs.serve import ServeConfig
from scheduler.params import SamplingParams

API_DEPLOYMENT_NAME = "api"
MAX_ONGOING_REQUESTS = 100_000  # so that our own limits are reached before Serve's
MAX_STARTS = 2  # that fail, of any replicas of a deployment, before Serve gives up
# How long a replica without Serve's proxy waits before it ends, and between looks at what still
# runs: its requests come past Serve, so it need not wait until Serve's routers know that it ends.
SHUTDOWN_WAIT_PERIOD_S = 0.1

logger = logging.getLogger("eagleray")


def build(args: dict[str, Any]) -> serve.Application:
    """An application from the options of `ServeConfig`. Raises `ConfigError`."""
    return application(ServeConfig.from_dict(args))


def application(config: ServeConfig) -> serve.Application:
    """The application of a configuration. Raises `ConfigError`, `RequestError`."""
    make_engine_setup(config.engine, SamplingParams.from_dict(config.sampling))
    timeouts = Timeouts.from_options(config.engine)
    if raised_limits_text := timeouts.describe_raised_limits():
        logger.info("to fit the options of the engine: %s", raised_limits_text)
    num_ranks = config.engine.tensor_parallel_size
    if not ray.is_initialized():
        ray.init(address="auto")
    device = pick_device(config.engine.device, num_ranks)
    if not config.engine.wait_for_nodes_s:
        check_room(num_ranks, device, num_engines=config.replicas)
    shared_options: dict[str, Any] = {
        "max_ongoing_requests": MAX_ONGOING_REQUESTS,
        "max_queued_requests": -1,
        "max_constructor_retry_count": MAX_STARTS,
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": timeouts.health_timeout_s,
        "graceful_shutdown_timeout_s": config.drain_timeout_s,
        "ray_actor_options": {"num_cpus": 0, "runtime_env": actor_environment()},
        "logging_config": {"enable_access_log": False},
    }
    if config.listens_itself:
        shared_options["graceful_shutdown_wait_loop_s"] = SHUTDOWN_WAIT_PERIOD_S
    engine_options: dict[str, Any] = shared_options | {
        "name": DEPLOYMENT_NAME,
        "placement_group_bundles": [bundle_of(device) for _ in range(num_ranks)],
        "placement_group_strategy": placement_strategy(num_ranks, device),
    }
    if config.api_has_engine:
        return serve.deployment(**engine_options)(serve.ingress()(ApiReplica)).bind(config)
    engine_app = serve.deployment(
        **engine_options,
        num_replicas="auto" if config.max_replicas else config.replicas,
        autoscaling_config=_autoscaling(config, device),
        request_router_config={"request_router_class": LeaseRouter},
    )(EngineReplica).bind(config)
    return serve.deployment(
        **shared_options, name=API_DEPLOYMENT_NAME, num_replicas=config.api_replicas
    )(serve.ingress()(ApiReplica)).bind(config, engine_app)


def _autoscaling(config: ServeConfig, device: str) -> AutoscalingConfig | None:
    """How Serve adds and ends replicas; None for a fixed number of them."""
    if config.max_replicas is None:
        return None
    # Serve decides by the mean load over this time, 30 s by default.
    averaging_window_s = min(30.0, config.upscale_delay_s)
    return AutoscalingConfig(
        min_replicas=config.replicas,
        max_replicas=config.max_replicas,
        target_ongoing_requests=config.target_ongoing_requests
        or max(1, resolve_max_num_seqs(config.engine, device) // 2),
        upscale_delay_s=config.upscale_delay_s,
        downscale_delay_s=config.downscale_delay_s,
        look_back_period_s=averaging_window_s,
        metrics_interval_s=averaging_window_s / 3,
    )
