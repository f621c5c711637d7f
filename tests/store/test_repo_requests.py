"""Requests of commands: add repos, request resyncs."""

from dataclasses import replace

import asyncpg
import pytest

from indexer.reasons import Desync
from indexer.store import Store, repo_requests
from indexer.sync.plans import Batch, BufferedEvent, RepoWrite
from indexer.sync.repo_state import PARKED, Repo, SyncStatus
from tests.store.repo_rows import did, in_progress, insert, synchronized


async def test_adding_repos_does_not_change_known_ones(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repo_requests, "BATCH_SIZE", 3)
    await insert(store, synchronized(1))
    assert await store.add_repos([did(n) for n in (1, 2, 3, 4, 5, 2)]) == 4
    assert await store.add_repos([did(2)]) == 0
    rows = await store.repos([did(1), did(2)])
    assert rows == {did(1): synchronized(1), did(2): Repo(did(2), version=1)}


async def test_resyncs_are_requested_of_some_failed_or_all_repos(
    store: Store, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repo_requests, "BATCH_SIZE", 2)
    claimed = await in_progress(store, "in progress")
    buffering = replace(claimed, version=claimed.version + 1, buffered_events=1, buffered_bytes=5)
    buffered = (BufferedEvent(claimed.did, "wss://relay.test", 5, b"frame"),)
    assert not await store.apply(Batch((RepoWrite(claimed.version, buffering, (), buffered),)))
    failed = Repo(
        did("failed"),
        version=1,
        next_attempt_at=PARKED,
        attempts=4,
        last_error="timeout",
        sync_reason=Desync.SYNC_EVENT,
    )
    others = [synchronized(n) for n in range(5)]
    await insert(store, failed, *others)

    assert await store.request_resyncs([did(0), did("in progress"), did("unknown")]) == 2
    requested = (await store.repos([did(0)]))[did(0)]
    assert (requested.sync_status, requested.sync_reason, requested.version) == (
        SyncStatus.DESYNCHRONIZED,
        Desync.REQUESTED,
        2,
    )
    assert requested.head == others[0].head
    ended = (await store.repos([claimed.did]))[claimed.did]
    assert (ended.sync_status, ended.buffered_events) == (SyncStatus.DESYNCHRONIZED, 0), (
        "it may have read the repo before the fault that the request is about"
    )
    assert not await store.renew(claimed.did, claimed.lease, 10.0)
    assert await sql.fetchval("select count(*) from indexer.buffered_event") == 0

    assert await store.request_resyncs(errored=True) == 1
    again = (await store.repos([failed.did]))[failed.did]
    assert (again.sync_reason, again.attempts, again.next_attempt_at, again.version) == (Desync.REQUESTED, 0, None, 2)
    assert (await store.repos([did(1)]))[did(1)] == others[1]

    assert await store.request_resyncs(everything=True) == 7
    rows = await store.repos([repo.did for repo in others])
    assert {repo.sync_status for repo in rows.values()} == {SyncStatus.DESYNCHRONIZED}
    assert len(await store.claim(100, range(256), 10.0, 100.0)) == 7
