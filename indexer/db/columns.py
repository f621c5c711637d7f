"""Convert between Python values and SQL: rows of the table `repo`, arrays for UNNEST, text that Postgres accepts."""

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any

import asyncpg

from indexer.reasons import Desync, FetchFailure
from indexer.sync.export import PIECE_BYTES
from indexer.sync.repo import Head, Repo, SyncStatus
from indexer.sync.shard import bucket_of

Columns = Mapping[str, str]
"""SQL types by column name, in the order of the columns."""
Connection = asyncpg.Connection | asyncpg.pool.PoolConnectionProxy

# The columns of a `Repo`: SQL type and value. Times are Unix seconds; infinity is infinity in Postgres as well.
_REPO: dict[str, tuple[str, Callable[[Repo], Any]]] = {
    "did": ("text", lambda repo: repo.did),
    "bucket": ("smallint", lambda repo: bucket_of(repo.did)),
    "version": ("bigint", lambda repo: repo.version),
    "sync_status": ("text", lambda repo: repo.sync_status),
    "sync_reason": ("text", lambda repo: repo.sync_reason),
    "rev": ("text", lambda repo: repo.head and repo.head.rev),
    "data": ("bytea", lambda repo: repo.head and repo.head.data),
    "commit": ("bytea", lambda repo: repo.head and repo.head.commit),
    "latest_verified_rev": ("text", lambda repo: repo.latest_verified_rev),
    "latest_unverified_rev": ("text", lambda repo: repo.latest_unverified_rev),
    "active": ("boolean", lambda repo: repo.active),
    "hosting_status": ("text", lambda repo: storable(repo.hosting_status)),
    "hosting_relay": ("text", lambda repo: repo.hosting_relay),
    "hosting_epoch": ("bigint", lambda repo: repo.hosting_epoch),
    "hosting_seq": ("bigint", lambda repo: repo.hosting_seq),
    "hosting_time": ("float8", lambda repo: repo.hosting_time),
    "takedown": ("boolean", lambda repo: repo.takedown),
    "buffered_events": ("integer", lambda repo: repo.buffered_events),
    "buffered_bytes": ("bigint", lambda repo: repo.buffered_bytes),
    "lease": ("bigint", lambda repo: repo.lease),
    "attempts": ("integer", lambda repo: repo.attempts),
    "next_attempt_at": ("float8", lambda repo: repo.next_attempt_at),
    "last_failure": ("text", lambda repo: repo.last_failure),
    "last_error": ("text", lambda repo: storable(repo.last_error)),
    "synchronized_at": ("float8", lambda repo: repo.synchronized_at),
    "erase_at": ("float8", lambda repo: repo.erase_at),
    "unproven_since": ("float8", lambda repo: repo.unproven_since),
    "from_stream": ("boolean", lambda repo: repo.from_stream),
    "scope_version": ("bigint", lambda repo: repo.scope_version),
    "tracked": ("boolean", lambda repo: repo.tracked),
    "wanted_in": ("bigint", lambda repo: repo.wanted_in),
    "withheld_since": ("float8", lambda repo: repo.withheld_since),
}
_REASONS = {str(reason): reason for reason in Desync}
_FAILURES = {str(failure): failure for failure in FetchFailure}
_TIMES = ("hosting_time", "next_attempt_at", "synchronized_at", "erase_at", "unproven_since", "withheld_since")

REPO_COLUMNS: Columns = {name: type_ for name, (type_, _) in _REPO.items()}
HEAD_COLUMNS: Columns = {name: REPO_COLUMNS[name] for name in ("did", "version", "rev", "data", "commit")}


def repo_columns(alias: str) -> str:
    """Return the SELECT list that `repo_of` reads, with times as Unix seconds."""
    return ", ".join(
        f"date_part('epoch', {alias}.{name}) as {name}" if name in _TIMES else f"{alias}.{name}" for name in _REPO
    )


def repo_values(alias: str) -> dict[str, str]:
    """Return the SQL expression for each column, from the arrays of `repo_arrays`."""
    return {name: f"to_timestamp({alias}.{name})" if name in _TIMES else f"{alias}.{name}" for name in _REPO}


def repo_arrays(repos: Sequence[Repo]) -> list[list[Any]]:
    """Return one array per column of `REPO_COLUMNS`."""
    return [[value(repo) for repo in repos] for _, value in _REPO.values()]


def head_arrays(repos: Sequence[Repo]) -> list[list[Any]]:
    """Return one array per column of `HEAD_COLUMNS`."""
    no_head = (None, None, None)
    return columns_of([(repo.did, repo.version, *(repo.head or no_head)) for repo in repos], HEAD_COLUMNS)


def repo_of(row: asyncpg.Record) -> Repo:
    """Return the repo of a row that was selected with `repo_columns`."""
    return Repo(
        did=row["did"],
        version=row["version"],
        sync_status=SyncStatus(row["sync_status"]),
        sync_reason=None if row["sync_reason"] is None else _REASONS[row["sync_reason"]],
        head=None if row["rev"] is None else Head(row["rev"], row["data"], row["commit"]),
        latest_verified_rev=row["latest_verified_rev"],
        latest_unverified_rev=row["latest_unverified_rev"],
        active=row["active"],
        hosting_status=row["hosting_status"],
        hosting_relay=row["hosting_relay"],
        hosting_epoch=row["hosting_epoch"],
        hosting_seq=row["hosting_seq"],
        hosting_time=row["hosting_time"],
        takedown=row["takedown"],
        buffered_events=row["buffered_events"],
        buffered_bytes=row["buffered_bytes"],
        lease=row["lease"],
        attempts=row["attempts"],
        next_attempt_at=row["next_attempt_at"],
        last_failure=None if row["last_failure"] is None else _FAILURES[row["last_failure"]],
        last_error=row["last_error"],
        synchronized_at=row["synchronized_at"],
        erase_at=row["erase_at"],
        unproven_since=row["unproven_since"],
        from_stream=row["from_stream"],
        scope_version=row["scope_version"],
        tracked=row["tracked"],
        wanted_in=row["wanted_in"],
        withheld_since=row["withheld_since"],
    )


def unnest(columns: Columns, alias: str, first: int = 1) -> str:
    """Return a FROM item for arrays `$first`, … in the order of `columns`, with the row number in column `ordinal`."""
    arrays = ", ".join(f"${number}::{type_}[]" for number, type_ in enumerate(columns.values(), first))
    return f"unnest({arrays}) with ordinality as {alias}({', '.join(columns)}, ordinal)"


def columns_of(rows: Iterable[Sequence[Any]], columns: Columns) -> list[list[Any]]:
    """Transpose rows to one array per column, also if there are no rows."""
    return [list(column) for column in zip(*rows, strict=True)] or [[] for _ in columns]


def of_buckets(alias: str, array: int = 1) -> str:
    """Return the condition that a row is in the buckets `$array`, for joins with arrays.

    A join alone does not tell Citus which shards to query. Citus recognizes the condition in spite of the cast to
    float8, and the cast keeps Postgres from using it in an index condition: there, it would sort the array again for
    every row of the join, or make the planner prefer a sequential scan.
    """
    return f"{alias}.bucket = any(${array}::float8[])"


def buckets_of(dids: Iterable[str]) -> list[int]:
    """Return the distinct buckets of the DIDs, in ascending order."""
    return sorted(set(map(bucket_of, dids)))


def storable(text: str | None) -> str | None:
    """Return text from outside as Postgres can store it: without U+0000 and lone surrogates."""
    return None if text is None else text.replace("\0", "\ufffd").encode(errors="replace").decode()


def typed(columns: str) -> dict[str, str]:
    """Return the SQL types by name of columns that are written as in CREATE TABLE: `did text, bucket smallint`."""
    return dict(map(str.split, columns.split(",")))


def values_of(item: object, names: Iterable[str]) -> tuple[Any, ...]:
    """Return attributes in this order, text as Postgres can store it."""
    values = [getattr(item, name) for name in names]
    return tuple([storable(value) if isinstance(value, str) else value for value in values])


# The signature, no flags, and no extension: the header of the binary format of COPY. A row count of -1 ends the rows.
_COPY_HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_COPY_TRAILER = b"\xff\xff"


async def copy_binary(connection: Connection, table: str, columns: Sequence[str], rows: Iterable[bytes]) -> None:
    """Copy rows that are in the binary format of COPY into a table of schema `indexer`."""
    source = _binary_file(rows)
    await connection.copy_to_table(table, schema_name="indexer", columns=columns, source=source, format="binary")


async def _binary_file(rows: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Yield the rows as a whole file. Small rows are joined, as each item is a message."""
    joined = bytearray(_COPY_HEADER)
    for row in rows:
        joined += row
        if len(joined) >= PIECE_BYTES:
            yield bytes(joined)
            joined.clear()
    yield bytes(joined + _COPY_TRAILER)
