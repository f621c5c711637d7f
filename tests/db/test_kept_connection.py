"""A kept connection is open between its blocks, belongs to one at a time, and is replaced if it may not work."""

import asyncio

import asyncpg
import pytest

from indexer.db.kept_connection import KeptConnection


def kept_to(database: str) -> KeptConnection:
    return KeptConnection(lambda: asyncpg.connect(database))


async def used_by(kept: KeptConnection) -> asyncpg.Connection:
    """Use the connection in a block; return it."""
    async with kept.use() as connection:
        await connection.execute("select 1")
    return connection


async def hold(kept: KeptConnection, held: asyncio.Event, release: asyncio.Event) -> asyncpg.Connection:
    """Use the connection in a block until `release` is set; return it."""
    async with kept.use() as connection:
        held.set()
        await release.wait()
        await connection.execute("select 1")
    return connection


@pytest.mark.slow
async def test_blocks_use_the_same_connection_one_after_the_other(database: str) -> None:
    kept, held, second_held, release = kept_to(database), asyncio.Event(), asyncio.Event(), asyncio.Event()
    first = asyncio.create_task(hold(kept, held, release))
    await held.wait()
    second = asyncio.create_task(hold(kept, second_held, release))
    await asyncio.sleep(0)  # the second block would begin without a round trip
    assert not second_held.is_set()
    release.set()
    assert await second is await first
    assert second_held.is_set()
    await kept.close()


async def test_a_connection_is_replaced_after_a_block_that_raises(database: str) -> None:
    kept, used = kept_to(database), list[asyncpg.Connection]()
    for error in (asyncpg.DataError("a value"), ValueError("a bug"), asyncio.CancelledError()):
        with pytest.raises(type(error)):  # noqa: PT012
            async with kept.use() as connection:
                used.append(connection)
                raise error
        assert used[-1].is_closed()
    assert await used_by(kept) not in used
    assert len(set(used)) == 3
    await kept.close()


@pytest.mark.slow
async def test_a_connection_that_was_unused_for_long_is_replaced(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A firewall may have forgotten it: then the next statement would wait for its time limit."""
    kept = kept_to(database)
    first = await used_by(kept)
    monkeypatch.setattr("indexer.db.kept_connection.MAX_IDLE_SECONDS", 0.0)
    second = await used_by(kept)
    assert second is not first
    assert first.is_closed()
    await kept.close()


@pytest.mark.slow
async def test_close_waits_for_the_block_and_no_other_block_follows(database: str) -> None:
    kept, held, release = kept_to(database), asyncio.Event(), asyncio.Event()
    block = asyncio.create_task(hold(kept, held, release))
    await held.wait()
    closing = asyncio.create_task(kept.close())
    later = asyncio.create_task(used_by(kept))
    release.set()
    used = await block  # its statement would fail on a closed connection
    await closing
    assert used.is_closed()
    with pytest.raises(asyncpg.InterfaceError, match="closed"):
        await later
    unused = KeptConnection(lambda: pytest.fail("opened"))
    await unused.close()
    with pytest.raises(asyncpg.InterfaceError, match="closed"):
        await used_by(unused)
