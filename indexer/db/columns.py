"""Convert between Python values and SQL: rows of the table `repo`, arrays for UNNEST, text that Postgres accepts."""

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any

import asyncpg

from indexer.reasons import Desync, FetchFailure
from indexer.sync.export import PIECE_BYTES
from indexer.sync.repo import Head, Repo, SyncStatus
from indexer.sync.shard import bucket_of

Columns = Mapping[str, str]
"""SQL types by column name, in the order of the columns."""
Connection = asyncpg.Connection | asyncpg.pool.PoolConnectionProxy


def typed(columns: str) -> dict[str, str]:
    """Return the SQL types by name of columns that are written as in CREATE TABLE: `did text, bucket smallint`."""
    return dict(map(str.split, columns.split(",")))


RECORD_KEY: Columns = typed("did text, collection text, rkey text")
REPO_COLUMNS: Columns = typed(
    "did text, bucket smallint, version bigint, sync_status text, sync_reason text, rev text, data bytea, "
    "commit bytea, latest_verified_rev text, latest_unverified_rev text, active boolean, hosting_status text, "
    "hosting_relay text, hosting_epoch bigint, hosting_seq bigint, hosting_time float8, takedown boolean, "
    "buffered_events integer, buffered_bytes bigint, lease bigint, attempts integer, next_attempt_at float8, "
    "last_failure text, last_error text, synchronized_at float8, erase_at float8, unproven_since float8, "
    "from_stream boolean, scope_version bigint, tracked boolean, wanted_in bigint, withheld_since float8"
)
"""The columns of a `Repo`. Times are Unix seconds (float8); infinity is infinity in Postgres as well."""
HEAD_COLUMNS: Columns = {name: REPO_COLUMNS[name] for name in ("did", "version", "rev", "data", "commit")}

_VALUES: dict[str, Callable[[Repo], Any]] = {name: attrgetter(name) for name in REPO_COLUMNS if name in Repo._fields}
_VALUES |= {
    "bucket": lambda repo: bucket_of(repo.did),
    "rev": lambda repo: repo.head and repo.head.rev,
    "data": lambda repo: repo.head and repo.head.data,
    "commit": lambda repo: repo.head and repo.head.commit,
    "hosting_status": lambda repo: storable(repo.hosting_status),
    "last_error": lambda repo: storable(repo.last_error),
}
# The columns in the order of the fields of a `Repo`, with the rev at the place of the head.
_IN_ORDER = itemgetter(*["rev" if name == "head" else name for name in Repo._fields])
_FAILURE = Repo._fields.index("last_failure") - Repo._fields.index("head") - 1
_STATUSES = {str(status): status for status in SyncStatus}
_REASONS: dict[str | None, Desync | None] = {None: None, **{str(reason): reason for reason in Desync}}
_FAILURES: dict[str | None, FetchFailure | None] = {None: None, **{str(failure): failure for failure in FetchFailure}}


def select_list(columns: Columns, alias: str) -> str:
    """Return a SELECT list of columns; those of type float8 are times as Unix seconds."""
    return ", ".join(
        f"date_part('epoch', {alias}.{name}) as {name}" if type_ == "float8" else f"{alias}.{name}"
        for name, type_ in columns.items()
    )


def repo_columns(alias: str) -> str:
    """Return the SELECT list that `repo_of` reads."""
    return select_list(REPO_COLUMNS, alias)


def stored_values(columns: Columns, alias: str) -> dict[str, str]:
    """Return the SQL expression for each column, from arrays of these types; float8 is the type of times."""
    return {
        name: f"to_timestamp({alias}.{name})" if type_ == "float8" else f"{alias}.{name}"
        for name, type_ in columns.items()
    }


def repo_arrays(repos: Sequence[Repo]) -> list[list[Any]]:
    """Return one array per column of `REPO_COLUMNS`."""
    return [list(map(_VALUES[name], repos)) for name in REPO_COLUMNS]


def head_arrays(repos: Sequence[Repo]) -> list[list[Any]]:
    """Return one array per column of `HEAD_COLUMNS`."""
    no_head = (None, None, None)
    return columns_of([(repo.did, repo.version, *(repo.head or no_head)) for repo in repos], HEAD_COLUMNS)


def repo_of(row: asyncpg.Record) -> Repo:
    """Return the repo of a row that was selected with `repo_columns`."""
    did, version, status, reason, rev, *others = _IN_ORDER(row)
    head = None if rev is None else Head(rev, row["data"], row["commit"])
    others[_FAILURE] = _FAILURES[others[_FAILURE]]
    return Repo(did, version, _STATUSES[status], _REASONS[reason], head, *others)


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
    """Yield the rows as a whole file. Small rows are joined, as each item is a message; large ones are not copied."""
    waiting, size = [_COPY_HEADER], len(_COPY_HEADER)
    for row in rows:
        waiting.append(row)
        size += len(row)
        if size >= PIECE_BYTES:
            yield b"".join(waiting)
            waiting, size = [], 0
    yield b"".join([*waiting, _COPY_TRAILER])
