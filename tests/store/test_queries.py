import asyncio
import json
from dataclasses import replace
from typing import Any

import asyncpg
import pytest

from indexer.atproto.cid import cid_text
from indexer.reasons import Desync
from indexer.store import Store
from indexer.store import queries as queries_module
from indexer.sync.identity import HandleCheck, HandleClaim, StoredIdentity
from indexer.sync.plan import Batch, Cursor, KeptEvent, RepoWrite
from indexer.sync.repo import PARKED, Repo, SyncStatus
from tests.store.rows import did, head, in_progress, insert, put, synchronized


def identity(name: object, handle: str | None = None, fetched_at: float = 5.5, **fields: object) -> StoredIdentity:
    values = {"pds": "https://pds.test", "signing_key": "did:key:zabc", **fields}
    return StoredIdentity(did(name), handle, fetched_at=fetched_at, **values)  # type: ignore[arg-type]


async def test_counts(store: Store, sql: asyncpg.Connection) -> None:
    await in_progress(store, "in progress", reason=Desync.SYNC_EVENT)
    await insert(
        store,
        Repo(did("at once"), version=1),
        Repo(did("later"), version=1, next_attempt_at=1e10),
        Repo(did("parked"), version=1, next_attempt_at=PARKED, last_error="repo-not-found: 400 RepoNotFound"),
        Repo(did("inactive"), version=1, active=False),
        synchronized(1),
        changes=(put("app.test/a"),),
    )
    await store.apply(Batch(cursor=Cursor("wss://relay.test", "0/1", 9, "now")))
    await sql.execute("analyze indexer.record")
    counts = await store.counts()
    assert counts.statuses == {
        SyncStatus.DESYNCHRONIZED: 4,
        SyncStatus.IN_PROGRESS: 1,
        SyncStatus.SYNCHRONIZED: 1,
    }
    assert counts.reasons == {"new": 4, "sync-event": 1}
    assert counts.failures == {"repo-not-found": 1}
    assert (counts.queued, counts.parked, counts.records) == (2, 1, 5)
    assert counts.cursors == [Cursor("wss://relay.test", "0/1", 9, "now")]


async def test_counts_what_has_left_the_queue_since(store: Store, sql: asyncpg.Connection) -> None:
    """Done or given up on; what was done and broke again was done all the same."""
    await insert(
        store,
        synchronized("done", synchronized_at=100.0),
        synchronized("broken", synchronized_at=100.0, status=SyncStatus.DESYNCHRONIZED),
        synchronized("done before", synchronized_at=99.0),
        Repo(did("parked"), version=1, next_attempt_at=PARKED),
        Repo(did("parked before"), version=1, next_attempt_at=PARKED),
        Repo(did("failed"), version=1, next_attempt_at=1e10, attempts=1),
    )
    await sql.execute("update indexer.repo set updated_at = to_timestamp(99)")
    await sql.execute("update indexer.repo set updated_at = to_timestamp(100) where did = $1", did("parked"))
    assert [(await store.counts(since)).ended for since in (98.0, 100.0, 101.0)] == [5, 3, 0]
    assert (await store.counts()).ended == 0


async def test_counts_of_nothing(store: Store) -> None:
    counts = await store.counts()
    assert counts.statuses == dict.fromkeys(SyncStatus, 0)
    assert (counts.reasons, counts.queued, counts.parked, counts.records, counts.cursors) == ({}, 0, 0, 0, [])


async def test_a_report_says_why(store: Store) -> None:
    await insert(
        store,
        Repo(did(1), version=1, next_attempt_at=PARKED, last_error="repo-not-found", attempts=1, head=head()),
        changes=(put("app.test/a"), put("app.test/b")),
    )
    await store.save([identity(1, "alice.test")])
    await store.save_check(HandleCheck(HandleClaim(did(1), "alice.test", None, 0), "alice.test", 0, 9.0))
    report = await store.repo_report(did(1))
    assert report is not None
    expected = {
        "handle": "alice.test",
        "pds": "https://pds.test",
        "sync_status": "desynchronized",
        "sync_reason": "new",
        "last_error": "repo-not-found",
        "rev": head().rev,
        "data": cid_text(head().data),
        "commit": cid_text(head().commit),
        "parked": True,
        "next_attempt_at": None,
        "records": 2,
    }
    assert {name: report[name] for name in expected} == expected
    assert await store.repo_report(did("unknown")) is None


async def test_a_record_as_the_face_shows_it(store: Store) -> None:
    change = put("app.test/a", '{"n": 1}')
    await insert(store, synchronized(1), synchronized(2, takedown=True), changes=(change,))
    record = await store.record(did(1), "app.test", "a")
    assert record is not None
    assert record["uri"] == f"at://{did(1)}/app.test/a"
    assert record["cid"] == cid_text(change.cid or b"")
    assert record["value"] == {"n": 1}
    assert await store.record(did(1), "app.test", "b") is None
    assert await store.record(did(2), "app.test", "a") is None


async def test_adding_leaves_what_is_there(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries_module, "AT_ONCE", 3)
    await insert(store, synchronized(1))
    assert await store.add([did(n) for n in (1, 2, 3, 4, 5, 2)]) == 4
    assert await store.add([did(2)]) == 0
    rows = await store.repos([did(1), did(2)])
    assert rows == {did(1): synchronized(1), did(2): Repo(did(2), version=1)}


async def test_marking_for_a_resync(store: Store, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries_module, "AT_ONCE", 2)
    claimed = await in_progress(store, "in progress")
    buffering = replace(claimed, version=claimed.version + 1, buffered_events=1, buffered_bytes=5)
    kept = (KeptEvent(claimed.did, "wss://relay.test", 5, b"frame"),)
    assert not await store.apply(Batch((RepoWrite(claimed.version, buffering, (), kept),)))
    failed = Repo(
        did("failed"), version=1, next_attempt_at=PARKED, attempts=4, last_error="timeout", reason=Desync.SYNC_EVENT
    )
    others = [synchronized(n) for n in range(5)]
    await insert(store, failed, *others)

    assert await store.mark_resync([did(0), did("in progress"), did("unknown")]) == 2
    marked = (await store.repos([did(0)]))[did(0)]
    assert (marked.status, marked.reason, marked.version) == (SyncStatus.DESYNCHRONIZED, Desync.REQUESTED, 2)
    assert marked.head == others[0].head
    ended = (await store.repos([claimed.did]))[claimed.did]
    assert (ended.status, ended.buffered_events) == (SyncStatus.DESYNCHRONIZED, 0), "it may have read what is doubted"
    assert not await store.renew(claimed.did, claimed.lease, 10.0)
    assert await sql.fetchval("select count(*) from indexer.kept_event") == 0

    assert await store.mark_resync(errored=True) == 1
    again = (await store.repos([failed.did]))[failed.did]
    assert (again.reason, again.attempts, again.next_attempt_at, again.version) == (Desync.REQUESTED, 0, None, 2)
    assert (await store.repos([did(1)]))[did(1)] == others[1]

    assert await store.mark_resync(all=True) == 7
    rows = await store.repos([repo.did for repo in others])
    assert {repo.status for repo in rows.values()} == {SyncStatus.DESYNCHRONIZED}
    assert len(await store.claim(100, range(256), 10.0, 100.0)) == 7


async def test_identities_come_back_and_the_later_reading_stays(store: Store) -> None:
    one, two = identity(1, "alice.test", 5.5), identity(2, None, problem="not found", signing_key=None, pds=None)
    await store.save([one, two])
    assert await store.load([did(1), did(2), did(3)]) == {did(1): one, did(2): two}
    await store.save([identity(1, "before.test", 4.0)])
    assert (await store.load([did(1)]))[did(1)] == one
    await store.apply(Batch(stale_identities=frozenset({did(1), did(3)})))
    assert (await store.load([did(1)]))[did(1)].stale
    later = identity(1, "after.test", 6.0)
    await store.save([one, later])
    assert await store.load([did(1), did(3)]) == {did(1): later}


async def test_a_document_of_nuls_is_stored(store: Store) -> None:
    await store.save([identity(1, "nul\0.test", pds="https://\ud800")])
    assert (await store.load([did(1)]))[did(1)].handle == "nul\ufffd.test"


async def pages_of(sql: asyncpg.Connection, dids: list[str]) -> set[int]:
    """Which of the table's pages these repos are on."""
    rows = await sql.fetch("select ctid::text as place from indexer.repo where did = any($1::text[])", dids)
    return {int(row["place"].strip("()").partition(",")[0]) for row in rows}


async def test_a_sample_is_from_all_over_the_table_and_reads_little_of_it(
    store: Store, sql: asyncpg.Connection
) -> None:
    await insert(store, *[synchronized(number) for number in range(20_000)])
    pages = await sql.fetchval("select pg_relation_size('indexer.repo') / 8192")
    samples = [await store.sample(40) for _ in range(4)]
    assert [len(set(sample)) for sample in samples] == [40] * 4
    assert len(set().union(*samples)) > 140, "each is another one"
    for sample in samples:
        places = sorted(await pages_of(sql, sample))
        assert len(places) > 20, "few are neighbours"
        assert places[0] < pages / 3 < pages * 2 / 3 < places[-1]
    assert pages > 4 * queries_module.PAGES_EACH * 40, "so this shows that little was read"
    plan = await sql.fetchval(f"explain (analyze, format json) {queries_module._SAMPLE}", 100 * 160 / pages, 40)
    [read] = [node for node in nodes_of(plan) if node["Node Type"] == "Sample Scan"]
    assert read["Actual Rows"] < 20_000 / 4


def nodes_of(plan: str) -> list[dict[str, Any]]:
    """All nodes of a plan."""
    [top] = json.loads(plan)
    found = [top["Plan"]]
    for node in found:
        found += node.get("Plans", ())
    return found


async def test_a_sample_is_of_active_synchronized_repos_however_few(store: Store) -> None:
    fit = [synchronized(number) for number in range(5)]
    others = [Repo(did(f"new {number}"), version=1) for number in range(3_000)]
    away = [synchronized("deactivated", active=False), synchronized("broken", status=SyncStatus.DESYNCHRONIZED)]
    assert await store.sample(3) == []
    await insert(store, *others, *fit, *away)
    assert set(await store.sample(100)) == {repo.did for repo in fit}
    assert set(await store.sample(3)) < {repo.did for repo in fit}


async def test_a_sample_of_a_table_without_any_reads_no_more_than_its_share(
    store: Store, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries_module, "MOST_PAGES", 16)
    await insert(store, *[Repo(did(number), version=1) for number in range(20_000)])
    shares = []
    fetch = asyncpg.Connection.fetch

    async def heard(self: asyncpg.Connection, query: str, *values: Any) -> Any:
        if query == queries_module._SAMPLE:
            shares.append(values[0])
        return await fetch(self, query, *values)

    monkeypatch.setattr(asyncpg.Connection, "fetch", heard)
    pages = await sql.fetchval("select pg_relation_size('indexer.repo') / 8192")
    async with asyncio.timeout(20):
        assert await store.sample(1) == []
    assert shares == [pytest.approx(100 * read / pages) for read in (4, 16)]
