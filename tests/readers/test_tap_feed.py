"""The feed for clients of tap, with a real daemon: nothing is lost, and each repo's order is kept."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from itertools import count
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest

from indexer.db import Database
from indexer.demo.local_repo import Write
from indexer.readers.tap import feed
from indexer.readers.tap.deliveries import RefusalLimits
from indexer.telemetry.conditions import FEED_CUT_OFF, FEED_EVENTS_SET_ASIDE, Conditions
from indexer.telemetry.metrics import Metrics
from tests.background import running
from tests.daemon.running_daemon import POST, post
from tests.faulty_network import FaultyAccount
from tests.readers.tap_client import (
    Event,
    Tap,
    TapClient,
    channel,
    feed_client,
    summary,
    tap_daemon,
    wait_until_delivered,
)
from tests.waiting import until

pytestmark = pytest.mark.slow

END_SESSION = "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'indexer feed'"


@pytest.fixture
async def tap(database: str, tmp_path: Path) -> AsyncIterator[Tap]:
    async with tap_daemon(database, tmp_path) as daemon, feed_client(daemon) as session:
        yield Tap(daemon, session)


async def test_events_of_a_repo_come_in_order_and_what_is_acknowledged_is_not_sent_again(tap: Tap) -> None:
    """Acknowledgements are text or binary messages. Other messages of a client have no effect."""
    account = tap.daemon.create_account("ada.test", records=3)
    await tap.daemon.wait_until_equal()
    async with tap.channel() as client:
        assert list(map(summary, await client.process(3))) == [
            ("create", f"{number:03}", True, str(number)) for number in range(3)
        ]
        account.create(POST, post("new"), rkey="new")
        account.update(f"{POST}/000", post("changed"))
        account.delete(f"{POST}/001")
        assert list(map(summary, await client.process(2, binary=True))) == [
            ("create", "new", True, "new"),
            ("update", "000", True, "changed"),
        ]
        deleted = await client.receive()
        assert summary(deleted) == ("delete", "001", True, None)
        for other in ("", "null", "{", '{"type":"ack"}', '{"type":"ack","id":"1"}', '{"type":"ack","id":99999}'):
            await client.websocket.send_str(other)
        await client.websocket.send_bytes(b'{"type":"ack","id":"\xff"}')
    async with tap.channel() as client:
        assert await client.process(1) == [deleted], "the connection was lost before its acknowledgement"
        await tap.daemon.execute("select atproto.request_takedown($1, true)", account.did)
        assert list(map(summary, await client.process(1))) == [("identity", "handle.invalid", False, "takendown")]
        await wait_until_delivered(tap.daemon)


async def test_several_clients_share_the_work_and_each_repo_stays_in_order(tap: Tap) -> None:
    async with AsyncExitStack() as stack:
        accounts = [tap.daemon.create_account(f"a{number}.test", records=0) for number in range(4)]
        await tap.daemon.wait_until_equal()
        clients = [await stack.enter_async_context(tap.channel()) for _ in range(3)]
        order = defaultdict[str, list[int]](list)

        async def work(client: TapClient) -> None:
            while True:
                [event] = await client.process(1)
                order[event["record"]["did"]].append(int(event["record"]["rkey"]))

        workers = [asyncio.create_task(work(client)) for client in clients]
        for number in range(60):
            accounts[number % 4].create(POST, post(number), rkey=f"{number:03}")
        await until(lambda: sum(map(len, order.values())) >= 60, lambda: order)
        await wait_until_delivered(tap.daemon)
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
        async with (
            tap_daemon(database, tmp_path / "second", network=first.network, shard="0/2") as second,
            feed_client(second) as other,
            channel(other) as waiting,
        ):
            silent = asyncio.create_task(waiting.receive())
            await first.stages.tap_feed.stop()
            assert summary(await silent) == summary(events[0])
            await waiting.acknowledge(events[0])
            await wait_until_delivered(second)


async def test_connection_ends_without_a_close_frame_when_the_daemon_stops(tap: Tap) -> None:
    async with tap.channel() as client:
        tap.daemon.create_account("ada.test", records=1)
        event = await client.receive()
        stopping = asyncio.create_task(tap.daemon.stages.tap_feed.stop())
        await client.acknowledge(event)
        await stopping
        message = await client.websocket.receive(timeout=60)
        assert message.type in {aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR}
        assert client.websocket.close_code == aiohttp.WSCloseCode.ABNORMAL_CLOSURE
        with suppress(asyncio.CancelledError):
            await wait_until_delivered(tap.daemon)


async def test_client_that_acknowledges_nothing_does_not_fill_the_memory(tap: Tap) -> None:
    feed = tap.daemon.stages.tap_feed
    feed.max_unacknowledged = 10
    deliveries = await feed.deliveries()
    accounts = [tap.daemon.create_account(f"a{number}.test", records=4) for number in range(5)]
    async with tap.channel() as silent:
        for _ in range(2):
            await silent.receive()
        await tap.daemon.wait_until_equal()
        assert len(deliveries.window) <= 10
    async with tap.channel() as client:
        events = await client.process(20)
        await wait_until_delivered(tap.daemon)
    order = [(event["record"]["did"], event["record"]["rkey"]) for event in events]
    for account in accounts:
        assert [rkey for did, rkey in order if did == account.did] == ["000", "001", "002", "003"]


async def test_feed_that_was_cut_off_says_how_to_continue(tap: Tap) -> None:
    """The first client sends no acknowledgements."""
    tap.daemon.create_account("ada.test", records=1)
    async with tap.channel("/channel?acks=false") as client:
        await client.receive()
        await wait_until_delivered(tap.daemon)
    await tap.daemon.execute(
        "insert into indexer.disconnected_consumer (id) select id from indexer.consumer where name = 'tap-feed'"
    )
    await tap.daemon.execute(END_SESSION)
    conditions = tap.daemon.stages.conditions
    await until(lambda: conditions.is_active(FEED_CUT_OFF))
    [condition] = [condition for condition in conditions.active() if condition.kind is FEED_CUT_OFF]
    assert "select atproto.unregister_reader('tap-feed')" in condition.message
    await tap.daemon.execute("select atproto.unregister_reader('tap-feed')")
    async with tap.channel() as client:
        assert summary(await client.receive())[1] == "000", "from the oldest change in the log"
    assert not conditions.is_active(FEED_CUT_OFF)


def folded(events: list[Event]) -> dict[str, set[str]]:
    """Return the records of each repo after these events: what a client has that stores what it gets."""
    records: dict[str, set[str]] = {}
    for event in events:
        if event["type"] == "record":
            record = event["record"]
            paths = records.setdefault(record["did"], set())
            path = f"{record['collection']}/{record['rkey']}"
            (paths.discard if record["action"] == "delete" else paths.add)(path)
    return records


async def test_change_log_waits_for_no_consumer_before_the_first_client_connects(tap: Tap) -> None:
    tap.daemon.create_account("ada.test", records=2)
    async with tap.session.ws_connect("/subscribe?cursor=0") as jetstream:
        for _ in range(2):
            await jetstream.receive_str(timeout=60)
    assert await tap.consumers() == []
    async with tap.channel() as client:
        assert [summary(event)[1] for event in await client.process(2)] == ["000", "001"]
        assert await tap.consumers() == ["tap-feed"]
        assert tap.gauge("clients", kind="tap") == 1
        await wait_until_delivered(tap.daemon)
    assert tap.daemon.counter("feed_events", kind="tap") == 2
    await until(lambda: tap.daemon.counter("feed_disconnections", kind="tap", reason="client") == 1)
    assert await tap.consumers() == ["tap-feed"], "from now on, the log waits for the clients"


async def test_first_client_gets_all_stored_records_although_the_log_was_trimmed(tap: Tap) -> None:
    """The session of the feed is lost in the middle of the snapshot, and records change meanwhile."""
    tap.daemon.stages.tap_feed.max_unacknowledged = 8  # so that the snapshot has several pages
    accounts = [tap.daemon.create_account(f"a{number}.test", records=5) for number in range(3)]
    accounts.sort(key=lambda account: account.did)  # the order of the snapshot
    await tap.daemon.wait_until_equal()
    await tap.daemon.execute("select setval('indexer.trimmed_seq', atproto.latest_seq())")
    async with tap.channel() as client:
        received = await client.process(7)
        accounts[0].update(f"{POST}/001", post("changed"))
        accounts[1].create(POST, post("new"), rkey="new")
        accounts[2].delete(f"{POST}/000")
        assert len(await tap.daemon.execute(END_SESSION)) == 1
        while (await client.websocket.receive(timeout=60)).type is aiohttp.WSMsgType.TEXT:
            pass
    async with tap.channel() as client:
        while folded(received) != {account.did: set(account.records) for account in accounts}:
            received += await client.process(1)
        changed = (accounts[0].did, "update", "001", True, "changed")
        while changed not in {
            (event["record"]["did"], *summary(event)) for event in received if event["type"] == "record"
        }:
            received += await client.process(1)
        await wait_until_delivered(tap.daemon)
    identities = {event["identity"]["did"] for event in received if event["type"] == "identity"}
    assert identities == {account.did for account in accounts}
    await until(lambda: snapshot_is_delivered(tap))


async def snapshot_is_delivered(tap: Tap) -> bool:
    rows = await tap.daemon.execute("select snapshot_did from indexer.feed_delivery")
    return [row["snapshot_did"] for row in rows] == [None]


@pytest.mark.parametrize("trimmed", [False, True], ids=["from the log", "from a snapshot"])
async def test_records_of_a_hidden_account_come_when_it_is_visible_again_and_not_before(
    tap: Tap, *, trimmed: bool
) -> None:
    """Deletions come, and the session of the feed is lost."""
    tap.daemon.stages.tap_feed.max_unacknowledged = 8  # so that what was set aside has several pages
    hidden = tap.daemon.create_account("hidden.test", records=6)
    other = tap.daemon.create_account("other.test", records=1)
    await tap.daemon.wait_until_equal()
    await tap.daemon.execute("select atproto.request_takedown($1, true)", hidden.did)
    if trimmed:
        await tap.daemon.execute("select setval('indexer.trimmed_seq', atproto.latest_seq())")

    async with tap.processing() as received:
        hidden.create(POST, post("live"), rkey="live")
        hidden.update(f"{POST}/000", post("changed"))
        hidden.delete(f"{POST}/001")
        await tap.daemon.wait_for_cursor()
        await until(lambda: (other.did, f"{POST}/000") in paths(received))
        await wait_until_delivered(tap.daemon)
        session = await tap.daemon.stages.tap_feed.deliveries()
        assert len(await tap.daemon.execute(END_SESSION)) == 1
        await session.ended.wait()
    assert summaries(received, hidden) <= {
        ("identity", "handle.invalid", False, "takendown"),
        ("delete", "001", True, None),
    }
    async with tap.processing() as received:
        await until(lambda: snapshot_is_delivered(tap))
        await wait_until_delivered(tap.daemon)
    assert summaries(received, hidden) <= {("identity", "handle.invalid", False, "takendown")}
    async with tap.channel() as client:
        await tap.daemon.execute("select atproto.request_takedown($1, false)", hidden.did)
        identity = await client.receive()
        assert summary(identity) == ("identity", "handle.invalid", True, "active")
        other.create(POST, post("other"), rkey="other")
        assert summary(await client.receive())[1] == "other", "records wait until it is known that they may be shown"
        await client.acknowledge(client.received[-1])
        await client.acknowledge(identity)
        events = await client.process(6)
        assert {summary(event)[0:3:2] for event in events} == {("create", False)}
        assert folded(events) == {hidden.did: set(hidden.records)}
        assert {event["record"]["record"]["text"] for event in events} >= {"live", "changed"}

        async def nothing_is_set_aside() -> bool:
            return not await tap.daemon.execute("select from indexer.feed_set_aside")

        await until(nothing_is_set_aside)


def paths(events: list[Event]) -> set[tuple[str, str]]:
    return {(did, path) for did, records in folded(events).items() for path in records}


def summaries(events: list[Event], account: FaultyAccount) -> set[tuple[Any, ...]]:
    """Return the summaries of the events of one account."""
    return {summary(event) for event in events if account.did in str(event)}


async def test_event_that_a_client_does_not_acknowledge_is_sent_again_and_delays_only_its_own_repo(tap: Tap) -> None:
    async with AsyncExitStack() as stack:
        tap.daemon.stages.channel.retry_seconds = 0.2
        client = await stack.enter_async_context(tap.channel())
        refusing = tap.daemon.create_account("refusing.test", records=2)
        other = tap.daemon.create_account("other.test", records=0)
        refused, numbers = list[Event](), count(100)
        while len(refused) < 3:
            other.create(POST, post("other"), rkey=(rkey := str(next(numbers))))
            while (event := await client.receive())["record"]["rkey"] != rkey:
                if event["record"]["did"] == refusing.did:  # an event of the other one may be sent again, too
                    assert event["record"]["rkey"] == "000", "later events of the repo wait"
                    refused.append(event)
            await client.acknowledge(event)
        assert 0 < (tap.gauge("oldest_unacknowledged_seconds") or 0) < 600
        await client.acknowledge(refused[0])
        while (event := await client.receive())["record"]["rkey"] != "001":
            pass
        await client.acknowledge(event)
        await wait_until_delivered(tap.daemon)
        assert tap.gauge("oldest_unacknowledged_seconds") == 0


async def test_event_that_is_refused_for_too_long_is_set_aside_and_sent_again_on_request(tap: Tap) -> None:
    """The repo goes on, and nothing keeps the position of the feed."""
    feed, db, conditions = tap.daemon.stages, tap.daemon.stages.db, tap.daemon.stages.conditions
    feed.channel.retry_seconds = 0.2
    account = tap.daemon.create_account("refused.test", records=3)
    other = tap.daemon.create_account("other.test", records=0)

    def refuses(event: Event) -> bool:
        return bool(event["type"] == "record" and event["record"]["rkey"] == "000")

    async with tap.processing(refuses) as received:
        (await feed.tap_feed.deliveries()).limits = RefusalLimits(attempts=3, seconds=0.0)
        number = 0
        while not conditions.is_active(FEED_EVENTS_SET_ASIDE):
            other.create(POST, post("other"), rkey=f"other-{number}")
            await until(lambda: any(event["record"]["rkey"] == f"other-{number}" for event in received))  # noqa: B023
            number += 1
        await until(lambda: paths(received) >= {(account.did, f"{POST}/{rkey}") for rkey in ("000", "001", "002")})
        await wait_until_delivered(tap.daemon)
        [event] = await db.feed.set_aside(account.did, 10)
        assert (event.collection, event.rkey, event.action) == (POST, "000", "create")
        assert event.attempts >= 3
        assert event.failure == "no acknowledgement within 0.2 seconds"
        assert tap.gauge("set_aside_events") == 1
        assert len(await tap.daemon.execute(END_SESSION)) == 1
    assert await db.feed.send_again(None) == 1
    async with tap.processing() as received:
        await until(lambda: len(received) > 0)
        assert summary(received[0]) == ("create", "000", False, "0")
        await until(lambda: not conditions.is_active(FEED_EVENTS_SET_ASIDE))
        assert await db.feed.set_aside(None, 10) == []
    assert tap.gauge("set_aside_events") == 0


async def test_repo_that_fills_its_share_behind_a_refused_event_delays_no_other(tap: Tap) -> None:
    """The session of the feed is lost. Then each event comes once, in order."""
    feed = tap.daemon.stages.tap_feed
    feed.max_unacknowledged = 100
    filling = tap.daemon.create_account("filling.test", records=0)
    other = tap.daemon.create_account("other.test", records=0)
    keys = ["refused", *(f"{number:03}" for number in range(120))]
    async with tap.processing(lambda event: event["record"]["rkey"] == "refused") as received:
        filling.create(POST, post("refused"), rkey="refused")
        filling.apply_writes([Write.create(f"{POST}/{rkey}", post(rkey)) for rkey in keys[1:]])
        await tap.daemon.wait_for_cursor()
        for number in range(3):
            other.create(POST, post(number), rkey=f"other-{number}")
            await until(lambda: (other.did, f"{POST}/other-{number}") in paths(received))  # noqa: B023
        assert paths(received) == {
            (filling.did, f"{POST}/refused"),
            *((other.did, f"{POST}/other-{number}") for number in range(3)),
        }
        deliveries = await feed.deliveries()
        assert len(deliveries.window) < 50

        async def stored() -> bool:
            statement = "select delivered_to = atproto.latest_seq() and behind is not null from indexer.feed_delivery"
            return [tuple(row) for row in await tap.daemon.execute(statement)] == [(True,)]

        await until(stored)
        assert len(await tap.daemon.execute(END_SESSION)) == 1
        await deliveries.ended.wait()
    async with tap.processing() as received:
        await wait_until_delivered(tap.daemon)
    assert [event["record"]["rkey"] for event in received] == keys


async def test_repeated_acknowledgement_lets_no_event_wait_for_ever(tap: Tap) -> None:
    tap.daemon.stages.channel.retry_seconds = 0.5
    account = tap.daemon.create_account("ada.test", records=1)
    async with tap.channel() as client:
        [first] = await client.process(1)

        async def acknowledge_again() -> None:
            while True:
                await client.acknowledge(first)
                await asyncio.sleep(0.02)

        async with running(acknowledge_again()), asyncio.timeout(20):
            account.create(POST, post("new"), rkey="new")
            events = [await client.receive(), await client.receive()]
    assert [summary(event)[1] for event in events] == ["new", "new"]


async def test_event_at_which_the_connection_always_ends_is_set_aside(tap: Tap) -> None:
    crashing = tap.daemon.create_account("crashing.test", records=1)
    other = tap.daemon.create_account("other.test", records=0)
    (await tap.daemon.stages.tap_feed.deliveries()).limits = RefusalLimits(attempts=3, seconds=0.0)
    number = 0
    while not tap.daemon.stages.conditions.is_active(FEED_EVENTS_SET_ASIDE):
        other.create(POST, post("other"), rkey=f"{number:03}")
        number += 1
        async with tap.channel() as client:
            events = [await client.receive()]
            while other.did not in {event["record"]["did"] for event in events}:
                events.append(await client.receive())
            for event in events:
                if event["record"]["did"] == other.did:
                    await client.acknowledge(event)
        assert number < 20
    [row] = await tap.daemon.stages.db.feed.set_aside(crashing.did, 10)
    assert (row.rkey, row.failure) == ("000", "the connection ended before its acknowledgement")


class DatabaseWithoutClients:
    def __init__(self) -> None:
        self.feed = self
        self.asked = asyncio.Event()

    async def is_cut_off(self) -> bool | None:
        self.asked.set()
        return None


async def test_feed_that_waits_for_its_first_client_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "CLAIM_SECONDS", 3_600.0)
    db = DatabaseWithoutClients()
    stage = feed.TapFeed(cast(Database, db), Conditions(), Metrics(), RefusalLimits())
    run = asyncio.create_task(stage.run())
    await db.asked.wait()
    await stage.stop()
    await asyncio.wait_for(run, 10)
