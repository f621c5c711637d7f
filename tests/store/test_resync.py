import asyncio
import random
from dataclasses import replace
from functools import partial
from itertools import count
from time import time

import asyncpg
import pytest

from indexer.atproto.record import Problem
from indexer.errors import BrokenInvariantError
from indexer.reasons import Desync
from indexer.store import Store
from indexer.store import resync as resync_module
from indexer.store.resync import DUE
from indexer.sync.diff import Diff, Difference
from indexer.sync.plan import Batch, KeptEvent, RecordChange, RepoWrite
from indexer.sync.repo import PARKED, Repo, SyncStatus
from indexer.sync.shard import Shard, bucket_of
from tests.serving import until
from tests.store.following import connected
from tests.store.rows import delete, did, head, held_up, in_progress, insert, put, synchronized

RELAY = "wss://relay.test"

ALL = range(256)


def waiting(name: object, **fields: object) -> Repo:
    return replace(Repo(did(name), version=1), **fields)  # type: ignore[arg-type]


async def kept_up(store: Store, repo: Repo) -> Repo:
    """The repo as its resync ends when nothing happened meanwhile."""
    row = (await store.repos([repo.did]))[repo.did]
    return replace(
        row, version=row.version + 1, status=SyncStatus.SYNCHRONIZED, reason=None, head=head("3lbbbbbbbbb22")
    )


async def stored(store: Store, claimed: Repo) -> list[tuple[bytes, bytes]]:
    async with store.resync(claimed) as transaction:
        return [entry async for chunk in transaction.stored() for entry in chunk]


def of_bucket(bucket: int, name: str) -> str:
    """A name like it whose DID is of this bucket."""
    return next(like for like in (f"{name} {n}" for n in count()) if bucket_of(did(like)) == bucket)


async def test_claims_go_to_what_was_shown_before_and_what_is_due_first(store: Store) -> None:
    """The first within a bucket; of what was shown, first among all of them."""
    names = ["at once", "due", "later", "known, due", "known, due before", "known, later", "parked", "away", "whole"]
    of = {name: of_bucket(200, name) for name in names}
    await insert(
        store,
        waiting(of["at once"]),
        waiting(of["due"], next_attempt_at=99.0),
        waiting(of["later"], next_attempt_at=101.0),
        waiting(of["known, due"], next_attempt_at=99.5, head=head()),
        waiting(of["known, due before"], next_attempt_at=98.0, head=head()),
        waiting(of["known, later"], next_attempt_at=101.0, head=head()),
        waiting(of["parked"], next_attempt_at=PARKED),
        waiting(of["away"], active=False),
        synchronized(of["whole"]),
    )
    others = [waiting(of_bucket(bucket, "new")) for bucket in range(0, 200, 10)]
    await insert(store, *others)
    known = [await store.claim(1, ALL, 10.0, 100.0) for _ in range(2)]
    assert [[repo.did for repo in claim] for claim in known] == [
        [did(of["known, due before"])],
        [did(of["known, due"])],
    ]
    new = [repo for _ in range(22) for repo in await store.claim(1, ALL, 10.0, 100.0)]
    assert {repo.did for repo in new} == {*(repo.did for repo in others), did(of["at once"]), did(of["due"])}
    assert [repo.did for repo in new if bucket_of(repo.did) == 200] == [did(of["at once"]), did(of["due"])]
    assert await store.claim(1, ALL, 10.0, 100.0) == []
    claimed = next(repo for repo in new if repo.did == did(of["at once"]))
    assert claimed == waiting(of["at once"], version=2, status=SyncStatus.IN_PROGRESS, lease=1)
    assert await store.repos([claimed.did]) == {claimed.did: claimed}


async def test_a_claim_of_several_takes_what_was_shown_before_all_else(store: Store) -> None:
    known = [waiting(of_bucket(bucket, "known"), head=head()) for bucket in (3, 77, 250)]
    await insert(store, *known, *[waiting(n) for n in range(40)])
    claimed = await store.claim(5, ALL, 10.0, 100.0)
    assert [repo.head is not None for repo in claimed] == [True, True, True, False, False]


async def test_what_somebody_asked_for_waits_for_what_broke(store: Store) -> None:
    """Which may be everything there is."""
    await insert(store, *[synchronized(of_bucket(7, f"asked for {n}")) for n in range(3)], waiting(of_bucket(7, "new")))
    assert await store.mark_resync(all=True) == 4
    failed = waiting(of_bucket(7, "failed"), head=head(), attempts=1, next_attempt_at=time() - 1)
    await insert(store, failed, waiting(of_bucket(7, "broke"), head=head()))
    order = [repo.did for _ in range(6) for repo in await store.claim(1, ALL, 10.0, time())]
    assert order[:2] == [did(of_bucket(7, "broke")), failed.did]
    assert order[-1] == did(of_bucket(7, "new"))


async def test_a_row_that_somebody_has_holds_up_nobody(store: Store, sql: asyncpg.Connection) -> None:
    await insert(store, *[waiting(n) for n in range(10)])
    async with sql.transaction():
        await sql.execute("select atproto.request_resync($1)", did(3))
        claimed = await asyncio.wait_for(store.claim(10, ALL, 10.0, 100.0), 5)
        assert {repo.did for repo in claimed} == {did(n) for n in range(10)} - {did(3)}
    assert [repo.did for repo in await store.claim(10, ALL, 10.0, 100.0)] == [did(3)]


async def test_those_who_look_at_the_same_moment_find_others(store: Store, sql: asyncpg.Connection) -> None:
    """One of each bucket: whatever order a look has, it has all of them, and no two orders begin alike."""
    await insert(store, *[waiting(of_bucket(bucket, "new")) for bucket in range(0, 256, 8)])
    looks = [[row["bucket"] for row in await sql.fetch(DUE, 32, list(ALL), 100.0, place)] for place in range(0, 256, 8)]
    assert all(sorted(look) == list(range(0, 256, 8)) for look in looks)
    assert len({look[0] for look in looks}) == 32


async def test_workers_never_claim_the_same(store: Store) -> None:
    await insert(store, *[waiting(n) for n in range(40)])
    claims = await asyncio.gather(*[store.claim(3, ALL, 10.0, 100.0) for _ in range(20)])
    dids = [repo.did for claim in claims for repo in claim]
    assert sorted(dids) == sorted(set(dids))
    rest = await store.claim(100, ALL, 10.0, 100.0)
    assert {*dids, *(repo.did for repo in rest)} == {did(n) for n in range(40)}


async def test_a_shard_claims_its_own(store: Store) -> None:
    await insert(store, *[waiting(n) for n in range(40)])
    shards = [Shard(index, 3) for index in range(3)]
    for shard in shards:
        claimed = await store.claim(100, shard.buckets, 10.0, 100.0)
        assert {repo.did for repo in claimed} == {did(n) for n in range(40) if shard.owns(did(n))}


async def test_a_lease_that_ran_out_ends_the_claim(store: Store, sql: asyncpg.Connection) -> None:
    claimed = await in_progress(store, 1, now=100.0, reason=Desync.SYNC_EVENT)
    buffering = replace(claimed, version=claimed.version + 1, buffered_events=1, buffered_bytes=5)
    kept = (KeptEvent(claimed.did, RELAY, 5, b"frame"),)
    await store.apply(Batch((RepoWrite(claimed.version, buffering, (), kept),)))
    assert await store.expire_leases(ALL, 109.0) == 0
    assert await store.expire_leases(ALL, 111.0) == 1
    ended = replace(
        claimed,
        version=buffering.version + 1,
        status=SyncStatus.DESYNCHRONIZED,
        reason=Desync.LEASE_EXPIRED,
        attempts=1,
        next_attempt_at=None,
    )
    assert await store.repos([did(1)]) == {did(1): ended}
    assert await sql.fetchval("select count(*) from indexer.kept_event") == 0
    assert not await store.renew(did(1), claimed.lease, 60.0)
    async with store.resync(claimed) as transaction:
        assert await transaction.lock() is None
    again = await store.claim(1, ALL, 10.0, 200.0)
    assert [repo.lease for repo in again] == [claimed.lease + 1]
    async with store.resync(claimed) as transaction:
        assert await transaction.lock() is None


async def test_a_repo_that_ends_its_workers_waits_longer_each_time(store: Store) -> None:
    now, waits = 100.0, []
    await in_progress(store, 1, now=now)
    for _ in range(4):
        now += 11.0
        assert await store.expire_leases(ALL, now) == 1
        waits.append(((await store.repos([did(1)]))[did(1)].next_attempt_at or now) - now)
        now += waits[-1]
        assert len(await store.claim(1, ALL, 10.0, now)) == 1
    assert waits[0] == 0
    assert waits == sorted(set(waits))


async def test_whoever_writes_first_is_not_disturbed(store: Store, database: str, sql: asyncpg.Connection) -> None:
    """What ends a claim, or wakes or doubts a repo, passes over one that has moved since it was found."""
    claimed = await in_progress(store, "claimed", now=100.0)
    await insert(store, waiting("parked", next_attempt_at=PARKED), waiting("parked too", next_attempt_at=PARKED))
    lacking = put("app.test/a")._replace(value=None, problem=Problem.MISSING)
    await insert(store, synchronized("lacking"), changes=(lacking,))
    moved = [claimed.did, did("parked"), did("lacking")]
    before = await store.repos(moved)
    async with connected(database) as first, first.transaction():
        await first.execute("update indexer.repo set version = version + 1 where did = any($1)", moved)
        marking = [
            asyncio.create_task(coroutine)
            for coroutine in (
                store.expire_leases(ALL, 200.0),
                store.wake_parked(ALL, -1.0, time()),
                store.mark_missing(ALL, 0.0, 200.0),
            )
        ]
        await until(partial(held_up, sql, len(marking)))
    assert await asyncio.gather(*marking) == [0, 1, 0]
    after = {name: replace(repo, version=repo.version + 1) for name, repo in before.items()}
    assert await store.repos(moved) == after
    assert await store.expire_leases(ALL, 200.0) == 1


async def test_a_renewed_lease_lasts_and_leaves_the_version(store: Store) -> None:
    claimed = await in_progress(store, 1, now=100.0)
    assert await store.renew(did(1), claimed.lease, 60.0)
    assert not await store.renew(did(1), claimed.lease + 1, 60.0)
    assert await store.expire_leases(ALL, 200.0) == 0
    assert await store.repos([did(1)]) == {did(1): claimed}


async def test_stored_paths_come_in_the_order_of_the_tree(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resync_module, "CHUNK", 2)
    collections = ["com.example.foo", "com.example.foo-x", "com.example.foo.bar", "com.example.fo", "a.b", "z.z"]
    paths = [f"{collection}/{rkey}" for collection in collections for rkey in ("A", "a", "-", "~", "3l:x")]
    await insert(store, synchronized("other"), changes=(put("com.example.foo/other"),))
    await insert(store, replace(synchronized(1), status=SyncStatus.DESYNCHRONIZED), changes=tuple(map(put, paths)))
    (claimed,) = await store.claim(1, ALL, 10.0, 100.0)
    async with store.resync(claimed) as transaction:
        chunks = [chunk async for chunk in transaction.stored()]
    assert max(map(len, chunks)) == 2
    assert min(map(len, chunks)) > 0
    assert [path for chunk in chunks for path, _ in chunk] == sorted(path.encode() for path in paths)


async def test_reading_many_collections_leaves_no_cursor_open(store: Store) -> None:
    """Each takes memory of the server until the transaction ends, and names are for others to choose."""
    names = [f"a.b.c{n}{more}" for n in range(30) for more in ("", ".x")]
    await insert(
        store,
        synchronized(1, status=SyncStatus.DESYNCHRONIZED),
        changes=tuple(put(f"{name}/self") for name in names),
    )
    (claimed,) = await store.claim(1, ALL, 10.0, 100.0)
    async with store.resync(claimed) as transaction:
        [chunk] = [chunk async for chunk in transaction.stored()]
        assert [path for path, _ in chunk] == sorted(f"{name}/self".encode() for name in names)
        assert await transaction._connection.fetchval("select count(*) from pg_cursors where name <> ''") == 0


@pytest.mark.parametrize(
    "change",
    [put("app.test/there"), put("app.test/absent", action="update"), delete("app.test/absent")],
    ids=lambda change: change.action,
)
async def test_a_difference_from_other_records_than_ours_is_a_fault_of_ours(
    store: Store, sql: asyncpg.Connection, change: RecordChange
) -> None:
    """Unless the claim is lost: then another worker may have been here."""
    repo = replace(synchronized(1), status=SyncStatus.DESYNCHRONIZED)
    await insert(store, repo, changes=(put("app.test/there"),))
    (claimed,) = await store.claim(1, ALL, 10.0, 100.0)
    with pytest.raises(BrokenInvariantError, match="not those that were compared"):
        async with store.resync(claimed) as transaction:
            await transaction.write([put("app.test/new"), change])
    await store.expire_leases(ALL, 200.0)
    async with store.resync(claimed) as transaction:
        await transaction.write([put("app.test/new"), change])
        assert await transaction.lock() is None
    assert list(await store.visible_records(did(1))) == ["app.test/there"]


async def test_writing_between_chunks_doesnt_disturb_the_reading(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a resync does it: merged with a snapshot and written chunk by chunk, the table becomes the snapshot."""
    monkeypatch.setattr(resync_module, "CHUNK", 3)
    numbers = random.Random(3)
    names = [f"{c}/{n}" for c in ("app.test", "app.test-x", "app.test.more", "b.c", "z.z") for n in range(9)]
    for round_ in range(8):
        ours = {path: put(path, '"ours"') for path in numbers.sample(names, numbers.randrange(len(names)))}
        theirs = {path: put(path, numbers.choice(['"ours"', '"theirs"'])) for path in numbers.sample(names, 20)}
        repo = replace(synchronized(round_), status=SyncStatus.DESYNCHRONIZED)
        await insert(store, repo, changes=tuple(ours.values()))
        (claimed,) = await store.claim(1, ALL, 1e10, 100.0)
        diff = Diff(iter(sorted((path.encode(), change.cid or b"") for path, change in theirs.items())))
        async with store.resync(claimed) as transaction:

            async def write(differences: list[Difference]) -> None:
                await transaction.write(
                    [
                        theirs[d.path.decode()]._replace(action="update" if d.old else "create")  # noqa: B023
                        if d.new
                        else delete(d.path.decode())
                        for d in differences
                    ]
                )

            async for chunk in transaction.stored():
                await write(list(diff.against(chunk)))
            await write(list(diff.rest()))
            locked = await transaction.lock()
            assert locked == claimed
            await transaction.finish(Batch((RepoWrite(claimed.version, await kept_up(store, claimed)),)))
        assert await store.visible_records(repo.did) == {path: change.cid for path, change in theirs.items()}


async def test_nobody_sees_anything_before_the_end(store: Store, sql: asyncpg.Connection) -> None:
    claimed = await in_progress(store, 1)
    drained = put("app.test/b")
    async with store.resync(claimed) as transaction:
        await transaction.write([put("app.test/a"), put("app.test/b", '"old"')])
        row = (await store.repos([did(1)]))[did(1)]  # the live path goes on meanwhile
        buffering = replace(row, version=row.version + 1, buffered_events=1)
        kept = tuple(KeptEvent(did(1), RELAY, seq, b"frame") for seq in (9, 8))
        assert not await store.apply(Batch((RepoWrite(row.version, buffering, (), kept),)))
        assert await store.visible_records(did(1)) == {}
        locked = await transaction.lock()
        assert locked == buffering
        assert [event.seq for event in await transaction.kept()] == [9, 8]
        end = await kept_up(store, claimed)
        await transaction.finish(Batch((RepoWrite(buffering.version, end, (drained._replace(action="update"),)),)))
        assert await store.visible_records(did(1)) == {}
    assert await store.repos([did(1)]) == {did(1): end}
    assert await store.visible_records(did(1)) == {"app.test/a": put("app.test/a").cid, "app.test/b": drained.cid}
    assert await sql.fetchval("select count(*) from indexer.kept_event") == 0
    changes = await sql.fetch("select action, rkey, live from atproto.changes order by seq")
    assert [tuple(row) for row in changes] == [
        ("create", "a", False),
        ("create", "b", False),
        ("update", "b", True),
        ("completed", None, False),
    ]


@pytest.mark.parametrize("finish", [False, True])
async def test_a_block_left_early_leaves_nothing(store: Store, sql: asyncpg.Connection, *, finish: bool) -> None:
    claimed = await in_progress(store, 1)

    class LeftError(Exception):
        pass

    with pytest.raises(LeftError):  # noqa: PT012
        async with store.resync(claimed) as transaction:
            await transaction.write([put("app.test/a")])
            await transaction.lock()
            if finish:
                await transaction.finish(Batch((RepoWrite(claimed.version, await kept_up(store, claimed)),)))
            raise LeftError
    async with store.resync(claimed) as transaction:
        await transaction.write([put("app.test/a")])
    assert await store.repos([did(1)]) == {did(1): claimed}
    assert await sql.fetchval("select count(*) from indexer.record") == 0
    assert await sql.fetchval("select count(*) from indexer.change where rkey is not null") == 0


async def test_a_finish_on_other_ground_is_a_fault_of_ours(store: Store) -> None:
    claimed = await in_progress(store, 1)
    with pytest.raises(BrokenInvariantError):
        async with store.resync(claimed) as transaction:
            await transaction.finish(Batch((RepoWrite(claimed.version - 1, claimed),)))


async def test_resyncs_leave_connections_to_the_live_path(store: Store) -> None:
    """Of five connections two; the third resync waits."""
    entered: list[int] = []
    two, leave = asyncio.Event(), asyncio.Event()

    async def hold(number: int) -> None:
        async with store.resync(synchronized(number)):
            entered.append(number)
            if len(entered) == 2:
                two.set()
            await leave.wait()

    holding = [asyncio.create_task(hold(number)) for number in range(5)]
    await two.wait()
    await asyncio.gather(*[insert(store, synchronized(number)) for number in range(6)])
    assert len(entered) == 2
    leave.set()
    await asyncio.gather(*holding)
    assert sorted(entered) == list(range(5))


async def test_a_record_of_any_size_and_shape_survives_the_arrays(store: Store) -> None:
    claimed = await in_progress(store, 1)
    text = '{"quote": "\\"", "braces": "{a,b}", "null": null, "text": "\\\\ \\n é 🦋", "long": "' + "x" * 200_000 + '"}'
    odd = RecordChange("create", "app.test", "NULL", "3laaaaaaaaa22", put("app.test/x").cid, text)
    async with store.resync(claimed) as transaction:
        await transaction.write([odd])
        await transaction.lock()
        await transaction.finish(Batch((RepoWrite(claimed.version, await kept_up(store, claimed)),)))
    record = await store.record(did(1), "app.test", "NULL")
    assert record is not None
    assert record["value"]["braces"] == "{a,b}"
    assert record["value"]["text"] == "\\ \n é 🦋"
    assert await stored(store, claimed) == [(b"app.test/NULL", odd.cid)]


async def test_what_was_given_up_on_is_tried_again_after_a_long_time(store: Store, sql: asyncpg.Connection) -> None:
    await insert(
        store,
        waiting("parked", next_attempt_at=PARKED, last_error="repo-not-found"),
        waiting("later", next_attempt_at=time() + 60),
        waiting("left", next_attempt_at=PARKED, active=False),
    )
    everything = Shard().buckets
    assert await store.wake_parked(everything, 3_600.0, time()) == 0
    assert await store.wake_parked(everything, -1.0, time()) == 1
    rows = await store.repos([did(name) for name in ("parked", "later", "left")])
    assert [rows[did(name)].next_attempt_at == PARKED for name in ("parked", "later", "left")] == [False, False, True]
    assert rows[did("parked")].last_error == "repo-not-found"
