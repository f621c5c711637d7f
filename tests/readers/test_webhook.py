"""The webhook gets each event until it accepts it, and one event of a repo at a time."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog

from indexer.demo.local_repo import Write
from indexer.errors import UnavailableError
from indexer.net.http.host_limits import HostPauses
from indexer.readers.tap.deliveries import RefusalLimits
from indexer.reasons import FetchFailure
from indexer.telemetry.conditions import WEBHOOK_FAILING
from tests.daemon.running_daemon import POST, RunningDaemon, post, running_daemon
from tests.faulty_network import FaultyNetwork
from tests.quick_tuning import QUICK
from tests.readers.tap_client import feed_client, tap_daemon, wait_until_delivered
from tests.readers.webhook_server import Event, WebhookServer
from tests.waiting import until

pytestmark = pytest.mark.slow
HOST_PAUSED, THROTTLED = FetchFailure.HOST_PAUSED, FetchFailure.THROTTLED


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
            assert (len(server.accepted), server.overlaps, server.arrays) == (6, set(), {False})
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


async def test_event_is_not_refused_if_the_host_of_the_webhook_gets_no_requests(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with WebhookServer() as server, tap_daemon(database, tmp_path, webhook_url=server.url) as daemon:
        client = daemon.stages.webhook_client
        assert client is not None
        send = client.post
        pauses = [UnavailableError(reason, retry_after=0.01) for reason in (HOST_PAUSED, THROTTLED)] * 3

        async def send_after_pauses(*arguments: Any, **options: Any) -> int:
            if pauses:
                raise pauses.pop()
            return await send(*arguments, **options)

        monkeypatch.setattr(client, "post", send_after_pauses)
        (await daemon.stages.tap_feed.deliveries()).limits = RefusalLimits(attempts=1, seconds=0.0)
        with structlog.testing.capture_logs() as lines:
            account = daemon.create_account("ada.test", records=2)
            await until(lambda: rkeys(server.accepted, account.did) == ["000", "001"])
        assert (pauses, daemon.stages.tap_feed.set_aside) == ([], 0)
        assert WEBHOOK_FAILING.name not in [line.get("condition") for line in lines]


async def test_array_is_in_order_within_each_repo_and_acknowledged_as_one(database: str, tmp_path: Path) -> None:
    """After a crash, only the events of arrays that were not acknowledged come again."""
    expected = [f"{number:03}" for number in range(30)]
    settings: dict[str, Any] = {"roles": "live,resync,feed", "webhook_batch": 20}
    async with FaultyNetwork() as network, WebhookServer() as first, WebhookServer() as second:
        accounts = [network.create_account(f"a{number}.test") for number in range(3)]
        dids = [account.did for account in accounts]
        async with running_daemon(database, tmp_path, network, webhook_url=first.url, **settings) as daemon:
            for rkey in expected[:10]:
                for account in accounts:
                    account.create(POST, post(rkey), rkey=rkey)
            await until(lambda: len(first.accepted) == 30)
            await wait_until_delivered(daemon)
            first.answering.clear()
            for account in accounts:
                account.apply_writes([Write.create(f"{POST}/{rkey}", post(rkey)) for rkey in expected[10:]])
            await until(lambda: sum(map(len, first.requests)) == 90)
        assert [rkeys(first.accepted, did) for did in dids] == [expected[:10]] * 3
        async with running_daemon(database, tmp_path, network, webhook_url=second.url, **settings) as daemon:
            await until(lambda: len(second.accepted) == 60, lambda: len(second.accepted))
            await wait_until_delivered(daemon)
        assert [rkeys(second.accepted, did) for did in dids] == [expected[10:]] * 3
        assert [len(events) for events in second.requests] == [20, 20, 20]
        assert first.overlaps | second.overlaps == set()


async def test_event_that_is_refused_in_an_array_comes_alone_until_it_is_set_aside(
    database: str, tmp_path: Path
) -> None:
    """All events of a refused array come again, in arrays of one."""
    async with (
        WebhookServer() as server,
        tap_daemon(database, tmp_path, webhook_url=server.url, webhook_batch=100) as daemon,
    ):
        retry_soon(daemon)
        feed = daemon.stages.tap_feed
        deliveries = await feed.deliveries()
        deliveries.limits = RefusalLimits(attempts=2, seconds=0.0)
        server.answering.clear()
        accounts = [daemon.create_account(f"a{number}.test", records=10) for number in range(4)]
        refused = accounts[2].did, "004"
        server.status_of = lambda event: 422 if (event["record"]["did"], event["record"]["rkey"]) == refused else 200
        await until(lambda: len(deliveries.window) == 40)
        server.answering.set()
        await until(lambda: feed.set_aside == 1)
        await until(lambda: len(server.accepted) == 39, lambda: len(server.accepted))
        await wait_until_delivered(daemon)
        with_refused = [events for events in server.requests if refused in map(path, events)]
        assert [len(events) > 1 for events in with_refused] == [True] + [False] * (len(with_refused) - 1)
        again = [events for events in server.requests if path(events[0]) in map(path, with_refused[0])]
        assert [len(events) for events in again[1:]] == [1] * (len(with_refused) + len(with_refused[0]) - 2)
        for account in accounts:
            expected = [f"{number:03}" for number in range(10) if (account.did, f"{number:03}") != refused]
            assert rkeys(server.accepted, account.did) == expected
        assert server.arrays == {True}
        [row] = await daemon.stages.db.feed.set_aside(None, 10)
        assert (row.did, row.rkey) == refused


def path(event: Event) -> tuple[str, str]:
    return event["record"]["did"], event["record"]["rkey"]


async def test_array_has_a_megabyte_at_most_or_one_event(database: str, tmp_path: Path) -> None:
    texts = {"000": "x" * 1_010_000} | {f"{number:03}": f"{number}" * 300_000 for number in range(1, 6)}
    async with (
        WebhookServer() as server,
        tap_daemon(database, tmp_path, webhook_url=server.url, webhook_batch=100) as daemon,
    ):
        deliveries = await daemon.stages.tap_feed.deliveries()
        server.answering.clear()
        account = daemon.create_account("ada.test", records=0)
        for rkey, text in texts.items():
            account.create(POST, post(text), rkey=rkey)
        await until(lambda: len(deliveries.window) == len(texts))
        server.answering.set()
        await until(lambda: len(server.accepted) == len(texts), lambda: len(server.accepted))
        assert [[event["record"]["rkey"] for event in events] for events in server.requests] == [
            ["000"],
            ["001", "002", "003"],
            ["004", "005"],
        ]
        assert all(event["record"]["record"]["text"] == texts[event["record"]["rkey"]] for event in server.accepted)
