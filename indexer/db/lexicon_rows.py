"""Store lexicons, and create the typed views of their record types (docs/sql.md#typed-views).

The statements that create the views are in functions of the database, so that migrations can call them, too.
"""

import json
from asyncio import sleep
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import NamedTuple, TypeVar

import asyncpg

from indexer.atproto.lexicon import Lexicon, RecordField, parse_lexicon, record_fields, references
from indexer.db.columns import Connection
from indexer.db.connections import Area
from indexer.db.database_errors import DatabaseError
from indexer.db.lexicon_columns import ViewField, fields_of_json, plan_columns, view_name
from indexer.reasons import FetchFailure

_LOCK = "lock table indexer.lexicon in share row exclusive mode"
_LOCK_TIMEOUT = "set local lock_timeout = '2s'"
_LOAD = "select nsid, document::text, source, view_name, fields::text from indexer.lexicon order by nsid"
_UPSERT = """
    insert into indexer.lexicon (nsid, document, source, view_name, fields) values ($1, $2::json, $3, $4, $5::jsonb)
    on conflict (nsid) do update
    set document = excluded.document, source = excluded.source, view_name = excluded.view_name,
        fields = excluded.fields, added_at = now()
"""
_CREATE_VIEW = "select indexer.create_lexicon_view($1)"
_DROP_VIEW = "select indexer.drop_lexicon_view($1)"


T = TypeVar("T")
LEXICON_PAUSE = 1.0
"""Seconds between attempts to change views, in which other queries on the views proceed."""


class ViewInUseError(Exception):
    """A view cannot be changed, because objects of users depend on it. The message names them."""


class AddedState(StrEnum):
    """Result of adding a lexicon."""

    ADDED = "added"
    UPDATED = "updated"
    UNCHANGED = "unchanged"
    SKIPPED = "skipped"


class AddedLexicon(NamedTuple):
    """The result of adding a lexicon.

    Attributes:
        view: The name of its view; None if it has none.
        unknown: NSIDs of lexicons that its fields refer to and that are not stored.
    """

    nsid: str
    state: AddedState
    view: str | None = None
    unknown: tuple[str, ...] = ()


class StoredLexicon(NamedTuple):
    """A stored lexicon.

    Attributes:
        source: The file, or the AT-URI of the record, that it was read from.
        view: The name of its view; None if it has none.
        fields: The fields with their columns, in the order of the columns.
    """

    lexicon: Lexicon
    source: str
    view: str | None
    fields: Mapping[str, ViewField]


class Lexicons(Area):
    """Lexicons and their typed views.

    Attributes:
        attempts: Attempts to change typed views while queries use them. Each waits for at most two seconds.
    """

    attempts = 5

    async def load(self) -> dict[str, StoredLexicon]:
        """Return all stored lexicons by NSID."""
        async with self._pool.connection() as connection:
            return await load_lexicons(connection)

    async def add(self, given: Mapping[str, tuple[Lexicon, str]]) -> list[AddedLexicon]:
        """Store lexicons (with their sources, by NSID), and create or update the views that depend on them.

        Raises:
            ViewInUseError: A view has to be dropped, and objects of users depend on it.
        """
        return await self._change_views(lambda connection: add_lexicons(connection, given))

    async def remove(self, nsids: Sequence[str]) -> None:
        """Remove lexicons with their views, and lexicons that only these refer to.

        Raises:
            ViewInUseError: Objects of users depend on a view.
        """
        await self._change_views(lambda connection: remove_lexicons(connection, nsids))

    async def _change_views(self, change: Callable[[Connection], Awaitable[T]]) -> T:
        """Run `change` in a transaction, again if queries use the views. It waits briefly, so no query waits long."""
        for attempt in range(1, self.attempts + 1):
            try:
                async with self._pool.transaction() as connection:
                    return await change(connection)
            except DatabaseError as error:
                if not isinstance(error.__cause__, asyncpg.LockNotAvailableError | asyncpg.DeadlockDetectedError):
                    raise
                if attempt == self.attempts:
                    text = "open transactions use a typed view that has to change; end them, or try again later"
                    raise DatabaseError(FetchFailure.TIMEOUT, text) from error
            await sleep(LEXICON_PAUSE)
        raise AssertionError


async def load_lexicons(connection: Connection) -> dict[str, StoredLexicon]:
    """Return all stored lexicons by NSID."""
    return {
        row["nsid"]: StoredLexicon(
            parse_lexicon(json.loads(row["document"])),
            row["source"],
            row["view_name"],
            fields_of_json(json.loads(row["fields"] or "[]")),
        )
        for row in await connection.fetch(_LOAD)
    }


async def add_lexicons(connection: Connection, given: Mapping[str, tuple[Lexicon, str]]) -> list[AddedLexicon]:
    """Store lexicons (with their sources, by NSID), and create or update the views that depend on them.

    Without `given`, update the views only. The caller has begun a transaction.

    Raises:
        ViewInUseError: A view has to be dropped, and objects of users depend on it.
    """
    await _lock(connection)
    stored = await load_lexicons(connection)
    known = {nsid: one.lexicon for nsid, one in stored.items()} | {nsid: one for nsid, (one, _) in given.items()}
    needed = needed_lexicons(known)
    results = []
    for nsid in sorted(known):
        lexicon, before = known[nsid], stored.get(nsid)
        if before is not None and (nsid not in needed or (before.view and not lexicon.record)):
            await _drop(connection, nsid)
        if nsid not in needed:
            results.append(AddedLexicon(nsid, AddedState.SKIPPED))
            continue
        source = given[nsid][1] if nsid in given else stored[nsid].source
        fields = plan_columns(record_fields(lexicon, known), before.fields if before else {})
        changed = before is None or _changed(before, lexicon, fields)
        if before is None or changed or source != before.source:
            await _save(connection, lexicon, source, fields)
        state = AddedState.UPDATED if changed else AddedState.UNCHANGED
        results.append(
            AddedLexicon(
                nsid,
                AddedState.ADDED if before is None else state,
                view_name(nsid) if lexicon.record else None,
                tuple(sorted(references(lexicon, known) - known.keys())),
            )
        )
    return results


async def remove_lexicons(connection: Connection, nsids: Iterable[str]) -> None:
    """Remove lexicons with their views, and lexicons that only these refer to.

    Raises:
        ViewInUseError: Objects of users depend on a view.
    """
    await _lock(connection)
    known = {nsid: one.lexicon for nsid, one in (await load_lexicons(connection)).items()}
    removed = set(nsids)
    left = needed_lexicons({nsid: one for nsid, one in known.items() if nsid not in removed})
    for nsid in sorted(known.keys() - left):
        await _drop(connection, nsid)


def needed_lexicons(known: Mapping[str, Lexicon]) -> set[str]:
    """Return the NSIDs of lexicons with a record type, and of the known ones that their fields refer to."""
    records = {nsid for nsid, lexicon in known.items() if lexicon.record is not None}
    referred = {other for nsid in records for other in references(known[nsid], known)}
    return records | referred & known.keys()


async def _lock(connection: Connection) -> None:
    await connection.execute(_LOCK_TIMEOUT)
    await connection.execute(_LOCK)


async def _save(connection: Connection, lexicon: Lexicon, source: str, fields: list[ViewField]) -> None:
    if lexicon.record is None:
        await connection.execute(_UPSERT, lexicon.nsid, lexicon.text, source, None, None)
        return
    text = json.dumps([field.to_json() for field in fields])
    with _dependents():
        await connection.execute(_UPSERT, lexicon.nsid, lexicon.text, source, view_name(lexicon.nsid), text)
        await connection.execute(_CREATE_VIEW, lexicon.nsid)


async def _drop(connection: Connection, nsid: str) -> None:
    with _dependents():
        await connection.execute(_DROP_VIEW, nsid)


@contextmanager
def _dependents() -> Iterator[None]:
    """Raise `ViewInUseError` if objects of users, or the view of another lexicon, prevent the change of a view.

    Two long NSIDs of one authority may have the same view (`view_name`).
    """
    try:
        yield
    except asyncpg.DependentObjectsStillExistError as error:
        raise ViewInUseError("; ".join((error.detail or str(error)).splitlines())) from error
    except asyncpg.DuplicateTableError as error:
        raise ViewInUseError(str(error)) from error
    except asyncpg.UniqueViolationError as error:
        raise ViewInUseError(f"the view of another lexicon has this name: {error.detail}") from error


def _changed(before: StoredLexicon, lexicon: Lexicon, fields: list[ViewField]) -> bool:
    """Return True if the document has changed, or the type of a field that is defined in another one."""
    return before.lexicon.text != lexicon.text or _types(before.fields.values()) != _types(fields)


def _types(fields: Iterable[ViewField]) -> list[tuple[RecordField, tuple[str, ...]]]:
    """Return what the view depends on: everything but descriptions."""
    return [(view.field._replace(description=""), view.columns) for view in fields]
