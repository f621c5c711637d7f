"""Links of stored records are added, and removed, when links are turned on and off; the progress of that."""

import asyncpg
import pytest

from indexer.store import FIRST_PATH, LinkProgress, Store, link_progress
from indexer.store.link_progress import share_before
from indexer.sync.plans import Batch, RepoWrite
from indexer.sync.shard import Placement, Shard
from tests.store.link_checks import assert_links_exact
from tests.store.link_steps import ALL, LIKE, claim_again, count, finish_resync, like, maintenance, settle, turn_on
from tests.store.repo_rows import delete, did, insert, synchronized
from tests.store.test_placement_check import COMPLETE_ROW, PRETEND_SHARDS

pytestmark = pytest.mark.slow


async def test_without_links_nothing_is_stored_and_the_count_is_null(store: Store, sql: asyncpg.Connection) -> None:
    await maintenance(store, wanted=False).run_once()
    await insert(store, synchronized(1), changes=(like("a"),))
    await sql.execute("select atproto.request_takedown($1, true)", did(1))
    for table in ("link", "link_delta", "link_count", "link_recount", "link_bucket"):
        assert await sql.fetchval(f"select count(*) from indexer.{table}") == 0  # noqa: S608
    assert await count(sql) is None
    assert await sql.fetchval("select state from atproto.link_progress") == "off"


async def test_stored_records_are_backfilled_while_others_are_written(store: Store, sql: asyncpg.Connection) -> None:
    changes = tuple(like(f"r{number:04}", number % 3) for number in range(450))
    await insert(store, *[synchronized(number) for number in range(3)], changes=changes[:40])
    await insert(store, synchronized("large"), synchronized("hidden", takedown=True), changes=changes)
    task = maintenance(store)
    state = await store.turn_links_on(ALL)
    assert (state.kept, state.done) == (True, False)
    assert await count(sql, 0) is None
    assert await sql.fetchval("select state from atproto.link_progress") == "backfill"
    touched = (like("r0000", "new", action="update"), delete(f"{LIKE}/r0001"), like("later"))
    await store.write(Batch((RepoWrite(1, synchronized("large", version=2), touched),)))
    steps, _ = await store.backfill_links({did("large"): FIRST_PATH})
    assert steps[did("large")].after is not None
    await store.write(Batch((RepoWrite(2, synchronized("large", version=3), (delete(f"{LIKE}/r0005"),)),)))
    while not (await store.link_state(ALL)).done:
        await task.run_once()
    await assert_links_exact(sql)
    progress = await sql.fetchrow("select state, repos_done, buckets_done, buckets from atproto.link_progress")
    assert tuple(progress or ()) == ("complete", 5, 256, 256)
    assert await count(sql, "new") == 1


async def test_a_backfill_goes_on_after_a_restart_and_adds_nothing_twice(store: Store, sql: asyncpg.Connection) -> None:
    await insert(store, *[synchronized(number) for number in range(8)], changes=(like("a"), like("b", "two")))
    await store.turn_links_on(ALL)
    dids = await store.next_link_repos(ALL, "", 5)
    steps, links = await store.backfill_links(dict.fromkeys(dids, FIRST_PATH))
    assert [step.after for step in steps.values()] == [None] * 5
    assert links == 10
    await store.save_link_backfill(ALL, dids[2], {})
    assert await store.link_backfill_position(ALL) == dids[2]
    await turn_on(store)
    assert (await count(sql), await count(sql, "two")) == (8, 8)
    await assert_links_exact(sql)


async def test_a_repo_in_progress_is_backfilled_after_its_resync(store: Store, sql: asyncpg.Connection) -> None:
    """A resync that began before does not know that links are kept, if it asked before they were.

    A repo that was untracked has no rev. It may be tracked again before its records are erased.
    """
    await insert(store, synchronized(1), synchronized(2), changes=(like("a"),))
    await sql.execute("select atproto.untrack(array[$1])", did(2))
    claimed = await claim_again(store, synchronized(1))
    await sql.execute("select atproto.track(array[$1])", did(2))
    task = maintenance(store)

    async def begin_backfill() -> None:
        await task.run_once()
        assert not (await store.link_state(ALL)).done

    await finish_resync(store, claimed, (like("b"),), before_lock=begin_backfill)
    while not (await store.link_state(ALL)).done:
        await task.run_once()
    assert await count(sql) == 3
    await assert_links_exact(sql)


async def test_turning_links_off_removes_them_and_on_again_brings_them_back(
    store: Store, sql: asyncpg.Connection
) -> None:
    await turn_on(store)
    store.keeps_links = None  # a batch asks the database
    await insert(store, synchronized(1), changes=(like("a"),))
    assert await count(sql) == 1
    async with store.feed_session() as feed:  # it owns the feed in the table of the shard locks, and no bucket
        assert await feed.lock.claim()
        assert await count(sql) == 1
    await maintenance(store, wanted=False).run_once()
    assert await count(sql) is None
    assert await sql.fetchval("select count(*) from indexer.link") == 0
    await store.write(Batch((RepoWrite(1, synchronized(1, version=2), (like("b"), delete(f"{LIKE}/a"))),)))
    await turn_on(store)
    assert await count(sql) == 1
    await assert_links_exact(sql)


async def test_links_that_one_shard_does_not_keep_are_not_counted(store: Store, sql: asyncpg.Connection) -> None:
    """The shard with links on is complete, the other one turned them off; then both."""
    halves = range(128), range(128, 256)
    for half in halves:
        await store.turn_links_on(half)
        await store.finish_link_backfill(half)
    assert await count(sql) == 0
    assert not await store.turn_links_off(halves[1])
    assert await count(sql) is None
    assert (await store.turn_links_on(halves[1])).off
    assert await store.turn_links_off(halves[0])
    assert (await store.turn_links_on(halves[1])).kept


@pytest.mark.parametrize("placement", Placement)
async def test_links_of_an_owner_that_never_kept_them_are_not_counted(
    database: str, sql: asyncpg.Connection, placement: Placement
) -> None:
    """The function finds the buckets of each owner as the processes do."""
    if placement is Placement.DISTRIBUTED:
        await sql.execute(f"{COMPLETE_ROW}; {PRETEND_SHARDS}")
    store = await Store.open(database)
    keeping = [Shard(index, 8, store.placement) for index in (0, 2, 3, 5)]
    for shard in keeping:
        await store.turn_links_on(shard.buckets)
        await store.finish_link_backfill(shard.buckets)
    counted = {}
    for index in range(8):
        async with store.shard_lock(Shard(index, 8).positions) as lock:
            assert await lock.claim()
            counted[index] = await count(sql) is not None
    await store.close()
    assert store.placement is placement
    assert [index for index, known in counted.items() if known] == [shard.index for shard in keeping]


async def test_a_consumer_that_reads_links_does_not_keep_writers_from_turning_them_off_forever(
    store: Store, sql: asyncpg.Connection
) -> None:
    """Removing links waits for a moment only, and is tried again."""
    await turn_on(store)
    task = maintenance(store, wanted=False)
    async with sql.transaction():
        await sql.fetch("select * from atproto.links")
        with pytest.raises(Exception, match="lock timeout"):
            await task.run_once()
    await task.run_once()
    assert not (await store.link_state(ALL)).kept


@pytest.mark.parametrize(
    ("repo", "share"),
    [
        *[("", 0.0), ("did:key:z", 0.0), ("did:plc:2", 0.0), ("did:plc:a", 6 / 32)],
        ("did:plc:jaaaaaaaaaaaaaaaaaaaaaaa", 15 / 32 + 6 / 32**2 + 6 / 32**3),
        *[("did:plc:zzzzzzzzzzzzzzzzzzzzzzzz", 1.0), ("did:plc:~", 1.0), ("did:web:example.com", 1.0)],
    ],
)
def test_the_place_of_a_did_among_all_is_estimated(repo: str, share: float) -> None:
    assert share_before(repo) == pytest.approx(share, abs=1e-4)


def test_the_estimate_grows_with_the_did() -> None:
    dids = sorted(f"did:plc:{first}{second}x" for first in "27az" for second in "27amz")
    shares = [share_before(did) for did in dids]
    assert shares == sorted(shares)
    assert 0 <= shares[0] <= shares[-1] <= 1


async def test_progress_of_links_in_each_state(
    store: Store, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await store.counts()).links == LinkProgress()
    await insert(store, synchronized(1), changes=(like("a"),))
    await store.turn_links_on(ALL)
    links = (await store.counts()).links
    assert (links.state, links.progress, links.repos_done) == ("backfill", 0.0, 0)
    assert links.enabled_at is not None
    await sql.execute("update indexer.link_bucket set backfilled_to = 'did:plc:j2', backfilled_repos = 2")
    links = (await store.counts()).links
    assert (links.state, links.progress, links.repos_done) == ("backfill", 15 / 32, 512)
    await turn_on(store)
    await settle(store)
    links = (await store.counts()).links
    assert (links.state, links.progress, links.open_deltas) == ("complete", 1.0, 0)
    await insert(store, synchronized(2), changes=(like("a", "one"), like("b", "two"), like("c", "three")))
    await sql.execute("select atproto.request_takedown($1, true)", did(2))
    links = (await store.counts()).links
    assert (links.open_deltas, links.open_recounts) == (3, 1)
    monkeypatch.setattr(link_progress, "MAX_OPEN", 2)
    assert (await store.counts()).links.open_deltas == 2
    await store.turn_links_off(range(10))
    assert (await store.counts()).links.state == "outdated"
    await store.turn_links_off(ALL)
    assert (await store.counts()).links == LinkProgress()
