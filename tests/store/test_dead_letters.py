from dataclasses import replace

import asyncpg

from indexer.reasons import Rejection
from indexer.store import Store
from indexer.sync.plans import Batch, DeadLetter

LETTER = DeadLetter("wss://one.example", 7, None, "commit", Rejection.FIELD_INVALID, "", b"frame", 0)


async def test_message_that_is_received_again_has_one_dead_letter(database: str, sql: asyncpg.Connection) -> None:
    others = [replace(LETTER, frame=b"other"), replace(LETTER, seq=8), replace(LETTER, epoch=1)]
    without_seq = replace(LETTER, seq=None)
    store = await Store.open(database, connections=1)
    try:
        for _ in range(3):
            await store.write(Batch(dead_letters=(LETTER, *others, without_seq)))
    finally:
        await store.close()
    assert await sql.fetchval("select count(*) from indexer.dead_letter where seq is not null") == 4
    assert await sql.fetchval("select count(*) from indexer.dead_letter where seq is null") == 3
