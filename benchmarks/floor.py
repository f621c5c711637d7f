"""What this machine could do at best: the proofs with nothing around them, and the same rows from a bare script.

No rule is checked here, nothing is retried, counted or looked up. What the measured part needs is laid out before.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, NamedTuple

import asyncpg
import libipld
import orjson

from benchmarks import tables
from indexer.atproto import cbor
from indexer.atproto.car import split_car
from indexer.atproto.commit import decode_commit
from indexer.atproto.crypto import PublicKey
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.sync.shard import bucket_of

BATCH = 500

_TABLES = """
    create schema benchmark;
    create table benchmark.log (
        seq bigint generated always as identity primary key, did text, collection text, rkey text, action text,
        cid bytea, rev text, time timestamptz default now()
    );
    create table benchmark.record (like indexer.record including all);
"""
_HEADS = """
    update indexer.repo r set version = version + 1, rev = w.rev, data = w.data, commit = w.commit, updated_at = now()
    from unnest($1::text[], $2::smallint[], $3::text[], $4::bytea[], $5::bytea[]) w(did, bucket, rev, data, commit)
    where r.did = w.did and r.bucket = w.bucket
"""
_PUTS = """
    insert into indexer.record (did, collection, rkey, bucket, cid, rev, value)
    select did, collection, rkey, bucket, cid, rev, value::jsonb
    from unnest($1::text[], $2::text[], $3::text[], $4::smallint[], $5::bytea[], $6::text[], $7::text[])
        w(did, collection, rkey, bucket, cid, rev, value)
    on conflict (did, collection, rkey, bucket) do update
    set cid = excluded.cid, rev = excluded.rev, value = excluded.value, indexed_at = now()
"""
_DELETES = """
    delete from indexer.record r
    using unnest($1::text[], $2::text[], $3::text[], $4::smallint[]) w(did, collection, rkey, bucket)
    where r.did = w.did and r.collection = w.collection and r.rkey = w.rkey and r.bucket = w.bucket
"""
_CHANGES = """
    insert into benchmark.log (did, collection, rkey, action, cid, rev)
    select * from unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::bytea[], $6::text[])
"""

_COPIED = """
    insert into benchmark.log (did, collection, rkey, action, cid, rev)
    select did, collection, rkey, 'create', cid, rev from benchmark.record
"""

Columns = list[list[Any]]
Row = tuple[Any, ...]


class Proof(NamedTuple):
    """What of a message takes a proof."""

    frame: bytes
    blocks: list[bytes]
    key: PublicKey
    unsigned: bytes
    sig: bytes


class Message(NamedTuple):
    """A commit's message, taken apart."""

    payload: Mapping[str, Any]
    blocks: Mapping[bytes, bytes]
    proof: Proof


def take_apart(frame: bytes, keys: Mapping[str, PublicKey]) -> Message:
    _, payload = cbor.decode_pair(frame)
    (root, *_), blocks = split_car(payload["blocks"], DEFAULT_LIMITS, max_bytes=len(frame))
    commit = decode_commit(blocks[root], root)
    proof = Proof(frame, list(blocks.values()), keys[payload["repo"]], commit.unsigned, commit.sig)
    return Message({**payload, "data": commit.data}, blocks, proof)


def prove(proofs: Iterable[Proof]) -> float:
    """Seconds of one core to decode every frame, hash its blocks and verify its signature."""
    began = process_time()
    for frame, blocks, key, unsigned, sig in proofs:
        libipld.decode_dag_cbor_multi(frame)
        for block in blocks:
            sha256(block).digest()
        if not key.verify(sig, unsigned):
            raise ValueError("a commit isn't signed by its key")
    return process_time() - began


async def write(dsn: str, messages: Sequence[Message]) -> tuple[float, float]:
    """Writes what the commits change, in transactions of `BATCH` commits; seconds by the clock, and of this process.

    What changed goes into a log of its own: the product's has rules.
    """
    batches = [_columns(messages[start : start + BATCH]) for start in range(0, len(messages), BATCH)]
    connection = await asyncpg.connect(dsn)
    await connection.execute(_TABLES)
    began, used = perf_counter(), process_time()
    for batch in batches:
        async with connection.transaction():
            for statement, columns in batch:
                await connection.execute(statement, *columns)
    took = perf_counter() - began, process_time() - used
    await connection.close()
    return took


def read_exports(exports: Iterable[bytes]) -> float:
    """Seconds of one core to hash every export, and to decode all its blocks."""
    began = process_time()
    for export in exports:
        sha256(export).digest()
        libipld.decode_car(export)
    return process_time() - began


async def copy(dsn: str, rows: Path) -> tuple[float, int]:
    """Brings the rows of a file into a table like the product's, and into the log; seconds, and how many."""
    connection = await asyncpg.connect(dsn)
    await connection.execute(_TABLES)
    began = perf_counter()
    async with connection.transaction():
        await connection.copy_to_table(
            "record", schema_name="benchmark", source=rows, columns=tables.COLUMNS, format="text"
        )
        status = await connection.execute(_COPIED)
    passed = perf_counter() - began
    await connection.close()
    return passed, int(status.removeprefix("INSERT 0 "))


def changes(messages: Iterable[Message]) -> Counter[str]:
    return Counter(op["action"] for message in messages for op in message.payload["ops"])


def _columns(messages: Sequence[Message]) -> list[tuple[str, Columns]]:
    """The statements of one batch, sorted by key, each key once."""
    heads: dict[str, Row] = {}
    records: dict[Row, Row] = {}
    log: list[Row] = []
    for payload, blocks, _ in messages:
        did, rev, bucket = payload["repo"], payload["rev"], bucket_of(payload["repo"])
        heads[did] = (did, bucket, rev, payload["data"], payload["commit"])
        for op in payload["ops"]:
            collection, _, rkey = op["path"].partition("/")
            key, cid = (did, collection, rkey, bucket), op["cid"]
            records[key] = (*key, cid, rev, cid and orjson.dumps(cbor.decode_json(blocks[cid])).decode())
            log.append((did, collection, rkey, op["action"], cid, rev))
    ordered = [records[key] for key in sorted(records)]
    puts, deletes = [row for row in ordered if row[4]], [row[:4] for row in ordered if not row[4]]
    rows_of: dict[str, list[Row]] = {_HEADS: [heads[did] for did in sorted(heads)], _PUTS: puts}
    rows_of |= {_DELETES: deletes, _CHANGES: log}
    return [
        (statement, [list(column) for column in zip(*rows, strict=True)]) for statement, rows in rows_of.items() if rows
    ]
