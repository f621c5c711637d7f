"""A subscriber that connects again with its cursor gets the whole log in order, although the daemon is killed."""

from pathlib import Path
from typing import Any

import asyncpg
import orjson
import pytest
from websockets import ConnectionClosed

from indexer.localnet.local_network import LocalNetwork
from tests.daemon.running_daemon import POST, post
from tests.daemon_process import daemon_process, log_tail
from tests.service.feed.jetstream_client import subscribed
from tests.waiting import until

pytestmark = pytest.mark.slow

KILLS = 3
ROLES = "live,resync,feed"
TIMES = """
    select (extract(epoch from b.time) * 1000000)::bigint + c.ordinal, c.action || ' ' || c.rkey
    from indexer.change c join indexer.change_batch b on b.id = c.batch and b.segment = c.segment
    where c.collection is not null order by b.first_seq, c.ordinal
"""


async def started(directory: Path, number: int) -> str:
    """Wait until the daemon that was started as the `number`th serves HTTP; return its address."""

    def addresses() -> list[str]:
        lines = (directory / "daemon.log").read_bytes().splitlines()
        events = [orjson.loads(line) for line in lines if line.startswith(b"{")]
        return [event["health"] for event in events if event["event"] == "daemon.started"]

    await until(lambda: len(addresses()) == number, lambda: log_tail(directory))
    return addresses()[-1].removeprefix("http://")


async def test_subscriber_gets_the_whole_log_although_the_daemon_is_killed(database: str, tmp_path: Path) -> None:
    events: dict[int, str] = {}
    cursor = 0

    def add(event: dict[str, Any]) -> None:
        nonlocal cursor
        text = f"{event['commit']['operation']} {event['commit']['rkey']}"
        assert event["time_us"] > cursor or events[event["time_us"]] == text, "only the event of the cursor is repeated"
        events[event["time_us"]], cursor = text, event["time_us"]

    async with LocalNetwork() as network:
        account = network.create_account("ada.test")
        for number in range(KILLS + 1):
            async with daemon_process(network, database, tmp_path, roles=ROLES, log_format="json") as process:
                address = await started(tmp_path, number + 1)
                async with subscribed(address, ("cursor", cursor)) as client:
                    for write in range(20):
                        account.create(POST, post("text"), rkey=f"{number}-{write:02}")
                    last = f"create {number}-{10 if number < KILLS else 19:02}"
                    while last not in events.values():
                        add(await client.next())
                    process.kill()
                    try:
                        while True:
                            add(await client.next())
                    except ConnectionClosed:
                        pass
    connection = await asyncpg.connect(database)
    logged = [tuple(row) for row in await connection.fetch(TIMES)]
    await connection.close()
    assert len(logged) == 20 * (KILLS + 1)
    assert list(events.items()) == logged
