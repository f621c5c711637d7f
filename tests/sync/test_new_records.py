"""All records of an export, converted in chunks."""

from unittest.mock import patch

import pytest

from indexer.atproto.car import split_car
from indexer.atproto.cid import cid_of
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.record import Problem
from indexer.demo.local_repo import Write
from indexer.sync.changes import RecordChange, RecordConverter
from indexer.sync.export import NewRecords, RecordChunk, Snapshot, verify_snapshot
from tests.sync.signing_account import POST, STORE_ALL, SigningAccount

RKEYS = [f"{number:02}" for number in range(7)]


def export_of(account: SigningAccount, *missing: str) -> Snapshot:
    """Return an export of the account without the blocks of some records."""
    _, blocks = split_car(b"".join(account.repo.export()), DEFAULT_LIMITS, max_bytes=10**7)
    for rkey in missing:
        del blocks[cid_of(account.repo.records[f"{POST}/{rkey}"])]
    head = account.repo.head.cid
    return verify_snapshot(account.did, head, blocks.get, account.key.public, DEFAULT_LIMITS, 10_000)


def account_with_posts() -> SigningAccount:
    account = SigningAccount()
    account.commit(*[Write.create(f"{POST}/{rkey}", {"$type": POST, "rkey": rkey}) for rkey in RKEYS])
    return account


def chunks_of(records: NewRecords) -> list[RecordChunk]:
    chunks = []
    while (chunk := records.next_chunk()) is not None:
        chunks.append(chunk)
    assert records.next_chunk() is None
    return chunks


def rkeys(chunk: RecordChunk) -> list[str]:
    return [change.rkey for change in chunk.changes]


def test_export_has_the_head_and_the_records_of_its_snapshot() -> None:
    account = account_with_posts()
    export = export_of(account)
    assert export.head == account.head
    expected = [(path.encode(), cid_of(block)) for path, block in sorted(account.repo.records.items())]
    assert list(export.records()) == expected
    assert export.block_of(expected[0][1]) == account.repo.records[f"{POST}/00"]


def test_all_selected_records_are_converted() -> None:
    account = account_with_posts()
    account.commit(Write.create("not a path", {}))
    [chunk] = chunks_of(export_of(account, "03").new_records(STORE_ALL))
    assert (rkeys(chunk), chunk.count, chunk.missing) == (RKEYS, 7, 1)
    first, missing = chunk.changes[0], chunk.changes[3]
    cid = cid_of(account.repo.records[f"{POST}/00"])
    value = '{"rkey":"00","$type":"app.bsky.feed.post"}'
    assert first == RecordChange("create", POST, "00", account.head.rev, cid, value)
    assert (missing.value, missing.problem) == (None, Problem.MISSING)
    assert chunk.size == sum(change.size for change in chunk.changes if change.value is not None)
    assert chunk.rows is None


def test_chunk_ends_after_the_maximum_of_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are kept for one chunk only."""
    monkeypatch.setattr("indexer.sync.export.CHUNK_RECORDS", 3)
    with patch.object(RecordConverter, "forget_values") as forget:
        chunks = chunks_of(export_of(account_with_posts(), "04", "06").new_records(STORE_ALL))
    assert [rkeys(chunk) for chunk in chunks] == [RKEYS[:3], RKEYS[3:6], RKEYS[6:]]
    assert [chunk.missing for chunk in chunks] == [0, 1, 1]
    assert forget.call_count == 5, "before each chunk, and before it is known that there are no more"


@pytest.mark.parametrize(("less", "records"), [(0, 2), (1, 2), (-1, 3)])
def test_chunk_ends_with_the_record_that_takes_it_to_the_maximum_of_bytes(
    less: int, records: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = export_of(account_with_posts())
    [whole] = chunks_of(export.new_records(STORE_ALL))
    two = sum(change.size for change in whole.changes[:2])
    monkeypatch.setattr("indexer.sync.export.CHUNK_BYTES", two - less)
    chunks = chunks_of(export.new_records(STORE_ALL))
    assert [rkeys(chunk) for chunk in chunks] == [RKEYS[n : n + records] for n in range(0, 7, records)]
    assert all(chunk.size == sum(change.size for change in chunk.changes) for chunk in chunks)
