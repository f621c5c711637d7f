"""Measure the floor: a lower bound of the CPU time that verification and writing take on this machine.

The measured parts call libraries directly, check no protocol rule, and retry, count and look up nothing. A slower
indexer therefore does not change the floor. The inputs are prepared before the measurement.
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
from coincurve._libsecp256k1 import ffi, lib
from coincurve.context import GLOBAL_CONTEXT
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256

from benchmarks import cpu_usage
from benchmarks.database_rows import COLUMNS
from benchmarks.report import MICRO, Figures, cpu_of
from benchmarks.stage_clock import StageClock
from benchmarks.workload import WorkloadAccount
from indexer.atproto import cbor
from indexer.atproto.car import split_car
from indexer.atproto.commit import decode_commit
from indexer.atproto.crypto import PublicKey
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.sync.shard import bucket_of

BATCH_SIZE = 500
"""Commits per transaction."""
CHANGES_PER_TRANSACTION = 20_000

_TABLES = """
    create schema benchmark;
    create table benchmark.log (
        seq bigint generated always as identity primary key, did text, collection text, rkey text, action text,
        cid bytea, rev text, time timestamptz default now()
    );
    create table benchmark.record (like indexer.record including all);
"""
_UPDATE_HEADS = """
    update indexer.repo r set version = version + 1, rev = w.rev, data = w.data, commit = w.commit, updated_at = now()
    from unnest($1::text[], $2::smallint[], $3::text[], $4::bytea[], $5::bytea[]) w(did, bucket, rev, data, commit)
    where r.did = w.did and r.bucket = w.bucket
"""
_UPSERT_RECORDS = """
    insert into {table} (did, collection, rkey, bucket, cid, rev, value)
    select did, collection, rkey, bucket, cid, rev, value::jsonb
    from unnest($1::text[], $2::text[], $3::text[], $4::smallint[], $5::bytea[], $6::text[], $7::text[])
        w(did, collection, rkey, bucket, cid, rev, value)
    on conflict (did, collection, rkey, bucket) do update
    set cid = excluded.cid, rev = excluded.rev, value = excluded.value, indexed_at = now()
"""
_DELETE_RECORDS = """
    delete from {table} r
    using unnest($1::text[], $2::text[], $3::text[], $4::smallint[]) w(did, collection, rkey, bucket)
    where r.did = w.did and r.collection = w.collection and r.rkey = w.rkey and r.bucket = w.bucket
"""
_INSERT_LOG = """
    insert into benchmark.log (did, collection, rkey, action, cid, rev)
    select * from unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::bytea[], $6::text[])
"""
_SELECT_CHANGES = """
    select c.action, c.did, c.collection, c.rkey, c.bucket, c.cid, c.rev, r.value::text
    from indexer.change c left join indexer.record r using (did, collection, rkey, bucket)
    where c.collection is not null and c.did = any($1::text[]) order by c.segment, c.batch, c.ordinal
"""
_RECORD_TABLE, _RECORD_COPY = "indexer.record", "benchmark.record"
_LOG_COLUMNS = ("did", "collection", "rkey", "action", "cid", "rev")

Row = tuple[Any, ...]
Statements = list[tuple[str, list[list[Any]]]]
"""SQL statements with their arguments, which are columns of rows."""

SignatureCheck = Callable[[bytes, bytes], bool]
"""Verifies a signature of 64 bytes over a message."""


class VerificationInput(NamedTuple):
    """The prepared input for the verification of one commit.

    Attributes:
        frame: The frame of the event.
        blocks: All blocks of the slice.
        check: The check of the account's signatures.
        sig: The signature of the commit.
        unsigned: The signed bytes of the commit.
    """

    frame: bytes
    blocks: list[bytes]
    check: SignatureCheck
    sig: bytes
    unsigned: bytes


class ParsedMessage(NamedTuple):
    """The parts of a `#commit` message.

    Attributes:
        payload: The payload, with the CID of the tree's root as `data`.
        blocks: The blocks of the slice by CID.
        verification: The input for its verification.
    """

    payload: Mapping[str, Any]
    blocks: Mapping[bytes, bytes]
    verification: VerificationInput


def signature_check(key: PublicKey) -> SignatureCheck:
    """Return a function that calls the signature library directly."""
    return _k256_check(key.compressed) if key.curve == "k256" else _p256_check(key.compressed)


def _k256_check(point: bytes) -> SignatureCheck:
    key, context = coincurve.PublicKey(point).public_key, GLOBAL_CONTEXT.ctx

    def check(sig: bytes, message: bytes) -> bool:
        parsed = ffi.new("secp256k1_ecdsa_signature *")
        lib.secp256k1_ecdsa_signature_parse_compact(context, parsed, sig)
        return bool(lib.secp256k1_ecdsa_verify(context, parsed, sha256(message).digest(), key))

    return check


def _p256_check(point: bytes) -> SignatureCheck:
    key, algorithm = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), point), ec.ECDSA(SHA256())

    def check(sig: bytes, message: bytes) -> bool:
        parsed = encode_dss_signature(int.from_bytes(sig[:32], "big"), int.from_bytes(sig[32:], "big"))
        try:
            key.verify(parsed, message, algorithm)
        except InvalidSignature:
            return False
        return True

    return check


def parse_message(frame: bytes, checks: Mapping[str, SignatureCheck]) -> ParsedMessage:
    """Parse the frame of a `#commit` event. `checks` has the signature check by DID."""
    _, payload = cbor.decode_pair(frame)
    (root, *_), blocks = split_car(payload["blocks"], DEFAULT_LIMITS, max_bytes=len(frame))
    commit = decode_commit(blocks[root], root)
    verification = VerificationInput(frame, list(blocks.values()), checks[payload["repo"]], commit.sig, commit.unsigned)
    return ParsedMessage({**payload, "data": commit.data}, blocks, verification)


def verification_seconds(inputs: Iterable[VerificationInput]) -> float:
    """Return the CPU seconds to decode every frame, hash its blocks and verify its signature, on one core.

    Raises:
        ValueError: A signature is invalid.
    """
    began = process_time()
    for frame, blocks, check, sig, unsigned in inputs:
        libipld.decode_dag_cbor_multi(frame)
        for block in blocks:
            sha256(block).digest()
        if not check(sig, unsigned):
            raise ValueError("the signature of a commit is invalid")
    return process_time() - began


def export_verification_seconds(export: bytes, check: SignatureCheck) -> float:
    """Return the CPU seconds to hash and decode every block of an export and to verify its signature, on one core.

    Raises:
        ValueError: The signature is invalid.
    """
    (root, *_), blocks = split_car(export, DEFAULT_LIMITS, max_bytes=len(export))
    commit = decode_commit(blocks[root], root)
    began = process_time()
    for block in blocks.values():
        sha256(block).digest()
        libipld.decode_dag_cbor(block)
    if not check(commit.sig, commit.unsigned):
        raise ValueError("the signature of an export is invalid")
    return process_time() - began


class LoggedChange(NamedTuple):
    """An entry of the change log.

    Attributes:
        action: The action.
        row: The record, in the order of `COLUMNS`. For a delete, only the key is set.
    """

    action: str
    row: Row


class BareScript:
    """Writes rows over one connection and measures only that. It writes changes to its own, simpler log table.

    Attributes:
        clock: The measured time.
    """

    def __init__(self, connection: asyncpg.Connection, clock: StageClock) -> None:
        self.clock = clock
        self._connection = connection

    async def write(self, statements: Statements) -> None:
        """Execute statements in one transaction."""
        with self.clock.database():
            async with self._connection.transaction():
                for statement, columns in statements:
                    await self._connection.execute(statement, *columns)

    async def copy_records(self, rows: Path) -> None:
        """Copy the initial records into the table that `write_export` changes, without measuring it."""
        schema, table = _RECORD_COPY.split(".")
        await self._connection.copy_to_table(table, schema_name=schema, source=rows, columns=COLUMNS, format="text")
        await self._connection.execute(f"analyze {_RECORD_COPY}")

    async def write_export(self, heads: Sequence[Row], changes: Sequence[LoggedChange]) -> None:
        """Update heads of repos and apply changes to the copied records, in one transaction."""
        creates = [change.row for change in changes if change.action == "create"]
        others = {
            _UPSERT_RECORDS: [change.row for change in changes if change.action == "update"],
            _DELETE_RECORDS: [change.row[:4] for change in changes if change.action == "delete"],
        }
        statements = [(_UPDATE_HEADS, _columns(heads))] * bool(heads)
        statements += [
            (statement.format(table=_RECORD_COPY), _columns(rows)) for statement, rows in others.items() if rows
        ]
        log = [(*change.row[:3], change.action, *change.row[4:6]) for change in changes]
        schema = _RECORD_COPY.partition(".")[0]
        copy = self._connection.copy_records_to_table
        with self.clock.database():
            async with self._connection.transaction():
                await copy("record", schema_name=schema, columns=COLUMNS, records=creates)
                for statement, columns in statements:
                    await self._connection.execute(statement, *columns)
                await copy("log", schema_name=schema, columns=_LOG_COLUMNS, records=log)


def head_row(account: WorkloadAccount) -> Row:
    """Return the expected head of a repo, as an argument of `BareScript.write_export`."""
    head = account.after
    return account.did, bucket_of(account.did), head.rev, bytes.fromhex(head.data), bytes.fromhex(head.commit)


async def read_changes(dsn: str, dids: Sequence[str]) -> AsyncIterator[list[LoggedChange]]:
    """Yield the change log of these repos in chunks."""
    connection = await asyncpg.connect(dsn)
    async with connection.transaction():
        cursor = await connection.cursor(_SELECT_CHANGES, dids)
        while rows := await cursor.fetch(CHANGES_PER_TRANSACTION):
            yield [LoggedChange(action, tuple(row)) for action, *row in rows]
    await connection.close()


@asynccontextmanager
async def bare_script(dsn: str, postgres: Callable[[], float] | None = None) -> AsyncIterator[BareScript]:
    """Connect a bare script.

    `postgres` returns the CPU seconds of Postgres so far. The default measures only the backend of the script.
    """
    connection = await asyncpg.connect(dsn)
    await connection.execute(_TABLES)
    backend = connection.get_server_pid()
    yield BareScript(connection, StageClock(postgres or (lambda: cpu_usage.backend_seconds([backend]))))
    await connection.close()


def count_changes(messages: Iterable[ParsedMessage]) -> Counter[str]:
    """Return the number of operations by action."""
    return Counter(op["action"] for message in messages for op in message.payload["ops"])


def batch_statements(messages: Sequence[ParsedMessage]) -> Statements:
    """Return the statements that write one batch, with rows sorted by key and each key once."""
    heads: dict[str, Row] = {}
    records: dict[Row, Row] = {}
    log: list[Row] = []
    for payload, blocks, _ in messages:
        did, rev, bucket = payload["repo"], payload["rev"], bucket_of(payload["repo"])
        heads[did] = (did, bucket, rev, payload["data"], payload["commit"])
        for op in payload["ops"]:
            collection, _, rkey = op["path"].partition("/")
            key, cid = (did, collection, rkey, bucket), op["cid"]
            records[key] = (*key, cid, rev, cid and _json_text(blocks[cid]))
            log.append((did, collection, rkey, op["action"], cid, rev))
    ordered = [records[key] for key in sorted(records)]
    rows_of: dict[str, list[Row]] = {
        _UPDATE_HEADS: [heads[did] for did in sorted(heads)],
        _UPSERT_RECORDS.format(table=_RECORD_TABLE): [row for row in ordered if row[4]],
        _DELETE_RECORDS.format(table=_RECORD_TABLE): [row[:4] for row in ordered if not row[4]],
        _INSERT_LOG: log,
    }
    return [(statement, _columns(rows)) for statement, rows in rows_of.items() if rows]


def _json_text(record: bytes) -> str:
    decoded = cbor.decode_json(record)
    if decoded is None:
        raise ValueError("the record is not an ordinary one")
    return decoded[1].decode()


def _columns(rows: Sequence[Row]) -> list[list[Any]]:
    return [list(column) for column in zip(*rows, strict=True)]


def compare_with_floor(
    unit: str, daemon: Figures, rate: float, verification: float, script: StageClock, count: int
) -> Figures:
    """Return the floor, and the ratio of the daemon to it.

    The main ratio is one of CPU time, because elapsed time depends on the number of cores and on other processes.

    Args:
        unit: `commit` or `record`.
        daemon: The figures of the daemon, with its CPU time and that of Postgres.
        rate: The units per second of the daemon.
        verification: The CPU seconds of verification per unit.
        script: The clock of the bare script.
        count: The number of units that the script wrote.
    """
    client, postgres, elapsed = (
        seconds / count for seconds in (script.cpu["client"], script.cpu["database"], script.elapsed["client"])
    )
    daemon_cpu = sum(float(daemon[cpu_of(part, unit)]) for part in ("daemon", "Postgres"))
    return {
        f"verification only, one core, µs per {unit}": verification * MICRO,
        f"bare script, script CPU, µs per {unit}": client * MICRO,
        f"bare script, Postgres CPU, µs per {unit}": postgres * MICRO,
        f"bare script, elapsed, µs per {unit}": elapsed * MICRO,
        "floor CPU / daemon CPU, both with Postgres": (verification + client + postgres) * MICRO / daemon_cpu,
        "daemon rate / verification rate on one core": rate * verification,
        "daemon rate / bare script rate": rate * elapsed,
    }
