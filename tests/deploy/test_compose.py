"""The Compose files."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from indexer.cli.demo_network import daemon_variables
from indexer.localnet.local_network import LocalNetwork
from indexer.settings import Settings
from tests.deploy.files import ROOT, SETUP, VARIABLES, compose, indexer_variables, seconds

BASE, DEMO = "docker-compose.yml", "docker-compose.demo.yml"
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


@pytest.mark.parametrize("names", [(BASE,), (BASE, DEMO)], ids="+".join)
def test_docker_compose_accepts_the_files(names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTGRES_PASSWORD", "of-the-test")
    loaded = load(*names)
    assert loaded.returncode == 0, loaded.stderr
    services = json.loads(loaded.stdout)["services"]
    assert services.keys() == compose(BASE)["services"].keys() | compose(names[-1])["services"].keys()
    assert services["indexer"]["environment"]["PGPASSWORD"] == "of-the-test"


def test_compose_does_not_start_without_a_password(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("POSTGRES_PASSWORD", raising=False)
    loaded = load(str(shutil.copy(ROOT / BASE, tmp_path)))  # away from an .env file of the developer
    assert loaded.returncode != 0
    assert "Set it in the file .env" in loaded.stderr
    assert ".env" in (ROOT / ".gitignore").read_text().splitlines()


@pytest.mark.parametrize("name", [BASE, DEMO])
def test_compose_files_contain_no_secret(name: str) -> None:
    """Every value whose name suggests a secret comes from a variable without a default."""
    text = (ROOT / name).read_text()
    values = re.findall(r"^\s*\w*(?:PASSWORD|SECRET|TOKEN)\w*: *(.+)$", text, re.MULTILINE)
    assert [value for value in values if not re.match(r"\$\{\w+:\?", value)] == []
    assert not re.search(r"://[^/\s]+:[^/\s]+@", text)


@pytest.mark.parametrize("name", [BASE, DEMO])
def test_variables_of_the_compose_files_are_settings(name: str) -> None:
    assert set(indexer_variables(compose(name)["services"])) <= VARIABLES


@pytest.mark.parametrize("service", sorted(compose(BASE)["services"]))
def test_services_have_limits_rotate_their_logs_and_listen_on_loopback(service: str) -> None:
    described = compose(BASE)["services"][service]
    assert described["deploy"]["resources"]["limits"]["memory"]
    assert described["logging"]["options"].keys() == {"max-size", "max-file"}
    assert described["restart"] == "unless-stopped"
    assert all(port.startswith("127.0.0.1:") for port in described.get("ports", []))


@pytest.mark.parametrize(
    ("name", "service"), [(BASE, "indexer"), (BASE, "prometheus"), (BASE, "grafana"), (DEMO, "network")]
)
def test_containers_cannot_write_to_their_root_file_system(name: str, service: str) -> None:
    described = compose(name)["services"][service]
    assert described["read_only"] is True
    assert described["cap_drop"] == ["ALL"]
    assert described["security_opt"] == ["no-new-privileges:true"]


def test_compose_waits_longer_than_the_daemon_takes_to_stop() -> None:
    assert seconds(compose(BASE)["services"]["indexer"]["stop_grace_period"]) > Settings().stop_timeout


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
    prometheus = yaml.safe_load((ROOT / mounted["/etc/prometheus"] / "prometheus.yml").read_text())
    assert prometheus["scrape_configs"][0]["static_configs"][0]["targets"] == ["indexer:2580"]
    provisioning = ROOT / mounted["/etc/grafana/provisioning"]
    (provider,) = yaml.safe_load((provisioning / "dashboards/indexer.yml").read_text())["providers"]
    assert list((ROOT / mounted[provider["options"]["path"]]).glob("*.json"))
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())["datasources"]
    assert source["url"].strip("${}") in services["grafana"]["environment"]


def test_demo_override_gives_the_indexer_the_addresses_of_the_network() -> None:
    services = compose(DEMO)["services"]
    assert services["network"]["command"][:3] == ["demo", "--serve", f"{NETWORK_HOST}:{NETWORK_PORT}"]
    assert NETWORK_HOST in services
    network = LocalNetwork(host=NETWORK_HOST, first_port=NETWORK_PORT)
    assert services["indexer"]["environment"] == daemon_variables(network)
