import asyncio
import json
import random
from collections.abc import Iterable
from time import time

import asyncpg
import pytest

from indexer.atproto.cid import cid_text
from indexer.db import Database, DatabaseError, dead_letters
from indexer.db.write import MIN_COPIED
from indexer.errors import RefusedWriteError
from indexer.reasons import Desync, FetchFailure, Rejection
from indexer.sync.changes import Batch, BufferedEvent, DeadLetter, RecordChange, RepoWrite
from indexer.sync.repo import PARKED, Repo, SyncStatus
from indexer.sync.stream import Cursor
from tests.db.change_log_helpers import connected
from tests.db.repo_rows import delete, did, head, in_progress, insert, put, synchronized

RELAY = "wss://relay.test"


def dead_letter(number: int, **fields: object) -> DeadLetter:
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


async def terminate_all_but(connection: asyncpg.Connection) -> None:
    assert await connection.fetchval(
        "select count(pg_terminate_backend(pid)) from pg_stat_activity "
        "where datname = current_database() and pid <> pg_backend_pid()"
    )


async def test_rows_are_read_as_they_were_written(db: Database, sql: asyncpg.Connection) -> None:
    rows = [
        Repo(did(1), version=1),
        Repo(
            did(1),
            version=7,
            next_attempt_at=PARKED,
            last_failure=FetchFailure.HTTP_STATUS,
            last_error="http-status: 500",
            attempts=3,
        ),
        Repo(
            did(1),
            version=2**40,
            sync_status=SyncStatus.SYNCHRONIZED,
            sync_reason=None,
            head=head(),
            latest_verified_rev="3lzzzzzzzzzzz",
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
        *[Repo(did(1), version=1, sync_reason=reason) for reason in Desync],
    ]
    repos = {did(number): row._replace(did=did(number)) for number, row in enumerate(rows)}
    await insert(db, *repos.values())
    assert await db.repos.load([*repos, did("unknown")]) == repos
    assert await sql.fetchval("select count(*) from atproto.repos where next_attempt_at = 'infinity'") == 1


@pytest.mark.parametrize("min_copied", [1, pytest.param(MIN_COPIED, marks=pytest.mark.slow)])
async def test_random_batches_give_the_same_records_as_a_dictionary(
    db: Database, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch, min_copied: int
) -> None:
    """Write hundreds of changes, with repeated paths in one batch, and compare with a dictionary."""
    monkeypatch.setattr("indexer.db.write.MIN_COPIED", min_copied)
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
            repo = synchronized(0)._replace(did=one, version=repos[one].version + 1)
            writes.append(RepoWrite(repos[one], repo, tuple(changes)))
            repos[one] = repo
        assert (await db.write(Batch(tuple(writes)))).skipped == frozenset()
    assert await db.repos.load(list(repos)) == {one: repo for one, repo in repos.items() if repo.version}
    for one in repos:
        assert await db.reports.visible_records(one) == {
            path: cid for (owner, path), cid in records.items() if owner == one
        }
        rows = await sql.fetch(
            "select action, collection || '/' || rkey, cid from atproto.changes where did = $1 and rkey is not null "
            "order by seq",
            one,
        )
        assert [tuple(row) for row in rows] == [(action, path, cid and cid_text(cid)) for action, path, cid in log[one]]


async def test_a_write_on_another_version_is_skipped_and_the_cursor_is_not_saved(
    db: Database, sql: asyncpg.Connection
) -> None:
    await insert(db, synchronized("same"), synchronized("changed"), synchronized("inserted"))
    await db.write(Batch((RepoWrite(synchronized("changed"), synchronized("changed", version=2)),)))
    claimed = await in_progress(db, "claimed")
    changed = synchronized("changed", version=2, latest_verified_rev="3lzzzzzzzzzzz")
    writes = (
        RepoWrite(synchronized("same"), synchronized("same", version=2), (put("app.test/a"),)),
        RepoWrite(synchronized("changed"), changed, (put("app.test/a"),)),
        RepoWrite(Repo(did("new")), synchronized("new")),
        RepoWrite(Repo(did("inserted")), Repo(did("inserted"), version=1)),
        RepoWrite(
            claimed._replace(version=claimed.version - 1),
            claimed,
            (),
            (BufferedEvent(claimed.did, RELAY, 5, b"frame"),),
        ),
    )
    letters = tuple(dead_letter(seq, did=did(name)) for seq, name in ((1, "same"), (2, "changed"), (3, "other")))
    skipped = (await db.write(Batch(writes, letters, cursors=(Cursor(RELAY, "0/1", 9),)))).skipped
    assert skipped == {did("changed"), did("inserted"), claimed.did}
    assert [row[0] for row in await sql.fetch("select seq from atproto.rejected order by seq")] == [1, 3]
    assert await db.reports.visible_records(did("same")) != {}
    assert await db.reports.visible_records(did("changed")) == {}
    assert (await db.repos.load([did("changed")]))[did("changed")].latest_verified_rev is None
    assert (await db.repos.load([did("inserted")]))[did("inserted")] == synchronized("inserted")
    assert await sql.fetchval("select count(*) from indexer.buffered_event") == 0
    assert await sql.fetchval("select array_agg(did) from indexer.change where rkey is not null") == [did("same")]
    assert await db.gaps.cursors() == []


@pytest.mark.slow
async def test_of_two_writes_on_one_version_one_is_skipped(db: Database) -> None:
    repos = [synchronized(n) for n in range(20)]
    await insert(db, *repos)

    async def write(status: str, order: Iterable[Repo]) -> frozenset[str]:
        put_one = (put("app.test/a"),)
        writes = [RepoWrite(repo, repo._replace(version=2, hosting_status=status), put_one) for repo in order]
        return (await db.write(Batch(tuple(writes)))).skipped

    first, second = await asyncio.gather(write("first", repos), write("second", reversed(repos)))
    rows = await db.repos.load([repo.did for repo in repos])
    assert first | second == set(rows)
    assert not first & second
    assert {one for one, repo in rows.items() if repo.hosting_status == "first"} == second


async def test_a_batch_that_fails_writes_nothing(db: Database, sql: asyncpg.Connection) -> None:
    batch = Batch(
        (RepoWrite(Repo(did(1)), synchronized(1), (put("app.test/a"), put("app.test/b", "not json"))),),
        (dead_letter(1),),
        cursors=(Cursor(RELAY, "0/1", 9),),
    )
    with pytest.raises(RefusedWriteError):  # a retry would fail again, so it is no DatabaseError
        await db.write(batch)
    for table in ("repo", "record", "change", "dead_letter", "cursor"):
        assert await sql.fetchval(f"select count(*) from indexer.{table}") == 0  # noqa: S608
    with pytest.raises(RefusedWriteError, match="closed"):  # even if its text is like that of a lost connection
        await db.write(Batch(cursors=(Cursor(RELAY, "0/1", "the connection is closed"),)))  # type: ignore[arg-type]


async def test_the_cursor_never_decreases_within_an_epoch(db: Database, sql: asyncpg.Connection) -> None:
    for seq, event_time in ((5, "five"), (3, "three"), (7, None), (9, "a time\0 of any form")):
        await db.write(Batch(cursors=(Cursor(RELAY, "0/1", seq, event_time),)))
        assert [cursor.seq for cursor in await db.gaps.cursors()] == [max(5, seq)]
    await db.write(Batch(cursors=(Cursor(RELAY, "1/2", 4),)))
    rows = await sql.fetch("select shard, seq, event_time from atproto.cursors order by shard")
    assert [tuple(row) for row in rows] == [("0/1", 9, "a time\ufffd of any form"), ("1/2", 4, None)]
    for epoch, seq in ((1, 3), (0, 901), (1, 2)):
        await db.write(Batch(cursors=(Cursor(RELAY, "0/1", seq, epoch=epoch),)))
    assert {(str(cursor.shard), cursor.epoch, cursor.seq) for cursor in await db.gaps.cursors()} == {
        ("0/1", 1, 3),
        ("1/2", 0, 4),
    }


@pytest.mark.slow
async def test_time_of_the_cursor_goes_back_only_from_before_the_clock_was_set_back(
    db: Database, sql: asyncpg.Connection
) -> None:
    now = time()
    for seq, caught_up_at, stored in (
        (1, now - 9, now - 9), (2, now - 99, now - 9), (3, now + 86_400, now + 86_400), (4, now, now)
    ):  # fmt: skip
        await db.write(Batch(cursors=(Cursor(RELAY, "0/1", seq, caught_up_at=caught_up_at),)))
        assert await sql.fetchval("select date_part('epoch', caught_up_at) from indexer.cursor") == pytest.approx(
            stored
        )


async def test_events_are_buffered_until_the_resync_ends(db: Database, sql: asyncpg.Connection) -> None:
    repo = await in_progress(db, 1)
    for seq in (7, 8, 8):
        before, repo = repo, repo._replace(version=repo.version + 1, buffered_events=repo.buffered_events + 1)
        await db.write(Batch((RepoWrite(before, repo, (), (BufferedEvent(repo.did, RELAY, seq, b"frame"),)),)))
    assert [row[0] for row in await sql.fetch("select seq from indexer.buffered_event order by seq")] == [7, 8, 8]
    assert await sql.fetchval("select lease_until from indexer.repo") is not None
    ended = repo._replace(version=repo.version + 1, sync_status=SyncStatus.DESYNCHRONIZED)
    assert not (await db.write(Batch((RepoWrite(repo, ended),)))).skipped
    assert await sql.fetchval("select count(*) from indexer.buffered_event") == 0
    assert await sql.fetchval("select lease_until from indexer.repo") is None


async def test_a_message_that_is_received_again_has_one_dead_letter(db: Database, sql: asyncpg.Connection) -> None:
    """Apart from characters that Postgres cannot store, it is stored as it is."""
    hostile = dead_letter(0, seq=None, did="did:\0", kind="#\0", detail="half a pair \ud800 and \0")
    letter = dead_letter(7)
    others = [dead_letter(7, frame=b"other"), dead_letter(8), dead_letter(7, epoch=1)]
    for _ in range(3):
        await db.write(Batch(dead_letters=(hostile, letter, *others)))
    assert await sql.fetchval("select count(*) from indexer.dead_letter where seq is not null") == 4
    rows = await sql.fetch("select did, kind, detail, frame from indexer.dead_letter where seq is null")
    assert [tuple(row) for row in rows] == [("did:\ufffd", "#\ufffd", "half a pair ? and \ufffd", b"frame")] * 3


@pytest.mark.slow
async def test_the_dead_letters_of_each_relay_and_reason_are_limited_in_number_and_bytes(
    db: Database, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def left() -> list[int]:
        return [row[0] for row in await sql.fetch("select seq from atproto.rejected order by seq")]

    monkeypatch.setattr(dead_letters, "MAX_ROWS", 5)
    others = (dead_letter(1, reason=Rejection.FUTURE_REV), dead_letter(2, relay="wss://other.test"))
    await db.write(Batch(dead_letters=(*others, dead_letter(3))))
    for start in range(4, 16, 3):
        await db.write(Batch(dead_letters=tuple(dead_letter(n) for n in range(start, start + 3))))
        assert len(await left()) <= 7
    assert await left() == [1, 2, *range(11, 16)]
    monkeypatch.setattr(dead_letters, "MAX_BYTES", 100)
    for seq in range(20, 30):
        await db.write(Batch(dead_letters=(dead_letter(seq, frame=bytes(40)),)))
    assert await left() == [1, 2, 28, 29]
    for seq in range(30, 40):
        await db.write(Batch(dead_letters=(dead_letter(seq, relay=f"https://{seq}.test", frame=bytes(40)),)))
    assert await left() == [1, 2, 28, 29, 38, 39], "all hosts count as one relay"


@pytest.mark.slow
async def test_commit_with_changes_notifies_once(db: Database, sql: asyncpg.Connection, database: str) -> None:
    received: asyncio.Queue[str] = asyncio.Queue()
    await sql.add_listener("atproto_changes", lambda _c, _p, _ch, payload: received.put_nowait(str(payload)))
    await db.write(Batch((RepoWrite(Repo(did(1)), Repo(did(1), version=1)),)))
    async with connected(database) as other:
        await other.execute("select pg_notify('atproto_changes', 'no changes until now')")
        await db.write(Batch((RepoWrite(Repo(did(2)), synchronized(2), (put("app.test/a"), put("app.test/b"))),)))
        await other.execute("select pg_notify('atproto_changes', 'end')")
    payloads = [await received.get()]
    while payloads[-1] != "end":
        payloads.append(await received.get())
    assert payloads == ["no changes until now", "", "end"]


@pytest.mark.slow
async def test_a_lost_connection_is_a_database_error(db: Database, sql: asyncpg.Connection) -> None:
    await insert(db, synchronized(1))
    with pytest.raises(DatabaseError):  # noqa: PT012 - the end of the block raises it, too
        async with db.resyncs.transaction(synchronized(1)) as transaction:
            await terminate_all_but(sql)
            await transaction.lock()
    assert await db.repos.load([did(1)]) == {did(1): synchronized(1)}


@pytest.mark.slow
async def test_large_records_are_written_in_several_statements_with_the_same_result(
    db: Database, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indexer.db.write.STATEMENT_BYTES", 10_000)
    values = {f"{number:02}": json.dumps("x" * (5_000 if number % 3 else 20_000)) for number in range(20)}
    creates = [RecordChange("create", "a.b.c", rkey, "3a", b"cid", value) for rkey, value in values.items()]
    row = synchronized(1)
    await sql.execute("create table statement (size bigint)")
    await sql.execute(
        """
        create function note_statement() returns trigger language plpgsql as $$
            begin insert into statement select sum(octet_length(value::text)) from written; return null; end
        $$"""
    )
    await sql.execute(
        "create trigger note after insert on indexer.record referencing new table as written "
        "for each statement execute function note_statement()"
    )
    assert not (await db.write(Batch((RepoWrite(Repo(row.did), row, tuple(creates)),)))).skipped
    assert {row["rkey"]: row["value"] for row in await sql.fetch("select rkey, value from indexer.record")} == values
    sizes = [size for (size,) in await sql.fetch("select size from statement")]
    assert len(sizes) > 10
    assert max(sizes) < 21_000
    deletes = [change._replace(action="delete", cid=None, value=None) for change in creates]
    assert not (await db.write(Batch((RepoWrite(row, row._replace(version=9), tuple(deletes)),)))).skipped
    assert not await sql.fetch("select from indexer.record")


@pytest.mark.slow
async def test_row_of_which_only_the_head_advances_is_stored_completely(db: Database) -> None:
    await insert(db, synchronized(1), synchronized(2))
    before = await db.repos.load([did(1), did(2)])
    after = before[did(1)]._replace(version=before[did(1)].version + 3, head=head("3lbbbbbbbbb22"))
    assert after.advances(before[did(1)])
    write = RepoWrite(before[did(1)], after, advances=True)
    assert not (await db.write(Batch((write,)))).skipped
    assert await db.repos.load([did(1), did(2)]) == {did(1): after, did(2): before[did(2)]}
    assert (await db.write(Batch((write,)))).skipped == {did(1)}, "the row has another version by now"
