"""Sessions that the server ends: nothing of ours, and over at the next try."""

import asyncio
from collections import Counter

import asyncpg

from indexer.store import DatabaseError
from indexer.store.errors import database_errors

MOST_SESSIONS = 500


async def test_a_session_that_was_ended_says_so_at_whatever_moment(database: str, sql: asyncpg.Connection) -> None:
    """The driver has read the server's last word and not yet the end, or both, or neither."""
    met = Counter[str]()
    while met["InternalClientError"] < 3 and met.total() < MOST_SESSIONS:
        connection = await asyncpg.connect(database)
        transaction = connection.transaction()
        await transaction.start()
        ending = asyncio.create_task(sql.execute("select pg_terminate_backend($1)", connection.get_server_pid()))
        while not ending.done():  # noqa: ASYNC110
            await asyncio.sleep(0)  # one round of the loop at a time
        try:
            with database_errors():
                await transaction.rollback()
        except DatabaseError as error:
            met[type(error.__cause__).__name__] += 1
        connection.terminate()
    assert met["InternalClientError"], met
