"""Errors of the database are transient, or the operator's to correct, or bugs."""

import asyncio
import errno
import socket
import ssl
from collections import Counter

import asyncpg
import pytest
from asyncpg.exceptions import TargetServerAttributeNotMatched

from indexer.db import Database, DatabaseError
from indexer.db.database_errors import database_errors, without_password
from indexer.db.process_reports import DatabaseCheck
from indexer.errors import IndexerError, SettingsError
from indexer.reasons import FetchFailure
from indexer.sync.repo import Repo
from tests.database_proxy import DatabaseProxy
from tests.db.change_log_helpers import connected

END_OTHER_TRANSACTIONS = """
    select bool_and(pg_terminate_backend(pid, 5000)) from pg_stat_activity
    where datname = current_database() and state = 'idle in transaction' and pid <> pg_backend_pid()
"""
MAX_SESSIONS = 500


@pytest.mark.slow
async def test_a_session_ended_by_the_server_is_a_database_error_at_any_moment(
    database: str, sql: asyncpg.Connection
) -> None:
    """The driver may have read the error message and the end of the stream, or only the message, or neither."""
    causes = Counter[str]()
    while causes["InternalClientError"] < 3 and causes.total() < MAX_SESSIONS:
        connection = await asyncpg.connect(database)
        transaction = connection.transaction()
        await transaction.start()
        ending = asyncio.create_task(sql.execute("select pg_terminate_backend($1)", connection.get_server_pid()))
        while not ending.done():  # noqa: ASYNC110
            await asyncio.sleep(0)  # one cycle of the event loop at a time
        try:
            with database_errors():
                await transaction.rollback()
        except DatabaseError as error:
            causes[type(error.__cause__).__name__] += 1
        connection.terminate()
    assert causes["InternalClientError"], causes


@pytest.mark.slow
async def test_a_statement_that_the_server_cancels_after_a_time_limit_is_a_timeout(
    database: str, sql: asyncpg.Connection
) -> None:
    """So that `DatabaseAttempt` does not report it as an answer: the stage still waits."""
    async with sql.transaction():
        await sql.execute("lock table indexer.repo in access exclusive mode")
        for limit in ("statement_timeout", "lock_timeout"):
            async with connected(database) as other:
                await other.execute(f"set {limit} = '50ms'")
                with pytest.raises(DatabaseError) as caught, database_errors():
                    await other.fetch("select from indexer.repo")
            assert caught.value.reason is FetchFailure.TIMEOUT


def raised(error: BaseException) -> IndexerError:
    """Return what `database_errors` makes of an error of the driver."""
    with (
        pytest.raises(IndexerError) as caught,
        database_errors("postgresql://me:hunter2@db.example:5433/mine?sslpassword=hunter2"),
    ):
        raise error
    assert "postgresql://me@db.example:5433/mine" in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value


OUTAGES = [
    ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed"),
    OSError(errno.EHOSTUNREACH, "No route to host"),
    TimeoutError(),
    socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
    asyncpg.CannotConnectNowError("the database system is starting up"),
    asyncpg.TooManyConnectionsError("sorry, too many clients already"),
    TargetServerAttributeNotMatched("None of the hosts match"),
    asyncpg.InternalServerError("postmaster was shut down, exiting"),
    asyncpg.InternalServerError("server closed the connection unexpectedly"),
    asyncpg.InternalServerError("could not commit transaction for shard 102015 on at least one active node"),
]
WRONG_SETTINGS = [
    socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
    asyncpg.InvalidPasswordError('password authentication failed for user "me"'),
    asyncpg.InvalidAuthorizationSpecificationError("no pg_hba.conf entry"),
    asyncpg.InvalidCatalogNameError('database "mine" does not exist'),
    asyncpg.InsufficientPrivilegeError('permission denied for database "mine"'),
    asyncpg.UndefinedObjectError('unrecognized configuration parameter "foo"'),
    ssl.SSLCertVerificationError("certificate verify failed"),
]


@pytest.mark.parametrize("error", [*OUTAGES, *WRONG_SETTINGS])
def test_outage_is_transient_and_a_wrong_setting_is_named(error: BaseException) -> None:
    found = raised(error)
    if error in OUTAGES:
        assert isinstance(found, DatabaseError)
    else:
        assert isinstance(found, SettingsError)
        assert str(found).startswith("INDEXER_DATABASE_URL: ")


def test_internal_error_that_names_no_lost_node_is_no_outage_and_a_lost_privilege_is_a_setting() -> None:
    with pytest.raises(asyncpg.InternalServerError), database_errors():
        raise asyncpg.InternalServerError("invalid memory alloc request size 1073741824")
    with pytest.raises(SettingsError, match="lacks a privilege: permission denied for table repo"), database_errors():
        raise asyncpg.InsufficientPrivilegeError("permission denied for table repo")


@pytest.mark.parametrize(
    ("dsn", "shown"),
    [
        ("postgresql://me:hunter2@one:5432,two:5433/x", "postgresql://me@one:5432,two:5433/x"),
        ("postgres:///x?user=me&password=hunter2&host=/run/p", "postgres:///x?user=me&host=/run/p"),
        ("postgres://me@one/x?SSLPassword=hunter2&api_token=hunter2&port=1", "postgres://me@one/x?port=1"),
        ("postgres://me@one/x?options=-c%20app.secret=hunter2", "postgres://me@one/x?options=-c%20app.secret=***"),
    ],
)
def test_address_has_no_password_in_any_form_of_the_url(dsn: str, shown: str) -> None:
    assert without_password(dsn) == shown


@pytest.mark.parametrize("limit", [None, 0.01], ids=["no-limit", "time-limit"])
async def test_failed_rollback_without_a_cancellation_is_a_database_error(limit: float | None) -> None:
    with pytest.raises(DatabaseError), database_errors():  # noqa: PT012
        async with asyncio.timeout(limit):
            try:
                await asyncio.sleep(60.0 if limit else 0.0)
            finally:
                raise ConnectionResetError("the rollback failed")


async def test_cancellation_is_not_lost_if_the_server_ends_the_session_meanwhile(
    db: Database, sql: asyncpg.Connection
) -> None:
    """A stage that retries after errors of the database would never end, and a stop would last until its timeout."""
    entered = asyncio.Event()

    async def use() -> None:
        async with db.resyncs.transaction(Repo("did:plc:new")):
            entered.set()
            await asyncio.sleep(60)

    task = asyncio.create_task(use())
    await entered.wait()
    assert await sql.fetchval(END_OTHER_TRANSACTIONS) is True
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.slow
async def test_check_reports_an_outage_a_hang_and_the_end_of_each(database: str) -> None:
    proxy = DatabaseProxy(database)
    async with proxy.serve():
        check = DatabaseCheck(proxy.dsn, 2.0)
        for fail, error in ((proxy.refuse, "unreachable"), (proxy.hang, "no answer for 2 s")):
            assert await check.run() is None
            fail()
            for _ in range(2):  # on the open connection, and while it connects
                assert error in (await check.run() or "")
            proxy.open()
        assert await check.run() is None
        check.close()
