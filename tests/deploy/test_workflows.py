"""The workflows of GitHub run commands that exist."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.yaml_files import read_yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def commands(workflow: dict[str, Any]) -> list[str]:
    """Return the commands of a workflow, each one of a matrix included."""
    found = []
    for job in workflow["jobs"].values():
        found += job.get("strategy", {}).get("matrix", {}).get("command", [])
        found += [step["run"] for step in job["steps"] if "run" in step]
    return [command for command in found if command != "${{ matrix.command }}"]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_commands_of_a_workflow_exist(file: Path) -> None:
    found = commands(read_yaml(file))
    assert found
    for command in found:
        program, *words = command.split()
        assert (program == "make" and words[0] in TARGETS) or (ROOT / program).is_file(), command


def test_what_takes_hours_runs_each_week() -> None:
    workflow = read_yaml(ROOT / ".github/workflows/weekly.yml")
    started = {command.split()[1] for command in commands(workflow)}
    assert started >= {"mutants", "mutate", "simulate", "crashes", "fuzz", "soak", "overload"}
