"""The Dockerfile, the Compose files, the Kubernetes manifests and the systemd unit fit the program."""

import re
from typing import Any

import pytest

from indexer.app.settings import OTHER_VARIABLES, Settings, variable
from indexer.cli.command import ExitCode
from indexer.cli.demo import daemon_variables
from indexer.cluster.nodes import OLDEST_CITUS, ClusterNode, check_nodes
from indexer.demo.local_network import LocalNetwork
from indexer.sync.shard import Shard
from tests.deploy.files import (
    BASE,
    CITUS,
    COMPOSE_FILES,
    DEMO,
    SYSTEMD,
    entry,
    indexer_variables,
    instruction,
    manifests,
    seconds,
    services,
)


def pod() -> dict[str, Any]:
    spec: dict[str, Any] = manifests()["StatefulSet"]["spec"]["template"]["spec"]
    return spec


def test_variables_of_all_files_are_settings() -> None:
    """The program refuses an unknown one."""
    example = (SYSTEMD / "indexer.env.example").read_text()
    named = [
        instruction("ENV").split(),
        *map(services, COMPOSE_FILES),
        manifests()["ConfigMap"]["data"],
        [variable["name"] for variable in pod()["containers"][0]["env"]],
        entry("Environment").split(),
        re.findall(r"^#?(INDEXER_\w+)=", example, re.MULTILINE),
    ]
    found = [set(indexer_variables(part)) for part in named]
    assert all(found)
    assert set.union(*found) <= OTHER_VARIABLES | set(map(variable, Settings.model_fields))


def test_every_runtime_waits_longer_than_the_daemon_takes_to_stop() -> None:
    periods = [pod()["terminationGracePeriodSeconds"], seconds(entry("TimeoutStopSec"))]
    for name, service in ((BASE, "indexer"), (CITUS, "indexer0"), (CITUS, "indexer1")):
        periods.append(seconds(services(name)[service]["stop_grace_period"]))
    assert min(periods) > Settings().stop_timeout


def test_liveness_is_health_and_readiness_is_not() -> None:
    """A daemon that is not ready must not be restarted, and one that waits for its database gets an hour."""
    (daemon,) = pod()["containers"]
    probes = {name: daemon[f"{name}Probe"] for name in ("startup", "liveness", "readiness")}
    assert [probe["httpGet"]["path"] for probe in probes.values()] == ["/healthz", "/healthz", "/readyz"]
    assert probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"] >= 3_600
    assert entry("RestartPreventExitStatus") == str(int(ExitCode.BAD_ARGUMENT)), "no restart after a wrong setting"


@pytest.mark.parametrize("ordinal", [0, 1])
def test_each_pod_derives_its_shard_from_its_ordinal(ordinal: int) -> None:
    """Kubernetes expands $(NAME) from variables that come earlier in the list."""
    variables = {variable["name"]: variable for variable in pod()["containers"][0]["env"]}
    assert list(variables).index("POD_INDEX") < list(variables).index("INDEXER_SHARD")
    text = variables["INDEXER_SHARD"]["value"].replace("$(POD_INDEX)", str(ordinal))
    assert Settings(shard=text).shard == Shard(ordinal, manifests()["StatefulSet"]["spec"]["replicas"])


def test_daemons_of_the_cluster_share_the_accounts() -> None:
    daemons = [service for name, service in services(CITUS).items() if name.startswith("indexer")]
    shards = [Settings(shard=daemon["environment"]["INDEXER_SHARD"]).shard for daemon in daemons]
    assert shards == [Shard(index, len(daemons)) for index in range(len(daemons))]


def node_of(name: str, service: dict[str, Any]) -> ClusterNode:
    """Return the node that a service runs, as `indexer distribute` sees it."""
    settings = dict(word.split("=") for word in service["command"][1::2])
    return ClusterNode(
        id=0,
        name=name,
        is_coordinator=name == "coordinator",
        holds_shards=name != "coordinator",
        postgres=170_000,  # the image has no version of Postgres in its name
        citus=service["image"].partition(":")[2],
        connections=int(settings["max_connections"]),
        prepared=int(settings["max_prepared_transactions"]),
        is_owner=True,
    )


def test_nodes_of_the_cluster_have_what_distribute_requires() -> None:
    nodes = [node_of(name, services(CITUS)[name]) for name in ("coordinator", "worker1", "worker2")]
    check_nodes(nodes)
    assert int(nodes[0].citus.partition(".")[0]) >= OLDEST_CITUS


def test_demo_override_gives_the_indexer_the_addresses_of_the_network() -> None:
    found = services(DEMO)
    _, _, address = found["network"]["command"][:3]
    host, _, port = address.partition(":")
    assert host in found
    assert found["indexer"]["environment"] == daemon_variables(LocalNetwork(host=host, first_port=int(port)))


def test_services_listen_on_loopback_and_cannot_write_to_their_root_file_system() -> None:
    for name in (BASE, CITUS):
        for service in services(name).values():
            assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    for service in (services(BASE)["indexer"], services(CITUS)["indexer0"], services(DEMO)["network"]):
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    for container in (*pod()["initContainers"], *pod()["containers"]):
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
