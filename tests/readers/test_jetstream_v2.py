"""The second wire of Jetstream on a running daemon: cursors, refusals, compression, endings."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import aiohttp
import orjson
import pytest
import websockets
from backports.zstd import ZstdDict, decompress, get_frame_info

from indexer.db import Database
from indexer.readers.jetstream.log_reading import EventWindow
from indexer.readers.jetstream.options import BadOptionsError, parse_v2_query
from tests.daemon.running_daemon import LIKE, POST, RunningDaemon, post
from tests.database_proxy import DatabaseProxy
from tests.readers.jetstream_client import JetstreamClient, describe, feed, subscribed
from tests.readers.test_jetstream_slow import EVENTS, write_events
from tests.waiting import until

pytestmark = pytest.mark.slow

PATH = "/xrpc/network.bsky.jetstream.subscribeEvents"
DICTIONARY = "/xrpc/network.bsky.jetstream.getZstdDictionary"


@asynccontextmanager
async def events_of(address: object, *parameters: tuple[str, object], **options: Any) -> AsyncIterator[JetstreamClient]:
    """Connect with these parameters."""
    async with subscribed(address, *parameters, path=PATH, **options) as client:
        yield client


async def take(client: JetstreamClient, count: int) -> list[dict[str, Any]]:
    """Return the payloads of the next messages."""
    return [message["payload"] for message in await client.take(count)]


def described(payload: dict[str, Any]) -> str:
    """Return a commit as `operation collection/rkey`, and any other message as its fragment or name."""
    fragment = payload["$type"].partition("#")[2]
    return describe({"commit": payload}) if fragment == "commit" else payload.get("name", fragment)


async def refusal(address: object, query: str, **headers: str) -> tuple[int, str, str]:
    """Return status, error and message of a request that is refused before the upgrade."""
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.WSServerHandshakeError) as raised:
            await session.ws_connect(f"http://{address}{PATH}?{query}", headers=headers)
        async with session.get(
            f"http://{address}{PATH}?{query}",
            headers=headers
            | {
                "Connection": "Upgrade",
                "Upgrade": "websocket",
                "Sec-WebSocket-Version": "13",
                "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
            },
        ) as response:
            body = await response.json()
            assert (response.status, body.keys()) == (raised.value.status, {"error", "message"})
            return response.status, body["error"], body["message"]


async def trim(daemon: RunningDaemon) -> int:
    """Trim the log, as far as readers see; return the number of the newest change."""
    [row] = await daemon.execute("select setval('indexer.trimmed_seq', atproto.latest_seq())")
    return int(row[0])


async def test_every_process_sends_the_numbers_of_the_log_and_repeats_the_event_of_the_cursor(
    database: str, tmp_path: Path
) -> None:
    async with (
        feed(database, tmp_path / "1") as (daemon, first),
        feed(database, tmp_path / "2", roles="feed") as (_, second),
    ):
        account = daemon.create_account("ada.test", records=5)
        await daemon.wait_until_equal()
        logged = await daemon.execute("select seq, time from atproto.changes where rkey is not null order by seq")
        async with events_of(first, ("cursor", 0)) as one, events_of(second, ("cursor", 0)) as other:
            payloads = await take(one, 5)
            assert [payload["seq"] for payload in payloads] == [row["seq"] for row in logged]
            assert [described(payload) for payload in payloads] == [f"create {POST}/{n:03}" for n in range(5)]
            account.create(LIKE, post("new"), rkey="x")
            payloads += await take(one, 1)
            assert await take(other, 6) == payloads
        for number, payload in enumerate(payloads):  # also within one transaction
            async with events_of(second, ("cursor", payload["seq"])) as client:
                assert await take(client, 6 - number) == payloads[number:]
            async with subscribed(first, ("cursor", payload["seq"])) as client:
                events = await client.take(6 - number)
                assert [event["cursor"] for event in events] == [one["seq"] for one in payloads[number:]]
            async with events_of(first, ("cursor", events[0]["time_us"])) as client:
                assert await take(client, 6 - number) == payloads[number:], "a time, as on the first wire"


async def test_cursor_of_a_trimmed_event_is_refused_and_a_time_begins_at_the_oldest_one(
    database: str, tmp_path: Path
) -> None:
    async with feed(database, tmp_path) as (daemon, address):
        account = daemon.create_account("ada.test", records=3)
        await daemon.wait_until_equal()
        trimmed = await trim(daemon)
        account.create(LIKE, post("like"), rkey="x")
        await daemon.wait_until_equal()
        for cursor in (0, 1, trimmed):
            message = f"the oldest event has seq {trimmed + 1}"
            assert await refusal(address, f"cursor={cursor}") == (400, "CursorTooOld", message)
        async with events_of(address, ("cursor", trimmed + 1)) as client:
            assert described((await take(client, 1))[0]) == f"create {LIKE}/x"
        # Trimmed changes stay for a while after a crash, with their times.
        [(oldest,)] = await daemon.execute(
            "select (extract(epoch from min(time)) * 1000000)::bigint from atproto.changes"
        )
        for cursor in (10**15, oldest):
            async with events_of(address, ("cursor", cursor)) as client:
                info, event = await take(client, 2)
                assert (described(info), sorted(info)) == ("OutdatedCursor", ["$type", "message", "name"])
                assert info["message"].endswith(f"seq {event['seq']}")
                assert described(event) == f"create {LIKE}/x"
            async with subscribed(address, ("cursor", cursor)) as client:
                assert describe((await client.take(1))[0]) == f"create {LIKE}/x"


async def test_cursor_beyond_the_next_event_begins_with_new_events(database: str, tmp_path: Path) -> None:
    async with feed(database, tmp_path) as (daemon, address):
        account = daemon.create_account("ada.test", records=1)
        await daemon.wait_until_equal()
        latest = await daemon.db.changes.latest_seq()
        async with (
            events_of(address, ("cursor", latest + 2)) as ahead,
            events_of(address, ("cursor", latest + 1)) as next_,
        ):
            assert described((await take(ahead, 1))[0]) == "FutureCursor"
            account.create(LIKE, post("like"), rkey="x")
            for client in (ahead, next_):
                assert described((await take(client, 1))[0]) == f"create {LIKE}/x"
        await daemon.wait_until_equal()


@pytest.mark.parametrize(
    "query",
    [
        "cursor=-1",
        "cursor=",
        "cursor=1&cursor=2",
        f"cursor={2**63}",
        "cursor=\u0663",
        f"cursor={'9' * 5_000}",
        "kinds=commit&kinds=info",
        "kinds=commit&kinds=commit&kinds=commit&kinds=commit&kinds=commit",
        "kinds=identity&collections=app.bsky.feed.post",
        "collections=*",
        "collections=app.*",
        "collections=app.bsky.fo*",
        "collections=post",
        urlencode([("collections", "app.bsky.feed.post")] * 101),
        "dids=ada.test",
        "maxMessageSizeBytes=",
        "maxMessageSizeBytes=1&maxMessageSizeBytes=1",
        f"maxMessageSizeBytes={2**32}",
        "maxMessageSizeBytes=1.5",
        "zstdDictionary=x",
        "wantedDids=did:plc:ada",
        "wantedCollections=app.bsky.feed.post",
        "requireHello=false",
        "compress=true",
    ],
)
def test_bad_parameter_gives_one_clear_line(query: str) -> None:
    with pytest.raises(BadOptionsError) as raised:
        parse_v2_query(query, "")
    message = str(raised.value)
    assert raised.value.name == "InvalidRequest"
    assert message.isprintable()
    assert len(message) < 250


def test_other_parameters_are_ignored() -> None:
    assert parse_v2_query("compress=false&live=true&maxMessageSizeBytes=0&x", "") == parse_v2_query("", "")
    options = parse_v2_query("collections=app.bsky.*&collections=a.b.c&kinds=commit&dids=did:web:a.b&cursor=0", "")
    collections = options.events.collections
    assert collections is not None
    assert collections.patterns == ("app.bsky.*", "a.b.c")
    assert (options.cursor, *options.events.dids, *options.events.kinds) == (0, "did:web:a.b", "commit")


async def test_refusals_are_errors_of_xrpc(database: str, tmp_path: Path) -> None:
    async with feed(database, tmp_path, roles="feed") as (_, address), aiohttp.ClientSession() as session:
        status, error, message = await refusal(address, "cursor=yesterday")
        assert (status, error) == (400, "InvalidRequest")
        assert message.startswith("cursor is not one integer from 0 to ")
        current = "the dictionary is 1612007021"
        assert await refusal(address, "zstdDictionary=5") == (400, "UnknownZstdDictionary", current)
        assert (await refusal(address, "", **{"Socket-Encoding": "zstd"}))[1] == "InvalidRequest"
        async with session.get(f"http://{address}{PATH}") as response:
            assert (response.status, (await response.json())["error"]) == (400, "InvalidRequest")
        for query, expected in {"?id=5": (404, "DictionaryNotFound"), "?id=x": (400, "InvalidRequest")}.items():
            async with session.get(f"http://{address}{DICTIONARY}{query}") as response:
                assert (response.status, (await response.json())["error"]) == expected
        too_long = "&".join([f"dids=did:plc:{number:024}" for number in range(250)])
        async with session.get(f"http://{address}{PATH}?{too_long}") as response:
            assert response.status == 400


async def test_without_stored_values_the_path_says_so(database: str, tmp_path: Path) -> None:
    async with feed(database, tmp_path, roles="feed", store_values="false") as (_, address):
        assert (await refusal(address, ""))[:2] == (501, "MethodNotImplemented")


async def test_cursor_that_cannot_be_looked_up_is_to_be_tried_again(database: str, tmp_path: Path) -> None:
    proxy = DatabaseProxy(database)
    async with proxy.serve(), feed(proxy.dsn, tmp_path, roles="feed") as (daemon, address):
        proxy.refuse()
        assert await refusal(address, "cursor=1") == (503, "ServiceUnavailable", "the database is unavailable")
        assert daemon.counter("feed_disconnections", kind="jetstream", reason="refused") == 2
        proxy.open()
        async with events_of(address, ("cursor", 0)):
            pass


async def test_compressed_messages_are_those_of_the_dictionary_that_is_served(database: str, tmp_path: Path) -> None:
    async with feed(database, tmp_path) as (daemon, address), aiohttp.ClientSession() as session:
        daemon.create_account("ada.test", records=3)
        await daemon.wait_until_equal()
        async with session.get(f"http://{address}{DICTIONARY}") as response:
            blob = await response.read()
            headers = [response.headers[name] for name in ("ETag", "X-Zstd-Dictionary-Id", "Content-Type")]
        assert blob.startswith(b"\x37\xa4\x30\xec")
        id_ = int.from_bytes(blob[4:8], "little")
        assert headers == [f'"zstd-dict-{id_}"', f"{id_}", "application/octet-stream"]
        async with session.get(f"http://{address}{DICTIONARY}?id={id_}") as response:
            assert await response.read() == blob
        cursor = ("cursor", 10**15)
        async with events_of(address, cursor) as plain, events_of(address, cursor, ("zstdDictionary", id_)) as client:
            for _ in range(4):  # an #info, too
                frame = await client.connection.recv()
                assert isinstance(frame, bytes)
                text = decompress(frame, ZstdDict(blob))
                assert get_frame_info(frame).decompressed_size == len(text)
                assert orjson.loads(text) == await plain.next()


async def test_subprotocol_is_chosen_and_compression_of_the_connection_is_not(database: str, tmp_path: Path) -> None:
    async with feed(database, tmp_path, roles="feed") as (_, address):
        for offered, chosen in {
            ("xrpc.v1.cbor", "xrpc.v1.json"): "xrpc.v1.json",
            ("XRPC.v1.json",): None,
            None: None,
        }.items():
            protocols = offered and [websockets.Subprotocol(name) for name in offered]
            async with events_of(address, subprotocols=protocols, compression="deflate") as client:
                assert client.connection.subprotocol == chosen
                assert client.connection.protocol.extensions == []


@pytest.mark.parametrize("message", ["{}", b"{}"])
async def test_any_message_ends_the_connection(database: str, tmp_path: Path, message: str | bytes) -> None:
    async with feed(database, tmp_path, roles="feed") as (daemon, address), events_of(address) as client:
        await client.connection.send(message)
        assert (await client.rest())[1] == (1008, "this stream takes no messages")
        await until(lambda: daemon.counter("feed_disconnections", kind="jetstream", reason="bad-message") == 1)


async def test_server_that_stops_says_so(database: str, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        async with feed(database, tmp_path, roles="feed") as (daemon, address):
            client = await stack.enter_async_context(events_of(address))
            await until(lambda: daemon.stages.jetstream_reader.window.end is not None)
        assert await client.rest() == ([], (1001, "the server is stopping"))


async def test_slow_subscriber_gets_the_cursor_from_which_nothing_is_lost(
    database: str, db: Database, tmp_path: Path
) -> None:
    async with feed(database, tmp_path, roles="feed") as (daemon, address):
        daemon.stages.jetstream_reader.window = EventWindow(max_bytes=1_000_000, max_seconds=60.0)
        async with events_of(address) as slow, events_of(address) as fast:
            await until(lambda: daemon.stages.jetstream_reader.window.end is not None)
            for number in range(0, EVENTS, 10):
                await write_events(db, number, 10)
                await take(fast, 10)
            messages, (code, _) = await slow.rest()
        error = messages.pop()
        assert (code, error["$type"], error["error"]) == (1008, "error", "ConsumerTooSlow")
        cursor = int(error["message"].rpartition("cursor=")[2])
        received = [message["payload"]["rkey"] for message in messages]
        assert 0 < len(received) < EVENTS
        async with events_of(address, ("cursor", cursor)) as again:
            received += [payload["rkey"] for payload in await take(again, EVENTS - len(received))]
        assert received == [f"{number:05}" for number in range(EVENTS)]


async def test_replay_of_which_the_rest_is_trimmed_ends_with_the_same_error(
    database: str, db: Database, tmp_path: Path
) -> None:
    await write_events(db)
    async with feed(database, tmp_path, roles="feed") as (daemon, address), events_of(address, ("cursor", 0)) as client:
        await take(client, 1)
        trimmed = await trim(daemon)
        messages, _ = await client.rest()
        assert (len(messages) < EVENTS, messages[-1]["error"]) == (True, "ConsumerTooSlow")
        cursor = messages[-1]["message"].rpartition("cursor=")[2]
        message = f"the oldest event has seq {trimmed + 1}"
        assert await refusal(address, f"cursor={cursor}") == (400, "CursorTooOld", message)


async def test_sync_comes_before_all_records_of_a_repo_and_not_before_differences(
    database: str, tmp_path: Path
) -> None:
    """A client that takes #sync as the removal of all records has exactly those of the repo."""
    async with feed(database, tmp_path) as (daemon, address):
        account = daemon.create_account("ada.test", records=0)
        await daemon.wait_until_equal()
        kinds = [("kinds", "sync"), ("kinds", "commit")]
        async with events_of(address, *kinds, ("cursor", 0)) as client:
            daemon.lose_commit(account)
            account.create(LIKE, post("found by the first resync"), rkey="a")
            await daemon.wait_until_equal()
            daemon.lose_commit(account)
            await daemon.wait_for_counter("desynchronized", above=1, reason="chain-break")
            await daemon.resync_until_equal(account)
            account.create(LIKE, post("the end"), rkey="b")
            received = list[dict[str, Any]]()
            while not received or described(received[-1]) != f"create {LIKE}/b":
                received += await take(client, 1)
        fragments = [payload["$type"].partition("#")[2] for payload in received]
        assert fragments == ["sync", *6 * ["commit"]]
        assert [payload.get("operation") for payload in received[1:]] == ["create"] * 6
        assert received[0]["sync"]["rev"] == received[1]["rev"]
