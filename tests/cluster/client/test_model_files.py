"""Finding a checkpoint, and the sampling defaults that come with it."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import pytest

from cluster.client.model_files import find_model, generation_defaults
from cluster.client.setup import make_engine_setup
from configs.engine import EngineConfig
from scheduler.errors import ConfigError
from scheduler.params import SamplingParams
from workers.models.local import MODEL_PATTERNS


def test_a_directory_is_found_wherever_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert (
        find_model("model") == find_model(str(tmp_path / "model")) == (tmp_path / "model").resolve()
    )


def test_a_directory_of_ones_home_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_model("~/model") == (tmp_path / "model").resolve()


def test_a_directory_in_the_form_of_a_hub_id_is_found_before_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Qwen" / "Qwen3-0.6B").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert find_model("Qwen/Qwen3-0.6B") == (tmp_path / "Qwen" / "Qwen3-0.6B").resolve()


def test_a_file_instead_of_a_directory_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_text("")
    with pytest.raises(
        ConfigError, match=r"^model '.*model\.safetensors' is a file; give the directory that holds"
    ):
        find_model(str(file))


@pytest.mark.parametrize(
    "model",
    ["/no/such/directory", "./nothing", "nothing", "a/b/c", "Qwen/", "/Qwen", "Qwen /x", "../x/y"],
)
def test_what_is_neither_a_directory_nor_a_hub_id_is_refused_by_name(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match="is neither an existing directory nor a hub id such as Qwen/"
    ) as refused:
        find_model(model)
    assert repr(model) in str(refused.value)


def test_what_was_looked_for_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^tokenizer '/no/such' is neither"):
        find_model("/no/such", option="tokenizer")


def test_a_hub_id_without_network_is_refused_quickly_and_clearly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert os.environ["HF_HUB_OFFLINE"] == "1", "the tests run without network"
    monkeypatch.chdir(tmp_path)
    began = time.perf_counter()
    with pytest.raises(ConfigError) as refused:
        find_model("nobody/no-such-model")
    assert time.perf_counter() - began < 10.0
    message = str(refused.value)
    assert message.startswith(
        "model 'nobody/no-such-model' is not a directory here, and it cannot be downloaded as a"
    )
    assert message.endswith(
        "Check the spelling, the network and HF_HUB_OFFLINE, or give a directory"
    )
    assert "\n" not in message


def test_a_directory_has_no_revision(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="revision 'v2' is one of a hub id, and model '/"):
        find_model(str(tmp_path), "v2")
    with pytest.raises(ConfigError, match="leave revision out, or give a hub id"):
        make_engine_setup(EngineConfig(revision="v2"))


def test_a_hub_id_is_downloaded_at_its_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked: list[tuple[str, dict[str, Any]]] = []

    def download(model: str, *, tqdm_class: type, **options: Any) -> str:
        asked.append((model, options))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert find_model("nobody/some-model", "v2") == tmp_path
    assert asked == [("nobody/some-model", {"revision": "v2", "allow_patterns": MODEL_PATTERNS})]


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (OSError("no route\nto the\nhost"), "as a hub id: no route. Check"),
        (OSError(), "OSError. Check"),
    ],
)
def test_of_a_long_reason_only_the_first_line_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, shown: str
) -> None:
    import huggingface_hub

    def download(model: str, **_: Any) -> str:
        raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ConfigError) as refused:
        find_model("nobody/some-model")
    assert shown in str(refused.value) and "\n" not in str(refused.value)


# generation_config.json


def test_sampling_defaults_are_read() -> None:
    values: dict[str, Any] = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.1,
        "repetition_penalty": 1.05,
    }
    assert generation_defaults(values | {"do_sample": True}) == SamplingParams(**values)


def test_a_whole_number_may_stand_for_any() -> None:
    values: dict[str, Any] = {"temperature": 1, "top_k": 20, "top_p": 1}
    assert generation_defaults(values) == SamplingParams(**values)


def test_nothing_given_leaves_all_unset() -> None:
    assert generation_defaults({}) == SamplingParams()
    assert generation_defaults({"temperature": None, "top_k": None}) == SamplingParams()


def test_what_is_no_sampling_parameter_is_left_alone() -> None:
    assert (
        generation_defaults({"pad_token_id": 0, "max_length": 2048, "transformers_version": "5"})
        == SamplingParams()
    )


def test_do_sample_false_means_greedy() -> None:
    assert (
        generation_defaults({"do_sample": False, "temperature": 0.7, "top_k": 20}).temperature
        == 0.0
    )


@pytest.mark.parametrize("given", [{}, {"do_sample": True}, {"do_sample": None}])
def test_without_do_sample_false_the_temperature_stands(given: dict[str, Any]) -> None:
    assert generation_defaults(given | {"temperature": 0.7}).temperature == 0.7


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("temperature", True),
        pytest.param("temperature", 10**400, id="temperature-huge"),
        ("top_p", 1.5),
        ("top_k", 2.5),
        ("min_p", math.nan),
        ("repetition_penalty", 0),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_file_and_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^generation_config\.json: {name} must be"):
        generation_defaults({name: value})


@pytest.mark.parametrize("model", ["~nosuchuser/x", "x" * 5000])
def test_a_path_the_system_cannot_look_up_is_refused(model: str) -> None:
    with pytest.raises(ConfigError):
        find_model(model)
