"""The script that builds the image and runs it. CI runs it as a whole."""

import subprocess
from pathlib import Path

import pytest

from tests.deploy.files import ROOT

CANNOT_RUN = 77


def deploy_check(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{path}:/usr/bin:/bin" if path else "/usr/sbin:/usr/bin:/sbin:/bin"}
    return subprocess.run(
        [ROOT / "deploy/check", *arguments],
        env=environment, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def test_check_says_loudly_that_this_machine_cannot_run_it(tmp_path: Path) -> None:
    (tmp_path / "id").write_text("#!/bin/sh\necho 1000\n")
    (tmp_path / "id").chmod(0o755)
    result = deploy_check(path=tmp_path)
    assert result.returncode == CANNOT_RUN
    assert "deploy/check: NOT RUN: it needs root" in result.stderr
    assert result.stderr.count("!" * 100) == 2


@pytest.mark.parametrize("argument", ["--help", "unknown"])
def test_check_explains_its_options(argument: str) -> None:
    result = deploy_check(argument)
    assert result.returncode == 2
    assert "usage: deploy/check" in result.stderr
    assert "exit code:" in result.stderr


def test_ci_runs_the_check_and_is_loud_if_it_cannot() -> None:
    text = (ROOT / ".ci/run").read_text()
    assert "deploy/check" in text
    assert f"-eq {CANNOT_RUN}" in text
