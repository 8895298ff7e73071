"""The cluster files are what Ray takes, and what is sent to the nodes is small."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from configs.paths import CHECKOUT
from configs.serve import ServeConfig

CLUSTERS = CHECKOUT / "configs" / "clusters"
MAX_SHIPPED_BYTES = 2 * 2**20


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CLUSTERS / name).read_text())
    return found


@pytest.mark.parametrize("name", ["on_premise.yaml", "aws.yaml", "gcp.yaml"])
def test_ray_accepts_the_file(name: str) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(load(name))
    validate_config(config)
    starts = [*config["head_start_ray_commands"], *config["worker_start_ray_commands"]]
    starts = [command for command in starts if " start " in command]
    assert len(starts) == 2 and all("RAY_AUTH_MODE=token" in command for command in starts)
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    for kind, node in config["available_node_types"].items():
        assert name == "on_premise.yaml" or node["resources"]["CPU"] == (kind != "head") * 48


def test_ray_does_not_accept_just_anything() -> None:
    from jsonschema import ValidationError
    from ray.autoscaler._private.util import prepare_config, validate_config

    with pytest.raises(ValidationError):
        validate_config(prepare_config(load("aws.yaml") | {"max_workers": "many"}))


def test_the_service_for_kubernetes_deploys_what_serve_takes() -> None:
    from ray.serve.schema import ServeDeploySchema

    service = load("kuberay.yaml")
    assert (service["kind"], service["apiVersion"]) == ("RayService", "ray.io/v1")
    deployed = ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
    [application] = deployed.applications
    config = ServeConfig.from_dict(application.args)
    cluster = service["spec"]["rayClusterConfig"]
    [workers] = cluster["workerGroupSpecs"]
    [container] = workers["template"]["spec"]["containers"]
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert config.engine.tensor_parallel_size == gpus
    assert cluster["authOptions"] == {"mode": "token"}


def test_what_is_sent_to_nodes_is_small_and_holds_no_weights(tmp_path: Path) -> None:
    from ray._private.runtime_env.packaging import create_package, get_uri_for_directory

    where = str(CHECKOUT)
    uri = get_uri_for_directory(where, include_gitignore=True)
    package = tmp_path / Path(uri).name
    create_package(where, package, include_gitignore=True)
    names = zipfile.ZipFile(package).namelist()
    assert {"launch.py", "cluster/llm.py", "configs/default_model/config.json"} <= set(names)
    kept_out = ("tests/", "benchmarks/", "docs/", ".git/", ".venv/")
    assert not [name for name in names if name.startswith(kept_out) or "safetensors" in name]
    assert package.stat().st_size < MAX_SHIPPED_BYTES
