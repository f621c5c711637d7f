"""The queries of the status page."""

from dataclasses import replace

import asyncpg
import pytest

from indexer.reasons import Rejection
from indexer.store import Store, status_queries
from indexer.sync.plans import Batch, DeadLetter
from indexer.sync.repo_state import PARKED, Repo
from indexer.sync.stored_identity import HandleCheck, HandleClaim, StoredIdentity
from tests.store.repo_rows import did, head, insert, put, synchronized

pytestmark = pytest.mark.slow
LETTER = DeadLetter("wss://one.example", 7, None, "commit", Rejection.FIELD_INVALID, "no rev", b"frame", 0)


async def test_dead_letters_are_counted_by_reason_with_the_newest_one(store: Store, sql: asyncpg.Connection) -> None:
    forged = replace(LETTER, did=did(1), reason=Rejection.SIGNATURE_INVALID, detail="<b>forged</b>")
    await store.write(Batch(dead_letters=(LETTER, replace(LETTER, seq=8, detail="later"))))
    await sql.execute("update indexer.dead_letter set time = now() - interval '2 hours' where seq = 7")
    await store.write(Batch(dead_letters=(forged,)))
    found = (await store.delivery_state()).rejections
    assert [(entry.reason, entry.stored, entry.last_hour, entry.detail) for entry in found] == [
        ("signature-invalid", 1, 1, "<b>forged</b>"),
        ("field-invalid", 2, 1, "later"),
    ]
    assert (found[0].did, found[1].seq, found[1].relay) == (did(1), 8, "wss://one.example")


async def test_registered_consumers_are_listed(store: Store, sql: asyncpg.Connection) -> None:
    await sql.execute("select atproto.register_reader('one')")
    [consumer] = (await store.delivery_state()).consumers
    assert (consumer.name, consumer.behind, consumer.cut_off) == ("one", 0, False)


async def test_account_is_found_by_did_and_by_verified_handle(store: Store) -> None:
    await insert(store, synchronized(1), changes=(put("app.test/a"), put("app.test/b")))
    await store.save_identities([StoredIdentity(did(1), "alice.test", "https://pds.test", "did:key:zabc", 5.5)])
    assert await store.account_state("alice.test") is None, "not verified yet"
    await store.save_handle_check(HandleCheck(HandleClaim(did(1), "alice.test", None, 0), "alice.test", 0, 9.0))
    state = await store.account_state("alice.test")
    assert state == await store.account_state(did(1))
    assert state is not None
    assert (state["did"], state["records"], state["synchronized_at"]) == (did(1), 2, 1.5)
    assert (state["visible"], state["parked"], state["next_attempt_at"]) == (True, False, None)


async def test_parked_account_has_no_next_attempt(store: Store) -> None:
    await insert(store, Repo(did(1), version=1, next_attempt_at=PARKED, head=head(), last_error="repo-not-found"))
    state = await store.account_state(did(1))
    assert state is not None
    assert (state["parked"], state["next_attempt_at"], state["last_error"]) == (True, None, "repo-not-found")


async def test_unknown_account_is_not_found(store: Store) -> None:
    assert await store.account_state(did(1)) is None
    assert await store.account_state("nobody.test") is None


async def test_records_of_an_account_are_counted_only_to_a_limit(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_queries, "MAX_COUNTED_RECORDS", 2)
    await insert(store, synchronized(1), changes=tuple(put(f"app.test/{number}") for number in range(9)))
    state = await store.account_state(did(1))
    assert state is not None
    assert state["records"] == 3


async def test_statements_have_a_time_limit_that_ends_with_the_transaction(sql: asyncpg.Connection) -> None:
    before = await sql.fetchval("show statement_timeout")
    async with sql.transaction():
        await status_queries.load_delivery_state(sql)
        assert await sql.fetchval("show statement_timeout") == f"{status_queries.TIMEOUT_SECONDS}s"
    assert await sql.fetchval("show statement_timeout") == before


async def test_no_query_scans_repos_records_or_identities(sql: asyncpg.Connection) -> None:
    """With tables that are not empty, a sequential scan would read all of them."""
    await sql.execute("set enable_seqscan = off")
    account = await sql.fetch(f"explain {status_queries.ACCOUNT}", did(1), 3, 10)
    rejections = await sql.fetch(f"explain {status_queries.REJECTIONS}")
    assert [line for (line,) in account if "Seq Scan" in line] == []
    assert sum("Index" in line and " on " in line for (line,) in account) == 3
    large_tables = (" on repo ", " on record ", " on identity ")
    assert [line for (line,) in rejections if any(table in line for table in large_tables)] == []
