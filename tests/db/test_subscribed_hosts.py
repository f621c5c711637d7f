"""The hosts that are subscribed, and their withheld repos, on Postgres."""

import asyncio
from time import time
from typing import Any

import asyncpg
import pytest

from indexer.db import Database
from indexer.reasons import Desync, FetchFailure
from indexer.sync.changes import Batch, RepoWrite
from indexer.sync.identity import StoredIdentity
from indexer.sync.repo import PARKED, Repo, SyncStatus
from indexer.sync.shard import Shard
from tests.db.change_log_helpers import connected
from tests.db.repo_rows import completed, did, in_progress, insert, synchronized, waiting_for_locks
from tests.waiting import until

ALL = Shard()
PDS, OTHER = "https://pds.test", "https://other.test"
WITHHELD: dict[str, Any] = {"withheld_since": 5.0, "hosting_status": "throttled"}


async def add(db: Database, name: object, pds: str | None = PDS, **fields: Any) -> str:
    """Insert a synchronized repo with an identity that names its host; return its DID."""
    await insert(db, synchronized(name, **fields))
    await db.identities.save([StoredIdentity(did(name), None, pds, None, time())])
    return did(name)


async def rows(db: Database, *names: object) -> list[Repo]:
    stored = await db.repos.load([did(name) for name in names])
    return [stored[did(name)] for name in names]


async def statuses(db: Database, *names: object) -> list[SyncStatus]:
    return [row.sync_status for row in await rows(db, *names)]


D, S = SyncStatus.DESYNCHRONIZED, SyncStatus.SYNCHRONIZED


async def test_only_withheld_repos_of_hosts_that_are_not_subscribed_are_desynchronized(db: Database) -> None:
    await db.subscribed_hosts.add(PDS, ALL)
    await add(db, "subscribed", **WITHHELD)
    await add(db, "elsewhere", OTHER, **WITHHELD)
    await add(db, "without a host", None, **WITHHELD)
    await add(db, "shown", OTHER)
    assert await db.subscribed_hosts.withhold(ALL) == 2
    assert await statuses(db, "subscribed", "elsewhere", "without a host", "shown") == [S, D, D, S]
    [elsewhere] = await rows(db, "elsewhere")
    assert (elsewhere.sync_reason, elsewhere.next_attempt_at) == (Desync.WITHHELD, PARKED)
    assert await db.subscribed_hosts.withhold(ALL) == 0


async def test_repos_of_a_host_are_desynchronized_when_it_is_left(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indexer.db.subscribed_hosts.BATCH_SIZE", 2)
    names = range(5)
    for pds in (PDS, OTHER):
        await db.subscribed_hosts.add(pds, ALL)
    for name in names:
        await add(db, name, **WITHHELD)
    await add(db, "other", OTHER, **WITHHELD)
    assert await db.subscribed_hosts.remove(PDS, ALL) == len(names)
    assert await db.subscribed_hosts.load(ALL) == [OTHER]
    assert await statuses(db, *names, "other") == [D] * len(names) + [S]


async def test_host_that_is_added_again_at_once_is_left_all_the_same(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another task has noticed that the stream is open, before that one noticed its gap."""
    await add(db, "ada", **WITHHELD)
    load = db.subscribed_hosts.load

    async def add_before(shard: Shard) -> list[str]:
        await db.subscribed_hosts.add(PDS, shard)
        return await load(shard)

    monkeypatch.setattr(db.subscribed_hosts, "load", add_before)
    assert await db.subscribed_hosts.remove(PDS, ALL) == 1
    assert (await statuses(db, "ada"), await load(ALL)) == ([D], [PDS])


async def test_repo_that_changes_meanwhile_is_desynchronized_too(
    db: Database, sql: asyncpg.Connection, database: str
) -> None:
    await add(db, "busy", **WITHHELD)
    async with connected(database) as other, other.transaction():
        await other.execute("update indexer.repo set version = version + 1")
        withholding = asyncio.create_task(db.subscribed_hosts.withhold(ALL))
        await until(lambda: waiting_for_locks(sql, 1))
    assert await withholding == 1
    assert await statuses(db, "busy") == [D]


async def test_repos_of_subscribed_hosts_become_due(db: Database) -> None:
    await db.subscribed_hosts.add(PDS, ALL)
    for name, pds in (("subscribed", PDS), ("elsewhere", OTHER)):
        await add(db, name, pds, **WITHHELD)
    await db.subscribed_hosts.remove(PDS, ALL)
    await db.subscribed_hosts.withhold(ALL)
    await db.subscribed_hosts.add(PDS, ALL)
    before = time()
    assert await db.subscribed_hosts.unpark(ALL) == 1
    subscribed, elsewhere = await rows(db, "subscribed", "elsewhere")
    assert before - 1 <= (subscribed.next_attempt_at or 0) <= time()
    assert elsewhere.next_attempt_at == PARKED
    assert await db.subscribed_hosts.unpark(ALL) == 0
    assert [repo.did for repo in await db.resyncs.claim(9, range(256), 10.0, time())] == [subscribed.did]


@pytest.mark.parametrize(
    "fields",
    [
        {"last_failure": FetchFailure.IDENTITY_MISSING, "last_error": "no PDS"},
        {"active": False},
        {"sync_reason": Desync.ERASED},
        {"withheld_since": None},
    ],
    ids=str,
)
async def test_repo_that_is_parked_for_another_reason_stays_so(db: Database, fields: dict[str, Any]) -> None:
    await db.subscribed_hosts.add(PDS, ALL)
    parked: dict[str, Any] = {"sync_status": D, "sync_reason": Desync.WITHHELD, "next_attempt_at": PARKED}
    await add(db, "parked", **(WITHHELD | parked | fields))
    assert await db.subscribed_hosts.unpark(ALL) == 0


async def test_shard_follows_hosts_for_its_own_repos(db: Database) -> None:
    lower, upper = Shard(0, 2).placed(db.layout), Shard(1, 2).placed(db.layout)
    await db.subscribed_hosts.add(PDS, lower)
    names = range(20)
    for name in names:
        await add(db, name, **WITHHELD)
    owned = [name for name in names if lower.owns(did(name))]
    assert 0 < len(owned) < len(names)
    assert await db.subscribed_hosts.withhold(lower) == 0
    assert await db.subscribed_hosts.withhold(upper) == len(names) - len(owned)
    found = {name: await db.subscribed_hosts.find(did(name), PDS) for name in names}
    assert [name for name, id_ in found.items() if id_ is not None] == owned
    await db.subscribed_hosts.remove_former(upper)
    assert await db.subscribed_hosts.load(lower) == [PDS]
    await db.subscribed_hosts.remove_former(ALL.placed(db.layout))
    assert await db.subscribed_hosts.load(lower) == []


async def test_host_that_is_subscribed_again_has_another_id(db: Database) -> None:
    await db.subscribed_hosts.add(PDS, ALL)
    first = await db.subscribed_hosts.find(did("x"), PDS)
    await db.subscribed_hosts.add(PDS, ALL)
    assert await db.subscribed_hosts.find(did("x"), PDS) == first
    await db.subscribed_hosts.remove(PDS, ALL)
    assert await db.subscribed_hosts.find(did("x"), PDS) is None
    await db.subscribed_hosts.add(PDS, ALL)
    assert await db.subscribed_hosts.find(did("x"), PDS) not in {None, first}


async def test_host_is_left_after_the_resyncs_that_rely_on_it(db: Database, sql: asyncpg.Connection) -> None:
    """The resync has seen that the host is subscribed, and ends after it was left: no repo is left over."""
    await db.subscribed_hosts.add(PDS, ALL)
    claimed = await in_progress(db, "ada", now=time(), **WITHHELD)
    await db.identities.save([StoredIdentity(claimed.did, None, PDS, None, time())])
    subscribed = await db.subscribed_hosts.find(claimed.did, PDS)
    async with db.resyncs.transaction(claimed) as transaction:
        locked = await transaction.lock()
        assert locked is not None
        assert await transaction.is_subscribed(subscribed)
        leaving = asyncio.create_task(db.subscribed_hosts.remove(PDS, ALL))
        await until(lambda: waiting_for_locks(sql, 1))
        assert await transaction.finish(Batch((RepoWrite(locked, completed(locked)),)))
    assert await leaving == 1
    assert await statuses(db, "ada") == [D]
    claimed = await in_progress(db, "bea", now=time(), **WITHHELD)
    async with db.resyncs.transaction(claimed) as transaction:
        assert not await transaction.is_subscribed(subscribed)
        assert not await transaction.is_subscribed(None)
