import asyncio
import random
from collections.abc import Iterable
from dataclasses import replace
from math import inf

import asyncpg
import pytest

from indexer.atproto.cid import cid_of, cid_text
from indexer.reasons import Desync, Rejection
from indexer.store import DatabaseError, Store, letters
from indexer.sync.plan import Batch, Cursor, DeadLetter, KeptEvent, RecordChange, RepoWrite
from indexer.sync.repo import PARKED, Repo, SyncStatus
from tests.store.rows import delete, did, head, in_progress, insert, put, synchronized

RELAY = "wss://relay.test"


def letter(number: int, **fields: object) -> DeadLetter:
    values = {
        "relay": RELAY,
        "seq": number,
        "did": did(number),
        "kind": "#commit",
        "reason": Rejection.FIELD_INVALID,
        "detail": "",
        "frame": b"frame",
    }
    return DeadLetter(**{**values, **fields})  # type: ignore[arg-type]


async def kill_all_but(connection: asyncpg.Connection) -> None:
    assert await connection.fetchval(
        "select count(pg_terminate_backend(pid)) from pg_stat_activity "
        "where datname = current_database() and pid <> pg_backend_pid()"
    )


@pytest.mark.parametrize(
    "repo",
    [
        Repo(did(1), version=1),
        Repo(did(1), version=7, next_attempt_at=PARKED, last_error="http-status: 500", attempts=3),
        Repo(
            did(1),
            version=2**40,
            status=SyncStatus.SYNCHRONIZED,
            reason=None,
            head=head(),
            seen_rev="3lzzzzzzzzzzz",
            active=False,
            hosting_status="deactivated",
            hosting_relay=RELAY,
            hosting_seq=2**62,
            takedown=True,
            lease=3,
            attempts=2,
            next_attempt_at=1_763_000_000.125,
            synchronized_at=0.5,
        ),
        *[Repo(did(1), version=1, reason=reason) for reason in Desync],
    ],
)
async def test_a_row_comes_back_as_it_was(store: Store, repo: Repo) -> None:
    await insert(store, repo)
    assert await store.repos([did(1), did("unknown")]) == {did(1): repo}


async def test_random_batches_end_where_a_dictionary_ends(store: Store, sql: asyncpg.Connection) -> None:
    """Hundreds of changes, repeated paths within a batch included, against the obvious."""
    numbers = random.Random(11)
    repos = {did(n): Repo(did(n)) for n in range(5)}
    records: dict[tuple[str, str], bytes] = {}
    log: dict[str, list[tuple[str, str, bytes | None]]] = {one: [] for one in repos}
    for step in range(40):
        writes = []
        for one in numbers.sample(sorted(repos), 3):
            changes: list[RecordChange] = []
            for n in range(numbers.randrange(6)):
                path = f"{numbers.choice(['app.test', 'app.test.more', 'app.test-x'])}/{numbers.randrange(4)}"
                if (one, path) in records and numbers.random() < 0.5:
                    changes.append(delete(path))
                    del records[one, path]
                else:
                    action = "update" if (one, path) in records else "create"
                    changes.append(put(path, f'{{"step": {step}, "n": {n}}}', action))  # type: ignore[arg-type]
                    records[one, path] = changes[-1].cid or b""
                log[one].append((changes[-1].action, path, changes[-1].cid))
            repo = replace(synchronized(0), did=one, version=repos[one].version + 1)
            writes.append(RepoWrite(repos[one].version, repo, tuple(changes)))
            repos[one] = repo
        assert await store.apply(Batch(tuple(writes))) == frozenset()
    assert await store.repos(list(repos)) == {one: repo for one, repo in repos.items() if repo.version}
    for one in repos:
        assert await store.visible_records(one) == {path: cid for (owner, path), cid in records.items() if owner == one}
        rows = await sql.fetch(
            "select action, collection || '/' || rkey, cid from atproto.changes where did = $1 and rkey is not null "
            "order by seq",
            one,
        )
        assert [tuple(row) for row in rows] == [(action, path, cid and cid_text(cid)) for action, path, cid in log[one]]


async def test_batches_cut_anywhere_give_the_same_rows(store: Store, sql: asyncpg.Connection) -> None:
    """The same commits one by one, or any number in a transaction: records, changes and heads are the same."""
    numbers = random.Random(5)
    commits: list[tuple[int, list[RecordChange]]] = []
    present: set[tuple[int, str]] = set()
    for _ in range(60):
        owner, changes = numbers.randrange(4), []
        for path in numbers.choices(
            ["app.test/a", "app.test/b", "app.test.more/a", "b.c/d"], k=numbers.randrange(1, 4)
        ):
            if (owner, path) not in present:
                changes.append(put(path, f'"{len(commits)}"'))
            else:
                changes.append(numbers.choice([delete(path), put(path, f'"{len(commits)}"', "update")]))
            (present.discard if changes[-1].action == "delete" else present.add)((owner, path))
        commits.append((owner, changes))

    async def play(size: int) -> list[object]:
        dids = [did((size, owner)) for owner in range(4)]
        repos = {owner: Repo(dids[owner]) for owner in range(4)}
        for start in range(0, len(commits), size):
            writes: dict[int, RepoWrite] = {}
            for owner, changes in commits[start : start + size]:
                before = writes.get(owner, RepoWrite(repos[owner].version, repos[owner]))
                repos[owner] = synchronized((size, owner), version=repos[owner].version + 1)
                writes[owner] = RepoWrite(before.expected, repos[owner], (*before.changes, *changes))
            assert not await store.apply(Batch(tuple(writes.values())))
        log = (
            "select action, collection, rkey, cid, rev, live from atproto.changes where did = $1 "
            "and rkey is not null order by seq"
        )
        return [
            (
                await store.visible_records(one),
                [tuple(row) for row in await sql.fetch(log, one)],
                (await store.repos([one]))[one].version,
            )
            for one in dids
        ]

    one_by_one = await play(1)
    for size in (2, 3, 7, 60):
        assert await play(size) == one_by_one


async def test_what_moved_is_left_out_and_the_cursor_with_it(store: Store, sql: asyncpg.Connection) -> None:
    await insert(store, synchronized("stays"), synchronized("moves"))
    await store.apply(Batch((RepoWrite(1, synchronized("moves", version=2)),)))
    claimed = await in_progress(store, "claimed")
    kept = (KeptEvent(claimed.did, RELAY, 5, b"frame"),)
    moved = await store.apply(
        Batch(
            (
                RepoWrite(1, synchronized("stays", version=2), (put("app.test/a"),)),
                RepoWrite(1, synchronized("moves", version=2, seen_rev="3lzzzzzzzzzzz"), (put("app.test/a"),)),
                RepoWrite(0, synchronized("stays too")),
                RepoWrite(claimed.version - 1, claimed, (), kept),
            ),
            tuple(letter(seq, did=did(name)) for seq, name in ((1, "stays"), (2, "moves"), (3, "other"))),
            cursor=Cursor(RELAY, "0/1", 9),
        )
    )
    assert moved == {did("moves"), claimed.did}
    assert [row[0] for row in await sql.fetch("select seq from atproto.rejected order by seq")] == [1, 3]
    assert await store.visible_records(did("stays")) != {}
    assert await store.visible_records(did("moves")) == {}
    assert (await store.repos([did("moves")]))[did("moves")].seen_rev is None
    assert await sql.fetchval("select count(*) from indexer.kept_event") == 0
    assert await sql.fetchval("select array_agg(did) from indexer.change where rkey is not null") == [did("stays")]
    assert await store.cursor(RELAY, "0/1") is None


async def test_a_repo_that_appeared_meanwhile_has_moved(store: Store) -> None:
    await insert(store, synchronized(1))
    assert await store.apply(Batch((RepoWrite(0, Repo(did(1), version=1)),))) == {did(1)}
    assert (await store.repos([did(1)]))[did(1)] == synchronized(1)


async def test_of_two_writers_of_one_version_one_wins(store: Store) -> None:
    repos = [synchronized(n) for n in range(20)]
    await insert(store, *repos)

    async def write(error: str, order: Iterable[Repo]) -> frozenset[str]:
        return await store.apply(
            Batch(
                tuple(RepoWrite(1, replace(repo, version=2, last_error=error), (put("app.test/a"),)) for repo in order)
            )
        )

    first, second = await asyncio.gather(write("first", repos), write("second", reversed(repos)))
    rows = await store.repos([repo.did for repo in repos])
    assert first | second == set(rows)
    assert not first & second
    assert {one for one, repo in rows.items() if repo.last_error == "first"} == second


async def test_a_batch_that_fails_leaves_nothing(store: Store, sql: asyncpg.Connection) -> None:
    batch = Batch(
        (RepoWrite(0, synchronized(1), (put("app.test/a"), put("app.test/b", "not json"))),),
        (letter(1),),
        cursor=Cursor(RELAY, "0/1", 9),
    )
    with pytest.raises(asyncpg.DataError):  # ours, and loud
        await store.apply(batch)
    for table in ("repo", "record", "change", "dead_letter", "cursor"):
        assert await sql.fetchval(f"select count(*) from indexer.{table}") == 0  # noqa: S608


async def test_the_cursor_never_goes_back(store: Store, sql: asyncpg.Connection) -> None:
    for seq, event_time in ((5, "five"), (3, "three"), (7, None), (9, "a time\0 of any form")):
        await store.apply(Batch(cursor=Cursor(RELAY, "0/1", seq, event_time)))
        assert await store.cursor(RELAY, "0/1") == max(5, seq)
    await store.apply(Batch(cursor=Cursor(RELAY, "1/2", 4)))
    assert await store.cursor(RELAY, "0/1") == 9
    rows = await sql.fetch("select shard, seq, event_time from atproto.cursors order by shard")
    assert [tuple(row) for row in rows] == [("0/1", 9, "a time\ufffd of any form"), ("1/2", 4, None)]


async def test_events_are_kept_as_long_as_the_resync_lasts(store: Store, sql: asyncpg.Connection) -> None:
    repo = await in_progress(store, 1)
    for seq in (7, 8, 8):
        repo = replace(repo, version=repo.version + 1, buffered_events=repo.buffered_events + 1)
        await store.apply(Batch((RepoWrite(repo.version - 1, repo, (), (KeptEvent(repo.did, RELAY, seq, b"frame"),)),)))
    assert [row[0] for row in await sql.fetch("select seq from indexer.kept_event order by seq")] == [7, 8, 8]
    assert await sql.fetchval("select lease_until from indexer.repo") is not None
    ended = replace(repo, version=repo.version + 1, status=SyncStatus.DESYNCHRONIZED)
    assert not await store.apply(Batch((RepoWrite(repo.version, ended),)))
    assert await sql.fetchval("select count(*) from indexer.kept_event") == 0
    assert await sql.fetchval("select lease_until from indexer.repo") is None


async def test_dead_letters_are_kept_whole_and_not_without_end(
    store: Store, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(letters, "MOST", 5)
    hostile = letter(0, seq=None, did="did:\0", kind="#\0", detail="half a pair \ud800 and \0")
    await store.apply(Batch(dead_letters=(hostile,)))
    row = await sql.fetchrow("select seq, did, kind, detail, frame from indexer.dead_letter")
    assert tuple(row or ()) == (None, "did:\ufffd", "#\ufffd", "half a pair ? and \ufffd", b"frame")
    for start in range(1, 13, 3):
        await store.apply(Batch(dead_letters=tuple(letter(n) for n in range(start, start + 3))))
        assert await sql.fetchval("select count(*) from atproto.rejected") <= 5
    assert [row[0] for row in await sql.fetch("select seq from atproto.rejected order by id")] == [8, 9, 10, 11, 12]


async def test_a_flood_of_dead_letters_leaves_the_others(
    store: Store, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bounded in bytes too, and for each relay and reason by itself."""
    monkeypatch.setattr(letters, "MOST_BYTES", 100)
    await store.apply(
        Batch(dead_letters=(letter(1, reason=Rejection.FUTURE_REV), letter(2, relay="wss://other.test"), letter(3)))
    )
    for seq in range(10, 20):
        await store.apply(Batch(dead_letters=(letter(seq, frame=bytes(40)),)))
    rows = await sql.fetch("select seq from atproto.rejected order by seq")
    assert [row[0] for row in rows] == [1, 2, 18, 19]


async def test_one_notification_a_batch_and_none_without_changes(
    store: Store, sql: asyncpg.Connection, database: str
) -> None:
    heard: asyncio.Queue[str] = asyncio.Queue()
    await sql.add_listener("atproto_changes", lambda _c, _p, _ch, payload: heard.put_nowait(str(payload)))
    other = await asyncpg.connect(database)
    await store.apply(Batch((RepoWrite(0, Repo(did(1), version=1)),)))
    await store.apply(Batch((RepoWrite(0, synchronized(2), (put("app.test/a"), put("app.test/b"))),)))
    await other.execute("select pg_notify('atproto_changes', 'end')")
    await other.close()
    assert [await heard.get(), await heard.get()] == ["", "end"]


async def test_an_empty_value_stays_null_and_the_original_whole(store: Store, sql: asyncpg.Connection) -> None:
    change = RecordChange("create", "app.test", "a", "3laaaaaaaaa22", cid_of(b"x"), None, "not-dag-cbor", b"\xff\0")
    await insert(store, synchronized(1), changes=(change,))
    row = await sql.fetchrow("select value, value_problem, original from indexer.record")
    assert tuple(row or ()) == (None, "not-dag-cbor", b"\xff\0")


async def test_a_lost_connection_is_an_error_that_passes(store: Store, sql: asyncpg.Connection) -> None:
    await insert(store, synchronized(1))
    with pytest.raises(DatabaseError):  # noqa: PT012 - out of the block as well
        async with store.resync(synchronized(1)) as transaction:
            await kill_all_but(sql)
            await transaction.lock()
    assert await store.repos([did(1)]) == {did(1): synchronized(1)}


async def test_a_time_that_never_comes_is_infinity(store: Store, sql: asyncpg.Connection) -> None:
    await insert(store, Repo(did(1), version=1, next_attempt_at=inf))
    assert await sql.fetchval("select next_attempt_at = 'infinity' from atproto.repos")


async def test_a_value_of_ours_that_cannot_be_stored_stays_loud(store: Store) -> None:
    """Whatever the words in it."""
    with pytest.raises(asyncpg.DataError, match="closed"):
        await store.apply(Batch(cursor=Cursor(RELAY, "0/1", "the connection is closed")))  # type: ignore[arg-type]
