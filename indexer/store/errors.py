"""The driver's errors, sorted: what passes by itself is a `DatabaseError`, all else stays what it is."""

from collections.abc import Iterator
from contextlib import contextmanager

import asyncpg
from asyncpg import exceptions
from sqlalchemy.exc import DBAPIError

from indexer.errors import UnavailableError
from indexer.reasons import FetchFailure

CONNECT_SECONDS = 10.0

_PASSING = (
    OSError,  # and with it TimeoutError
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

_ENDING = "another operation (2) is in progress"  # the number of asyncpg's state `PROTOCOL_ERROR_CONSUME`


class DatabaseError(UnavailableError):
    """The database could not be asked, or could not do it just now: nothing of it is done, or all of it."""


@contextmanager
def database_errors() -> Iterator[None]:
    """Raises `DatabaseError` for what another try may cure."""
    try:
        yield
    except _PASSING as error:
        raise _database_error(error) from error
    except DBAPIError as error:
        cause = getattr(error.orig, "__cause__", None)
        if not isinstance(cause, _PASSING):
            raise
        raise _database_error(cause) from error
    except asyncpg.InterfaceError as error:
        # The driver has no class of its own for the use of a connection that broke before.
        if "clos" not in str(error):
            raise
        raise _database_error(error) from error
    except exceptions.InternalClientError as error:
        # Nor has it for a session that the server has ended with a last word, but whose socket is still open.
        if _ENDING not in str(error):
            raise
        raise _database_error(error) from error


def _database_error(error: BaseException) -> DatabaseError:
    reason = FetchFailure.TIMEOUT if isinstance(error, TimeoutError) else FetchFailure.UNREACHABLE
    return DatabaseError(reason, f"{type(error).__name__}: {error}"[:500])
