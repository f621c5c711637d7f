"""The Dockerfile. `deploy/check` builds the image and runs it."""

import asyncio
import json
import os
import re
import subprocess
import sys
import tomllib
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import unused_port
from packaging.requirements import Requirement

from tests.deploy.files import ROOT, VARIABLES, dockerfile, image_environment, instruction


class HealthServer:
    """Answers /healthz with `status`; never, if that is None."""

    def __init__(self) -> None:
        self.status: int | None = 200
        self.port = 0

    async def healthz(self, _: web.Request) -> web.Response:
        if self.status is None:
            await asyncio.get_running_loop().create_future()
        return web.Response(status=self.status or 0)


@pytest.fixture
async def server() -> AsyncIterator[HealthServer]:
    server, application = HealthServer(), web.Application()
    application.router.add_get("/healthz", server.healthz)
    runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.port = runner.addresses[0][1]
    yield server
    await runner.cleanup()


async def health_check(port: int, host: str = "0.0.0.0") -> int:  # noqa: S104 - the check asks another address then
    """Run the health check of the image on this machine, and return its exit code."""
    command = json.loads(instruction("HEALTHCHECK").partition("CMD ")[2])
    environment = {"PATH": os.environ["PATH"], "INDEXER_HTTP_BIND": f"{host}:{port}"}
    process = await asyncio.create_subprocess_exec(*command, env=environment, stderr=DEVNULL)
    return await asyncio.wait_for(process.wait(), 60)


async def test_health_check_of_the_image_asks_healthz_at_the_port_of_the_settings(server: HealthServer) -> None:
    assert await health_check(server.port) == 0


@pytest.mark.parametrize(
    ("bind", "listens"), [("127.0.0.1", "127.0.0.1"), ("[::1]", "::1"), ("[::]", "::1"), ("127.0.0.2", "127.0.0.2")]
)
async def test_health_check_of_the_image_asks_the_address_of_the_settings(bind: str, listens: str) -> None:
    application = web.Application()
    application.router.add_get("/healthz", HealthServer().healthz)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, listens, 0).start()
    assert await health_check(runner.addresses[0][1], bind) == 0
    await runner.cleanup()


async def test_health_check_of_the_image_fails_if_a_stage_is_stalled(server: HealthServer) -> None:
    server.status = 503
    assert await health_check(server.port) == 1


async def test_health_check_of_the_image_fails_if_nothing_listens() -> None:
    assert await health_check(unused_port()) == 1


@pytest.mark.slow
async def test_health_check_of_the_image_ends_if_the_daemon_hangs(server: HealthServer) -> None:
    server.status = None
    assert await health_check(server.port) != 0


def test_image_runs_as_a_numeric_user_that_owns_the_volume() -> None:
    # Kubernetes can check runAsNonRoot only for a number.
    assert instruction("USER") == "10001:10001"
    assert "useradd --uid 10001 --gid 10001" in dockerfile()
    assert instruction("VOLUME") == image_environment()["INDEXER_DATA_DIR"] == "/data"


def test_variables_of_the_image_are_settings() -> None:
    assert {name for name in image_environment() if name.startswith("INDEXER_")} <= VARIABLES
    assert image_environment()["INDEXER_HTTP_BIND"].endswith(f":{instruction('EXPOSE')}")


def test_image_is_built_from_wheels_and_pinned_versions() -> None:
    installs = re.findall(r"pip .*? install ([^&\n]+)", dockerfile())
    assert len(installs) == 4
    for install in installs:
        assert "--no-deps" in install or {"--only-binary", "--constraint"} <= set(install.split()), install
    assert not re.search(r"\b(apt-get|gcc|g\+\+|build-essential)\b", dockerfile())


def test_image_installs_the_native_core_that_a_stage_with_pinned_crates_builds() -> None:
    assert re.search(r"^RUN native/lock && maturin build .*--locked", dockerfile(), re.MULTILINE)
    assert dockerfile().index("COPY --from=native /wheels") < dockerfile().rindex("FROM ${PYTHON_IMAGE}")
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines())
    assert "maturin" in pinned


@pytest.mark.parametrize(("extras", "added"), [("", set()), ("parquet", {"pyarrow"})])
def test_image_installs_the_dependencies_and_those_of_the_extras(extras: str, added: set[str]) -> None:
    (command,) = re.findall(r"^RUN (python -c .+?) > dependencies\.txt", dockerfile(), re.MULTILINE)
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "EXTRAS": extras}
    listed = subprocess.run(
        ["sh", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    expected = {Requirement(line).name for line in project["dependencies"]} | added
    assert {Requirement(line).name for line in listed.stdout.splitlines()} == expected


def test_dependencies_are_installed_before_the_source_is_copied() -> None:
    text = dockerfile()
    assert text.index("--requirement dependencies.txt") < text.index("COPY indexer indexer")


def test_build_context_contains_what_the_dockerfile_copies() -> None:
    copied = {
        word for line in re.findall(r"^COPY (?!--from)(.+)$", dockerfile(), re.MULTILINE) for word in line.split()[:-1]
    }
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == allowed
    assert all((ROOT / name).exists() for name in copied)


def test_image_names_its_stop_signal_and_its_labels() -> None:
    assert instruction("STOPSIGNAL") == "SIGTERM"
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]*)"', instruction("LABEL")))
    assert labels.keys() >= {"title", "description", "licenses", "version", "revision"}
    assert (labels["version"], labels["revision"]) == ("${VERSION}", "${REVISION}")
