"""The webhook gets each event until it accepts it, and one event of a repo at a time."""

from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import structlog

from indexer import daemon as composition
from indexer.localnet.local_network import LocalNetwork
from indexer.monitoring.conditions import WEBHOOK_FAILING, Conditions
from indexer.outbound import host_limits
from indexer.service.feed import tap_feed, webhook
from tests.daemon.running_daemon import POST, post
from tests.daemon_process import daemon_process, log_tail
from tests.service.feed.test_tap_feed import tap_daemon, wait_until_delivered
from tests.service.feed.test_tap_routes import feed_client
from tests.service.feed.webhook_server import Event, WebhookServer
from tests.waiting import until

pytestmark = pytest.mark.slow
PASSWORD = "correct-horse"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "FIRST_RETRY_SECONDS", 0.05)
    monkeypatch.setattr(webhook, "MAX_RETRY_SECONDS", 0.2)
    monkeypatch.setattr(host_limits, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(host_limits, "MAX_PAUSE_CONFIGURED", 0.2)


def more_requests(server: WebhookServer, before: int) -> bool:
    return server.attempts > before


def rkeys(events: list[Event], did: str) -> list[str]:
    return [event["record"]["rkey"] for event in events if event["record"]["did"] == did]


async def test_event_is_sent_again_until_it_is_accepted_and_delays_only_its_own_repo(
    database: str, tmp_path: Path
) -> None:
    async with WebhookServer() as server:
        settings = {"webhook_url": server.url, "admin_password": PASSWORD}
        async with tap_daemon(database, tmp_path, **settings) as daemon:
            failing = daemon.create_account("failing.test", records=0)
            other = daemon.create_account("other.test", records=0)
            server.status_of = lambda event: 404 if event["record"]["did"] == failing.did else 200
            with structlog.testing.capture_logs() as lines:
                for number in range(3):
                    failing.create(POST, post(number), rkey=f"{number:03}")
                    other.create(POST, post(number), rkey=f"{number:03}")
                await until(lambda: rkeys(server.accepted, other.did) == ["000", "001", "002"])
                before = server.attempts
                await until(lambda: server.attempts >= before + 3)
            [line] = [line for line in lines if line.get("condition") == WEBHOOK_FAILING.name]
            assert line["event"] == "condition.began"
            assert line["message"].endswith("status 404; it is sent again, and later events of this repo wait")
            assert failing.did in line["message"]
            assert "/webhook" not in line["message"]
            server.status_of = lambda _event: 200
            await until(lambda: rkeys(server.accepted, failing.did) == ["000", "001", "002"])
            await wait_until_delivered(daemon)
            assert (len(server.accepted), server.overlaps) == (6, set())
            [credentials] = server.credentials
            assert credentials is not None
            assert credentials.startswith("Basic ")


async def test_nothing_is_lost_and_memory_is_bounded_while_the_webhook_fails_for_long(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tap_feed, "MAX_UNACKNOWLEDGED", 20)
    async with WebhookServer() as server:
        server.status_of = lambda _event: 500
        async with tap_daemon(database, tmp_path, webhook_url=server.url) as daemon:
            accounts = [daemon.create_account(f"a{number}.test", records=10) for number in range(5)]
            deliveries = await daemon.stages.feeds.tap_feed.deliveries()
            await until(lambda: server.attempts >= 20)
            assert len(deliveries.window) <= 20
            server.status_of = lambda _event: 200
            await daemon.wait_until_equal()
            await until(lambda: len(server.accepted) >= 50, lambda: len(server.accepted))
            await wait_until_delivered(daemon)
            assert Counter(event["record"]["did"] for event in server.accepted) == {
                account.did: 10 for account in accounts
            }
            for account in accounts:
                assert rkeys(server.accepted, account.did) == [f"{number:03}" for number in range(10)]


async def test_hour_of_failures_is_one_condition_and_nothing_is_lost(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the conditions is fast: between two failures, two minutes pass."""
    now = 0.0
    monkeypatch.setattr(composition, "Conditions", lambda: Conditions(lambda: now))
    async with WebhookServer() as server:
        server.status_of = lambda _event: 500
        async with tap_daemon(database, tmp_path, webhook_url=server.url) as daemon:
            conditions = daemon.stages.conditions
            with structlog.testing.capture_logs() as lines:
                accounts = [daemon.create_account(f"a{number}.test", records=3) for number in range(3)]
                for _ in range(30):
                    await until(partial(more_requests, server, server.attempts))
                    now += 120.0
                    conditions.update()
                assert conditions.is_active(WEBHOOK_FAILING)
                server.status_of = lambda _event: 200
                await until(lambda: len(server.accepted) >= 9)
                await wait_until_delivered(daemon)
                now += 301.0
                conditions.update()
            reported = [line for line in lines if "condition" in line and line["condition"] == WEBHOOK_FAILING.name]
            assert [line["event"] for line in reported] == [
                "condition.began",
                *["condition.continues"] * (len(reported) - 2),
                "condition.ended",
            ]
            assert len(reported) <= 7, "after 1, 3, 7, 15, 31 minutes"
            assert "did not accept event" in reported[0]["message"]
            assert "status 500; it is sent again, and later events of this repo wait" in reported[0]["message"]
            for account in accounts:
                assert rkeys(server.accepted, account.did) == ["000", "001", "002"]


async def test_restart_sends_the_events_again_that_were_not_accepted(database: str, tmp_path: Path) -> None:
    async with WebhookServer() as server:
        server.status_of = lambda event: 200 if event["record"]["rkey"] == "000" else 500
        async with tap_daemon(database, tmp_path, webhook_url=server.url) as daemon:
            account = daemon.create_account("ada.test", records=3)
            await until(lambda: server.attempts >= 3)
            network = daemon.network
            await daemon.stages.feeds.tap_feed.stop()
            server.status_of = lambda _event: 200
            async with tap_daemon(
                database, tmp_path / "two", network=network, webhook_url=server.url, shard="0/2"
            ) as two:
                await until(lambda: len(server.accepted) >= 3)
                await wait_until_delivered(two)
        assert rkeys(server.accepted, account.did) == ["000", "001", "002"]


async def test_channel_is_closed_if_a_webhook_gets_the_events(database: str, tmp_path: Path) -> None:
    async with (
        WebhookServer() as server,
        tap_daemon(database, tmp_path, webhook_url=server.url) as daemon,
        feed_client(daemon) as session,
        session.get("/channel") as response,
    ):
        assert response.status == 400
        assert "webhook mode" in (await response.json())["message"]


async def test_daemon_killed_repeatedly_delivers_every_event_in_the_order_of_its_repo(
    database: str, tmp_path: Path
) -> None:
    kills, batch = 4, 30
    async with WebhookServer() as server, LocalNetwork() as network:
        accounts = [network.create_account(f"a{number}.test") for number in range(5)]
        settings = {"roles": "live,resync,feed", "webhook_url": server.url}
        for kill in range(kills + 1):
            async with daemon_process(network, database, tmp_path, **settings):
                for number in range(kill * batch, (kill + 1) * batch):
                    accounts[number % len(accounts)].create(POST, post(number), rkey=f"{number:05}")
                # Killed in the middle of its deliveries, except the last one.
                wanted = (kill + 1) * batch if kill == kills else kill * batch + batch // 3
                accepted = set[int]()

                def enough(wanted: int = wanted, accepted: set[int] = accepted) -> bool:
                    accepted.update(int(event["record"]["rkey"]) for event in server.accepted)
                    return len(accepted) >= wanted

                await until(enough, lambda: log_tail(tmp_path))
        total = (kills + 1) * batch
        for index, account in enumerate(accounts):
            first = list(dict.fromkeys(rkeys(server.accepted, account.did)))
            assert first == [f"{number:05}" for number in range(index, total, len(accounts))]
