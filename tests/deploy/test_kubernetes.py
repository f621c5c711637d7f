"""The Kubernetes manifests."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from indexer.monitoring import health
from indexer.settings import Settings
from tests.deploy.files import (
    KUBERNETES,
    SETUP,
    VARIABLES,
    image_environment,
    indexer_variables,
    instruction,
    manifests,
)
from tests.deploy.files import ROOT as PROJECT
from tests.yaml_files import read_yaml

LABELS = {"app.kubernetes.io/name": "indexer"}
VALIDATOR = Path(sys.executable).with_name("kubernetes-validate")


def pod() -> dict[str, Any]:
    spec: dict[str, Any] = manifests()["StatefulSet"]["spec"]["template"]["spec"]
    return spec


def containers() -> list[dict[str, Any]]:
    return [*pod()["initContainers"], *pod()["containers"]]


def daemon() -> dict[str, Any]:
    (container,) = pod()["containers"]
    assert isinstance(container, dict)
    return container


@pytest.mark.slow
def test_manifests_conform_to_the_schemas_of_kubernetes() -> None:
    if not VALIDATOR.exists():
        pytest.skip(f"kubernetes-validate is not installed; {SETUP}")
    files = [
        path for path in sorted(KUBERNETES.glob("*.yaml")) if path.name not in {"kustomization.yaml", "podmonitor.yaml"}
    ]
    result = subprocess.run([VALIDATOR, "--strict", *files], capture_output=True, text=True, check=False, timeout=100)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(" passed for resource ") == len(files)


def test_kustomization_renders_all_manifests() -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    result = subprocess.run(
        ["kubectl", "kustomize", KUBERNETES], capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 0, result.stderr
    rendered = {item["kind"]: item for item in yaml.safe_load_all(result.stdout)}
    assert rendered.keys() == manifests().keys()
    assert {item["metadata"].get("namespace") for item in rendered.values()} == {None, "indexer"}


def test_every_manifest_is_in_the_kustomization_except_the_example_of_the_secret() -> None:
    listed = read_yaml(KUBERNETES / "kustomization.yaml")["resources"]
    present = {path.name for path in KUBERNETES.glob("*.yaml")}
    assert present - set(listed) == {"kustomization.yaml", "secret.example.yaml"}


def test_all_manifests_select_the_same_pods() -> None:
    found = manifests()
    stateful = found["StatefulSet"]["spec"]
    selectors = [found[kind]["spec"]["selector"] for kind in ("StatefulSet", "PodDisruptionBudget", "PodMonitor")]
    assert stateful["template"]["metadata"]["labels"] == found["Service"]["spec"]["selector"] == LABELS
    assert selectors == [{"matchLabels": LABELS}] * 3
    assert pod()["topologySpreadConstraints"][0]["labelSelector"] == {"matchLabels": LABELS}
    assert stateful["serviceName"] == found["Service"]["metadata"]["name"]


@pytest.mark.parametrize("ordinal", [0, 1])
def test_each_pod_derives_its_shard_from_its_ordinal(ordinal: int) -> None:
    """Kubernetes expands $(NAME) from variables that come earlier in the list."""
    names = [variable["name"] for variable in daemon()["env"]]
    values = {variable["name"]: variable for variable in daemon()["env"]}
    assert names.index("POD_INDEX") < names.index("INDEXER_SHARD")
    path = values["POD_INDEX"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert path == "metadata.labels['apps.kubernetes.io/pod-index']"
    shard = Settings.model_validate({"shard": values["INDEXER_SHARD"]["value"].replace("$(POD_INDEX)", str(ordinal))})
    assert (shard.shard.index, shard.shard.count) == (ordinal, manifests()["StatefulSet"]["spec"]["replicas"])


def test_variables_of_the_pods_are_settings_and_services_add_none() -> None:
    named = set(indexer_variables([manifests()["ConfigMap"]["data"], [entry["name"] for entry in daemon()["env"]]]))
    assert named <= VARIABLES
    assert pod()["enableServiceLinks"] is False


def test_secret_of_the_example_is_the_one_that_the_pods_read() -> None:
    example = read_yaml(KUBERNETES / "secret.example.yaml")
    for container in containers():
        reference = {entry["name"]: entry for entry in container["env"]}["INDEXER_DATABASE_URL"]["valueFrom"][
            "secretKeyRef"
        ]
        assert reference["name"] == example["metadata"]["name"]
        assert reference["key"] in example["stringData"]


def test_liveness_is_health_and_readiness_is_not() -> None:
    """A daemon that is not ready must not be restarted, and one that waits for its database gets an hour."""
    probes = {name: daemon()[f"{name}Probe"] for name in ("startup", "liveness", "readiness")}
    assert {name: probe["httpGet"]["path"] for name, probe in probes.items()} == {
        "startup": "/healthz",
        "liveness": "/healthz",
        "readiness": "/readyz",
    }
    for probe in probes.values():
        assert f'"{probe["httpGet"]["path"]}"' in Path(health.__file__).read_text()
        assert probe["httpGet"]["port"] == "http"
    assert probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"] >= 3_600
    assert probes["liveness"]["periodSeconds"] * probes["liveness"]["failureThreshold"] >= 60


def test_ports_agree_with_the_image() -> None:
    (port,) = daemon()["ports"]
    found = manifests()
    assert str(port["containerPort"]) == instruction("EXPOSE")
    assert found["Service"]["spec"]["ports"] == [
        {"name": "http", "port": port["containerPort"], "targetPort": port["name"]}
    ]
    assert found["PodMonitor"]["spec"]["podMetricsEndpoints"][0]["port"] == port["name"]


def test_pods_run_confined_as_the_user_of_the_image() -> None:
    user, group = map(int, instruction("USER").split(":"))
    context = pod()["securityContext"]
    assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (user, group, group)
    assert context["runAsNonRoot"] is True
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert manifests()["Namespace"]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for container in containers():
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["limits"]["memory"]


def test_pods_can_write_to_the_data_directory_and_to_tmp() -> None:
    volumes = {volume["name"] for volume in pod()["volumes"]}
    for container in containers():
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert mounts.keys() == {image_environment()["INDEXER_DATA_DIR"], "/tmp"}  # noqa: S108 - a path in the image
        assert set(mounts.values()) <= volumes


def test_kubernetes_waits_longer_than_the_daemon_takes_to_stop() -> None:
    assert pod()["terminationGracePeriodSeconds"] > Settings().stop_timeout


def test_pods_migrate_before_they_start_the_daemon() -> None:
    """A probe of the daemon would end a long migration."""
    (migrate,) = pod()["initContainers"]
    assert (migrate["args"], daemon()["args"]) == (["migrate"], ["run", "--no-migrate"])


def test_images_are_named_once() -> None:
    (image,) = read_yaml(KUBERNETES / "kustomization.yaml")["images"]
    assert {container["image"] for container in containers()} == {image["name"]}
    assert re.search(rf"^\s+image: {image['name']}:", (PROJECT / "docker-compose.yml").read_text(), re.MULTILINE)
