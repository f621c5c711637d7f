"""Links in a running daemon: live, resyncs, accounts that disappear, and the backfill."""

from pathlib import Path

import asyncpg
import pytest

from tests.daemon.running_daemon import LIKE, POST, running_daemon
from tests.db.change_log_helpers import connected
from tests.db.link_checks import assert_links_exact, links_at_end
from tests.faulty_network import FaultyAccount
from tests.waiting import until

CID = "bafkreibme22gw2h7y2h7tg2fhqotaqjucnbc24deqo72b6mkl2egezxhvy"
COUNT = f"select atproto.link_count($1, '{LIKE}', '.subject.uri')"


def like(account: FaultyAccount, author: FaultyAccount, number: object) -> str:
    """Let the account like a post; return the URI of the post."""
    uri = f"at://{author.did}/{POST}/{number:03}"
    account.create(LIKE, {"$type": LIKE, "subject": {"uri": uri, "cid": CID}})
    return uri


async def count(sql: asyncpg.Connection, uri: str) -> int | None:
    number: int | None = await sql.fetchval(COUNT, uri)
    return number


@pytest.mark.slow
async def test_links_follow_the_stream_resyncs_and_accounts(database: str, tmp_path: Path) -> None:
    async with running_daemon(database, tmp_path, links=True) as daemon, connected(database) as sql:
        author, *fans = [daemon.create_account(f"a{number}.test") for number in range(4)]
        for fan in fans:
            uri = like(fan, author, 1)
        await daemon.wait_until_equal()
        await until(lambda: is_count(sql, uri, 3))
        daemon.lose_commit(fans[0])
        like(fans[0], author, 2)
        fans[1].deactivate()
        fans[2].delete_account()
        await daemon.wait_until_equal()
        await until(lambda: is_count(sql, uri, 1))
        await until(lambda: nothing_left_to_count(sql))
        await assert_links_exact(sql)
        fans[1].activate()
        await daemon.resync_until_equal(fans[1])
        await until(lambda: is_count(sql, uri, 2))
        await until(lambda: nothing_left_to_count(sql))
        assert await assert_links_exact(sql) == 3


async def is_count(sql: asyncpg.Connection, uri: str, number: int) -> bool:
    return await count(sql, uri) == number


async def nothing_left_to_count(sql: asyncpg.Connection) -> bool:
    query = "select not exists (select 1 from indexer.links_to_recount)"
    return await links_at_end(sql) and bool(await sql.fetchval(query))
