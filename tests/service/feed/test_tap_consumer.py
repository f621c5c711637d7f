"""When the consumer of the feed for clients of tap is registered, and what its first client gets."""

from functools import partial
from pathlib import Path

import aiohttp
import pytest
import structlog

from indexer import daemon_feeds
from indexer.monitoring.conditions import FEED_EVENT_REFUSED
from indexer.outbound import host_limits
from indexer.service.feed import tap_feed, webhook
from indexer.service.feed.tap_channel import Channel
from tests.daemon.running_daemon import POST, RunningDaemon, post
from tests.service.feed.test_tap_feed import Event, channel, summary, tap_daemon, wait_until_delivered
from tests.service.feed.test_tap_routes import feed_client
from tests.service.feed.webhook_server import WebhookServer
from tests.waiting import until

pytestmark = pytest.mark.slow


async def consumers(daemon: RunningDaemon) -> list[str]:
    return [row["name"] for row in await daemon.execute("select name from atproto.readers")]


def gauge(daemon: RunningDaemon, name: str, **labels: str) -> float:
    value = daemon.stages.metrics.registry.get_sample_value(f"indexer_feed_{name}", labels)
    assert value is not None
    return value


async def trim(daemon: RunningDaemon) -> None:
    """Make the log one whose present changes have been trimmed."""
    await daemon.execute("select setval('indexer.trimmed_seq', atproto.latest_seq())")


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


async def test_change_log_waits_for_no_consumer_before_the_first_client_connects(database: str, tmp_path: Path) -> None:
    async with tap_daemon(database, tmp_path) as daemon, feed_client(daemon) as session:
        daemon.create_account("ada.test", records=2)
        async with session.ws_connect("/subscribe?cursor=0") as jetstream:
            for _ in range(2):
                await jetstream.receive_str(timeout=60)
        assert await consumers(daemon) == []
        async with channel(session) as client:
            assert [summary(event)[1] for event in await client.process(2)] == ["000", "001"]
            assert await consumers(daemon) == ["tap-feed"]
            assert gauge(daemon, "clients", kind="tap") == 1
            await wait_until_delivered(daemon)
        assert daemon.counter("feed_events", kind="tap") == 2
        await until(lambda: daemon.counter("feed_disconnections", kind="tap", reason="client") == 1)
        assert await consumers(daemon) == ["tap-feed"], "from now on, the log waits for the clients"


async def test_webhook_registers_the_consumer(database: str, tmp_path: Path) -> None:
    async with WebhookServer() as server, tap_daemon(database, tmp_path, webhook_url=server.url) as daemon:

        async def registered() -> bool:
            return await consumers(daemon) == ["tap-feed"]

        await until(registered)


async def test_first_client_gets_all_stored_records_although_the_log_was_trimmed(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session of the feed is lost in the middle of the snapshot, and records change meanwhile."""
    monkeypatch.setattr(tap_feed, "MAX_UNACKNOWLEDGED", 8)  # so that the snapshot has several pages
    async with tap_daemon(database, tmp_path) as daemon, feed_client(daemon) as session:
        accounts = [daemon.create_account(f"a{number}.test", records=5) for number in range(3)]
        await daemon.wait_until_equal()
        await trim(daemon)
        async with channel(session) as client:
            received = await client.process(7)
            accounts[0].create(POST, post("new"), rkey="new")
            accounts[1].delete(f"{POST}/000")
            accounts[2].update(f"{POST}/001", post("changed"))
            ended = await daemon.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'indexer feed'"
            )
            assert len(ended) == 1
            while (await client.websocket.receive(timeout=60)).type is aiohttp.WSMsgType.TEXT:
                pass
        async with channel(session) as client:
            while folded(received) != {account.did: set(account.records) for account in accounts}:
                received += await client.process(1)
            changed = (accounts[2].did, "update", "001", "changed")
            while changed not in {
                (event["record"]["did"], *(event["record"][name] for name in ("action", "rkey")), summary(event)[3])
                for event in received
                if event["type"] == "record" and event["record"]["live"]
            }:
                received += await client.process(1)
            await wait_until_delivered(daemon)
        identities = {event["identity"]["did"] for event in received if event["type"] == "identity"}
        assert identities == {account.did for account in accounts}

        async def completed() -> bool:
            rows = await daemon.execute("select snapshot_did from indexer.feed_delivery")
            return [row["snapshot_did"] for row in rows] == [None]

        await until(completed)


async def test_event_that_a_client_never_acknowledges_is_reported_and_delays_only_its_own_repo(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_feeds, "Channel", partial(Channel, retry_seconds=0.2))
    async with tap_daemon(database, tmp_path) as daemon, feed_client(daemon) as session, channel(session) as client:
        refusing = daemon.create_account("refusing.test", records=2)
        other = daemon.create_account("other.test", records=0)
        conditions, uri = daemon.stages.conditions, f"at://{refusing.did}/{POST}/000"
        accepted = list[str]()
        with structlog.testing.capture_logs() as lines:
            number = 0
            while not conditions.is_active(FEED_EVENT_REFUSED, uri):
                other.create(POST, post("other"), rkey=f"{number:03}")
                while (event := await client.receive())["record"]["did"] == refusing.did:
                    assert event["record"]["rkey"] == "000", "later events of the repo wait"
                await client.acknowledge(event)
                accepted.append(event["record"]["rkey"])
                number += 1
        assert accepted == [f"{rkey:03}" for rkey in range(number)]
        [line] = [line for line in lines if line["event"] == "condition.began"]
        assert (line["condition"], line["subject"]) == ("feed-event-refused", uri)
        assert f"(create of {uri}), which was sent 3 times: no acknowledgement within 0.2 seconds" in line["message"]
        assert gauge(daemon, "refused_events") == 1
        assert 0 < gauge(daemon, "oldest_unacknowledged_seconds") < 600
        [refused] = await daemon.stages.store.refused_events()
        assert (refused.uri, refused.action) == (uri, "create")
        assert refused.attempts >= 3
        await client.acknowledge({"id": refused.id})
        while (event := await client.receive())["record"]["rkey"] != "001":
            pass
        await client.acknowledge(event)
        await wait_until_delivered(daemon)
        await until(lambda: not conditions.is_active(FEED_EVENT_REFUSED, uri))
        assert await daemon.stages.store.refused_events() == []
        assert (gauge(daemon, "refused_events"), gauge(daemon, "oldest_unacknowledged_seconds")) == (0, 0)


async def test_connection_that_always_ends_at_one_event_is_reported(database: str, tmp_path: Path) -> None:
    async with tap_daemon(database, tmp_path) as daemon, feed_client(daemon) as session:
        crashing = daemon.create_account("crashing.test", records=1)
        other = daemon.create_account("other.test", records=0)
        conditions, uri = daemon.stages.conditions, f"at://{crashing.did}/{POST}/000"
        number = 0
        while not conditions.is_active(FEED_EVENT_REFUSED, uri):
            other.create(POST, post("other"), rkey=f"{number:03}")
            number += 1
            async with channel(session) as client:
                events = [await client.receive()]
                while not {crashing.did, other.did} <= {event["record"]["did"] for event in events}:
                    events.append(await client.receive())
                for event in events:
                    if event["record"]["did"] == other.did:
                        await client.acknowledge(event)
            assert number < 20
        [refused] = await daemon.stages.store.refused_events()
        assert refused.failure == "the connection ended before its acknowledgement"


async def test_event_that_a_webhook_refuses_forever_is_reported_apart_from_a_webhook_that_fails(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook, "FIRST_RETRY_SECONDS", 0.05)
    monkeypatch.setattr(webhook, "MAX_RETRY_SECONDS", 0.2)
    monkeypatch.setattr(host_limits, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(host_limits, "MAX_PAUSE_CONFIGURED", 0.2)
    async with WebhookServer() as server, tap_daemon(database, tmp_path, webhook_url=server.url) as daemon:
        server.status_of = lambda _event: 500
        refusing = daemon.create_account("refusing.test", records=2)
        other = daemon.create_account("other.test", records=2)
        await until(lambda: server.attempts >= 10)
        assert daemon.stages.feeds.tap_feed.refused == [], "all events fail: no event is to blame"
        server.status_of = lambda event: 422 if event["record"]["did"] == refusing.did else 200
        uri = f"at://{refusing.did}/{POST}/000"
        feed = daemon.stages.feeds.tap_feed
        await until(lambda: [(event.uri, event.failure) for event in feed.refused] == [(uri, "status 422")])
        assert {event["record"]["did"] for event in server.accepted} == {other.did}
        server.status_of = lambda _event: 200
        await until(lambda: len(server.accepted) == 4)
        await until(lambda: daemon.stages.feeds.tap_feed.refused == [])
