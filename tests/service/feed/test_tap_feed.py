"""The feed for clients of tap, with a real daemon: nothing is lost, and each repo's order is kept."""

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from indexer import daemon_feeds
from indexer.monitoring.conditions import FEED_CUT_OFF
from indexer.service.feed import tap_feed
from indexer.service.feed.tap_channel import Channel
from tests.daemon.running_daemon import POST, RunningDaemon, post, running_daemon
from tests.service.feed.test_tap_routes import ROLES, feed_client
from tests.waiting import until

pytestmark = pytest.mark.slow
Event = dict[str, Any]


def summary(event: Event) -> tuple[Any, ...]:
    """Return what happened to which record or account."""
    if event["type"] == "identity":
        identity = event["identity"]
        return ("identity", identity["handle"], identity["is_active"], identity["status"])
    record = event["record"]
    return (record["action"], record["rkey"], record["live"], record.get("record", {}).get("text"))


class Client:
    """A client of the channel, which acknowledges what the test says."""

    def __init__(self, websocket: aiohttp.ClientWebSocketResponse) -> None:
        self.websocket = websocket
        self.received: list[Event] = []

    async def receive(self) -> Event:
        event: Event = json.loads(await self.websocket.receive_str(timeout=60))
        self.received.append(event)
        return event

    async def acknowledge(self, event: Event) -> None:
        await self.websocket.send_str(json.dumps({"type": "ack", "id": event["id"]}))

    async def process(self, count: int) -> list[Event]:
        """Receive and acknowledge so many events."""
        events = []
        for _ in range(count):
            events.append(await self.receive())
            await self.acknowledge(events[-1])
        return events


@asynccontextmanager
async def channel(session: aiohttp.ClientSession, path: str = "/channel") -> AsyncIterator[Client]:
    async with session.ws_connect(path) as websocket:
        yield Client(websocket)


@asynccontextmanager
async def tap_daemon(database: str, directory: Path, **settings: Any) -> AsyncIterator[RunningDaemon]:
    async with running_daemon(database, directory, roles=ROLES, http_bind="127.0.0.1:0", **settings) as daemon:
        yield daemon


async def wait_until_delivered(daemon: RunningDaemon) -> None:
    """Wait until all acknowledgements are stored."""

    async def delivered() -> bool:
        rows = await daemon.execute("select behind from atproto.readers where name = 'tap-feed'")
        return [row["behind"] for row in rows] == [0]

    await until(delivered)


async def test_events_of_a_repo_come_in_order_and_what_is_acknowledged_is_not_sent_again(
    database: str, tmp_path: Path
) -> None:
    async with tap_daemon(database, tmp_path) as daemon, feed_client(daemon) as session:
        account = daemon.create_account("ada.test", records=3)
        await daemon.wait_until_equal()
        async with channel(session) as client:
            assert list(map(summary, await client.process(3))) == [
                ("create", f"{number:03}", True, str(number)) for number in range(3)
            ]
            account.create(POST, post("new"), rkey="new")
            account.update(f"{POST}/000", post("changed"))
            account.delete(f"{POST}/001")
            assert list(map(summary, await client.process(2))) == [
                ("create", "new", True, "new"),
                ("update", "000", True, "changed"),
            ]
            deleted = await client.receive()
            assert summary(deleted) == ("delete", "001", True, None)
        async with channel(session) as client:
            assert await client.process(1) == [deleted], "the connection was lost before its acknowledgement"
            await wait_until_delivered(daemon)


async def test_changes_of_the_account_are_delivered_as_identity_events(database: str, tmp_path: Path) -> None:
    async with (
        tap_daemon(database, tmp_path) as daemon,
        feed_client(daemon) as session,
        channel(session) as client,
    ):
        account = daemon.create_account("ada.test", records=1)
        await client.process(1)
        changes = {"deactivated": account.deactivate, "suspended": account.suspend, "takendown": account.takedown}
        for status, change in changes.items():
            change()
            assert list(map(summary, await client.process(1))) == [("identity", "handle.invalid", False, status)]
        account.reinstate()
        assert list(map(summary, await client.process(1))) == [("identity", "handle.invalid", True, "active")]
        await daemon.execute("select atproto.request_takedown($1, true)", account.did)
        assert list(map(summary, await client.process(1))) == [("identity", "handle.invalid", False, "takendown")]


async def test_several_clients_share_the_work_and_each_repo_stays_in_order(database: str, tmp_path: Path) -> None:
    async with tap_daemon(database, tmp_path) as daemon, feed_client(daemon) as session, AsyncExitStack() as stack:
        accounts = [daemon.create_account(f"a{number}.test", records=0) for number in range(4)]
        await daemon.wait_until_equal()
        clients = [await stack.enter_async_context(channel(session)) for _ in range(3)]
        order = defaultdict[str, list[int]](list)

        async def work(client: Client) -> None:
            while True:
                [event] = await client.process(1)
                order[event["record"]["did"]].append(int(event["record"]["rkey"]))

        workers = [asyncio.create_task(work(client)) for client in clients]
        for number in range(60):
            accounts[number % 4].create(POST, post(number), rkey=f"{number:03}")
        await until(lambda: sum(map(len, order.values())) >= 60, lambda: order)
        await wait_until_delivered(daemon)
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        assert all(numbers == sorted(set(numbers)) for numbers in order.values())
        assert [bool(client.received) for client in clients] == [True] * 3


async def test_restart_repeats_only_what_was_not_acknowledged(database: str, tmp_path: Path) -> None:
    async with tap_daemon(database, tmp_path) as first, feed_client(first) as session, channel(session) as client:
        for number in range(3):
            first.create_account(f"a{number}.test", records=1)
        events = [await client.receive() for _ in range(3)]
        await client.acknowledge(events[1])
        await client.acknowledge(events[2])

        async def stored() -> bool:
            rows = await first.execute("select undelivered from indexer.feed_delivery")
            return [row["undelivered"] for row in rows] == [[events[0]["id"]]]

        await until(stored)
        network = first.network
        async with (
            running_daemon(
                database, tmp_path / "second", network, roles=ROLES, http_bind="127.0.0.1:0", shard="0/2"
            ) as second,
            feed_client(second) as other,
            channel(other) as waiting,
        ):
            silent = asyncio.create_task(waiting.receive())
            await first.stages.feeds.tap_feed.stop()
            assert summary(await silent) == summary(events[0])
            await waiting.acknowledge(events[0])
            await wait_until_delivered(second)


async def test_client_without_acknowledgements_gets_each_event_once(database: str, tmp_path: Path) -> None:
    async with tap_daemon(database, tmp_path) as daemon, feed_client(daemon) as session:
        account = daemon.create_account("ada.test", records=2)
        async with channel(session, "/channel?acks=false") as client:
            for _ in range(2):
                await client.receive()
            account.create(POST, post("live"), rkey="live")
            assert summary(await client.receive())[1] == "live"
            await wait_until_delivered(daemon)


async def test_other_messages_of_a_client_have_no_effect(database: str, tmp_path: Path) -> None:
    async with tap_daemon(database, tmp_path) as daemon, feed_client(daemon) as session, channel(session) as client:
        daemon.create_account("ada.test", records=1)
        event = await client.receive()
        for message in ("", "null", "[]", "{", '{"type":"ack"}', '{"type":"ack","id":"1"}', '{"type":"ack","id":999}'):
            await client.websocket.send_str(message)
        await client.acknowledge(event)
        await wait_until_delivered(daemon)


async def test_connection_ends_without_a_close_frame_when_the_daemon_stops(database: str, tmp_path: Path) -> None:
    async with tap_daemon(database, tmp_path) as daemon, feed_client(daemon) as session, channel(session) as client:
        daemon.create_account("ada.test", records=1)
        event = await client.receive()
        stopping = asyncio.create_task(daemon.stages.feeds.tap_feed.stop())
        await client.acknowledge(event)
        await stopping
        message = await client.websocket.receive(timeout=60)
        assert message.type in {aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR}
        assert client.websocket.close_code == aiohttp.WSCloseCode.ABNORMAL_CLOSURE
        with suppress(asyncio.CancelledError):
            await wait_until_delivered(daemon)


async def test_event_that_is_not_acknowledged_in_time_is_sent_again(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_feeds, "Channel", partial(Channel, retry_seconds=0.2))
    async with tap_daemon(database, tmp_path) as daemon, feed_client(daemon) as session, channel(session) as client:
        daemon.create_account("ada.test", records=2)
        first = await client.receive()
        assert await client.receive() == first
        await client.acknowledge(first)
        while (second := await client.receive()) == first:
            pass
        await client.acknowledge(second)
        await wait_until_delivered(daemon)


async def test_client_that_acknowledges_nothing_does_not_fill_the_memory(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tap_feed, "MAX_UNACKNOWLEDGED", 10)
    async with tap_daemon(database, tmp_path) as daemon, feed_client(daemon) as session:
        deliveries = await daemon.stages.feeds.tap_feed.deliveries()
        accounts = [daemon.create_account(f"a{number}.test", records=4) for number in range(5)]
        async with channel(session) as silent:
            for _ in range(2):
                await silent.receive()
            await daemon.wait_until_equal()
            assert len(deliveries.window) <= 10
        async with channel(session) as client:
            events = await client.process(20)
            await wait_until_delivered(daemon)
        order = [(event["record"]["did"], event["record"]["rkey"]) for event in events]
        for account in accounts:
            assert [rkey for did, rkey in order if did == account.did] == ["000", "001", "002", "003"]


async def test_lost_session_of_the_feed_repeats_what_was_not_acknowledged(database: str, tmp_path: Path) -> None:
    async with tap_daemon(database, tmp_path) as daemon, feed_client(daemon) as session:
        daemon.create_account("ada.test", records=2)
        async with channel(session) as client:
            event = await client.receive()
            ended = await daemon.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'indexer feed'"
            )
            assert len(ended) == 1
            assert (await client.websocket.receive(timeout=60)).type is aiohttp.WSMsgType.CLOSED
        async with channel(session) as client:
            assert (await client.process(2))[0] == event
            await wait_until_delivered(daemon)


async def test_feed_that_was_cut_off_says_how_to_continue(database: str, tmp_path: Path) -> None:
    async with tap_daemon(database, tmp_path) as daemon, feed_client(daemon) as session:
        daemon.create_account("ada.test", records=1)
        async with channel(session) as client:
            await client.process(1)
            await wait_until_delivered(daemon)
        await daemon.execute(
            "insert into indexer.disconnected_consumer (id) select id from indexer.consumer where name = 'tap-feed'"
        )
        await daemon.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'indexer feed'"
        )
        conditions = daemon.stages.conditions
        await until(lambda: conditions.is_active(FEED_CUT_OFF))
        [condition] = [condition for condition in conditions.active() if condition.kind is FEED_CUT_OFF]
        assert "select atproto.unregister_reader('tap-feed')" in condition.message
        await daemon.execute("select atproto.unregister_reader('tap-feed')")
        async with channel(session) as client:
            assert summary(await client.receive())[1] == "000", "from the oldest change in the log"
        assert not conditions.is_active(FEED_CUT_OFF)
