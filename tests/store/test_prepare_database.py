"""The daemon waits at its start for a database that does not answer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from urllib.parse import parse_qs, urlsplit

import pytest
from structlog.testing import capture_logs

from indexer.errors import SchemaVersionError, SettingsError
from indexer.store import prepare_database as prepare_module
from indexer.store.migrate import migrate
from indexer.store.prepare_database import prepare_database
from indexer.store.schema_version import schema_is_current
from tests.store.change_log_helpers import connected
from tests.waiting import until

pytestmark = pytest.mark.slow

MAX_STOP_SECONDS = 8.0
WAITING = """
    select count(*) from pg_stat_activity
    where datname = current_database() and cardinality(pg_blocking_pids(pid)) > 0
"""


async def free_port() -> int:
    """Return a port of loopback that no server listens on."""
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port: int = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    return port


@asynccontextmanager
async def forwarded(dsn: str, port: int, hang_at: bytes | None = None) -> AsyncIterator[asyncio.Event]:
    """Forward connections to the port to the socket of the server.

    From the first statement with `hang_at` on, nothing is forwarded any more, as if the machine had stopped. Yield an
    event that is set then.
    """
    hangs, ended = asyncio.Event(), asyncio.Event()
    query = parse_qs(urlsplit(dsn).query)
    socket = f"{query['host'][0]}/.s.PGSQL.{query['port'][0]}"

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if hang_at is not None and hang_at in data:
                hangs.set()
            if hangs.is_set():
                await ended.wait()
            writer.write(data)
            await writer.drain()
        writer.close()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_unix_connection(socket)
        await asyncio.gather(copy(reader, server_writer), copy(server_reader, writer))

    async with await asyncio.start_server(forward, "127.0.0.1", port):
        try:
            yield hangs
        finally:
            ended.set()


async def test_daemon_waits_until_the_database_answers_and_says_so(empty_database: str) -> None:
    port = await free_port()
    dsn = f"postgresql://postgres:hunter2@127.0.0.1:{port}{urlsplit(empty_database).path}"
    with capture_logs() as lines:
        waiting = asyncio.create_task(prepare_database(dsn, asyncio.Event(), migrate_first=True))
        await until(lambda: [line["event"] for line in lines] == ["database.waiting"])
        async with forwarded(empty_database, port):
            assert await waiting
            # The server closes its side of the last connection after the client.
            await until(lambda: len(asyncio.all_tasks()) == 1)
    events = [line["event"] for line in lines if line["event"] != "database.migrating"]
    assert events == ["database.waiting", "database.migrated", "database.answered"]
    assert f"the database postgresql://postgres@127.0.0.1:{port}/" in lines[0]["error"]
    assert "hunter2" not in str(lines)
    assert await schema_is_current(empty_database)


async def test_stop_ends_the_wait_for_the_database() -> None:
    stop, port = asyncio.Event(), await free_port()
    with capture_logs() as lines:
        waiting = asyncio.create_task(
            prepare_database(f"postgresql://127.0.0.1:{port}/none", stop, migrate_first=False)
        )
        await until(lambda: bool(lines))
        stop.set()
        assert not await waiting


async def test_stop_ends_an_attempt_that_has_no_answer() -> None:
    """The server accepts connections and never answers."""
    stop, connected = asyncio.Event(), asyncio.Event()

    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        await stop.wait()
        writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        dsn = f"postgresql://127.0.0.1:{server.sockets[0].getsockname()[1]}/none"
        waiting = asyncio.create_task(prepare_database(dsn, stop, migrate_first=True))
        await connected.wait()
        stop.set()
        assert not await waiting


@pytest.mark.parametrize("statement", [b"alembic_version", b"lock table", b"select indexer.recreate_lexicon_views()"])
async def test_stop_ends_a_check_and_a_migration_on_a_server_that_hangs(empty_database: str, statement: bytes) -> None:
    stop, port = asyncio.Event(), await free_port()
    dsn = f"postgresql://postgres@127.0.0.1:{port}{urlsplit(empty_database).path}"
    async with forwarded(empty_database, port, hang_at=statement) as hangs:
        waiting = asyncio.create_task(prepare_database(dsn, stop, migrate_first=True))
        await hangs.wait()
        stop.set()
        async with asyncio.timeout(MAX_STOP_SECONDS):
            assert not await waiting
    await until(lambda: len(asyncio.all_tasks()) == 1)


async def test_stop_ends_the_wait_for_a_migration_of_another_process(empty_database: str) -> None:
    stop = asyncio.Event()
    # A transaction sees one snapshot of pg_stat_activity, so the one that blocks cannot watch.
    async with connected(empty_database) as other, connected(empty_database) as watcher:
        await other.execute("begin; create schema indexer")
        waiting = asyncio.create_task(prepare_database(empty_database, stop, migrate_first=True))

        async def waits_for_the_lock() -> bool:
            return bool(await watcher.fetchval(WAITING))

        await until(waits_for_the_lock)
        stop.set()
        assert not await waiting
        await other.execute("rollback")
    assert await prepare_database(empty_database, asyncio.Event(), migrate_first=True)


async def test_daemon_says_how_far_a_migration_is_while_it_lasts(
    empty_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module, "FIRST_LINE_SECONDS", 0.01)
    monkeypatch.setattr(prepare_module, "LINE_SECONDS", 0.01)
    await migrate(empty_database, "0015")

    def latest() -> tuple[object, ...]:
        return tuple(lines[-1].get(name) for name in ("event", "applied", "versions")) if lines else ()

    # The first version to apply changes the table that the one session has locked.
    async with connected(empty_database) as other, connected(empty_database) as reader:
        with capture_logs() as lines:
            await other.execute("begin; lock table indexer.migration_lock in exclusive mode")
            await reader.execute("begin; lock table indexer.cursor in access share mode")
            preparing = asyncio.create_task(prepare_database(empty_database, asyncio.Event(), migrate_first=True))
            await until(lambda: latest() == ("database.migrating", 0, None))
            await other.execute("rollback")
            await until(lambda: latest()[:2] == ("database.migrating", 0) and latest()[2] is not None)
            versions = latest()[2]
            await reader.execute("rollback")
            assert await preparing
    assert latest()[0] == "database.migrated"
    assert lines[-1]["versions"] == versions
    with capture_logs() as lines:
        assert await prepare_database(empty_database, asyncio.Event(), migrate_first=True)
    assert {line["event"] for line in lines} <= {"database.migrating"}, "nothing was migrated"


async def test_errors_that_the_operator_has_to_correct_end_the_start_at_once(empty_database: str) -> None:
    prepare = partial(prepare_database, stop=asyncio.Event(), migrate_first=False)
    with pytest.raises(SettingsError, match=r'INDEXER_DATABASE_URL: .*: database "none" does not exist$'):
        await prepare(empty_database.replace(urlsplit(empty_database).path, "/none"))
    with pytest.raises(SettingsError, match=r'INDEXER_DATABASE_URL: .*: role "nobody" does not exist$'):
        await prepare(empty_database.replace("//postgres@", "//nobody@"))
    with pytest.raises(SchemaVersionError):
        await prepare(empty_database)
