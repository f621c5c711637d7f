"""A session that the server ends is a transient error."""

import asyncio
from collections import Counter

import asyncpg

from indexer.store import DatabaseError
from indexer.store.database_errors import database_errors

MAX_SESSIONS = 500


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
