"""Docker Compose, Kubernetes and systemd accept their files, and the health check of the image works."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from asyncio.subprocess import DEVNULL
from pathlib import Path

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import unused_port

from tests.deploy.files import BASE, CITUS, DEMO, KUBERNETES, SYSTEMD, UNIT, entry, instruction, manifests, services
from tests.source_code import PROJECT

pytestmark = pytest.mark.proof("deploy")

SETUP = "run tests/deploy/setup.sh"
LOADER = Path(__file__).parent / "compose_config/compose-config"
VALIDATOR = Path(sys.executable).with_name("kubernetes-validate")


def run_tool(name: str, *arguments: str | Path, install: str) -> subprocess.CompletedProcess[str]:
    """Run a program; skip the test if it is not installed."""
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed; {install}")
    return subprocess.run([name, *arguments], cwd=PROJECT, capture_output=True, text=True, check=False, timeout=100)


def load_compose(*names: str) -> subprocess.CompletedProcess[str]:
    """Load Compose files with Docker Compose, or with its own loader."""
    found = shutil.which("docker")
    if found and subprocess.run([found, "compose", "version"], capture_output=True, check=False).returncode == 0:
        files = [word for name in names for word in ("--file", name)]
        return run_tool(found, "compose", *files, "--profile", "*", "config", "--format", "json", install="")
    return run_tool(str(LOADER), *names, install=f"{SETUP}, which needs Go")


@pytest.mark.parametrize(
    ("names", "daemons"),
    [((BASE,), ["indexer"]), ((BASE, DEMO), ["indexer"]), ((CITUS,), ["indexer0", "indexer1"])],
    ids=["base", "demo", "citus"],
)
def test_docker_compose_accepts_the_files(
    names: tuple[str, ...], daemons: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSTGRES_PASSWORD", "of-the-test")
    loaded = load_compose(*names)
    assert loaded.returncode == 0, loaded.stderr
    found = json.loads(loaded.stdout)["services"]
    assert found.keys() == {service for name in names for service in services(name)}
    assert [found[name]["environment"]["PGPASSWORD"] for name in daemons] == ["of-the-test"] * len(daemons)


@pytest.mark.parametrize("name", [BASE, CITUS])
def test_compose_does_not_start_without_a_password(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("POSTGRES_PASSWORD", raising=False)
    loaded = load_compose(str(shutil.copy(PROJECT / name, tmp_path)))  # away from an .env file of the developer
    assert loaded.returncode != 0
    assert "POSTGRES_PASSWORD" in loaded.stderr


def test_manifests_conform_to_the_schemas_of_kubernetes() -> None:
    files = [
        path for path in sorted(KUBERNETES.glob("*.yaml")) if path.name not in {"kustomization.yaml", "podmonitor.yaml"}
    ]
    result = run_tool(str(VALIDATOR), "--strict", *files, install=SETUP)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(" passed for resource ") == len(files)


def test_kustomization_renders_all_manifests() -> None:
    result = run_tool("kubectl", "kustomize", KUBERNETES, install="see kubernetes.io/docs/tasks/tools")
    assert result.returncode == 0, result.stderr
    rendered = {item["kind"]: item for item in yaml.safe_load_all(result.stdout)}
    assert rendered.keys() == manifests().keys()
    assert {item["metadata"].get("namespace") for item in rendered.values()} == {None, "indexer"}


def test_systemd_accepts_the_unit_which_is_well_confined(tmp_path: Path) -> None:
    """With a program that exists here. systemd rates the exposure from 0.0 (none) to 10.0: at most 2.0."""
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("ExecStart=/opt/indexer/bin/indexer", f"ExecStart={sys.executable}"))
    result = run_tool("systemd-analyze", "verify", "--man=no", unit, install="apt-get install systemd")
    assert "indexer.service" not in result.stderr  # unknown keys and bad values are warnings
    assert result.returncode == 0, result.stderr
    options = ("--offline=true", "--threshold=20", "--no-pager")
    result = run_tool("systemd-analyze", "security", *options, UNIT, install="apt-get install systemd")
    assert result.returncode == 0, result.stdout[-500:] + result.stderr
    arguments = (f"--root={tmp_path}", "--dry-run", SYSTEMD / "indexer.sysusers.conf")
    result = run_tool("systemd-sysusers", *arguments, install="apt-get install systemd")
    assert f"Creating user '{entry('User')}'" in result.stderr


async def health_check(port: int, host: str) -> int:
    """Run the health check of the image on this machine, and return its exit code."""
    command = json.loads(instruction("HEALTHCHECK").partition("CMD ")[2])
    environment = {"PATH": os.environ["PATH"], "INDEXER_HTTP_BIND": f"{host}:{port}"}
    process = await asyncio.create_subprocess_exec(*command, env=environment, stderr=DEVNULL)
    return await asyncio.wait_for(process.wait(), 60)


@pytest.mark.parametrize(
    ("bind", "listens"),
    [("0.0.0.0", "127.0.0.1"), ("[::1]", "::1"), ("[::]", "::1"), ("127.0.0.2", "127.0.0.2")],  # noqa: S104
)
async def test_health_check_of_the_image_asks_healthz_at_the_address_of_the_settings(bind: str, listens: str) -> None:
    status: int | None = 200

    async def healthz(_: web.Request) -> web.Response:
        if status is None:  # the daemon hangs
            await asyncio.get_running_loop().create_future()
        return web.Response(status=status or 0)

    assert await health_check(unused_port(), bind) == 1
    application = web.Application()
    application.router.add_get("/healthz", healthz)
    runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, listens, 0).start()
    port = runner.addresses[0][1]
    assert await health_check(port, bind) == 0
    status = 503
    assert await health_check(port, bind) == 1
    status = None
    assert await health_check(port, bind) != 0
    await runner.cleanup()
