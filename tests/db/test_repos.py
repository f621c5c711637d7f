"""Requests of commands: add repos, request resyncs. Accounts that are due to be erased."""

import pytest

from indexer.db import Database, repos
from indexer.reasons import Desync, FetchFailure
from indexer.sync.repo import CHOSEN, DELETED, PARKED, TOMBSTONED, Repo
from tests.db.repo_rows import did, in_progress, insert, synchronized


async def test_adding_repos_only_notes_that_known_ones_are_chosen(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repos, "BATCH_SIZE", 3)
    await insert(db, synchronized(1))
    assert await db.repos.add([did(n) for n in (1, 2, 3, 4, 5, 2)]) == 4
    assert await db.repos.add([did(2)]) == 0
    rows = await db.repos.load([did(1), did(2)])
    assert rows == {
        did(1): synchronized(1)._replace(version=2, wanted_in=CHOSEN),
        did(2): Repo(did(2), version=1, wanted_in=CHOSEN),
    }


async def test_listed_repos_no_longer_count_as_new_and_no_longer_wait_for_their_host(db: Database) -> None:
    new = Repo(did("new"), version=1, from_stream=True, next_attempt_at=50.0)
    waits = new._replace(
        did=did("waits"),
        next_attempt_at=9e9,
        last_failure=FetchFailure.NEW_ACCOUNTS,
        last_error="new-accounts: evil.example",
    )
    failed = new._replace(
        did=did("failed"), next_attempt_at=9e9, last_failure=FetchFailure.TIMEOUT, last_error="timeout: 30 s"
    )
    fetched = synchronized("fetched", from_stream=True)
    unlisted = waits._replace(did=did("unlisted"))
    await insert(db, new, waits, failed, fetched, unlisted)
    assert await db.repos.add([new.did, waits.did, failed.did, fetched.did]) == 0
    assert await db.repos.load([new.did, waits.did, failed.did, fetched.did, unlisted.did]) == {
        new.did: new._replace(version=2, from_stream=False, wanted_in=CHOSEN),
        waits.did: waits._replace(
            version=2, from_stream=False, next_attempt_at=None, last_failure=None, last_error=None, wanted_in=CHOSEN
        ),
        failed.did: failed._replace(version=2, from_stream=False, wanted_in=CHOSEN),
        fetched.did: fetched._replace(version=2, wanted_in=CHOSEN),
        unlisted.did: unlisted,
    }


async def test_resyncs_are_requested_of_some_failed_or_all_repos(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repos, "BATCH_SIZE", 2)
    claimed = await in_progress(db, "in progress")
    failed = Repo(
        did("failed"),
        version=1,
        next_attempt_at=PARKED,
        attempts=4,
        last_failure=FetchFailure.TIMEOUT,
        last_error="timeout",
    )
    others = [synchronized(n) for n in range(5)]
    await insert(db, failed, *others)
    assert await db.repos.request_resyncs([did(0), did("in progress"), did("unknown")]) == 2
    assert not await db.resyncs.renew(claimed.did, claimed.lease, 10.0), "it may have read the repo before the fault"
    assert sum([requested async for _, requested in db.repos.request_resyncs_of_all(errored=True)]) == 1
    again = (await db.repos.load([failed.did]))[failed.did]
    assert (again.sync_reason, again.attempts, again.next_attempt_at, again.version) == (Desync.REQUESTED, 0, None, 2)
    assert (await db.repos.load([did(1)]))[did(1)] == others[1]
    assert sum([requested async for _, requested in db.repos.request_resyncs_of_all()]) == 7
    assert len(await db.resyncs.claim(100, range(256), 10.0, 100.0)) == 7


async def test_account_whose_did_is_gone_is_not_erased_before_it_was_checked(db: Database) -> None:
    gone = synchronized("gone", active=False, hosting_status=TOMBSTONED, erase_at=1.0)
    deleted = synchronized("deleted", active=False, hosting_status=DELETED, erase_at=2.0)
    await insert(db, gone, deleted)
    assert await db.repos.due_gone(range(256), 10, 3.0) == [gone.did]
    erased = await db.repos.erase_batch(range(256), 3.0)
    assert erased is not None
    assert erased.did == deleted.did
    assert await db.repos.erase_batch(range(256), 3.0) is None
    assert await db.repos.erase_batch(range(256), 3.0, did=gone.did) is not None
