"""The table of identities, and the queue of handles to verify."""

import asyncio
from dataclasses import replace
from functools import partial
from time import time

import asyncpg
import pytest

from indexer.db import Database
from indexer.sync.changes import Batch
from indexer.sync.identity import INVALID_HANDLE, HandleCheck, HandleClaim, StoredIdentity
from indexer.sync.shard import PLAIN, Layout
from tests.db.change_log_helpers import connected
from tests.db.repo_rows import did, insert, synchronized, waiting_for_locks
from tests.waiting import until

ALL = range(256)
NOON = 4e9  # later than the clock of the database, so that every new handle is due


def identity(name: object, claimed: str | None, fetched_at: float = 5.0) -> StoredIdentity:
    return StoredIdentity(did(name), claimed, "https://pds.test", "did:key:zabc", fetched_at)


async def due(db: Database, count: int = 10, now: float = NOON) -> list[HandleClaim]:
    claims, _ = await db.identities.due_handles(ALL, count, now)
    return claims


async def save_check(db: Database, name: object, handle: str | None, due_at: float = NOON, attempts: int = 0) -> None:
    """Store the result of checking the handle that `name` claims."""
    [claim] = [claim for claim in await due(db, now=2 * NOON) if claim.did == did(name)]
    await db.identities.save_handle_check(HandleCheck(claim, handle, attempts, due_at))


async def shown(sql: asyncpg.Connection, name: object) -> str | None:
    handle: str | None = await sql.fetchval("select handle from atproto.repos where did = $1", did(name))
    return handle


async def test_identities_are_read_as_saved_and_the_latest_reading_stays(db: Database) -> None:
    one, two = identity(1, "alice.test", 5.5), StoredIdentity(did(2), None, None, None, 5.5, problem="not found")
    await db.identities.save([one, two])
    assert await db.identities.load([did(1), did(2), did(3)]) == {did(1): one, did(2): two}
    await db.identities.save([identity(1, "before.test", 4.0)])
    assert (await db.identities.load([did(1)]))[did(1)] == one
    await db.write(Batch(stale_identities=frozenset({did(1), did(3)})))
    assert (await db.identities.load([did(1)]))[did(1)].stale
    later = identity(1, "after.test", round(time()) + 1.0)  # asked after the announcement, so it removes the mark
    await db.identities.save([one, later])
    assert await db.identities.load([did(1), did(3)]) == {did(1): later}
    odd = replace(identity(4, "nul\0.test"), pds="https://\ud800", fetched_at=time() + 86_400)
    await db.identities.save([odd])
    assert (await db.identities.load([did(4)]))[did(4)].handle == "nul\ufffd.test"
    await db.identities.save([identity(4, "after.test", time())])  # the clock was set back
    assert (await db.identities.load([did(4)]))[did(4)].handle == "after.test"


@pytest.mark.slow
async def test_new_identities_are_saved_in_the_same_way_if_the_layout_has_several_parts(
    db: Database, sql: asyncpg.Connection
) -> None:
    before, after = identity("known", "before.test", 4.0), identity("known", "after.test", 5.0)
    others = [identity("new", "alice.test"), StoredIdentity(did("empty"), None, None, None, 5.5, True, "none", 1, 3.0)]
    saved = []
    for layout in (PLAIN, Layout(parts=4)):
        db.layout = layout
        await db.identities.save([before])
        await db.identities.save([after, *others])
        rows = await sql.fetch("select i.*, handle_due_at = 'epoch' as due from indexer.identity i order by did")
        saved.append([{**row, "handle_due_at": row["handle_due_at"] is not None} for row in rows])
        await sql.execute("delete from indexer.identity")
    assert len(saved[0]) == 3
    assert saved[0] == saved[1]


@pytest.mark.parametrize("stale_before", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_change_that_is_announced_after_the_lookup_asked_keeps_its_mark(
    db: Database, sql: asyncpg.Connection, stale_before: bool
) -> None:
    """The save comes later than the mark, for example because it waited for other saves."""
    announced = Batch(stale_identities=frozenset({did(1)}))
    await db.identities.save([identity(1, "alice.test")])
    if stale_before:
        await db.write(announced)
    asked_at = time()
    await db.write(announced)
    await db.identities.save([identity(1, "later.test", asked_at)])
    saved = (await db.identities.load([did(1)]))[did(1)]
    assert (saved.handle, saved.stale) == ("later.test", True)
    assert [due.did for due in await db.identities.due(ALL, 10, time(), web=False)] == [did(1)]
    await db.identities.save([identity(1, "later.test", time())])
    assert not (await db.identities.load([did(1)]))[did(1)].stale
    assert await sql.fetchval("select refresh_at from indexer.identity") is None


@pytest.mark.slow
@pytest.mark.parametrize("announced_again", [False, True])
async def test_postponed_refresh_keeps_a_mark_only_for_a_later_announcement(
    db: Database, announced_again: bool
) -> None:
    """A lookup that asked after the first announcement is saved while the refresh is postponed."""
    announced = Batch(stale_identities=frozenset({did(1)}))
    await db.identities.save([identity(1, "alice.test")])
    await db.write(announced)
    await db.identities.postpone_refresh(did(1), time() + 30, 0)
    asked_at = time()
    if announced_again:
        await db.write(announced)
    await db.identities.save([identity(1, "later.test", asked_at)])
    assert (await db.identities.load([did(1)]))[did(1)].stale == announced_again
    due = await db.identities.due(ALL, 10, time() + 60, web=False)
    assert [one.did for one in due] == [did(1)] * announced_again


@pytest.mark.slow
async def test_change_that_is_announced_during_a_back_off_keeps_its_mark(db: Database) -> None:
    """The time of the announcement is not stored then. So the identity is looked up once more, soon."""
    announced = Batch(stale_identities=frozenset({did(1)}))
    await db.identities.save([identity(1, "alice.test")])
    await db.write(announced)
    await db.identities.postpone_refresh(did(1), time() + 1_000, 1)
    asked_at = time()
    await db.write(announced)
    assert await db.identities.due(ALL, 10, time() + 999, web=False) == [], "the back-off is not shorter"
    assert len(await db.identities.due(ALL, 10, time() + 1_001, web=False)) == 1
    await db.identities.save([identity(1, "later.test", asked_at)])
    saved = (await db.identities.load([did(1)]))[did(1)]
    assert (saved.handle, saved.stale) == ("later.test", True)
    assert [due.did for due in await db.identities.due(ALL, 10, time() + 60, web=False)] == [did(1)]
    await db.identities.save([identity(1, "later.test", time() + 60)])
    assert not (await db.identities.load([did(1)]))[did(1)].stale
    assert await db.identities.due(ALL, 10, NOON, web=False) == []


@pytest.mark.slow
async def test_handle_check_does_not_deadlock_with_a_save(db: Database, database: str, sql: asyncpg.Connection) -> None:
    """The check confirms the handle of the last row, which the first row had. The save has locked the first row."""
    names = sorted([1, 2, 3], key=did)
    await db.identities.save([identity(name, "shared.test") for name in names])
    await save_check(db, names[0], "shared.test")
    [claim] = [claim for claim in await due(db, now=3 * NOON) if claim.did == did(names[2])]
    async with connected(database) as blocker, blocker.transaction():
        await blocker.execute("select from indexer.identity where did = $1 for update", did(names[1]))
        save = asyncio.create_task(db.identities.save([identity(name, "shared.test", 6.0) for name in names]))
        await until(partial(waiting_for_locks, sql, 1))
        check = asyncio.create_task(db.identities.save_handle_check(HandleCheck(claim, "shared.test", 0, NOON)))
        await until(partial(waiting_for_locks, sql, 2))
    await asyncio.gather(save, check)
    assert await db.identities.did_of_handle("shared.test") == did(names[2])
    found = await due(db, now=time() + 60)
    assert did(names[0]) in {claim.did for claim in found}


async def did_of(db: Database, sql: asyncpg.Connection, handle: str) -> str | None:
    """Return the DID of a verified handle, of which the daemon's query and the public function agree."""
    found: str | None = await sql.fetchval("select atproto.did_of($1)", handle)
    assert await db.identities.did_of_handle(handle) == found
    return found


async def test_a_claimed_handle_is_shown_only_while_it_is_verified(db: Database, sql: asyncpg.Connection) -> None:
    await insert(db, synchronized(1), synchronized(2))
    await db.identities.save([identity(1, "alice.test"), identity(2, None)])
    assert (await shown(sql, 1), await shown(sql, 2)) == (None, INVALID_HANDLE)
    assert await did_of(db, sql, "alice.test") is None
    assert await due(db) == [HandleClaim(did(1), "alice.test", None, 0)]
    await save_check(db, 1, "alice.test", due_at=NOON + 300)
    assert await shown(sql, 1) == "alice.test"
    assert await did_of(db, sql, "alice.test") == did(1)
    for name in ("Alice.TEST", "@alice.test"):
        assert await sql.fetchval("select atproto.did_of($1)", name) == did(1)
    for unknown in (INVALID_HANDLE, "bob.test", "", None):
        assert await sql.fetchval("select atproto.did_of($1)", unknown) is None
    assert (await db.identities.load([did(1)]))[did(1)] == identity(1, "alice.test")
    await db.identities.save([identity(1, "alice.test", 6.0)])
    assert await shown(sql, 1) == "alice.test", "the same claim keeps its verification"
    assert await due(db) == []
    await db.identities.save([identity(1, "after.test", 7.0)])
    assert await shown(sql, 1) is None
    assert await did_of(db, sql, "alice.test") is None
    [claim] = await due(db)
    assert claim == HandleClaim(did(1), "after.test", None, 0)
    await db.identities.save([identity(1, "last.test", 8.0)])
    await db.identities.save_handle_check(HandleCheck(claim, "after.test", 0, 2 * NOON))
    assert await shown(sql, 1) is None, "the check of an earlier claim is ignored"
    await save_check(db, 1, INVALID_HANDLE)
    assert await shown(sql, 1) == INVALID_HANDLE
    assert {await did_of(db, sql, handle) for handle in ("last.test", INVALID_HANDLE)} == {None}
    await db.identities.save([identity(1, None, 9.0)])
    assert await shown(sql, 1) == INVALID_HANDLE
    assert await due(db, now=2 * NOON) == []


@pytest.mark.slow
async def test_a_handle_is_due_until_it_was_checked_and_when_its_next_check_is(db: Database) -> None:
    """Attempts are stored. A handle that is not verified is due when the document is read again."""
    await db.identities.save([identity(1, "alice.test")])
    assert await due(db) == [HandleClaim(did(1), "alice.test", None, 0)]
    await save_check(db, 1, None, due_at=NOON + 300, attempts=3)
    assert await due(db, now=NOON + 299) == []
    assert await due(db, now=NOON + 301) == [HandleClaim(did(1), "alice.test", None, 3)]
    await save_check(db, 1, INVALID_HANDLE, due_at=NOON + 300, attempts=5)
    assert await due(db) == []
    await db.identities.save([identity(1, "alice.test", 6.0)])
    assert await due(db) == [HandleClaim(did(1), "alice.test", INVALID_HANDLE, 5)]


@pytest.mark.slow
async def test_a_handle_belongs_to_the_account_for_which_it_was_verified_last(
    db: Database, sql: asyncpg.Connection
) -> None:
    """The other account is checked again, also if both were claimed at the same time."""
    for name in (1, 2):
        await db.identities.save([identity(name, "alice.test")])
        await save_check(db, name, "alice.test", due_at=NOON + 300)
    assert await did_of(db, sql, "alice.test") == did(2)
    assert [claim.did for claim in await due(db)] == [did(1)]
    await db.identities.save([identity(3, "bob.test"), identity(4, "bob.test")])
    claims = [claim for claim in await due(db) if claim.claimed == "bob.test"]
    for claim in claims:
        await db.identities.save_handle_check(HandleCheck(claim, "bob.test", 0, NOON))
    assert await did_of(db, sql, "bob.test") == claims[1].did


@pytest.mark.slow
async def test_the_handles_that_became_due_last_come_first(db: Database, sql: asyncpg.Connection) -> None:
    await db.identities.save([identity(name, f"h{name}.test") for name in range(5)])
    for name in range(5):
        await sql.execute(
            "update indexer.identity set handle_due_at = to_timestamp($2) where did = $1", did(name), NOON - 10 + name
        )
    assert [claim.did for claim in await due(db, 2)] == [did(4), did(3), did(1), did(0)]
