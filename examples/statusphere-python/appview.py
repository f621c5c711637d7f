"""Statusphere in Python: the latest status of each account, newest first, and how often each status was chosen.

The AppView keeps two tables in a schema of its own, `statusphere`, in the database of the indexer. The tables and the
position in the change log are updated in one transaction. So the process may be killed at any time: after a restart it
continues exactly where it was.

Environment: DATABASE_URL, and PORT of the page (http://127.0.0.1:PORT/, as JSON at /statuses.json).
"""

import asyncio
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from html import escape
from typing import Any

import asyncpg
from aiohttp import web
from atproto_models import Change, Record, Repo
from sqlalchemy import DateTime, Index, MetaData, Text, delete, func, insert, select, text, tuple_
from sqlalchemy.dialects.postgresql import distinct_on
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.schema import CreateSchema

CONSUMER = SCHEMA = "statusphere"
COLLECTION = "xyz.statusphere.status"
BATCH_SIZE = 1_000
REPO_ACTIONS = {"hidden", "visible", "deleted", "identity", "moved"}
WAIT_SECONDS = 60.0  # read the change log after this time even without a notification
MAX_STATUS_BYTES = 32

NEXT_CHANGES = select(Change).from_statement(text("select * from atproto.next_changes(:consumer, :max)"))
ENGINE = web.AppKey("engine", AsyncEngine)


class Base(DeclarativeBase):
    """Base class of the tables of this AppView."""

    metadata = MetaData(schema=SCHEMA)


class Status(Base):
    """A record that fits the lexicon."""

    __tablename__ = "status"

    did: Mapped[str] = mapped_column(Text(collation="C"), primary_key=True)
    rkey: Mapped[str] = mapped_column(Text(collation="C"), primary_key=True)
    status: Mapped[str] = mapped_column(Text)
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))

    __table_args__ = (Index("status_latest", "did", created_at.desc(), rkey.desc()),)


class Account(Base):
    """The handle of an account that may have statuses."""

    __tablename__ = "account"

    did: Mapped[str] = mapped_column(Text(collation="C"), primary_key=True)
    handle: Mapped[str | None] = mapped_column(Text)


def read_status(value: Any) -> tuple[str, datetime] | None:
    """Return the status and its time; None if the record does not fit the lexicon. Clients may write anything."""
    match value:
        case {"status": str(status), "createdAt": str(created_at)} if 0 < len(status.encode()) <= MAX_STATUS_BYTES:
            with suppress(ValueError, OverflowError):
                moment = datetime.fromisoformat(created_at)
                if "T" in created_at and moment.tzinfo is not None:
                    return status, moment.astimezone(UTC)
    return None


async def take_snapshot(engine: AsyncEngine) -> None:
    """Create the tables, register the consumer and copy all records, in one snapshot; do nothing if that was done."""
    async with engine.connect() as connection:
        await connection.execution_options(isolation_level="REPEATABLE READ")
        async with connection.begin():
            if await connection.scalar(select(func.to_regnamespace(SCHEMA).is_not(None))):
                return
            await connection.execute(CreateSchema(SCHEMA))
            await connection.run_sync(Base.metadata.create_all)
            await connection.execute(select(func.atproto.register_reader(CONSUMER)))
            session = AsyncSession(connection)
            await copy_statuses(session, Record.collection == COLLECTION)
            await copy_accounts(session, Repo.did.in_(select(Status.did)))
            await session.flush()


async def process_batch(engine: AsyncEngine) -> int:
    """Read and apply the next changes in one transaction; return how many there were."""
    async with AsyncSession(engine) as session, session.begin():
        changes = (await session.scalars(NEXT_CHANGES, {"consumer": CONSUMER, "max": BATCH_SIZE})).all()
        await apply(session, changes)
    return len(changes)


async def apply(session: AsyncSession, changes: Sequence[Change]) -> None:
    """Replace every repo and record that changed by its current state.

    A change says what changed, and the public views have the current state. A hidden repo is not in them.
    """
    repos = {change.did for change in changes if change.collection is None and change.action in REPO_ACTIONS}
    keys = {(change.did, change.rkey) for change in changes if change.collection == COLLECTION}
    records = {key for key in keys if key[0] not in repos}
    if repos:
        await session.execute(delete(Status).where(Status.did.in_(repos)))
        await copy_statuses(session, (Record.collection == COLLECTION) & Record.did.in_(repos))
    if records:
        await session.execute(delete(Status).where(tuple_(Status.did, Status.rkey).in_(records)))
        changed = tuple_(Record.did, Record.rkey).in_(records)
        await copy_statuses(session, (Record.collection == COLLECTION) & changed)
    if accounts := repos | {did for did, _ in records}:
        await session.execute(delete(Account).where(Account.did.in_(accounts)))
        await copy_accounts(session, Repo.did.in_(accounts))


async def copy_statuses(session: AsyncSession, condition: Any) -> None:
    """Insert the records that fit the lexicon."""
    statement = select(Record.did, Record.rkey, Record.value).where(condition)
    rows = await session.stream(statement.execution_options(yield_per=BATCH_SIZE))
    async for page in rows.partitions():
        if statuses := list(status_rows(page)):
            await session.execute(insert(Status), statuses)


def status_rows(records: Iterable[Any]) -> Iterable[dict[str, Any]]:
    """Yield a row for each record that fits the lexicon."""
    for did, rkey, value in records:
        if (read := read_status(value)) is not None:
            status, created_at = read
            yield {"did": did, "rkey": rkey, "status": status, "created_at": created_at}


async def copy_accounts(session: AsyncSession, condition: Any) -> None:
    """Insert accounts with their handles."""
    await session.execute(
        insert(Account).from_select(["did", "handle"], select(Repo.did, Repo.handle).where(condition))
    )


async def follow(engine: AsyncEngine) -> None:
    """Apply changes as they arrive, until the connection to the database is lost."""
    notified = asyncio.Event()
    async with engine.connect() as listening:
        connection = (await listening.get_raw_connection()).driver_connection
        assert connection is not None  # noqa: S101 - it is open
        # Listen before reading: a change that commits between the last read and the wait then ends the wait.
        await connection.add_listener("atproto_changes", lambda *_: notified.set())
        connection.add_termination_listener(lambda *_: notified.set())
        while not connection.is_closed():
            notified.clear()
            while await process_batch(engine) == BATCH_SIZE:
                pass
            with suppress(TimeoutError):
                await asyncio.wait_for(notified.wait(), WAIT_SECONDS)


async def page(engine: AsyncEngine) -> dict[str, Any]:
    """Return the latest status of each account, newest first, and how often each status was chosen."""
    latest = (
        select(Status).ext(distinct_on(Status.did)).order_by(Status.did, Status.created_at.desc(), Status.rkey.desc())
    )
    newest = latest.subquery()
    statuses = (
        select(newest, Account.handle)
        .join(Account, Account.did == newest.c.did)
        .order_by(newest.c.created_at.desc(), newest.c.did)
    )
    count = func.count().label("count")
    counts = select(Status.status, count).group_by(Status.status).order_by(count.desc(), Status.status)
    async with engine.connect() as connection:
        await connection.execution_options(isolation_level="REPEATABLE READ")  # both queries see the same statuses
        return {
            "statuses": [
                {
                    "did": row.did,
                    "handle": row.handle,
                    "status": row.status,
                    "createdAt": row.created_at.astimezone(UTC).isoformat(timespec="milliseconds")[:23] + "Z",
                    "uri": f"at://{row.did}/{COLLECTION}/{row.rkey}",
                }
                for row in await connection.execute(statuses)
            ],
            "counts": [{"status": row.status, "count": row.count} for row in await connection.execute(counts)],
        }


async def answer_json(request: web.Request) -> web.Response:
    """Answer with the page as JSON."""
    return web.json_response(await page(request.app[ENGINE]))


async def answer_html(request: web.Request) -> web.Response:
    """Answer with the page, which loads itself again every two seconds."""
    shown = await page(request.app[ENGINE])
    counts = " ".join(f"{escape(row['status'])}&nbsp;{row['count']}" for row in shown["counts"])
    rows = "".join(
        f"<tr><td>{escape(row['status'])}<td>@{escape(row['handle'] or row['did'])}<td>{row['createdAt']}"
        for row in shown["statuses"]
    )
    return web.Response(
        text=f'<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="2">'
        f"<title>Statusphere</title><h1>Statusphere</h1><p>{counts}</p><table>{rows}</table>",
        content_type="text/html",
    )


async def main() -> None:
    """Serve the page and follow the change log, until the process is stopped or loses the database.

    It does not connect again. Its service manager starts it again, and it continues where it was.
    """
    # asyncpg reads the URL itself: it also knows URLs of Unix sockets.
    engine = create_async_engine(
        "postgresql+asyncpg://", async_creator=lambda: asyncpg.connect(os.environ["DATABASE_URL"])
    )
    application = web.Application()
    application[ENGINE] = engine
    application.router.add_get("/", answer_html)
    application.router.add_get("/statuses.json", answer_json)
    runner = web.AppRunner(application, access_log=None)
    try:
        await take_snapshot(engine)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", int(os.environ["PORT"])).start()
        await follow(engine)
        raise SystemExit("The connection to the database was lost.")
    except (DBAPIError, asyncpg.PostgresError, OSError) as error:
        raise SystemExit(f"The AppView cannot continue: {error}") from None
    finally:
        await runner.cleanup()
        await engine.dispose()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(main())
