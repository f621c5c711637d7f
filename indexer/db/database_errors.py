"""Sort errors of the database driver into transient ones, those that the operator has to correct, and bugs."""

import socket
import ssl
from asyncio import CancelledError, current_task
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import asyncpg
from asyncpg import exceptions

from indexer.errors import RefusedWriteError, SettingsError, UnavailableError
from indexer.reasons import FetchFailure
from indexer.redaction import is_secret_name, without_secrets

SETTING = "INDEXER_DATABASE_URL"
CONNECT_TIMEOUT = 10.0
"""Seconds to wait for a connection."""

_TRANSIENT = (
    OSError,  # includes TimeoutError
    exceptions.PostgresConnectionError,
    exceptions.InvalidAuthorizationSpecificationError,
    exceptions.InvalidCatalogNameError,
    exceptions.InsufficientResourcesError,
    exceptions.OperatorInterventionError,
    exceptions.TransactionRollbackError,
    exceptions.LockNotAvailableError,
    exceptions.ReadOnlySQLTransactionError,
    exceptions.IdleInTransactionSessionTimeoutError,
    exceptions.TransactionTimeoutError,
    exceptions.SnapshotTooOldError,
    exceptions.PostgresSystemError,
    exceptions.InvalidCachedStatementError,
    exceptions.OutdatedSchemaCacheError,
    exceptions.TargetServerAttributeNotMatched,  # no primary at present: a failover
)
_TIMEOUTS = (
    TimeoutError,
    exceptions.QueryCanceledError,  # by `statement_timeout`, which the operator may set for the role
    exceptions.LockNotAvailableError,  # after `lock_timeout`
    exceptions.TransactionTimeoutError,
)
"""The database works, and did not finish in time: an attempt that fails so is no progress of its stage."""
_REFUSALS = (
    exceptions.DataError,
    exceptions.IntegrityConstraintViolationError,
    exceptions.ProgramLimitExceededError,
    exceptions.PLPGSQLError,  # a trigger raised an exception
    exceptions.InternalServerError,  # includes an allocation of 1 GiB
    BufferError,  # the driver's message is too long
    OverflowError,
)
"""Errors that the values of a write may cause. Others, such as a missing column, are bugs.

The server may be the cause as well: it reports that no transaction ID is left, or that its queue of notifications is
full, as a program limit (54000). So a write counts as refused only while the server commits others, see
`Connections.accepts_writes`.
"""
NOT_BY_VALUES = (
    exceptions.DiskFullError,
    exceptions.ReadOnlySQLTransactionError,
    exceptions.DeadlockDetectedError,
    exceptions.SerializationError,
)
"""Transient errors of which the server or other transactions are the cause, and never the values of a write."""
_WRONG_ADDRESS = (
    exceptions.InvalidAuthorizationSpecificationError,  # includes a wrong password
    exceptions.InvalidCatalogNameError,
    ssl.SSLCertVerificationError,
)
"""Transient in a running daemon, whose database worked before. When it is opened, the operator has to act."""
_UNKNOWN_HOST = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}
"""The name server says that the host does not exist. `EAI_AGAIN` is transient: the name server does not answer."""

_NODE_LOST = (
    "postmaster was shut down",
    "server closed the connection",
    "connection not open",
    "no connection to the server",
    "could not send data to server",
    "could not receive data from server",
    "SSL SYSCALL error",
    "SSL connection has been closed",
    "SSL error: unexpected eof",
    "failure on connection marked as essential",
    "could not connect to any active placements",
    "could not commit transaction for shard",
)
"""Texts of internal errors (XX000) with which Citus reports that it lost the connection to a node or is shut down."""


class DatabaseError(UnavailableError):
    """A transient error of the database. Its transaction took effect completely or not at all; retry later."""


@contextmanager
def database_errors(dsn: str | None = None) -> Iterator[None]:
    """Raise `DatabaseError` for errors of the block that a retry may resolve.

    With `dsn`, the block connects to this database, checks it or migrates it. Each error names it, and is the
    operator's to correct unless it is transient.

    Raises:
        SettingsError: The database role lacks a privilege. With `dsn` also another error, such as a wrong password.
        CancelledError: The task was cancelled, and the driver could not end the transaction of the block.
    """
    try:
        yield
    except Exception as error:
        if _has_replaced_cancellation(error):
            raise CancelledError from error
        if dsn and (reason := _reason_to_correct(error)):
            raise unusable(dsn, reason) from error
        if _is_transient(error):
            prefix = f"the database {without_password(dsn)} is unavailable: " if dsn else ""
            failure = FetchFailure.TIMEOUT if isinstance(error, _TIMEOUTS) else FetchFailure.UNREACHABLE
            raise DatabaseError(failure, prefix + _text(error)) from error
        if isinstance(error, exceptions.InsufficientPrivilegeError):
            raise SettingsError(f"The database role lacks a privilege: {error}") from error
        raise


def _has_replaced_cancellation(error: Exception) -> bool:
    """Return True if the task was cancelled, and this error came from the end of the transaction.

    The driver rolls back the transaction of a cancelled block. If the connection is lost, its error replaces the
    cancellation. A loop that retries after errors of the database would never end.
    """
    context = error.__context__
    while context is not None and not isinstance(context, CancelledError):
        context = context.__context__
    task = current_task() if context is not None else None
    return task is not None and task.cancelling() > 0


@contextmanager
def refused_writes() -> Iterator[None]:
    """Raise `RefusedWriteError` for errors of the block that the values of its writes may cause.

    Use it around a block of `database_errors`, which the other errors have passed.
    """
    try:
        yield
    except _REFUSALS as error:
        raise RefusedWriteError(_text(error)) from error


class UnusableDatabaseError(SettingsError):
    """This program cannot use the database until the operator corrects something. The message begins with `SETTING`."""


@asynccontextmanager
async def connect(dsn: str, settings: dict[str, str] | None = None) -> AsyncIterator[asyncpg.Connection]:
    """Open a connection for a block, and close it at the end. Use it in a block of `database_errors`."""
    try:
        connection = await asyncpg.connect(dsn, timeout=CONNECT_TIMEOUT, server_settings=settings)
    except ValueError as error:  # a part of the URL that the driver cannot read
        raise unusable(dsn, str(error)) from error
    try:
        yield connection
    except CancelledError:
        connection.terminate()  # without a wait for the end of the statement, which a server that hangs never sends
        raise
    finally:
        await connection.close(timeout=CONNECT_TIMEOUT)


def without_password(dsn: str) -> str:
    """Return the connection string without passwords."""
    parts = urlsplit(dsn)
    credentials, separator, hosts = parts.netloc.rpartition("@")
    user = credentials.partition(":")[0]
    parameters = [(name, without_secrets(value)) for name, value in parse_qsl(parts.query) if not is_secret_name(name)]
    query = urlencode(parameters, safe="/*=", quote_via=quote)  # libpq takes + for itself
    return f"{parts.scheme}://{user}{separator}{hosts}{parts.path}{'?' if query else ''}{query}"


def unusable(dsn: str, reason: str) -> UnusableDatabaseError:
    """Return the error for a database that this program cannot use until the operator corrects something."""
    text = without_secrets(" ".join(reason.split()))
    return UnusableDatabaseError(f"{SETTING}: cannot use the database {without_password(dsn)}: {text}")


def _reason_to_correct(cause: BaseException) -> str | None:
    """Return what is wrong if the operator has to correct it before the database can be opened; otherwise None."""
    if isinstance(cause, socket.gaierror) and cause.errno in _UNKNOWN_HOST:
        return f"its host name does not resolve ({cause.strerror})"
    is_answer = isinstance(cause, asyncpg.PostgresError | asyncpg.InterfaceError) and not _is_transient(cause)
    return str(cause) if is_answer or isinstance(cause, _WRONG_ADDRESS) else None


def _is_transient(cause: BaseException) -> bool:
    if isinstance(cause, asyncpg.InterfaceError):
        # asyncpg has no class for the use of a connection that was closed before, only this text.
        return "clos" in str(cause)
    if isinstance(cause, _TRANSIENT):
        return True
    if isinstance(cause, exceptions.InternalServerError):
        return any(text in str(cause) for text in _NODE_LOST)
    # Nor has it one for a session that the server ended with an error message, while the socket is still open. 2 is its
    # state `PROTOCOL_ERROR_CONSUME`.
    return isinstance(cause, exceptions.InternalClientError) and "another operation (2) is in progress" in str(cause)


def _text(cause: BaseException) -> str:
    return f"{type(cause).__name__}: {str(cause) or 'no answer in time'}"[:500]
