"""Rows of the table `repo` and arrays of columns: how values go into statements, and come out."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import asyncpg

from indexer.reasons import Desync
from indexer.sync.repo import Head, Repo, SyncStatus
from indexer.sync.shard import bucket_of

Columns = Mapping[str, str]
Connection = asyncpg.Connection | asyncpg.pool.PoolConnectionProxy

# Each column of a `Repo`: its type, and its value. Times are Unix seconds; infinity is infinity in Postgres, too.
_REPO: dict[str, tuple[str, Callable[[Repo], Any]]] = {
    "did": ("text", lambda repo: repo.did),
    "bucket": ("smallint", lambda repo: bucket_of(repo.did)),
    "version": ("bigint", lambda repo: repo.version),
    "status": ("text", lambda repo: repo.status),
    "reason": ("text", lambda repo: repo.reason),
    "rev": ("text", lambda repo: repo.head and repo.head.rev),
    "data": ("bytea", lambda repo: repo.head and repo.head.data),
    "commit": ("bytea", lambda repo: repo.head and repo.head.commit),
    "seen_rev": ("text", lambda repo: repo.seen_rev),
    "heard_rev": ("text", lambda repo: repo.heard_rev),
    "active": ("boolean", lambda repo: repo.active),
    "hosting_status": ("text", lambda repo: plain(repo.hosting_status)),
    "hosting_relay": ("text", lambda repo: repo.hosting_relay),
    "hosting_seq": ("bigint", lambda repo: repo.hosting_seq),
    "takedown": ("boolean", lambda repo: repo.takedown),
    "buffered_events": ("integer", lambda repo: repo.buffered_events),
    "buffered_bytes": ("bigint", lambda repo: repo.buffered_bytes),
    "lease": ("bigint", lambda repo: repo.lease),
    "attempts": ("integer", lambda repo: repo.attempts),
    "next_attempt_at": ("float8", lambda repo: repo.next_attempt_at),
    "last_error": ("text", lambda repo: plain(repo.last_error)),
    "synchronized_at": ("float8", lambda repo: repo.synchronized_at),
    "erase_at": ("float8", lambda repo: repo.erase_at),
}
_REASONS = {str(reason): reason for reason in Desync}
_TIMES = ("next_attempt_at", "synchronized_at", "erase_at")

REPO_COLUMNS: Columns = {name: type_ for name, (type_, _) in _REPO.items()}


def repo_columns(alias: str) -> str:
    """The list of columns that `repo_of` reads, times as seconds."""
    return ", ".join(
        f"date_part('epoch', {alias}.{name}) as {name}" if name in _TIMES else f"{alias}.{name}" for name in _REPO
    )


def repo_values(alias: str) -> dict[str, str]:
    """The other way: what to write into each column from an array of `repo_arrays`."""
    return {name: f"to_timestamp({alias}.{name})" if name in _TIMES else f"{alias}.{name}" for name in _REPO}


def repo_arrays(repos: Sequence[Repo]) -> list[list[Any]]:
    return [[value(repo) for repo in repos] for _, value in _REPO.values()]


def repo_of(row: asyncpg.Record) -> Repo:
    return Repo(
        did=row["did"],
        version=row["version"],
        status=SyncStatus(row["status"]),
        reason=None if row["reason"] is None else _REASONS[row["reason"]],
        head=None if row["rev"] is None else Head(row["rev"], row["data"], row["commit"]),
        seen_rev=row["seen_rev"],
        heard_rev=row["heard_rev"],
        active=row["active"],
        hosting_status=row["hosting_status"],
        hosting_relay=row["hosting_relay"],
        hosting_seq=row["hosting_seq"],
        takedown=row["takedown"],
        buffered_events=row["buffered_events"],
        buffered_bytes=row["buffered_bytes"],
        lease=row["lease"],
        attempts=row["attempts"],
        next_attempt_at=row["next_attempt_at"],
        last_error=row["last_error"],
        synchronized_at=row["synchronized_at"],
        erase_at=row["erase_at"],
    )


def unnest(columns: Columns, alias: str, first: int = 1) -> str:
    """A FROM item of arrays: `$first`, … are the columns; their place in the arrays is the column `place`."""
    arrays = ", ".join(f"${number}::{type_}[]" for number, type_ in enumerate(columns.values(), first))
    return f"unnest({arrays}) with ordinality as {alias}({', '.join(columns)}, place)"


def columns_of(rows: Iterable[Sequence[Any]], columns: Columns) -> list[list[Any]]:
    """Rows to arrays; as many as there are columns, for no rows too."""
    return [list(column) for column in zip(*rows, strict=True)] or [[] for _ in columns]


def of_buckets(alias: str, array: int = 1) -> str:
    """That a row is of the buckets `$array`, for joins with arrays: those don't tell Citus which shards to ask.

    It sees through the conversion to float8, which hides the condition from Postgres's indexes. Within one, the array
    would be sorted anew for every row of the join, or the planner reads the whole table for fear of it.
    """
    return f"{alias}.bucket = any(${array}::float8[])"


def buckets_of(dids: Iterable[str]) -> list[int]:
    """Each of them once."""
    return sorted({bucket_of(did) for did in dids})


def plain(words: str | None) -> str | None:
    """Somebody else's words as Postgres can hold them: without U+0000 and half pairs of surrogates."""
    return None if words is None else words.replace("\0", "\ufffd").encode(errors="replace").decode()
