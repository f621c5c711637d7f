"""Classify errors of the database driver: transient ones become a `DatabaseError`, all others pass unchanged."""

from collections.abc import Iterator
from contextlib import contextmanager

import asyncpg
from asyncpg import exceptions
from sqlalchemy.exc import DBAPIError

from indexer.errors import UnavailableError
from indexer.reasons import FetchFailure

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
    exceptions.PostgresSystemError,
    exceptions.InvalidCachedStatementError,
    exceptions.OutdatedSchemaCacheError,
)

_SESSION_ENDED = "another operation (2) is in progress"  # 2 is asyncpg's state `PROTOCOL_ERROR_CONSUME`


class DatabaseError(UnavailableError):
    """A transient error of the database. Its transaction took effect completely or not at all; retry later."""


@contextmanager
def database_errors() -> Iterator[None]:
    """Raise `DatabaseError` for errors of the block that a retry may resolve."""
    try:
        yield
    except _TRANSIENT as error:
        raise _database_error(error) from error
    except DBAPIError as error:
        cause = getattr(error.orig, "__cause__", None)
        if not isinstance(cause, _TRANSIENT):
            raise
        raise _database_error(cause) from error
    except asyncpg.InterfaceError as error:
        # asyncpg has no class for the use of a connection that was closed before, only this text.
        if "clos" not in str(error):
            raise
        raise _database_error(error) from error
    except exceptions.InternalClientError as error:
        # Nor has it one for a session that the server ended with an error message, while the socket is still open.
        if _SESSION_ENDED not in str(error):
            raise
        raise _database_error(error) from error


def _database_error(error: BaseException) -> DatabaseError:
    reason = FetchFailure.TIMEOUT if isinstance(error, TimeoutError) else FetchFailure.UNREACHABLE
    return DatabaseError(reason, f"{type(error).__name__}: {error}"[:500])
