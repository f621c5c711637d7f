"""Reports: counts, one repo, one record, random samples, and the queries of the status page."""

import json
from dataclasses import replace
from time import time
from typing import Any

import asyncpg
import pytest

from indexer.atproto.cid import cid_text
from indexer.atproto.syntax import CollectionFilter
from indexer.db import Database, DatabaseError, reports
from indexer.db.layout import estimate_rows, load_parts
from indexer.db.reports import MAX_ROWS
from indexer.reasons import Desync, FetchFailure, GapReason, Rejection
from indexer.sync.changes import Batch, DeadLetter
from indexer.sync.hints import JETSTREAM
from indexer.sync.identity import HandleCheck, HandleClaim, HostState, StoredIdentity
from indexer.sync.repo import PARKED, Repo, SyncStatus
from indexer.sync.scope import Scope, Track
from indexer.sync.shard import BUCKETS
from indexer.sync.stream import Cursor, Gap
from tests.db.repo_rows import did, head, in_progress, insert, put, synchronized

LETTER = DeadLetter("wss://one.example", 7, None, "commit", Rejection.FIELD_INVALID, "no rev", b"frame", 0)


async def pages_of_repos(sql: asyncpg.Connection) -> int:
    """Return the size of the table of repos in pages, on a cluster that of all shards."""
    return sum(part.pages for part in await load_parts(sql, "indexer.repo"))


async def test_counts(db: Database, sql: asyncpg.Connection) -> None:
    empty = await db.reports.counts()
    assert empty.statuses == dict.fromkeys(SyncStatus, 0)
    assert (empty.reasons, empty.queued, empty.parked, empty.records) == ({}, 0, 0, 0)
    await in_progress(db, "in progress", sync_reason=Desync.SYNC_EVENT)
    await insert(
        db,
        Repo(did("at once"), version=1),
        Repo(did("later"), version=1, next_attempt_at=1e10),
        Repo(
            did("parked"),
            version=1,
            next_attempt_at=PARKED,
            last_failure=FetchFailure.REPO_NOT_FOUND,
            last_error="repo-not-found: 400 RepoNotFound",
        ),
        Repo(did("inactive"), version=1, active=False),
        synchronized(1),
        changes=(put("app.test/a"),),
    )
    await sql.execute("analyze indexer.record")
    counts = await db.reports.counts()
    assert counts.statuses == {
        SyncStatus.DESYNCHRONIZED: 4,
        SyncStatus.IN_PROGRESS: 1,
        SyncStatus.SYNCHRONIZED: 1,
    }
    assert counts.reasons == {"new": 4, "sync-event": 1}
    assert counts.failures == {"repo-not-found": 1}
    assert (counts.queued, counts.parked, counts.records) == (2, 1, 5)


@pytest.mark.slow
async def test_counts_of_repos_that_left_the_queue_since_a_time(db: Database, sql: asyncpg.Connection) -> None:
    """They are synchronized or parked. A repo that was synchronized and broke again counts, too."""
    await insert(
        db,
        synchronized("done", synchronized_at=100.0),
        synchronized("broken", synchronized_at=100.0, sync_status=SyncStatus.DESYNCHRONIZED),
        synchronized("done earlier", synchronized_at=99.0),
        Repo(did("parked"), version=1, next_attempt_at=PARKED),
        Repo(did("parked earlier"), version=1, next_attempt_at=PARKED),
        Repo(did("failed"), version=1, next_attempt_at=1e10, attempts=1),
    )
    await sql.execute("update indexer.repo set updated_at = to_timestamp(99)")
    await sql.execute("update indexer.repo set updated_at = to_timestamp(100) where did = $1", did("parked"))
    assert [(await db.reports.counts(since)).ended for since in (98.0, 100.0, 101.0)] == [5, 3, 0]
    assert (await db.reports.counts()).ended == 0


async def widen(db: Database) -> int:
    """Add a collection to the scope; return the version for which repos are complete."""
    await db.scope.begin(Scope(1, Track.ALL, CollectionFilter(["app.test.one"]), (0,)))
    return (await db.scope.change(collections=["app.test.one", "app.test.two"])).complete_from


@pytest.mark.slow
async def test_repos_wait_for_an_added_collection_until_they_are_complete(db: Database) -> None:
    widened = Desync.SCOPE_WIDENED
    await insert(
        db,
        synchronized("waits"),
        synchronized("is due", sync_status=SyncStatus.DESYNCHRONIZED, sync_reason=widened),
        synchronized("broke", sync_status=SyncStatus.DESYNCHRONIZED, sync_reason=Desync.CHAIN_BREAK),
        synchronized(
            "parked", sync_status=SyncStatus.DESYNCHRONIZED, sync_reason=widened, next_attempt_at=PARKED, attempts=1
        ),
        synchronized("hidden", active=False),
        Repo(did("never fetched"), version=1),
    )
    await db.scope.untrack([did("untracked")])
    assert (await db.reports.counts()).incomplete == 0, "no collection was added"
    complete_from = await widen(db)
    await insert(db, synchronized("complete", scope_version=complete_from))
    assert (await db.reports.counts()).incomplete == 3


MANY_REPOS = """
    insert into indexer.repo (did, bucket, version, sync_status, sync_reason, rev, data, commit, active, hosting_seq,
        takedown, buffered_events, buffered_bytes, lease, lease_until, attempts, next_attempt_at, last_failure,
        last_error, synchronized_at, unproven_since)
    select 'did:plc:' || n, n % 256, 1,
        case when n % 10 = 0 then 'desynchronized' when n = 1 then 'in-progress' else 'synchronized' end,
        case when n % 10 = 0 then 'chain-break' end, '3aaaaaaaaaaaa', '\\x01', '\\x02', true, 0, false, 0, 0, 0,
        case when n = 1 then now() end, 0, case when n = 10 then 'infinity'::timestamptz end,
        case when n % 20 = 0 then 'timeout' end, case when n % 20 = 0 then 'timeout: slow' end,
        to_timestamp(100 + n % 4), case when n = 3 then now() end
    from generate_series(1, $1) n
"""
"""One of ten repos is desynchronized; one repo each is being resynced, parked and unproven."""


def assert_about(estimate: int, number: int) -> None:
    assert estimate == pytest.approx(number, rel=0.25), "an estimate from many pages"


@pytest.mark.slow
async def test_repos_of_a_large_table_are_estimated_from_a_part_of_it_and_few_ones_counted(
    db: Database, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await sql.execute(MANY_REPOS.replace("$1", "40000"))
    await widen(db)
    await sql.execute("vacuum analyze indexer.repo")
    exact = await db.reports.counts(102.0)
    assert (exact.counted_share, sum(exact.statuses.values()), exact.ended) == (1.0, 40_000, 20_000)
    assert exact.incomplete == 39_999
    monkeypatch.setattr(reports, "MAX_COUNTED_PAGES", 200)
    monkeypatch.setattr(reports, "MAX_FEW", 100)
    counts = await db.reports.counts(102.0)
    assert counts.counted_share == pytest.approx(200 / await pages_of_repos(sql))
    assert counts.statuses[SyncStatus.IN_PROGRESS] == 1
    assert (counts.parked, counts.unproven) == (1, 1)
    assert_about(counts.incomplete, 39_999)
    assert_about(counts.statuses[SyncStatus.SYNCHRONIZED], 35_999)
    assert_about(counts.statuses[SyncStatus.DESYNCHRONIZED], 4_000)
    assert_about(counts.queued, 3_999)
    assert_about(counts.reasons["chain-break"], 4_000)
    assert_about(counts.failures["timeout"], 2_000)
    assert_about(counts.ended, 20_000)
    assert (await db.reports.counts(102.0)).statuses == counts.statuses, "the same pages are read again"
    monkeypatch.setattr(reports, "MAX_FEW", 100_000)
    counts = await db.reports.counts()
    assert (counts.queued, counts.incomplete) == (3_999, 39_999), "all but the parked one"


@pytest.mark.slow
async def test_repos_are_counted_whatever_the_time_limit(
    db: Database, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The count of all repos takes a minute, and the next attempt does not."""
    await sql.execute(MANY_REPOS.replace("$1", "100000"))
    count_sample = reports.count_sample

    def count_slowly(percentage: float) -> str:
        return count_sample(percentage) + (" having pg_sleep(60) is not null" if percentage == 100.0 else "")

    monkeypatch.setattr(reports, "COUNT_MILLISECONDS", 2_000)
    monkeypatch.setattr(reports, "count_sample", count_slowly)
    counts = await db.reports.counts()
    assert counts.counted_share == pytest.approx(1 / reports.PAGES_FACTOR, rel=0.1)
    assert 50_000 < sum(counts.statuses.values()) < 200_000
    assert counts.statuses[SyncStatus.SYNCHRONIZED] > counts.statuses[SyncStatus.DESYNCHRONIZED]


@pytest.mark.slow
async def test_count_that_waits_for_a_lock_ends_with_a_database_error(
    db: Database, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await insert(db, synchronized(1))
    with monkeypatch.context() as shortened:
        shortened.setattr(reports, "COUNT_MILLISECONDS", 50)
        async with sql.transaction():
            await sql.execute("lock table indexer.repo in access exclusive mode")
            with pytest.raises(DatabaseError):
                await db.reports.counts()
    assert (await db.reports.counts()).statuses[SyncStatus.SYNCHRONIZED] == 1


async def test_reports_on_a_repo_and_on_a_visible_record(db: Database) -> None:
    await insert(
        db,
        Repo(
            did(1),
            version=1,
            next_attempt_at=PARKED,
            last_failure=FetchFailure.REPO_NOT_FOUND,
            last_error="repo-not-found",
            attempts=1,
            head=head(),
        ),
        changes=(put("app.test/a"), put("app.test/b")),
    )
    await db.identities.save([StoredIdentity(did(1), "alice.test", "https://pds.test", "did:key:zabc", 5.5)])
    await db.identities.save_handle_check(HandleCheck(HandleClaim(did(1), "alice.test", None, 0), "alice.test", 0, 9.0))
    report = await db.reports.repo(did(1))
    assert report is not None
    expected = {
        "handle": "alice.test",
        "pds": "https://pds.test",
        "sync_status": "desynchronized",
        "sync_reason": "new",
        "last_failure": FetchFailure.REPO_NOT_FOUND,
        "last_error": "repo-not-found",
        "rev": head().rev,
        "data": cid_text(head().data),
        "commit": cid_text(head().commit),
        "parked": True,
        "next_attempt_at": None,
        "records": 2,
    }
    assert {name: report[name] for name in expected} == expected
    assert await db.reports.repo(did("unknown")) is None
    change = put("app.test/a", '{"n": 1}')
    await insert(db, synchronized(2), synchronized(3, takedown=True), changes=(change,))
    record = await db.reports.record(did(2), "app.test", "a")
    assert record is not None
    assert record["uri"] == f"at://{did(2)}/app.test/a"
    assert record["cid"] == cid_text(change.cid or b"")
    assert record["value"] == {"n": 1}
    assert await db.reports.record(did(2), "app.test", "b") is None
    assert await db.reports.record(did(3), "app.test", "a") is None


async def pages_of(sql: asyncpg.Connection, dids: list[str]) -> set[int]:
    """Return the pages of the table that contain these repos."""
    rows = await sql.fetch("select ctid::text as position from indexer.repo where did = any($1::text[])", dids)
    return {int(row["position"].strip("()").partition(",")[0]) for row in rows}


@pytest.mark.slow
@pytest.mark.one_server(
    "reads the places of rows in a table; tests/citus/test_reports_on_a_cluster.py has that of shards"
)
async def test_a_sample_is_spread_over_the_table_and_reads_little_of_it(
    db: Database, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "MAX_SAMPLE_PAGES", 160)
    await sql.execute(MANY_REPOS.replace("$1", "30000"))
    pages = await pages_of_repos(sql)
    samples = [await db.reports.sample_synchronized(40) for _ in range(4)]
    assert [len(set(sample)) for sample in samples] == [40] * 4
    assert len(set().union(*samples)) > 140, "the samples differ"
    for sample in samples:
        found = sorted(await pages_of(sql, sample))
        assert len(found) > 20, "few repos share a page"
        assert found[0] < pages / 3 < pages * 2 / 3 < found[-1]
    assert pages > 4 * 160, "the table is large enough for this test"
    statement = f"explain (analyze, format json) {reports.sample(100 * 160 / pages)}"
    plan = await sql.fetchval(statement, 40, list(range(256)))
    [read] = [node for node in nodes_of(plan) if node["Node Type"] == "Sample Scan"]
    assert read["Actual Rows"] < 30_000 / 4


def nodes_of(plan: str) -> list[dict[str, Any]]:
    """Return all nodes of a plan."""
    [top] = json.loads(plan)
    found = [top["Plan"]]
    for node in found:
        found += node.get("Plans", ())
    return found


@pytest.mark.slow
async def test_a_sample_has_only_active_synchronized_repos_however_few(db: Database) -> None:
    qualified = [synchronized(number) for number in range(5)]
    others = [Repo(did(f"new {number}"), version=1) for number in range(3_000)]
    excluded = [
        synchronized("deactivated", active=False),
        synchronized("broken", sync_status=SyncStatus.DESYNCHRONIZED),
    ]
    assert await db.reports.sample_synchronized(3) == []
    await insert(db, *others, *qualified, *excluded)
    assert set(await db.reports.sample_synchronized(100)) == {repo.did for repo in qualified}
    assert set(await db.reports.sample_synchronized(3)) < {repo.did for repo in qualified}


@pytest.mark.slow
@pytest.mark.one_server("the sessions on the nodes report the rows")
async def test_rows_are_estimated_before_the_first_vacuum_and_as_the_table_grows(sql: asyncpg.Connection) -> None:
    rows = MANY_REPOS.replace("$1", "2000")
    [part] = await load_parts(sql, "indexer.cursor")
    assert (part.buckets, part.pages, part.estimated_rows) == (list(range(BUCKETS)), 0, 0)
    await sql.execute("alter table indexer.repo set (autovacuum_enabled = false)")
    await sql.execute(rows)
    await sql.execute("select pg_stat_force_next_flush()")
    assert await estimate_rows(sql, "indexer.repo") == 2_000
    await sql.execute("vacuum analyze indexer.repo")
    assert await estimate_rows(sql, "indexer.repo") == 2_000
    await sql.execute(rows.replace("'did:plc:'", "'did:plc:more'"))
    assert await estimate_rows(sql, "indexer.repo") == pytest.approx(4_000, rel=0.05)


@pytest.mark.slow
async def test_dead_letters_are_counted_by_reason_with_the_newest_one(db: Database, sql: asyncpg.Connection) -> None:
    forged = replace(LETTER, did=did(1), reason=Rejection.SIGNATURE_INVALID, detail="<b>forged</b>")
    await db.write(Batch(dead_letters=(LETTER, replace(LETTER, seq=8, detail="later"))))
    await sql.execute("update indexer.dead_letter set time = now() - interval '2 hours' where seq = 7")
    await db.write(Batch(dead_letters=(forged,)))
    found = (await db.reports.state())[0]["rejections"]
    assert [(entry["reason"], entry["stored"], entry["last_hour"], entry["detail"]) for entry in found] == [
        ("signature-invalid", 1, 1, "<b>forged</b>"),
        ("field-invalid", 2, 1, "later"),
    ]
    assert (found[0]["did"], found[1]["seq"], found[1]["relay"]) == (did(1), 8, "wss://one.example")
    assert all(entry["meaning"] and 0 <= entry["newest_seconds_ago"] < 60 for entry in found)


async def test_rows_of_the_status_have_ages_instead_of_times(db: Database, sql: asyncpg.Connection) -> None:
    paused = HostState("pds.example", 7, 7, 6, time() + 90, FetchFailure.HOST_PAUSED, "timeout: 5 s", time() - 7)
    await db.hosts.save([paused])
    await sql.execute("select atproto.register_reader('one')")
    for _ in range(MAX_ROWS + 1):
        await db.gaps.open(Gap("wss://one.example", "1/2", GapReason.CURSOR_OUTDATED, first_seq=6))
    await sql.execute("update indexer.gap set opened_at = opened_at - interval '90 s'")
    state, _ = await db.reports.state()
    assert (state["gaps_open"], len(state["gaps"]), state["set_aside_events"]) == (MAX_ROWS + 1, MAX_ROWS, 0)
    gap, [host], [consumer] = state["gaps"][0], state["hosts"], state["consumers"]
    assert 90 <= gap.pop("open_seconds") < 120
    expected = {"relay": "wss://one.example", "shard": "1/2", "reason": "cursor-outdated", "first_seq": 6}
    assert gap == {**expected, "last_seq": None}
    assert 60 < host.pop("seconds_left") <= 90
    assert 7 <= host.pop("last_success_seconds_ago") < 37
    assert host == {
        "host": "pds.example",
        "reason": "host-paused",
        "failures_in_a_row": 6,
        "last_error": "timeout: 5 s",
    }
    assert 0 <= consumer.pop("silent_seconds") < 60
    assert consumer == {"name": "one", "seq": 0, "behind": 0, "lag_seconds": 0.0, "cut_off": False}


@pytest.mark.parametrize(
    ("event_time", "lag"),
    [
        ("2026-01-01T12:59:30+01:00", 30.0),
        ("2026-01-01T11:58:00Z", 120.0),
        ("2026-01-01T12:01:00Z", 0.0),
        ("2026-01-01T13:00:00Z", None),
        (None, None),
        ("yesterday", None),
    ],
)
async def test_lag_of_a_cursor_is_the_age_of_its_event(
    db: Database, monkeypatch: pytest.MonkeyPatch, event_time: str | None, lag: float | None
) -> None:
    noon = 1_767_268_800.0  # 2026-01-01T12:00:00Z
    monkeypatch.setattr(reports, "time", lambda: noon)
    await db.write(Batch(cursors=(Cursor("wss://relay.test", "0/1", 9, event_time),)))
    cursor = {"relay": "wss://relay.test", "shard": "0/1", "seq": 9, "event_time": event_time}
    assert (await db.reports.state())[0]["cursors"] == [{**cursor, "lag_seconds": lag}]
    await db.write(Batch(cursors=(Cursor("wss://relay.test", "0/1", 10, event_time, caught_up_at=noon - 5),)))
    assert (await db.reports.state())[0]["cursors"][0]["lag_seconds"] == 5.0
    # The repos were compared long ago, which says nothing of the stream.
    await db.write(Batch(cursors=(Cursor(JETSTREAM, "0/1", 9, event_time, caught_up_at=noon - 900),)))
    assert [row["lag_seconds"] for row in (await db.reports.state())[0]["cursors"] if row["relay"] == JETSTREAM] == [
        lag
    ]


async def test_records_of_a_repo_are_counted_to_a_limit(db: Database) -> None:
    await insert(db, synchronized(1), changes=tuple(put(f"app.test/{number}") for number in range(9)))
    for limit, records in ((3, 3), (9, 9), (10, 9)):
        report = await db.reports.repo(did(1), limit)
        assert report is not None
        assert report["records"] == records


@pytest.mark.slow
async def test_statements_have_a_time_limit_that_ends_with_the_transaction(sql: asyncpg.Connection) -> None:
    before = await sql.fetchval("show statement_timeout")
    async with sql.transaction():
        await reports.load_state(sql, time())
        assert await sql.fetchval("show statement_timeout") == f"{reports.TIMEOUT_SECONDS}s"
    assert await sql.fetchval("show statement_timeout") == before
