"""The Compose files."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from indexer.cli.demo_network import daemon_variables
from indexer.cli.main import COMMANDS
from indexer.localnet.local_network import LocalNetwork
from indexer.settings import Settings
from indexer.store.cluster_nodes import OLDEST_CITUS, ClusterNode, check_nodes, notices
from indexer.sync.shard import Shard
from tests.deploy.files import ROOT, SETUP, VARIABLES, compose, indexer_variables, seconds
from tests.yaml_files import read_yaml

BASE, DEMO, CITUS = "docker-compose.yml", "docker-compose.demo.yml", "docker-compose.citus.yml"
LOADER = Path(__file__).parent / "compose_config/compose-config"
NETWORK_HOST, NETWORK_PORT = "network", 2470


def loader_command(*names: str) -> list[str]:
    """Return the command that loads the files like Docker Compose; skip the test if there is none."""
    found = shutil.which("docker")
    if found and subprocess.run([found, "compose", "version"], capture_output=True, check=False).returncode == 0:
        files = [word for name in names for word in ("--file", name)]
        return [found, "compose", *files, "--profile", "*", "config", "--format", "json"]
    if not LOADER.exists():
        pytest.skip(f"neither docker compose nor its loader is installed; {SETUP}")
    return [str(LOADER), *names]


def load(*names: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(loader_command(*names), cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(
    ("names", "daemons"),
    [((BASE,), ["indexer"]), ((BASE, DEMO), ["indexer"]), ((CITUS,), ["indexer0", "indexer1"])],
    ids=["base", "demo", "citus"],
)
def test_docker_compose_accepts_the_files(
    names: tuple[str, ...], daemons: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSTGRES_PASSWORD", "of-the-test")
    loaded = load(*names)
    assert loaded.returncode == 0, loaded.stderr
    services = json.loads(loaded.stdout)["services"]
    assert services.keys() == {service for name in names for service in compose(name)["services"]}
    assert [services[name]["environment"]["PGPASSWORD"] for name in daemons] == ["of-the-test"] * len(daemons)


@pytest.mark.parametrize("name", [BASE, CITUS])
def test_compose_does_not_start_without_a_password(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("POSTGRES_PASSWORD", raising=False)
    loaded = load(str(shutil.copy(ROOT / name, tmp_path)))  # away from an .env file of the developer
    assert loaded.returncode != 0
    assert "Set it in the file .env" in loaded.stderr
    assert ".env" in (ROOT / ".gitignore").read_text().splitlines()


@pytest.mark.parametrize("name", [BASE, DEMO, CITUS])
def test_compose_files_contain_no_secret(name: str) -> None:
    """Every value whose name suggests a secret comes from a variable without a default."""
    text = (ROOT / name).read_text()
    values = re.findall(r"^\s*\w*(?:PASSWORD|SECRET|TOKEN)\w*: *(.+)$", text, re.MULTILINE)
    assert [value for value in values if not re.match(r"\$\{\w+:\?", value)] == []
    assert not re.search(r"://[^/\s]+:[^/\s]+@", text)


@pytest.mark.parametrize("name", [BASE, DEMO, CITUS])
def test_variables_of_the_compose_files_are_settings(name: str) -> None:
    assert set(indexer_variables(compose(name)["services"])) <= VARIABLES


@pytest.mark.parametrize(
    ("name", "service"), [(name, service) for name in (BASE, CITUS) for service in sorted(compose(name)["services"])]
)
def test_services_have_limits_rotate_their_logs_and_listen_on_loopback(name: str, service: str) -> None:
    described = compose(name)["services"][service]
    assert described["deploy"]["resources"]["limits"]["memory"]
    assert described["logging"]["options"].keys() == {"max-size", "max-file"}
    ends = described.get("profiles") == ["setup"]
    assert described.get("restart", "no") == ("no" if ends else "unless-stopped")
    assert all(port.startswith("127.0.0.1:") for port in described.get("ports", []))


@pytest.mark.parametrize(
    ("name", "service"),
    [
        (BASE, "indexer"),
        (BASE, "prometheus"),
        (BASE, "grafana"),
        (DEMO, "network"),
        *[(CITUS, name) for name in ("indexer0", "indexer1", "migrate", "distribute")],
    ],
)
def test_containers_cannot_write_to_their_root_file_system(name: str, service: str) -> None:
    described = compose(name)["services"][service]
    assert described["read_only"] is True
    assert described["cap_drop"] == ["ALL"]
    assert described["security_opt"] == ["no-new-privileges:true"]


@pytest.mark.parametrize(("name", "service"), [(BASE, "indexer"), (CITUS, "indexer0"), (CITUS, "indexer1")])
def test_compose_waits_longer_than_the_daemon_takes_to_stop(name: str, service: str) -> None:
    assert seconds(compose(name)["services"][service]["stop_grace_period"]) > Settings().stop_timeout


def test_monitoring_starts_only_with_its_profile_and_its_files_are_mounted_read_only() -> None:
    services: dict[str, Any] = compose(BASE)["services"]
    assert {name for name, service in services.items() if "profiles" in service} == {"prometheus", "grafana"}
    mounts = [volume for name in ("prometheus", "grafana") for volume in services[name]["volumes"] if volume[0] == "."]
    assert [mount for mount in mounts if not mount.endswith(":ro")] == []
    assert mounts


def test_prometheus_and_grafana_find_their_files() -> None:
    """Mounted directories exist, Prometheus scrapes the indexer, and Grafana reads its dashboards where they are."""
    services = compose(BASE)["services"]
    mounted = dict(
        reversed(volume.removesuffix(":ro").split(":", 1))
        for name in ("prometheus", "grafana")
        for volume in services[name]["volumes"]
        if volume[0] == "."
    )
    assert [source for source in mounted.values() if not (ROOT / source).is_dir()] == []
    prometheus = read_yaml(ROOT / mounted["/etc/prometheus"] / "prometheus.yml")
    assert prometheus["scrape_configs"][0]["static_configs"][0]["targets"] == ["indexer:2580"]
    provisioning = ROOT / mounted["/etc/grafana/provisioning"]
    (provider,) = read_yaml(provisioning / "dashboards/indexer.yml")["providers"]
    assert list((ROOT / mounted[provider["options"]["path"]]).glob("*.json"))
    (source,) = read_yaml(provisioning / "datasources/prometheus.yml")["datasources"]
    assert source["url"].strip("${}") in services["grafana"]["environment"]


def test_demo_builds_its_image_once() -> None:
    """Compose builds one image per service with `build`. If two have one tag, the next `up` replaces a container."""
    services = compose(BASE)["services"] | {"network": compose(DEMO)["services"]["network"]}
    assert "build" not in compose(DEMO)["services"]["indexer"]
    assert services["network"]["image"] == services["indexer"]["image"]
    assert [name for name, service in services.items() if "build" in service] == ["indexer"]
    assert services["network"]["pull_policy"] == "never"


def test_demo_override_gives_the_indexer_the_addresses_of_the_network() -> None:
    services = compose(DEMO)["services"]
    assert services["network"]["command"][:3] == ["demo", "--serve", f"{NETWORK_HOST}:{NETWORK_PORT}"]
    assert NETWORK_HOST in services
    network = LocalNetwork(host=NETWORK_HOST, first_port=NETWORK_PORT)
    assert services["indexer"]["environment"] == daemon_variables(network)


def test_daemons_of_the_cluster_share_the_accounts_and_nothing_else() -> None:
    services = compose(CITUS)["services"]
    daemons = [service for name, service in services.items() if name.startswith("indexer")]
    shards = [Settings(shard=daemon["environment"]["INDEXER_SHARD"]).shard for daemon in daemons]
    assert shards == [Shard(index, len(daemons)) for index in range(len(daemons))]
    used = [volume for service in services.values() for volume in service.get("volumes", ())]
    ports = [port.rpartition(":")[0] for daemon in daemons for port in daemon["ports"]]
    assert len(set(used)) == len(used) == 3 + len(daemons)
    assert {volume.partition(":")[0] for volume in used} == compose(CITUS)["volumes"].keys()
    assert len(set(ports)) == len(daemons)
    assert {daemon["environment"]["INDEXER_DATABASE_URL"] for daemon in daemons} == {
        "postgresql://indexer@coordinator:5432/indexer"
    }


def node_of(name: str, service: dict[str, Any]) -> ClusterNode:
    """Return the node that a service runs, as `indexer distribute` sees it."""
    words = service["command"]
    assert set(words[::2]) == {"-c"}
    settings = dict(word.split("=") for word in words[1::2])
    image, _, version = service["image"].partition(":")
    assert image == "citusdata/citus"
    return ClusterNode(
        id=0,
        name=name,
        is_coordinator=name == "coordinator",
        holds_shards=name != "coordinator",
        postgres=170_000,  # the image has no version of Postgres in its name
        citus=version,
        connections=int(settings["max_connections"]),
        prepared=int(settings["max_prepared_transactions"]),
        wal_level=settings["wal_level"],
        is_owner=True,
    )


def test_nodes_of_the_cluster_have_what_distribute_requires() -> None:
    services = compose(CITUS)["services"]
    nodes = [node_of(name, services[name]) for name in ("coordinator", "worker1", "worker2")]
    check_nodes(nodes)
    assert notices(nodes) == []
    assert int(nodes[0].citus.partition(".")[0]) >= OLDEST_CITUS
    assert all(nodes[0].connections == node.connections for node in nodes)


def test_setup_connects_all_nodes_and_then_migrates_and_distributes() -> None:
    services = compose(CITUS)["services"]
    connected = " ".join(services["nodes"]["command"])
    assert re.findall(r"citus_\w+\('(\w+)', 5432\)", connected) == ["coordinator", "worker1", "worker2"]
    for name in ("migrate", "distribute"):
        assert services[name]["command"] == [name]
        assert name in COMMANDS


def test_commands_of_the_setup_are_those_of_the_file_and_of_the_documents() -> None:
    setup = [name for name, service in compose(CITUS)["services"].items() if service.get("profiles") == ["setup"]]
    for text in ((ROOT / CITUS).read_text(), (ROOT / "docs/operations.md").read_text()):
        commands = re.findall(r"docker compose run --rm (.+?) {2,}# once", text)
        assert commands == ["nodes", "--build migrate", "distribute"]
        assert [command.split()[-1] for command in commands] == setup


def test_a_step_of_the_setup_leaves_no_container() -> None:
    """`docker compose run --rm` removes its own container only. A container of another step would stay after `down`."""
    services = compose(CITUS)["services"]
    started = {name for name, service in services.items() if "profiles" not in service}
    for name in services.keys() - started:
        assert services[name]["depends_on"].keys() <= started
        assert {dependency["condition"] for dependency in services[name]["depends_on"].values()} == {"service_healthy"}


@pytest.mark.parametrize("name", [BASE, DEMO, CITUS])
def test_files_name_the_engine_that_their_health_checks_need(name: str) -> None:
    """The engine refuses `start_interval` before version 25."""
    checks = [service.get("healthcheck", {}) for service in compose(name)["services"].values()]
    assert any("start_interval" in check for check in checks)
    assert "Docker Engine 25" in (ROOT / (BASE if name == DEMO else name)).read_text()
