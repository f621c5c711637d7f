"""docs/runbook.md has an answer for every state, reason, readiness code and condition that the program reports."""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from indexer.monitoring.conditions import CONDITION_KINDS
from indexer.reasons import Desync, FetchFailure, GapReason, Rejection
from indexer.sync.repo_state import SyncStatus

ROOT = Path(__file__).parents[2]
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text()
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
CODE = re.compile(r"^\| `([\w-]+)` \|", re.MULTILINE)


def section(page: str, heading: str) -> str:
    """Return the text below a heading, up to the next heading of any level."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", page, re.MULTILINE | re.DOTALL)
    assert found, heading
    return found[1]


@pytest.mark.parametrize(
    ("heading", "reasons"),
    [
        ("Reasons of dead letters", Rejection),
        ("Reasons of desynchronized repos", Desync),
        ("Reasons of failed fetches", FetchFailure),
        ("Reasons of gaps", GapReason),
        ("Conditions in the log", [kind.name for kind in CONDITION_KINDS]),
        ("Reasons why a daemon is not ready", CODE.findall(section(OPERATIONS, "Reasons why the daemon is not ready"))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_reason_says_what_to_do(heading: str, reasons: Iterable[str]) -> None:
    assert CODE.findall(section(RUNBOOK, heading)) == list(map(str, reasons))


@pytest.mark.parametrize("status", SyncStatus)
def test_every_sync_status_has_a_section(status: SyncStatus) -> None:
    assert section(RUNBOOK, status.value)


HOSTING_STATUSES = ("deactivated", "takendown", "suspended", "deleted", "tombstoned", "desynchronized", "throttled")


@pytest.mark.parametrize("status", HOSTING_STATUSES)
def test_every_hosting_status_that_hides_a_repo_is_explained(status: str) -> None:
    assert f"`{status}`" in section(RUNBOOK, "Hidden repos")


def test_failures_that_park_a_repo_are_named() -> None:
    named = re.search(r"\*\*parked\*\* if its last failure was permanent \((.*?)\)", RUNBOOK, re.DOTALL)
    assert named
    assert re.findall(r"`([\w-]+)`", named[1]) == [failure for failure in FetchFailure if failure.is_permanent]


@pytest.mark.parametrize(
    "task",
    [
        "Back up and restore",
        "Move from the embedded Postgres to a server",
        "Change relay",
        "Add a shard",
        "Disk full",
        "Upgrade",
    ],
)
def test_every_task_of_an_operator_has_a_section_with_commands(task: str) -> None:
    assert "\n$ " in section(RUNBOOK, task)


def test_restore_says_what_the_restored_cursor_means() -> None:
    text = section(RUNBOOK, "Back up and restore")
    assert "**What the restored cursor means.**" in text
    assert "indexer backup" in text
    assert "indexer restore" in text


def test_every_console_block_has_only_commands() -> None:
    blocks = re.findall(r"^```console\n(.*?)^```", RUNBOOK, re.MULTILINE | re.DOTALL)
    assert blocks
    assert [line for block in blocks for line in block.splitlines() if not line.startswith("$ ")] == []
