"""The cluster files are valid for Ray, and little is sent to the nodes."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml  # type: ignore[import-untyped]

from configs.paths import SOURCE_ROOT
from configs.serve import ServeConfig

CLUSTERS = SOURCE_ROOT / "configs" / "clusters"
MAX_SHIPPED_BYTES = 5 * 2**19


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


# The fields of KubeRay's v1 types that our files may use; no package contains the schema itself.
CLUSTER_FIELDS = {
    "rayVersion": str,
    "enableInTreeAutoscaling": bool,
    "authOptions": dict,
    "headGroupSpec": dict,
    "workerGroupSpecs": list,
}
HEAD_FIELDS = {"rayStartParams": dict, "template": dict}
WORKER_FIELDS = HEAD_FIELDS | {
    "groupName": str,
    "replicas": int,
    "minReplicas": int,
    "maxReplicas": int,
}


def fields(of: dict[str, Any]) -> dict[str, type]:
    return {name: type(value) for name, value in of.items()}


def test_kubernetes_and_the_operator_know_every_field() -> None:
    service = load("kuberay.yaml")
    assert fields(service["spec"]) == {"serveConfigV2": str, "rayClusterConfig": dict}
    cluster = service["spec"]["rayClusterConfig"]
    assert fields(cluster) == CLUSTER_FIELDS
    assert fields(cluster["headGroupSpec"]) == HEAD_FIELDS
    [workers] = cluster["workerGroupSpecs"]
    assert fields(workers) == WORKER_FIELDS
    for group in (cluster["headGroupSpec"], workers):
        assert set(fields(group["rayStartParams"]).values()) <= {str}
        check_pod(group["template"])


def check_pod(template: dict[str, Any]) -> None:
    """Check a pod by Kubernetes's own schema, in which unknown fields are errors."""
    metadata = {"name": "pod"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata} | template
    kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


def test_kubernetes_does_not_accept_just_any_pod() -> None:
    cluster = load("kuberay.yaml")["spec"]["rayClusterConfig"]
    template = cluster["headGroupSpec"]["template"]
    template["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(kubernetes_validate.ValidationError, match="volumeMount"):
        check_pod(template)


def test_rays_autoscaler_for_kubernetes_finds_the_groups() -> None:
    """Ray's part of KubeRay, on the cluster that the operator makes from the service."""
    from ray.autoscaler._private.kuberay import autoscaling_config

    spec = load("kuberay.yaml")["spec"]["rayClusterConfig"]
    metadata = {"name": "eagleray", "namespace": "default"}
    config = autoscaling_config._derive_autoscaling_config_from_ray_cr(
        {"metadata": metadata, "spec": spec}
    )
    head, gpu = (config["available_node_types"][name] for name in ("headgroup", "gpu"))
    assert head["resources"]["CPU"] == 0
    assert (gpu["resources"]["CPU"], gpu["resources"]["GPU"]) == (16, 4)
    assert (gpu["min_workers"], gpu["max_workers"]) == (0, 4)


def test_what_is_sent_to_nodes_is_small_and_holds_no_weights(tmp_path: Path) -> None:
    from ray._private.runtime_env.packaging import create_package, get_uri_for_directory

    where = str(SOURCE_ROOT)
    uri = get_uri_for_directory(where, include_gitignore=True)
    package = tmp_path / Path(uri).name
    create_package(where, package, include_gitignore=True)
    names = zipfile.ZipFile(package).namelist()
    assert {"launch.py", "cluster/llm.py", "configs/default_model/config.json"} <= set(names)
    kept_out = ("tests/", "benchmarks/", "docs/", ".git/", ".venv/")
    assert not [name for name in names if name.startswith(kept_out) or "safetensors" in name]
    assert package.stat().st_size < MAX_SHIPPED_BYTES
