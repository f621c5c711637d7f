"""The systemd unit."""

import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from indexer.cli.command import ExitCode
from indexer.settings import Settings
from tests.deploy.files import ROOT, VARIABLES, indexer_variables, seconds

SYSTEMD = ROOT / "deploy/systemd"
UNIT = SYSTEMD / "indexer.service"


def entries() -> dict[str, list[str]]:
    """Return the values of each key of the unit, in their order."""
    found = defaultdict(list)
    for key, value in re.findall(r"^(\w+)=(.*)$", UNIT.read_text(), re.MULTILINE):
        found[key].append(value)
    return found


def entry(key: str) -> str:
    (value,) = entries()[key]
    return value


def run_tool(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed; apt-get install systemd")
    return subprocess.run([name, *arguments], capture_output=True, text=True, check=False, timeout=60)


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """With a program that exists here. systemd reports unknown keys and bad values as warnings."""
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("ExecStart=/opt/indexer/bin/indexer", f"ExecStart={sys.executable}"))
    result = run_tool("systemd-analyze", "verify", "--man=no", str(unit))
    assert "indexer.service" not in result.stderr
    assert result.returncode == 0, result.stderr


def test_unit_is_well_confined() -> None:
    """Check the exposure, which systemd rates from 0.0 (none) to 10.0 (that of an unconfined unit): at most 2.0."""
    result = run_tool("systemd-analyze", "security", "--offline=true", "--threshold=20", "--no-pager", str(UNIT))
    assert result.returncode == 0, result.stdout[-500:] + result.stderr


def test_user_of_the_unit_is_created_by_the_sysusers_file(tmp_path: Path) -> None:
    result = run_tool("systemd-sysusers", f"--root={tmp_path}", "--dry-run", str(SYSTEMD / "indexer.sysusers.conf"))
    assert f"Creating user '{entry('User')}'" in result.stderr


def test_systemd_waits_longer_than_the_daemon_takes_to_stop() -> None:
    assert seconds(entry("TimeoutStopSec")) > Settings().stop_timeout


def test_only_the_daemon_is_signalled_because_it_stops_its_own_postgres() -> None:
    assert entry("KillMode") == "mixed"


def test_unit_restarts_after_a_crash_but_not_after_a_wrong_setting() -> None:
    assert entry("Restart") == "on-failure"
    assert entry("RestartPreventExitStatus") == str(int(ExitCode.BAD_ARGUMENT))


def test_unit_stores_its_data_in_the_state_directory() -> None:
    assert entry("Environment").split()[0] == f"INDEXER_DATA_DIR=/var/lib/{entry('StateDirectory')}"
    assert (entry("ProtectSystem"), entry("NoNewPrivileges")) == ("strict", "yes")


def test_variables_of_the_unit_and_of_its_example_are_settings() -> None:
    example = re.findall(r"^#?(INDEXER_\w+)=", (SYSTEMD / "indexer.env.example").read_text(), re.MULTILINE)
    assert example
    assert {*indexer_variables(entry("Environment").split()), *example} <= VARIABLES
