"""Bluesky's own client of tap, unchanged, gets everything from a daemon, in order, while both are restarted."""

import re
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from indexer.readers.tap.deliveries import RefusalLimits
from tests.daemon.running_daemon import POST, RunningDaemon, post, running_daemon
from tests.faulty_network import FaultyNetwork
from tests.feed_clients.link_records import encode, link
from tests.feed_clients.node_process import Line, needs_clients, node_process
from tests.readers.tap_client import wait_until_delivered
from tests.waiting import until

pytestmark = [pytest.mark.proof("clients"), needs_clients]
PASSWORD = "correct-horse"
THING = "com.example.thing"


def events(lines: Iterable[Line], kind: str = "record") -> list[Line]:
    return [line for line in lines if line.get("type") == kind]


def problems(lines: Iterable[Line]) -> list[Line]:
    return [line for line in lines if line.keys() & {"error", "failed", "ended"}]


@asynccontextmanager
async def served(
    database: str, directory: Path, network: FaultyNetwork, port: int = 0, **settings: Any
) -> AsyncIterator[tuple[RunningDaemon, str]]:
    """Run a daemon with its HTTP server; yield it with the URL. The server ends after the daemon, as in the program."""
    given = {"roles": "live,resync,feed", "http_bind": f"127.0.0.1:{port}", "admin_password": PASSWORD} | settings
    async with running_daemon(database, directory, network, **given) as daemon, daemon.stages.serve_http() as address:
        yield daemon, f"http://{address}"
        await daemon.stages.tap_feed.stop()


def final_texts(lines: Iterable[Line]) -> dict[str, dict[str, str]]:
    """Return what an app has stored after it processed the events: texts by DID and record key."""
    stored = defaultdict[str, dict[str, str]](dict)
    for event in events(lines):
        if event["action"] == "delete":
            stored[event["did"]].pop(event["rkey"], None)
        else:
            stored[event["did"]][event["rkey"]] = event["record"]["text"]
    return stored


async def test_tap_client_gets_all_events_in_order_through_restarts_of_both_sides(
    database: str, tmp_path: Path
) -> None:
    async with FaultyNetwork() as network:
        accounts = [network.create_account(f"a{number}.test") for number in range(5)]
        written = 0

        def write(count: int) -> None:
            nonlocal written
            for _ in range(count):
                account = accounts[written % len(accounts)]
                account.create(POST, post(written), rkey=f"{written:05}")
                if written % 7 == 0:
                    account.update(f"{POST}/{written:05}", post(f"changed {written}"))
                if written % 11 == 0:
                    account.delete(f"{POST}/{written:05}")
                written += 1

        lines: list[Line] = []
        write(40)
        port = 0
        async with served(database, tmp_path / "one", network) as (daemon, url):
            port = int(url.rpartition(":")[2])
            async with node_process("tap_indexer.mjs", url, PASSWORD) as client:
                await until(lambda: len(events(client.lines)) > 20, lambda: client.lines[-3:])
                write(40)
                await until(lambda: len(events(client.lines)) > 60, lambda: client.lines[-3:])
                client.kill()  # the client is killed while it processes events
            lines += client.lines  # only now all that it printed was read
            write(40)
            client_task = node_process("tap_indexer.mjs", url, PASSWORD)
            client = await client_task.__aenter__()
            await until(lambda: len(events(client.lines)) > 10, lambda: client.lines[-3:])
            write(40)
        try:
            write(40)  # while no daemon runs
            async with served(database, tmp_path / "two", network, port) as (daemon, _):
                write(40)
                await daemon.wait_for_cursor()
                await wait_until_delivered(daemon)
        finally:
            await client_task.__aexit__(None, None, None)
        lines += client.lines
        assert problems(lines) == []
        assert sum("reconnecting" in line for line in lines) > 0, "the connection was lost and came back"
        truth = {
            account.did: {
                path.partition("/")[2]: text
                for path, text in (
                    (f"{POST}/{number:05}", f"changed {number}" if number % 7 == 0 else str(number))
                    for number in range(written)
                    if accounts[number % len(accounts)] is account and number % 11
                )
            }
            for account in accounts
        }
        assert final_texts(lines) == truth
        for did in truth:
            firsts = list(dict.fromkeys(event["id"] for event in events(lines) if event["did"] == did))
            assert firsts == sorted(firsts), "repeated events do not count"


async def test_event_that_the_client_refuses_never_stops_others(database: str, tmp_path: Path) -> None:
    """A value with a CID of more than 128 characters is left out; what the handler refuses is set aside."""
    async with FaultyNetwork() as network, served(database, tmp_path, network) as (daemon, url):
        feed, db = daemon.stages, daemon.stages.db
        feed.channel.retry_seconds = 0.5
        account, other = network.create_account("ada.test"), network.create_account("bob.test")
        async with node_process("tap_indexer.mjs", url, PASSWORD, "refused") as client:
            (await feed.tap_feed.deliveries()).limits = RefusalLimits(attempts=3, seconds=0.0)
            account.create(THING, encode({"$type": THING, "v": link(b"x" * 76, function=0x13)}), rkey="link")
            account.create(POST, post("refused"), rkey="refused")
            account.create(POST, post("after"), rkey="after")
            while not any(event["rkey"] == "after" for event in events(client.lines)):
                before = len(events(client.lines))
                other.create(POST, post("other"))
                await until(lambda: len(events(client.lines)) > before, lambda: client.lines[-3:])  # noqa: B023
            await wait_until_delivered(daemon)
            of_account = [event for event in events(client.lines) if event["did"] == account.did]
            assert [(event["rkey"], "record" in event) for event in of_account] == [("link", False), ("after", True)]
            [error] = {line["error"] for line in problems(client.lines)}
            assert re.fullmatch(r"Failed to process event \d+: refused", error)
        assert [event.rkey for event in await db.feed.set_aside(None, 10)] == ["refused"]
        async with node_process("tap_indexer.mjs", url, PASSWORD) as client:
            await db.feed.send_again(None)
            await until(lambda: [event["rkey"] for event in events(client.lines)] == ["refused"])
        assert problems(client.lines) == []


async def test_client_gets_records_of_a_hidden_account_when_it_is_visible_again(database: str, tmp_path: Path) -> None:
    async with (
        FaultyNetwork() as network,
        served(database, tmp_path, network) as (daemon, url),
        node_process("tap_indexer.mjs", url, PASSWORD) as client,
    ):
        account = network.create_account("ada.test")
        account.create(POST, post("public"), rkey="public")
        await until(lambda: len(events(client.lines)) == 1)
        await daemon.execute("select atproto.request_takedown($1, true)", account.did)
        await until(lambda: [event["status"] for event in events(client.lines, "identity")] == ["takendown"])
        account.create(POST, post("hidden"), rkey="hidden")
        account.delete(f"{POST}/public")
        await until(lambda: events(client.lines)[-1]["action"] == "delete")
        await daemon.execute("select atproto.request_takedown($1, false)", account.did)
        await until(lambda: final_texts(client.lines)[account.did] == {"hidden": "hidden"}, lambda: client.lines)
        known = [line.get("rkey", line.get("status")) for line in client.lines]
        assert known == ["public", "takendown", "public", "active", "hidden"]
        assert problems(client.lines) == []


async def test_methods_of_the_tap_client_work(database: str, tmp_path: Path) -> None:
    async with (
        FaultyNetwork() as network,
        served(database, tmp_path, network, track="listed") as (daemon, url),
        node_process("tap_indexer.mjs", url, PASSWORD) as client,
    ):
        account = network.create_account("ada.test")
        account.create(POST, post("hello"), rkey="one")

        async def call(method: str, argument: object) -> Line:
            before = len(client.lines)
            client.send(method, argument)
            await until(lambda: any("method" in line for line in client.lines[before:]))
            return next(line for line in client.lines[before:] if "method" in line)

        assert await call("addRepos", [account.did]) == {"method": "addRepos", "result": None}
        await until(lambda: len(events(client.lines)) == 1, lambda: client.lines)
        [event] = events(client.lines)
        assert (event["live"], event["rkey"], event["record"]["text"]) == (False, "one", "hello")
        info = (await call("getRepoInfo", account.did))["result"]
        assert (info["did"], info["state"], info["rev"], info["records"]) == (account.did, "active", account.rev, 1)
        document = (await call("resolveDid", account.did))["result"]
        assert document["alsoKnownAs"] == ["at://ada.test"]
        refused = {"method": "addRepos", "failed": "Failed to add repos: Bad Request"}
        assert await call("addRepos", ["nonsense"]) == refused
        assert await call("removeRepos", [account.did]) == {"method": "removeRepos", "result": None}
        await until(lambda: [event["action"] for event in events(client.lines)] == ["create", "delete"])
        await wait_until_delivered(daemon)
        assert events(client.lines, "identity") == [], "an account that is not tracked has no state"
        unknown = {"method": "getRepoInfo", "failed": "Failed to get repo info: Not Found"}
        assert await call("getRepoInfo", account.did) == unknown
        assert problems(client.lines) == [refused, unknown]


async def test_webhook_handler_of_tap_gets_all_events_in_order_although_it_fails_at_first(
    database: str, tmp_path: Path
) -> None:
    async with FaultyNetwork() as network, node_process("tap_webhook.mjs", PASSWORD, "3") as webhook:
        await until(lambda: bool(webhook.lines))
        [ready] = webhook.lines
        account = network.create_account("ada.test")
        async with served(database, tmp_path / "one", network, webhook_url=ready["url"]):
            for number in range(10):
                account.create(POST, post(number), rkey=f"{number:03}")
            await until(lambda: len(events(webhook.lines)) >= 5, lambda: webhook.lines)
        account.deactivate()
        async with served(database, tmp_path / "two", network, webhook_url=ready["url"]) as (daemon, _):
            await daemon.wait_for_cursor()
            await wait_until_delivered(daemon)
            expected = [f"{number:03}" for number in range(10)]
            rkeys = list(dict.fromkeys(event["rkey"] for event in events(webhook.lines)))
            assert rkeys == expected[: len(rkeys)], "the others are hidden"
            account.activate()
            await until(lambda: len(events(webhook.lines, "identity")) == 2)
            await until(lambda: {event["rkey"] for event in events(webhook.lines)} == set(expected))
        identities = events(webhook.lines, "identity")
        assert [event["did"] for event in identities] == [account.did] * 2
        assert [(event["isActive"], event["status"]) for event in identities] == [
            (False, "deactivated"),
            (True, "active"),
        ]
        assert problems(webhook.lines) == []
