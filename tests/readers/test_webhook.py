"""The webhook gets each event until it accepts it, and one event of a repo at a time."""

from dataclasses import replace
from pathlib import Path

import pytest
import structlog

from indexer.demo.local_repo import Write
from indexer.net.http.host_limits import HostPauses
from indexer.readers.tap.deliveries import RefusalLimits
from indexer.telemetry.conditions import WEBHOOK_FAILING
from tests.daemon.running_daemon import POST, RunningDaemon, post
from tests.quick_tuning import QUICK
from tests.readers.tap_client import feed_client, tap_daemon, wait_until_delivered
from tests.readers.webhook_server import Event, WebhookServer
from tests.waiting import until

pytestmark = pytest.mark.slow


def retry_soon(daemon: RunningDaemon) -> None:
    webhook = daemon.stages.webhook
    assert webhook is not None
    webhook.first_retry, webhook.max_retry = 0.05, 0.2


def rkeys(events: list[Event], did: str) -> list[str]:
    return [event["record"]["rkey"] for event in events if event["record"]["did"] == did]


async def test_event_is_sent_again_until_it_is_accepted_and_delays_only_its_own_repo(
    database: str, tmp_path: Path
) -> None:
    """Meanwhile, the channel is closed."""
    async with WebhookServer() as server:
        settings = {"webhook_url": server.url, "admin_password": "correct-horse"}
        async with tap_daemon(database, tmp_path, **settings) as daemon:
            retry_soon(daemon)
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
            assert line["message"].endswith("status 404; each is sent again, and later events of its repo wait")
            assert failing.did in line["message"]
            assert "/webhook" not in line["message"]
            server.status_of = lambda _event: 200
            await until(lambda: rkeys(server.accepted, failing.did) == ["000", "001", "002"])
            await wait_until_delivered(daemon)
            assert (len(server.accepted), server.overlaps) == (6, set())
            [credentials] = server.credentials
            assert (credentials or "").startswith("Basic ")
            credentials_of_a_client = {"Authorization": credentials or ""}
            async with (
                feed_client(daemon) as session,
                session.get("/channel", headers=credentials_of_a_client) as response,
            ):
                assert response.status == 400
                assert "webhook mode" in (await response.json())["message"]


async def test_repos_take_turns_at_a_slow_webhook(database: str, tmp_path: Path) -> None:
    """One repo has more changes than the window, and none of them is refused."""
    async with WebhookServer() as server, tap_daemon(database, tmp_path, webhook_url=server.url) as daemon:
        daemon.stages.tap_feed.max_unacknowledged = 100
        server.answering.clear()
        filling = daemon.create_account("filling.test", records=0)
        other = daemon.create_account("other.test", records=0)
        filling.apply_writes([Write.create(f"{POST}/{number:03}", post(number)) for number in range(120)])
        other.create(POST, post("other"), rkey="other")
        await until(lambda: server.attempts == 2)
        server.answering.set()
        await until(lambda: len(server.accepted) == 121, lambda: len(server.accepted))
        assert rkeys(server.accepted[:2], other.did) == ["other"], "before the second event of the other repo"
        assert rkeys(server.accepted, filling.did) == [f"{number:03}" for number in range(120)]
        await wait_until_delivered(daemon)


async def test_event_that_a_webhook_refuses_forever_is_reported_apart_from_a_webhook_that_fails(
    database: str, tmp_path: Path
) -> None:
    """Nothing is lost, and the memory is bounded."""
    tuning = replace(QUICK, host_pauses=HostPauses(first=0.05, max_configured=0.2))
    async with (
        WebhookServer() as server,
        tap_daemon(database, tmp_path, webhook_url=server.url, tuning=tuning) as daemon,
    ):
        retry_soon(daemon)
        feed = daemon.stages.tap_feed
        feed.max_unacknowledged = 20
        server.status_of = lambda _event: 500
        refusing, *others = [daemon.create_account(f"a{number}.test", records=10) for number in range(4)]
        deliveries = await feed.deliveries()
        await until(lambda: server.attempts >= 20)
        assert len(deliveries.window) <= 20
        assert feed.set_aside == 0, "all events fail: no event is to blame"
        server.status_of = lambda event: 422 if event["record"]["did"] == refusing.did else 200
        await until(lambda: len(server.accepted) == 30)
        assert {event["record"]["did"] for event in server.accepted} <= {account.did for account in others}
        deliveries.limits = RefusalLimits(attempts=2, seconds=0.0)
        first = refusing.did, "000"
        server.status_of = lambda event: 422 if (event["record"]["did"], event["record"]["rkey"]) == first else 200
        await until(lambda: feed.set_aside > 0)
        await until(lambda: rkeys(server.accepted, refusing.did)[:1] == ["001"])
        [row] = await daemon.stages.db.feed.set_aside(refusing.did, 10)
        assert (row.rkey, row.failure) == ("000", "status 422")
        server.status_of = lambda _event: 200
        await daemon.stages.db.feed.send_again(None)
        await until(lambda: len(server.accepted) == 40, lambda: len(server.accepted))
        await until(lambda: feed.set_aside == 0)
        for account in (refusing, *others):
            expected = [f"{number:03}" for number in range(10)]
            assert sorted(rkeys(server.accepted, account.did)) == expected
            assert [rkey for rkey in rkeys(server.accepted, account.did) if rkey != "000"] == expected[1:]
