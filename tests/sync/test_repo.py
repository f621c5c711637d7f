import re
from pathlib import Path

import pytest

from indexer.errors import BrokenInvariantError
from indexer.sync.repo import TRANSITIONS, Finding, Outcome, SyncStatus, transition

ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"
BLOCK = re.compile(r"(<!-- transitions:.*?-->\n).*?(<!-- /transitions -->)", re.DOTALL)


def drawn() -> str:
    """The table of transitions as the documentation shows it."""
    rows = ["| | " + " | ".join(SyncStatus) + " |", "|---|" + "---|" * len(SyncStatus)]
    for finding in Finding:
        cells = []
        for status in SyncStatus:
            outcome, after = TRANSITIONS[status].get(finding, (None, status))
            cells.append("-" if outcome is None else f"{outcome}" if after is status else f"{outcome} → **{after}**")
        rows.append(f"| {finding} | " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def test_the_documentation_shows_the_table_as_it_is() -> None:
    text = ARCHITECTURE.read_text()
    assert BLOCK.sub(lambda match: match[1] + drawn() + match[2], text) == text, (
        "docs/architecture.md is behind: python -m tests.sync.test_repo"
    )


@pytest.mark.parametrize("status", SyncStatus)
def test_an_inauthentic_message_changes_no_state(status: SyncStatus) -> None:
    assert transition(status, Finding.AT_FAULT) == (Outcome.REJECTED, status)


@pytest.mark.parametrize("finding", [Finding.EXTENDS, Finding.BREAKS, Finding.UNCHECKED, Finding.SYNC_OTHER])
def test_nothing_is_dropped_while_a_resync_runs(finding: Finding) -> None:
    assert transition(SyncStatus.IN_PROGRESS, finding) == (Outcome.BUFFERED, SyncStatus.IN_PROGRESS)


@pytest.mark.parametrize("finding", [Finding.BREAKS, Finding.UNCHECKED, Finding.SYNC_OTHER])
def test_a_synchronized_repo_that_cannot_follow_says_so(finding: Finding) -> None:
    assert transition(SyncStatus.SYNCHRONIZED, finding) == (Outcome.DESYNCHRONIZED, SyncStatus.DESYNCHRONIZED)


def test_only_a_whole_tree_or_a_finished_resync_synchronizes() -> None:
    ways = {
        (status, finding)
        for status, row in TRANSITIONS.items()
        for finding, (_, after) in row.items()
        if after is SyncStatus.SYNCHRONIZED and status is not after
    }
    assert ways == {
        (SyncStatus.DESYNCHRONIZED, Finding.WHOLE),
        (SyncStatus.IN_PROGRESS, Finding.COMPLETED),
    }


def test_what_cannot_happen_is_our_bug() -> None:
    with pytest.raises(BrokenInvariantError):
        transition(SyncStatus.SYNCHRONIZED, Finding.CLAIMED)


if __name__ == "__main__":
    page = ARCHITECTURE.read_text()
    ARCHITECTURE.write_text(BLOCK.sub(lambda match: match[1] + drawn() + match[2], page))
