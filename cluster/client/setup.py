"""Checks everything about an engine that is known before Ray starts.

What cannot work is refused here, and requests can be built and checked against the limits, before
any process runs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from cluster.client.model_files import find_model, generation_defaults
from cluster.client.requests import RequestBuilder
from cluster.client.tokenizer import Tokenizer, load_tokenizer
from cluster.scheduler_limits import limits_of
from cluster.timeouts import Timeouts
from configs.engine import EngineConfig, ResolvedConfig
from configs.model import ModelConfig, read_generation_config
from scheduler.errors import ConfigError
from scheduler.limits import SchedulerLimits
from scheduler.params import SamplingParams
from workers.batch.kv_plan import plan_kv_cache
from workers.configuration import preview_config
from workers.models.checkpoint import check_checkpoint, quantization_of_files

_UNKNOWN_NUM_BLOCKS = 2**31 - 1  # stands for a cache whose size only the ranks know


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """Options, checkpoint, tokenizer and sampling defaults. `expected_config` is the configuration
    that will run, as far as that is known.
    """

    config: EngineConfig
    model: ModelConfig
    model_dir: Path
    tokenizer: Tokenizer | None
    sampling_defaults: SamplingParams
    expected_config: ResolvedConfig

    @property
    def has_chat_template(self) -> bool:
        return self.tokenizer is not None and self.tokenizer.has_chat_template

    def request_builder(self, limits: SchedulerLimits | None = None) -> RequestBuilder:
        """A builder of requests within the limits of a started engine, or within those known before
        the start.
        """
        limits = limits or limits_of(self.expected_config, self._num_blocks())
        return RequestBuilder(
            self.model, self.tokenizer, self.sampling_defaults, limits, self.config.seed
        )

    def _num_blocks(self) -> int:
        if self.config.device != "cpu" and self.config.num_kv_blocks is None:
            return _UNKNOWN_NUM_BLOCKS
        return plan_kv_cache(self.expected_config, rank=0).num_blocks


def make_engine_setup(
    config: EngineConfig, sampling_defaults: SamplingParams | None = None
) -> EngineSetup:
    """Find and check everything; downloads a hub id. Raises `ConfigError`.

    `sampling_defaults` fill what a request leaves unset, the checkpoint's own the rest.
    """
    if not isinstance(sampling_defaults, SamplingParams | None):
        raise ConfigError(
            f"sampling_defaults must be a SamplingParams, got {type(sampling_defaults).__name__}"
        )
    Timeouts.from_options(config)  # refuses what would replace ranks that work
    model_dir = find_model(config.model, config.revision)
    if config.tokenizer is not None:
        # Looked for once: the driver may run in another folder, and takes no hub id.
        tokenizer_dir = find_model(config.tokenizer, option="tokenizer")
        config = dataclasses.replace(config, tokenizer=str(tokenizer_dir))
    model = ModelConfig.from_dir(model_dir)
    model.check_tensor_parallel_size(config.tensor_parallel_size)
    check_checkpoint(model_dir, model)
    tokenizer = _load_tokenizer(config, model_dir)
    if tokenizer is not None:
        model = model.with_eos_token_ids(tokenizer.end_token_ids)
    expected_config = preview_config(config, model, model_dir)
    if config.quantization is not None:  # otherwise a rank logs what it unpacks, and why
        quantization_of_files(model_dir, model, expected_config.quantization, is_asked_for=True)
    if config.device == "cpu":
        plan_kv_cache(expected_config, rank=0)
    return EngineSetup(
        config=config,
        model=model,
        model_dir=model_dir,
        tokenizer=tokenizer,
        sampling_defaults=(sampling_defaults or SamplingParams()).with_defaults(
            generation_defaults(read_generation_config(model_dir))
        ),
        expected_config=expected_config,
    )


def _load_tokenizer(config: EngineConfig, model_dir: Path) -> Tokenizer | None:
    if config.tokenizer is None:
        return load_tokenizer(model_dir)
    tokenizer = load_tokenizer(Path(config.tokenizer))
    if tokenizer is None:
        raise ConfigError(f"{config.tokenizer} has no tokenizer files; give a folder that has")
    return tokenizer
