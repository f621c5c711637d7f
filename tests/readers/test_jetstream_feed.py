"""`/subscribe` of a running daemon: live events, replays, filters, bad input, and slow subscribers."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from time import time

import aiohttp
import pytest
import structlog

from indexer.readers.jetstream import subscriber
from tests.crashes.shifted_clock import Offset
from tests.daemon.running_daemon import LIKE, POST, post
from tests.readers.jetstream_client import describe, feed, subscribed
from tests.waiting import TIMEOUT, until

pytestmark = pytest.mark.slow


async def test_new_events_arrive_with_their_records_and_statuses(database: str, tmp_path: Path) -> None:
    """With a cursor in the future, too."""
    async with feed(database, tmp_path) as (daemon, address):
        account = daemon.create_account("ada.test", records=1)
        await daemon.wait_until_equal()
        async with subscribed(address, ("cursor", 9_000_000_000_000_000)) as client:
            await until(lambda: daemon.stages.jetstream_reader.window.end is not None)
            account.create(POST, post("hello"), rkey="new")
            created = await client.next()
            account.update(f"{POST}/new", post("changed"))
            updated = await client.next()
            account.delete(f"{POST}/new")
            deleted = await client.next()
            await daemon.wait_until_equal()
            await daemon.execute("select atproto.request_takedown($1, true)", account.did)
            hidden = await client.next()
            await daemon.execute("select atproto.request_takedown($1, false)", account.did)
            shown = await client.next()
        assert [describe(event) for event in (created, updated, deleted)] == [
            f"create {POST}/new",
            f"update {POST}/new",
            f"delete {POST}/new",
        ]
        assert created["commit"]["record"]["text"] == "hello"
        assert updated["commit"]["record"]["text"] == "changed"
        assert deleted["commit"]["rev"] == account.rev
        assert created["time_us"] < updated["time_us"] < deleted["time_us"]
        rows = await daemon.execute(
            "select cid, (extract(epoch from time) * 1e6)::bigint from atproto.changes where rkey = 'new' order by seq"
        )
        assert [row[0] for row in rows[:2]] == [created["commit"]["cid"], updated["commit"]["cid"]]
        assert [row[1] for row in rows] == [created["time_us"], updated["time_us"], deleted["time_us"]]
        status = {name: hidden["account"][name] for name in ("active", "did", "status")}
        assert status == {"active": False, "did": account.did, "status": "takendown"}
        assert (shown["kind"], shown["account"]["active"]) == ("account", True)
        assert daemon.counter("feed_events", kind="jetstream") == 5


async def test_cursor_replays_the_log_and_continues_with_new_events_in_any_process(
    database: str, tmp_path: Path
) -> None:
    """The times of events are the same after a restart."""
    async with feed(database, tmp_path / "one") as (daemon, address):
        account = daemon.create_account("ada.test", records=5)
        await daemon.wait_until_equal()
        async with subscribed(address, ("cursor", 0)) as client:
            replayed = await client.take(5)
            account.create(LIKE, post("like"), rkey="x")
            replayed.append(await client.next())
        assert [describe(event) for event in replayed] == [
            *(f"create {POST}/{number:03}" for number in range(5)),
            f"create {LIKE}/x",
        ]
        times = [event["time_us"] for event in replayed]
        assert times == sorted(set(times))
        await daemon.wait_until_equal()
    async with (
        feed(database, tmp_path / "two", roles="feed") as (_, first),
        feed(database, tmp_path / "three", roles="feed") as (_, second),
    ):
        for number, time in enumerate(times):
            for address in (first, second):
                async with subscribed(address, ("cursor", time)) as client:
                    assert await client.take(6 - number) == replayed[number:], "the event of the cursor is repeated"


@pytest.mark.one_server("the test changes one clock")
async def test_time_of_an_event_is_no_cursor_in_the_future(database: str, tmp_path: Path) -> None:
    """The clock of the database is a day ahead of the feed's, and is then set back."""
    clock = Offset(tmp_path / "offset")
    await clock.include_database(database)
    async with feed(database, tmp_path) as (daemon, address):
        account = daemon.create_account("ada.test", records=1)
        await daemon.wait_until_equal()
        for seconds in (86_400, 0):
            await clock.set(seconds)
            account.create(LIKE, post("like"), rkey=f"before-{seconds}")
            async with subscribed(address, ("cursor", 0)) as client:
                while describe(event := await client.next()) != f"create {LIKE}/before-{seconds}":
                    pass
            account.create(LIKE, post("like"), rkey=f"after-{seconds}")
            await daemon.wait_until_equal()
            async with subscribed(address, ("cursor", event["time_us"])) as client:
                assert event["time_us"] > (time() + 43_200) * 1_000_000
                account.create(LIKE, post("like"), rkey=f"new-{seconds}")
                received = [describe(event) for event in await client.take(3)]
            assert received == [f"create {LIKE}/{name}-{seconds}" for name in ("before", "after", "new")]
            await daemon.wait_until_equal()


async def test_options_update_changes_what_is_sent(database: str, tmp_path: Path) -> None:
    async with feed(database, tmp_path) as (daemon, address):
        ada, bob = daemon.create_account("ada.test", records=1), daemon.create_account("bob.test", records=1)
        await daemon.wait_until_equal()
        hello = ("requireHello", "true")
        async with subscribed(address, hello, ("cursor", 0)) as client, subscribed(address, ("cursor", 0)) as other:
            await other.take(2)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await client.connection.recv()
            await client.update_options(wantedDids=[bob.did])
            assert (await client.next())["did"] == bob.did
            ada.create(LIKE, post("like"), rkey="not-wanted")
            bob.create(LIKE, post("like"), rkey="x")
            assert describe(await client.next()) == f"create {LIKE}/x"
            await client.update_options(wantedCollections=["app.bsky.feed.*"], wantedDids=[ada.did])
            receiving, number = asyncio.create_task(client.next()), 0
            while not receiving.done():  # the update takes effect soon
                ada.create("com.example.other", post("other"), rkey=f"{number}")
                ada.create(POST, post("post"), rkey=f"{number}")
                number += 1
                await asyncio.sleep(0.05)
            event = await receiving
            assert (event["did"], event["commit"]["collection"]) == (ada.did, POST)
        await daemon.wait_until_equal()


async def test_subscriber_that_has_not_said_hello_is_pinged(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, one that vanishes would keep its websocket until the system tests the idle connection, after hours."""
    monkeypatch.setattr(subscriber, "PING_SECONDS", 0.05)
    async with (
        feed(database, tmp_path, roles="feed") as (_, address),
        aiohttp.ClientSession() as session,
        session.ws_connect(f"http://{address}/subscribe?requireHello=true", autoping=False) as websocket,
    ):
        for _ in range(2):
            assert (await websocket.receive(timeout=TIMEOUT)).type is aiohttp.WSMsgType.PING


async def test_cursor_before_the_log_begins_with_the_oldest_change_and_is_logged(database: str, tmp_path: Path) -> None:
    async with feed(database, tmp_path) as (daemon, address):
        account = daemon.create_account("ada.test", records=3)
        await daemon.wait_until_equal()
        await daemon.execute("select setval('indexer.trimmed_seq', atproto.latest_seq())")
        account.create(LIKE, post("like"), rkey="x")
        await daemon.wait_until_equal()
        cursors = [-(10**30), 0, 1]
        with structlog.testing.capture_logs() as lines:
            for cursor in cursors:
                async with subscribed(address, ("cursor", cursor)) as client:
                    assert describe(await client.next()) == f"create {LIKE}/x"
        assert [line["cursor"] for line in lines if line["event"] == "jetstream.cursor-too-old"] == cursors


async def test_bad_requests_and_messages_get_one_line(database: str, tmp_path: Path) -> None:
    bad_requests = {
        "": "connect with a websocket client: ws://HOST:PORT/subscribe",
        "?cursor=yesterday": "invalid cursor: 'yesterday' is not a time in microseconds",
        "?wantedDids=ada": "invalid DID: 'ada'",
    }
    async with feed(database, tmp_path, roles="feed") as (daemon, address), aiohttp.ClientSession() as session:
        for query, text in bad_requests.items():
            async with session.get(f"http://{address}/subscribe{query}") as response:
                assert (response.status, await response.text()) == (400, f"{text}\n")
        async with subscribed(address) as client:
            await client.update_options(wantedDids=["ada"])
            assert (await client.rest())[1] == (1000, "invalid DID: 'ada'")
        await until(lambda: daemon.counter("feed_disconnections", kind="jetstream", reason="bad-message") == 1)


async def test_huge_message_ends_the_connection(database: str, tmp_path: Path) -> None:
    async with feed(database, tmp_path, roles="feed") as (_, address), subscribed(address) as client:
        await client.connection.send("x" * 2_000_000)
        assert (await client.rest())[1][0] == 1009


async def test_without_stored_values_the_path_says_so(database: str, tmp_path: Path) -> None:
    async with (
        feed(database, tmp_path, roles="feed", store_values="false") as (_, address),
        aiohttp.ClientSession() as session,
        session.get(f"http://{address}/subscribe") as response,
    ):
        assert response.status == 501
        assert "INDEXER_STORE_VALUES is off" in await response.text()


async def test_replay_sends_the_newer_version_and_no_deleted_or_hidden_record(database: str, tmp_path: Path) -> None:
    async with feed(database, tmp_path) as (daemon, address):
        account = daemon.create_account("ada.test", records=0)
        account.create(POST, post("first"), rkey="updated")
        await daemon.wait_until_equal()
        account.create(POST, post("secret"), rkey="deleted")
        account.update(f"{POST}/updated", post("second"))
        account.delete(f"{POST}/deleted")
        await daemon.wait_until_equal()
        hidden = daemon.create_account("hidden.test", records=2)
        await daemon.wait_until_equal()
        await daemon.execute("select atproto.request_takedown($1, true)", hidden.did)
        async with subscribed(address, ("cursor", 0)) as client:
            created, updated, deleted, takedown = await client.take(4)
        assert describe(created) == f"create {POST}/updated"
        assert describe(updated) == f"update {POST}/updated"
        assert describe(deleted) == f"delete {POST}/deleted"
        assert created["commit"]["record"]["text"] == "second"
        assert created["commit"] == updated["commit"] | {"operation": "create"}
        assert (takedown["kind"], takedown["did"]) == ("account", hidden.did)


async def test_server_closes_subscribers_when_it_stops(database: str, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        async with feed(database, tmp_path, roles="feed") as (_, address):
            client = await stack.enter_async_context(subscribed(address))
            reading = asyncio.create_task(client.rest())
            await asyncio.sleep(0)
        assert await reading == ([], (1001, "the server is stopping"))
