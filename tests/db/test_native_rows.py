"""The rows that the native core makes are stored as those of the reference are."""

import tracemalloc
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from indexer.atproto.crypto import PrivateKey
from indexer.atproto.limits import DEFAULT_LIMITS, Limits
from indexer.core.spool import Spool
from indexer.db.write import NewRepoRecords, create_records
from indexer.demo import dag_cbor
from indexer.demo.local_repo import LocalRepo, Write
from indexer.sync.export import CHUNK_BYTES, ExportReader, RecordChunk
from tests.native_module import native_reader
from tests.sync.signing_account import POST, STORE_ALL

DID = "did:plc:z72i7hdynmk6r22z27h6tvur"
KEY = PrivateKey.from_seed("k256", b"rows")
RECORDS = "select * from indexer.record order by collection, rkey"
MIB = 1 << 20
CHANGES = "select * from indexer.change order by ordinal"


def export(count: int) -> list[bytes]:
    """Return the sections of an export: posts, and in the last chunk records that the reference converts."""
    posts = [dag_cbor.encode({"$type": POST, "text": f'\u00e9\n"{number}'}) for number in range(count)]
    records = {f"{POST}/{number:06}": post for number, post in enumerate(posts)}
    unusual = {f"{POST}/x": dag_cbor.encode({"text": "no type"}), "x.y.z/float": b"\xa1\x61a\xfb?\xf8" + bytes(6)}
    return sections_of(records | unusual)


def sections_of(records: dict[str, bytes], did: str = DID) -> list[bytes]:
    repo = LocalRepo(did, KEY, "3lwafzkjqm25s")
    repo.write([Write("create", path, block) for path, block in records.items()], KEY, "3lwafzkjqm26s")
    return list(repo.export())


def chunks_of(reader: ExportReader, sections: list[bytes], did: str = DID) -> list[RecordChunk]:
    for section in sections:
        reader.write(section)
    reader.finish()
    records = reader.verify(did, KEY.public, DEFAULT_LIMITS).new_records(STORE_ALL)
    return list(iter(records.next_chunk, None))


async def stored(sql: asyncpg.Connection, chunks: list[RecordChunk]) -> list[list[tuple[Any, ...]]]:
    """Write chunks, and return the rows of both tables without times and numbers of batches."""
    transaction = sql.transaction()
    await transaction.start()
    await create_records(sql, [NewRepoRecords(DID, chunk) for chunk in chunks])
    rows = [await sql.fetch(query) for query in (RECORDS, CHANGES)]
    await transaction.rollback()
    return [
        [tuple(value for name, value in row.items() if name not in {"batch", "indexed_at"}) for row in part]
        for part in rows
    ]


@pytest.mark.parametrize("count", [0, 5, 2_010, pytest.param(4_010, marks=pytest.mark.slow)])
async def test_both_cores_store_the_same_rows(
    sql: asyncpg.Connection, tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("core.core", "sync.export"):
        monkeypatch.setattr(f"indexer.{module}.CHUNK_RECORDS", 2_000)
    sections = export(count)
    native = chunks_of(native_reader(tmp_path, DEFAULT_LIMITS), sections)
    with closing(Spool(tmp_path, DEFAULT_LIMITS)) as spool:
        reference = chunks_of(spool, sections)
    assert sum(chunk.rows is not None for chunk in native) == count // 2_000
    expected = await stored(sql, reference)
    assert await stored(sql, native) == expected
    assert [len(rows) for rows in expected] == [count + 2, count + 2]


@pytest.mark.parametrize("open_reader", [native_reader, Spool])
async def test_rows_fill_the_pages_of_the_primary_key(
    sql: asyncpg.Connection, tmp_path: Path, open_reader: Callable[[Path, Limits], ExportReader]
) -> None:
    """In the order of the keys, they would leave half of each page empty if another repo comes after theirs."""
    count, last = 800, "did:plc:zzzzzzzzzzzzzzzzzzzzzzzz"
    records = {f"{POST}/{number:06}": dag_cbor.encode({"$type": POST}) for number in range(count)}
    dids = [last, *(f"did:plc:{letter * 24}" for letter in "abcd")]
    async with sql.transaction():
        for did in dids:
            with closing(open_reader(tmp_path, DEFAULT_LIMITS)) as reader:
                chunks = chunks_of(reader, sections_of(records, did), did)
                await create_records(sql, [NewRepoRecords(did, chunk) for chunk in chunks])
        size = await sql.fetchval("select pg_relation_size('indexer.record_pkey')")
    entry_bytes = 4 + 72  # a pointer, and a header of 8 bytes with four columns
    assert size * 0.65 < entry_bytes * count * len(dids)


async def test_chunk_is_in_memory_once_while_it_waits_and_while_it_is_written(
    sql: asyncpg.Connection, tmp_path: Path
) -> None:
    """The native core holds its rows, which Python does not see. Of a row, Python holds only pieces."""
    large = dag_cbor.encode({"$type": POST, "text": "x" * 500_000})
    sections = sections_of({f"{POST}/{number}": large for number in range(18)})
    reader = native_reader(tmp_path, DEFAULT_LIMITS)
    tracemalloc.start()
    try:
        [chunk, *_] = chunks_of(reader, sections)
        waiting, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        async with sql.transaction():
            await create_records(sql, [NewRepoRecords(DID, chunk)])
        _, writing = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        reader.close()
    assert chunk.size >= CHUNK_BYTES
    assert waiting < MIB
    assert writing - waiting < 4 * MIB
