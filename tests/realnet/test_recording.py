"""The daemon reads the recorded stream of a real network; the database must equal the recorded final state."""

from pathlib import Path
from typing import Any

import pytest

from indexer.app.daemon import Daemon
from tests.daemon_harness import run_daemon, settings_for, wait_for_cursor
from tests.database_checks import fetch
from tests.realnet.recording import FinalState, Recording, ReplayedNetwork, recording, replayed_network
from tests.waiting import until


async def differences(dsn: str, accounts: list[FinalState]) -> list[str]:
    """Compare the public views with the final states, and describe each difference."""
    repos = {row["did"]: row for row in await fetch(dsn, "select * from atproto.repos")}
    rows = await fetch(dsn, "select did, collection || '/' || rkey as path, cid from atproto.records")
    records: dict[str, dict[str, str]] = {}
    for row in rows:
        records.setdefault(row["did"], {})[row["path"]] = row["cid"]
    found = []
    for account in accounts:
        repo = repos.get(account.did)
        if not account.active:
            if records.get(account.did):
                found.append(f"{account.did} is {account.status} but visible")
        elif repo is None or repo["sync_status"] != "synchronized":
            found.append(f"{account.did} is {dict(repo) if repo else 'missing'}")
        elif records.get(account.did, {}) != account.records:
            found.append(
                f"{account.did} differs: {len(records.get(account.did, {}))} of {len(account.records)} records"
            )
    return found


def indexing(network: ReplayedNetwork, dsn: str, tmp_path: Path, **changes: Any) -> Any:
    settings = settings_for(network.relay_url, network.http_url, tmp_path, plc_lookup="document", **changes)
    return run_daemon(settings, dsn)


def count_of_outcome(running: Daemon, kind: str, outcome: str) -> float:
    value = running.metrics.registry.get_sample_value("indexer_events_total", {"kind": kind, "outcome": outcome})
    assert value is not None
    return value


@pytest.mark.slow
async def test_stream_with_the_directory_of_its_time_needs_almost_no_export(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only invalid messages are rejected, and no chain breaks."""
    # On a loaded machine, the first commit of an account may come later than the default allows.
    for module in ("account", "plan"):
        monkeypatch.setattr(f"indexer.sync.{module}.FIRST_COMMIT_SECONDS", 20.0)
    recorded = recording()
    async with replayed_network(recorded) as network, indexing(network, database, tmp_path) as running:
        for last, time in directory_changes(recorded):
            network.directory_time = time
            await network.allow(last)
            await wait_for_cursor(running, network.relay_url, last)
        await wait_until_equal(database, recorded.accounts)
        assert set(network.exports) <= inactive_at_some_time(recorded), "only reactivated accounts may need an export"
        assert count_of_outcome(running, "commit", "desynchronized") == 0
        assert count_of_outcome(running, "commit", "rejected") == 0
        assert count_of_outcome(running, "sync", "rejected") == 2, "the two invalid #sync messages after a migration"
        commits = sum(frame.type == "#commit" for frame in recorded.frames)
        outcomes = ("applied", "replayed", "ignored", "buffered")
        assert sum(count_of_outcome(running, "commit", outcome) for outcome in outcomes) == commits
        assert count_of_outcome(running, "commit", "applied") > commits - 200


def inactive_at_some_time(recorded: Recording) -> set[str]:
    return {
        frame.did
        for frame in recorded.frames
        if frame.type == "#account" and (b"deactivated" in frame.frame or b"takendown" in frame.frame)
    }


def directory_changes(recorded: Recording) -> list[tuple[int, str]]:
    """Return the last sequence number before each change in the directory, and a time just before that change."""
    changes = sorted(entry["createdAt"] for log in recorded.audit.values() for entry in log[1:])
    steps = []
    for time in changes:
        before = [frame.seq for frame in recorded.frames if frame.time < time]
        just_before = time[:-1]  # a prefix is less than the whole text
        steps.append((max(before), just_before))
    return [*steps, (recorded.frames[-1].seq, "9999")]


@pytest.mark.proof("realnet")
async def test_stream_from_its_middle_with_a_restart_is_completed_by_exports(database: str, tmp_path: Path) -> None:
    """The daemon misses the first half of the stream, and restarts after three quarters.

    The directory is that of the end: commits that were signed with earlier keys cannot be verified.
    """
    recorded = recording()
    middle, later, last = (recorded.frames[len(recorded.frames) * part // 4 - 1].seq for part in (2, 3, 4))
    async with replayed_network(recorded) as network:
        async with indexing(network, database, tmp_path, start=str(middle)) as running:
            await network.allow(later)
            await wait_for_cursor(running, network.relay_url, later)
        async with indexing(network, database, tmp_path, start=str(middle)) as running:
            await network.allow(last)
            await wait_for_cursor(running, network.relay_url, last)
            seen = {frame.did for frame in recorded.frames if frame.seq > middle}
            await wait_until_equal(database, [account for account in recorded.accounts if account.did in seen])
        assert network.exports != []


async def wait_until_equal(dsn: str, accounts: list[FinalState]) -> None:
    found: list[str] = []

    async def equal() -> bool:
        found[:] = await differences(dsn, accounts)
        return not found

    await until(equal, lambda: found)
