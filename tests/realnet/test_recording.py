"""A real PDS's stream, played through the real daemon: the database must end as the network did."""

from pathlib import Path
from typing import Any

import asyncpg
import pytest

from indexer.run import Daemon
from tests.realnet.recording import PlayedNetwork, Recording, played, recording
from tests.serving import saved, serving, settings_for, until

LIVING = 31


async def database_equals_truth(dsn: str, what: Recording) -> list[str]:
    """Sentences on what differs between the face of the database and the recording's ground truth."""
    connection = await asyncpg.connect(dsn)
    try:
        repos = {row["did"]: row for row in await connection.fetch("select * from atproto.repos")}
        rows = await connection.fetch("select did, collection || '/' || rkey as path, cid from atproto.records")
    finally:
        await connection.close()
    records: dict[str, dict[str, str]] = {}
    for row in rows:
        records.setdefault(row["did"], {})[row["path"]] = row["cid"]
    differences = []
    for truth in what.truth:
        repo = repos.get(truth.did)
        if not truth.active:
            if records.get(truth.did):
                differences.append(f"{truth.did} is {truth.status} and shown")
        elif repo is None or repo["sync_status"] != "synchronized":
            differences.append(f"{truth.did} is {dict(repo) if repo else 'missing'}")
        elif records.get(truth.did, {}) != truth.records:
            differences.append(f"{truth.did} differs: {len(records.get(truth.did, {}))} of {len(truth.records)}")
    return differences


def serve(network: PlayedNetwork, dsn: str, tmp_path: Path, **changes: Any) -> Any:
    settings = settings_for(network.relay_url, network.http_url, tmp_path, **changes)
    return serving(settings, dsn)


def outcome(running: Daemon, kind: str, name: str) -> float:
    value = running.metrics.registry.get_sample_value("indexer_events_total", {"kind": kind, "outcome": name})
    assert value is not None
    return value


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_the_stream_as_it_happened(database: str, tmp_path: Path) -> None:
    """The directory changes when it did: nothing is refused but what is wrong, and nothing breaks."""
    what = recording()
    async with played(what) as network, serve(network, database, tmp_path) as running:
        for last, at in turning_points(what):
            network.now = at
            await network.allow(last)
            await saved(running, network.relay_url, last)
        await equal_in_the_end(database, what)
        assert set(network.exports_asked) <= reactivated(what), "only those who were away may need an export"
        assert outcome(running, "commit", "desynchronized") == 0
        assert outcome(running, "commit", "rejected") == 0
        assert outcome(running, "sync", "rejected") == 2, "the two defective #syncs that follow a migration"
        commits = sum(recorded.type == "#commit" for recorded in what.frames)
        fine = ("applied", "replayed", "ignored", "buffered")
        assert sum(outcome(running, "commit", name) for name in fine) == commits
        assert outcome(running, "commit", "applied") > commits - 200


def reactivated(what: Recording) -> set[str]:
    """Accounts that were inactive and then active again."""
    return {
        recorded.did
        for recorded in what.frames
        if recorded.type == "#account" and (b"deactivated" in recorded.frame or b"takendown" in recorded.frame)
    }


def turning_points(what: Recording) -> list[tuple[int, str]]:
    """Frames up to a sequence number, and the time at which the directory stands while they are read.

    A key that the directory learns of between two frames is known before the second is sent.
    """
    changes = sorted(entry["createdAt"] for log in what.audit.values() for entry in log[1:])
    points = []
    for at in changes:
        before = [recorded.seq for recorded in what.frames if recorded.time < at]
        points.append((max(before), at_before(at)))
    return [*points, (what.frames[-1].seq, "9999")]


def at_before(at: str) -> str:
    """Just before `at`, as text that compares."""
    return at[:-1]


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_the_stream_all_at_once_long_after(database: str, tmp_path: Path) -> None:
    """The directory knows the last keys only: what can't be proven any more comes from exports."""
    what = recording()
    async with played(what) as network, serve(network, database, tmp_path) as running:
        await network.allow(what.frames[-1].seq)
        await saved(running, network.relay_url, what.frames[-1].seq)
        await equal_in_the_end(database, what)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_from_the_middle_with_a_restart(database: str, tmp_path: Path) -> None:
    """Everything before the middle was missed; halfway through the rest, the daemon is stopped and started."""
    what = recording()
    middle, later, last = (what.frames[len(what.frames) * part // 4 - 1].seq for part in (2, 3, 4))
    async with played(what) as network:
        async with serve(network, database, tmp_path, start=str(middle)) as running:
            await network.allow(later)
            await saved(running, network.relay_url, later)
        async with serve(network, database, tmp_path, start=str(middle)) as running:
            await network.allow(last)
            await saved(running, network.relay_url, last)
            seen = {recorded.did for recorded in what.frames if recorded.seq > middle}
            await equal_in_the_end(database, narrowed(what, seen))
        assert network.exports_asked != []


async def equal_in_the_end(dsn: str, what: Recording) -> None:
    differences: list[str] = []

    async def equal() -> bool:
        differences[:] = await database_equals_truth(dsn, what)
        return not differences

    await until(equal, lambda: differences)


def narrowed(what: Recording, dids: set[str]) -> Recording:
    """The same recording, with the truth of these accounts only."""
    part = object.__new__(Recording)
    part.truth = [truth for truth in what.truth if truth.did in dids]
    return part


def test_the_recording_is_what_it_says() -> None:
    what = recording()
    assert len(what.truth) == 36
    assert sum(truth.active for truth in what.truth) == LIVING
    assert {recorded.type for recorded in what.frames} == {"#commit", "#sync", "#identity", "#account"}
    assert [recorded.seq for recorded in what.frames] == list(range(1, len(what.frames) + 1))
    assert sum(len(truth.records) for truth in what.truth) > 3_000
