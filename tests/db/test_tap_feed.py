"""The rows that the feed loads and stores."""

import json

import asyncpg
import pytest

from indexer.db import Database
from indexer.db.change_log_reads import LoggedChange, LogTrimmedError, StoredAccount
from indexer.db.tap_feed import (
    FEED_CONSUMER,
    SNAPSHOT_BEGIN,
    DeliveryProgress,
    SetAside,
    SetAsideChanges,
    SetAsideReason,
    SnapshotPosition,
)
from indexer.sync.shard import Shard
from tests.db.change_log_helpers import change, log
from tests.db.repo_rows import did, insert, put, synchronized

pytestmark = pytest.mark.slow


async def test_delivered_changes_are_stored_with_the_position_of_the_consumer(
    db: Database, sql: asyncpg.Connection
) -> None:
    await log(sql, *[change("a", number) for number in range(9)])
    progress = DeliveryProgress(3, 8, (4, 6))
    async with db.feed.session() as session:
        assert await session.begin() == DeliveryProgress(0, 0), "from the oldest change"
        assert await session.save(progress)
    async with db.feed.session() as session:
        assert await session.begin() == progress
        changes = await session.changes_after(progress.position, 3)
        assert [change.seq for change in changes] == [4, 5, 6]
    assert await sql.fetchval("select seq from atproto.readers where name = $1", FEED_CONSUMER) == 3
    assert await db.feed.changes_behind() == 6


async def test_repos_that_are_behind_are_stored(db: Database, sql: asyncpg.Connection) -> None:
    await log(sql, *[change("a", number) for number in range(9)])
    async with db.feed.session() as session:
        await session.begin()
        for progress in (
            DeliveryProgress(1, 7, (2, 4), behind=((did(1), 3), (did(2), 6))),
            DeliveryProgress(5, 7, (6,)),
        ):
            await session.save(progress)
            assert await session.begin() == progress


async def test_repos_that_are_behind_are_read_as_the_previous_release_stored_them(
    db: Database, sql: asyncpg.Connection
) -> None:
    stored = {"delivered_to": 7, "undelivered": [2, 4], "repos": {did(1): 3}}
    async with db.feed.session() as session:
        await session.begin()
        await session.save(DeliveryProgress(1, 1))
        await sql.execute("update indexer.feed_delivery set behind = $1", json.dumps(stored))
        assert await session.begin() == DeliveryProgress(1, 7, (2, 4), behind=((did(1), 3),))


async def test_consumer_that_was_removed_or_disconnected_stores_nothing(db: Database, sql: asyncpg.Connection) -> None:
    async with db.feed.session() as session:
        await session.begin()
        await session.save(DeliveryProgress(0, 2, (1,)))
        await sql.execute("select atproto.unregister_reader($1)", FEED_CONSUMER)
        assert not await session.save(DeliveryProgress(5, 5))
        assert await session.begin() == DeliveryProgress(0, 0), "the deliveries of the removed consumer do not count"
        assert await db.feed.is_cut_off() is False
        await sql.execute("insert into indexer.disconnected_consumer (id) select id from indexer.consumer")
        assert await session.begin() is None
        assert await db.feed.is_cut_off()
        await sql.execute("select setval('indexer.trimmed_seq', 7)")
        with pytest.raises(LogTrimmedError):
            await session.changes_after(5, 10)


async def test_consumer_of_a_trimmed_log_gets_a_snapshot_of_the_repos_and_records(
    db: Database, sql: asyncpg.Connection
) -> None:
    await insert(db, synchronized(1), changes=(put("app.b/two"), put("app.a/one"), put("app.b/one")))
    await insert(db, synchronized(2))
    await insert(db, synchronized(3)._replace(tracked=False))
    repos = sorted([did(1), did(2)])
    stored = [
        SnapshotPosition(repo, *path)
        for repo in repos
        for path in (("", ""), *((("app.a", "one"), ("app.b", "one"), ("app.b", "two")) if repo == did(1) else ()))
    ]
    await sql.execute("select setval('indexer.trimmed_seq', atproto.latest_seq())")
    latest = await db.changes.latest_seq()
    assert await db.feed.is_cut_off() is None
    assert await db.feed.changes_behind() == 5, "what the first client will get"
    async with db.feed.session() as session:
        begun = DeliveryProgress(latest, latest, snapshot=SNAPSHOT_BEGIN)
        assert await session.begin() == begun
        assert await session.begin() == begun, "not delivered yet"
        read, position = list[SnapshotPosition](), SNAPSHOT_BEGIN
        while page := await session.snapshot_after(position, 2):
            assert len(page) <= 2
            read, position = read + page, page[-1]
        assert read == stored
        delivered = DeliveryProgress(latest, latest, snapshot=stored[2])
        await session.save(delivered)
        assert await session.begin() == delivered
        assert await db.feed.changes_behind() == 5, "as long as the snapshot is not complete"
        await session.save(DeliveryProgress(latest, latest))
        assert await session.begin() == DeliveryProgress(latest, latest)
        assert await db.feed.changes_behind() == 0


async def test_one_session_at_a_time_owns_the_feed_and_no_shard(db: Database) -> None:
    async with db.feed.session() as first:
        assert await first.lock.claim()
        async with db.feed.session() as second:
            assert not await second.lock.claim()
        assert await db.shard_locks.owners(Shard().positions) == []
    async with db.feed.session() as third:
        assert await third.lock.claim()


def entry(number: int, rkey: str, action: str = "create") -> LoggedChange:
    """Return an entry that is not read from the log, as those of a snapshot are."""
    return LoggedChange(1 << 52, did(number), "app.test", rkey, action, None, None, live=False, batch_time=0)


async def test_records_beyond_the_limit_are_left_out_but_never_the_first(db: Database) -> None:
    await insert(db, synchronized(1), changes=tuple(put(f"app.test/{rkey}") for rkey in ("one", "two", "three")))
    entries = [entry(1, rkey) for rkey in ("unknown", "two", "one", "three")]
    page = await db.changes.load(entries, 1)
    assert (page.changes, list(page.values)) == (entries[:2], [1])
    page = await db.changes.load(entries, 1_000_000)
    assert (page.changes, list(page.values)) == (entries, [1, 2, 3])


async def test_what_is_set_aside_is_stored_with_the_progress_and_due_when_the_repo_is_visible(db: Database) -> None:
    def aside(reason: SetAsideReason, number: int, rev: str, rkey: str = "") -> SetAside:
        refused = reason == "refused"
        path = ("app.test", rkey) if refused else ("", "")
        return SetAside(reason, did(number), *path, rev, "create" if refused else "", int(refused), 1_700_000_000.0, "")

    hidden, other, refused = aside("hidden", 1, "2"), aside("hidden", 2, "5"), aside("refused", 1, "3", "one")
    async with db.feed.session() as session:
        await session.begin()
        await session.save(DeliveryProgress(3, 3), set_aside=SetAsideChanges([hidden, other, refused]))
        assert await session.due(10) == []
        earlier = aside("hidden", 1, "1")
        later = aside("hidden", 1, "4")
        await session.save(DeliveryProgress(4, 4), set_aside=SetAsideChanges([earlier], [did(1)]))
        await session.save(DeliveryProgress(5, 5), set_aside=SetAsideChanges(visible=[did(3)]))
        assert await session.due(10) == [earlier], "one row for each repo, with the lowest rev"
        await session.save(DeliveryProgress(6, 6), set_aside=SetAsideChanges([later]))
        assert await session.due(10) == [], "it is hidden again"
        assert (await session.count_refused(), await db.feed.set_aside(None, 9)) == (1, [refused])
        assert await db.feed.send_again(did(2)) == 0
        assert await db.feed.send_again(None) == 1
        assert await session.due(10) == [refused]
        await session.save(DeliveryProgress(6, 6), set_aside=SetAsideChanges(delivered=[refused.key, hidden.key]))
        assert await session.due(10) == await db.feed.set_aside(None, 9) == []


async def test_records_of_a_repo_from_a_rev_on_are_found_in_pages(db: Database) -> None:
    await insert(db, synchronized(1), changes=tuple(put(f"app.test/{rev}", rev=rev) for rev in ("1", "2", "3")))
    async with db.feed.session() as session:
        assert await session.records_from_rev(did(1), "2", ("", ""), 1) == [("app.test", "2")]
        assert await session.records_from_rev(did(1), "2", ("app.test", "2"), 9) == [("app.test", "3")]
        assert await session.records_from_rev(did(2), "", ("", ""), 9) == []


async def test_accounts_are_loaded_with_what_decides_their_status(db: Database) -> None:
    await insert(db, synchronized(1))
    page = await db.changes.load([entry(number, "")._replace(collection=None) for number in (1, 2)], 1)
    assert page.accounts == {did(1): StoredAccount(None, active=True, hosting_status=None, takedown=False)}
