"""The scripts that run the image and the Compose files. CI runs `deploy/check` as a whole, and not the other one."""

import subprocess
from pathlib import Path

import pytest

from tests.deploy.files import ROOT

CANNOT_RUN = 77


SCRIPTS = ("check", "check-compose")


def deploy_check(script: str, *arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{path}:/usr/bin:/bin" if path else "/usr/sbin:/usr/bin:/sbin:/bin"}
    return subprocess.run(
        [ROOT / "deploy" / script, *arguments],
        env=environment, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS)
def test_check_says_loudly_that_this_machine_cannot_run_it(script: str, tmp_path: Path) -> None:
    (tmp_path / "id").write_text("#!/bin/sh\necho 1000\n")
    (tmp_path / "id").chmod(0o755)
    result = deploy_check(script, path=tmp_path)
    assert result.returncode == CANNOT_RUN
    assert f"deploy/{script}: NOT RUN: it needs root" in result.stderr
    assert result.stderr.count("!" * 100) == 2


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("argument", ["--help", "unknown"])
def test_check_explains_its_options(argument: str, script: str) -> None:
    result = deploy_check(script, argument)
    assert result.returncode == 2
    assert f"usage: deploy/{script}" in result.stderr
    assert "exit code:" in result.stderr


def test_ci_runs_the_check_and_is_loud_if_it_cannot() -> None:
    text = (ROOT / ".ci/run").read_text()
    assert "deploy/check" in text
    assert f"-eq {CANNOT_RUN}" in text
