"""What this machine could do at best: the proofs with nothing around them, and the same rows from a bare script.

No rule is checked here, nothing is retried, counted or looked up, and what is measured calls libraries alone: if the
product becomes slower, the floor doesn't. What the measured part needs is laid out before.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

import asyncpg
import coincurve
import libipld
import orjson
from coincurve._libsecp256k1 import ffi, lib
from coincurve.context import GLOBAL_CONTEXT
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256

from benchmarks import usage
from benchmarks.clock import Clock
from benchmarks.report import MICRO, Figures, cpu_of
from benchmarks.tables import COLUMNS
from benchmarks.world import Account
from indexer.atproto import cbor
from indexer.atproto.car import split_car
from indexer.atproto.commit import decode_commit
from indexer.atproto.crypto import PublicKey
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.sync.shard import bucket_of

BATCH = 500  # commits of a transaction
PIECE = 20_000  # changes of one

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
    insert into {table} (did, collection, rkey, bucket, cid, rev, value)
    select did, collection, rkey, bucket, cid, rev, value::jsonb
    from unnest($1::text[], $2::text[], $3::text[], $4::smallint[], $5::bytea[], $6::text[], $7::text[])
        w(did, collection, rkey, bucket, cid, rev, value)
    on conflict (did, collection, rkey, bucket) do update
    set cid = excluded.cid, rev = excluded.rev, value = excluded.value, indexed_at = now()
"""
_DELETES = """
    delete from {table} r
    using unnest($1::text[], $2::text[], $3::text[], $4::smallint[]) w(did, collection, rkey, bucket)
    where r.did = w.did and r.collection = w.collection and r.rkey = w.rkey and r.bucket = w.bucket
"""
_CHANGES = """
    insert into benchmark.log (did, collection, rkey, action, cid, rev)
    select * from unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::bytea[], $6::text[])
"""
_WRITTEN = """
    select c.action, c.did, c.collection, c.rkey, c.bucket, c.cid, c.rev, r.value::text
    from indexer.change c left join indexer.record r using (did, collection, rkey, bucket)
    where c.collection is not null and c.did = any($1::text[]) order by c.segment, c.batch, c.place
"""
_LIVE, _COPY = "indexer.record", "benchmark.record"
_LOG = ("did", "collection", "rkey", "action", "cid", "rev")

Row = tuple[Any, ...]
Statements = list[tuple[str, list[list[Any]]]]
"""With their arguments, columns of rows."""

Verifier = Callable[[bytes, bytes], bool]
"""Of a signature of 64 bytes, and what was signed."""


class Proof(NamedTuple):
    """What of a message takes a proof."""

    frame: bytes
    blocks: list[bytes]
    verify: Verifier
    sig: bytes
    unsigned: bytes


class Message(NamedTuple):
    """A commit's message, taken apart."""

    payload: Mapping[str, Any]
    blocks: Mapping[bytes, bytes]
    proof: Proof


def verifier(key: PublicKey) -> Verifier:
    """What the key's library does, without the product around it."""
    return _k256(key.compressed) if key.curve == "k256" else _p256(key.compressed)


def _k256(point: bytes) -> Verifier:
    key, context = coincurve.PublicKey(point).public_key, GLOBAL_CONTEXT.ctx

    def verify(sig: bytes, message: bytes) -> bool:
        parsed = ffi.new("secp256k1_ecdsa_signature *")
        lib.secp256k1_ecdsa_signature_parse_compact(context, parsed, sig)
        return bool(lib.secp256k1_ecdsa_verify(context, parsed, sha256(message).digest(), key))

    return verify


def _p256(point: bytes) -> Verifier:
    key, algorithm = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), point), ec.ECDSA(SHA256())

    def verify(sig: bytes, message: bytes) -> bool:
        parsed = encode_dss_signature(int.from_bytes(sig[:32], "big"), int.from_bytes(sig[32:], "big"))
        try:
            key.verify(parsed, message, algorithm)
        except InvalidSignature:
            return False
        return True

    return verify


def take_apart(frame: bytes, verifiers: Mapping[str, Verifier]) -> Message:
    _, payload = cbor.decode_pair(frame)
    (root, *_), blocks = split_car(payload["blocks"], DEFAULT_LIMITS, max_bytes=len(frame))
    commit = decode_commit(blocks[root], root)
    proof = Proof(frame, list(blocks.values()), verifiers[payload["repo"]], commit.sig, commit.unsigned)
    return Message({**payload, "data": commit.data}, blocks, proof)


def prove(proofs: Iterable[Proof]) -> float:
    """Seconds of one core to decode every frame, hash its blocks and verify its signature."""
    began = process_time()
    for frame, blocks, verify, sig, unsigned in proofs:
        libipld.decode_dag_cbor_multi(frame)
        for block in blocks:
            sha256(block).digest()
        if not verify(sig, unsigned):
            raise ValueError("a commit isn't signed by its key")
    return process_time() - began


def prove_export(export: bytes, verify: Verifier) -> float:
    """Seconds of one core to hash and decode every block of an export, and to verify its signature."""
    (root, *_), blocks = split_car(export, DEFAULT_LIMITS, max_bytes=len(export))
    commit = decode_commit(blocks[root], root)
    began = process_time()
    for block in blocks.values():
        sha256(block).digest()
        libipld.decode_dag_cbor(block)
    if not verify(commit.sig, commit.unsigned):
        raise ValueError("an export isn't signed by its key")
    return process_time() - began


class Script:
    """Writes rows by one connection, with nothing around. What changed goes into a log of its own: ours has rules."""

    def __init__(self, connection: asyncpg.Connection, clock: Clock) -> None:
        self.clock = clock
        self._connection = connection

    async def write(self, statements: Statements) -> None:
        """In one transaction."""
        with self.clock.database():
            async with self._connection.transaction():
                for statement, columns in statements:
                    await self._connection.execute(statement, *columns)

    async def copy(self, rows: Path) -> None:
        """Begins with the rows of a file, for `rewrite`."""
        schema, table = _COPY.split(".")
        await self._connection.copy_to_table(table, schema_name=schema, source=rows, columns=COLUMNS, format="text")
        await self._connection.execute(f"analyze {_COPY}")

    async def rewrite(self, heads: Sequence[Row], changes: Sequence["Written"]) -> None:
        """In one transaction: the heads of repos, and what has changed in the rows that `copy` began with."""
        creates = [change.row for change in changes if change.action == "create"]
        others = {
            _PUTS: [change.row for change in changes if change.action == "update"],
            _DELETES: [change.row[:4] for change in changes if change.action == "delete"],
        }
        statements = [(_HEADS, _columns(heads))] * bool(heads)
        statements += [(statement.format(table=_COPY), _columns(rows)) for statement, rows in others.items() if rows]
        log = [(*change.row[:3], change.action, *change.row[4:6]) for change in changes]
        schema = _COPY.partition(".")[0]
        copy = self._connection.copy_records_to_table
        with self.clock.database():
            async with self._connection.transaction():
                await copy("record", schema_name=schema, columns=COLUMNS, records=creates)
                for statement, columns in statements:
                    await self._connection.execute(statement, *columns)
                await copy("log", schema_name=schema, columns=_LOG, records=log)


class Written(NamedTuple):
    """A record that was written, or, but for its key, deleted; `row` is in the order of `COLUMNS`."""

    action: str
    row: Row


def head_row(account: Account) -> Row:
    """The head of a repo in the end."""
    head = account.after
    return account.did, bucket_of(account.did), head.rev, bytes.fromhex(head.data), bytes.fromhex(head.commit)


async def written(dsn: str, dids: Sequence[str]) -> AsyncIterator[list[Written]]:
    """What was changed in these repos, as the change log has it, in pieces."""
    connection = await asyncpg.connect(dsn)
    async with connection.transaction():
        cursor = await connection.cursor(_WRITTEN, dids)
        while rows := await cursor.fetch(PIECE):
            yield [Written(action, tuple(row)) for action, *row in rows]
    await connection.close()


@asynccontextmanager
async def script(dsn: str, postgres: Callable[[], float] | None = None) -> AsyncIterator[Script]:
    """A bare script, and its clock, of its own backend unless `postgres` tells what Postgres has used."""
    connection = await asyncpg.connect(dsn)
    await connection.execute(_TABLES)
    backend = connection.get_server_pid()
    yield Script(connection, Clock(postgres or (lambda: usage.backend_seconds([backend]))))
    await connection.close()


def changes(messages: Iterable[Message]) -> Counter[str]:
    return Counter(op["action"] for message in messages for op in message.payload["ops"])


def statements(messages: Sequence[Message]) -> Statements:
    """Of one batch, sorted by key, each key once."""
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
    rows_of: dict[str, list[Row]] = {
        _HEADS: [heads[did] for did in sorted(heads)],
        _PUTS.format(table=_LIVE): [row for row in ordered if row[4]],
        _DELETES.format(table=_LIVE): [row[:4] for row in ordered if not row[4]],
        _CHANGES: log,
    }
    return [(statement, _columns(rows)) for statement, rows in rows_of.items() if rows]


def _columns(rows: Sequence[Row]) -> list[list[Any]]:
    return [list(column) for column in zip(*rows, strict=True)]


def compared(unit: str, ours: Figures, rate: float, proof: float, clock: Clock, count: int) -> Figures:
    """The floor beside `ours`, of `count` commits or records; `proof` is in seconds each.

    There is one ratio, by CPU: whatever waits, however many processes share the work. Those by the clock depend on
    how many cores there are, and on who else uses them.
    """
    script, postgres, passed = (
        seconds / count for seconds in (clock.used["client"], clock.used["database"], clock.passed["client"])
    )
    used = sum(float(ours[cpu_of(part, unit)]) for part in ("daemon", "Postgres"))
    return {
        f"proof alone, one core, µs per {unit}": proof * MICRO,
        f"rows alone, CPU of the script, µs per {unit}": script * MICRO,
        f"rows alone, CPU of Postgres, µs per {unit}": postgres * MICRO,
        f"rows alone, by the clock, µs per {unit}": passed * MICRO,
        "CPU of the floor to ours, Postgres included": (proof + script + postgres) * MICRO / used,
        "by the clock: our rate to the proof's on one core": rate * proof,
        "by the clock: our rate to the bare script's": rate * passed,
    }
