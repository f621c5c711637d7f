"""A daemon whose only stream is a Jetstream: it ends equal to the network, and believes nothing that it is told."""

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from time import time
from typing import Any

import pytest

from indexer.atproto.syntax import tid_of
from indexer.cli.demo import compare
from indexer.demo.local_pds import GET_BLOCKS, GET_RECORD, GET_REPO
from indexer.demo.local_plc import did_of
from indexer.demo.local_repo import Write
from indexer.live.hint_reader import OVERLAP_MICROS
from indexer.sync.hints import JETSTREAM
from tests.daemon.health_checks import health_checks
from tests.daemon.running_daemon import LIKE, POST, FilteredNetwork, RunningDaemon, running_daemon
from tests.database_checks import assert_change_log_consistent, stored_seq
from tests.database_server import DatabaseServer
from tests.faulty_network import FaultyAccount
from tests.local_jetstream import LocalJetstream, Message, honest, local_jetstream
from tests.quick_tuning import QUICK
from tests.readers.jetstream_client import feed
from tests.waiting import until

pytestmark = pytest.mark.slow

TUNING = replace(QUICK, writer=replace(QUICK.writer, idle_after=0.1))
HOUR_MICROS = 3_600_000_000


@asynccontextmanager
async def followed(
    database: str, directory: Path, network: FilteredNetwork, jetstream: LocalJetstream, **settings: Any
) -> AsyncIterator[RunningDaemon]:
    """Run a daemon that follows a Jetstream, once it is connected."""
    subscriptions = len(jetstream.queries)
    settings = {"collections": LIKE, "sparse_resync": "always", "resync_source": "pds"} | settings
    async with running_daemon(
        database, directory, network, tuning=TUNING, upstream="jetstream", jetstreams=jetstream.ws_url, **settings
    ) as daemon:
        await until(lambda: len(jetstream.queries) > subscriptions)
        yield daemon


async def wait_until_equal(daemon: RunningDaemon) -> None:
    differences = ["not compared"]

    async def equal() -> bool:
        nonlocal differences
        differences = await compare(daemon.network, daemon.db)
        return not differences

    await until(equal, lambda: (differences[:5], daemon.stages.status.document()))


def like(account: FaultyAccount, number: object = 0) -> str:
    return account.create(LIKE, {"$type": LIKE, "number": str(number)})


def micros() -> int:
    return int(time() * 1_000_000)


def requests(daemon: RunningDaemon) -> int:
    """Return the number of requests to the hosts and the directory."""
    network = daemon.network
    return sum(server.requests.total() for server in [*network.pdses, network.plc, network.relay])


async def test_hints_lead_to_the_records_of_the_network(database: str, tmp_path: Path) -> None:
    """At once, however often an account writes: a true hint costs no back-off. What they bring counts as live."""
    async with (
        FilteredNetwork(collections=[LIKE]) as network,
        local_jetstream(network) as jetstream,
        followed(database, tmp_path, network, jetstream) as daemon,
        health_checks(daemon) as health,
    ):
        account, other = network.create_account("ada.test"), network.create_account("bob.test")
        path = like(account)
        account.create(POST, {"$type": POST})
        like(other)
        await wait_until_equal(daemon)
        first = {row["rkey"] for row in await daemon.record_rows(account)}
        network.plc.requests.clear()
        network.pdses[0].requests.clear()
        for number in range(5):
            like(account, number)
            await wait_until_equal(daemon)
        assert network.pdses[0].requests[GET_RECORD] >= 5
        blocks = network.pdses[0].requests[GET_BLOCKS]  # a comparison may come before the hint, and knows no path
        assert blocks < 5, "the proof of the hinted path has the record"
        assert not network.plc.requests
        account.apply_writes([Write.update(path, {"$type": LIKE, "new": True}), Write.create(f"{LIKE}/b", {})])
        await wait_until_equal(daemon)
        account.delete(path)
        await wait_until_equal(daemon)
        other.deactivate()
        account.create(POST, {"$type": POST})
        like(account, "last")
        await until(lambda: daemon.counter("events", kind="account", outcome="applied") > 0)

        async def is_current() -> bool:
            row = await daemon.repo_row(account)
            state = row["sync_status"], row["rev"], row["attempts"], row["latest_verified_rev"]
            return bool(state == ("synchronized", account.rev, 0, None))

        await until(is_current)
        changes = await daemon.execute(
            "select rkey, action, live from atproto.changes where did = $1 and collection = $2 order by seq",
            account.did, LIKE,
        )  # fmt: skip
        assert {(change["rkey"] in first and change["action"] == "create", change["live"]) for change in changes} == {
            (True, False), (False, True)
        }  # fmt: skip
        assert daemon.counter("record_changes", action="delete", live="true") == 1
        assert sum(pds.requests[GET_REPO] for pds in network.pdses) == 0
        assert jetstream.queries == [([LIKE], None)]
        assert all("lag" not in str(reason) for reason in (await health.get("/readyz"))[1].get("reasons", ()))
        await assert_change_log_consistent(database)


async def test_restart_resumes_a_little_before_the_cursor(database: str, tmp_path: Path) -> None:
    """Also with a Jetstream whose clock is wrong: the cursor is never in the future."""
    async with FilteredNetwork(collections=[LIKE]) as network, local_jetstream(network) as jetstream:

        def ahead(event: dict[str, Any]) -> Iterable[dict[str, Any]]:
            yield event | {"time_us": 2**62}

        async with followed(database, tmp_path, network, jetstream) as daemon:
            account = network.create_account("ada.test")
            like(account)
            await wait_until_equal(daemon)
            jetstream.rewrite = ahead
            like(account)
            await wait_until_equal(daemon)
            stored = await stored_seq(daemon.db, JETSTREAM)
            assert stored is not None
            assert stored <= micros()
        jetstream.rewrite = honest
        like(account, "while it was stopped")
        async with followed(database, tmp_path, network, jetstream) as daemon:
            assert jetstream.queries[-1] == ([LIKE], stored - OVERLAP_MICROS)
            await wait_until_equal(daemon)
            await until(lambda: daemon.counter("events", kind="commit", outcome="replayed") > 0)


async def test_change_of_the_scope_changes_the_filter(database: str, tmp_path: Path) -> None:
    """With all collections, no hints are followed, and the readiness check says so."""
    async with (
        FilteredNetwork(collections=[LIKE, POST]) as network,
        local_jetstream(network) as jetstream,
        followed(database, tmp_path, network, jetstream) as daemon,
        health_checks(daemon) as health,
    ):
        account = network.create_account("ada.test")
        like(account)
        account.create(POST, {"$type": POST})
        await until(lambda: daemon.counter("resync", result="synchronized") > 0)
        await daemon.db.scope.change(collections=[LIKE, POST])
        await until(lambda: len(jetstream.queries) > 1)
        wanted, cursor = jetstream.queries[1]
        assert wanted == [LIKE, POST]
        assert cursor is not None
        account.create(POST, {"$type": POST, "text": "now wanted"})
        await wait_until_equal(daemon)
        await daemon.db.scope.change(collections=["*"])
        reason = await health.wait_for_reason("the scope has all collections")
        assert reason["code"] == "stream-error"
        await daemon.db.scope.change(collections=[LIKE, "app.bsky.feed.*"])
        await until(lambda: len(jetstream.queries) > 2)
        assert set(jetstream.queries[2][0]) == {LIKE, "app.bsky.feed.*"}
        like(account, "followed again")
        await wait_until_equal(daemon)


async def test_jetstream_that_is_gone_is_named_and_what_it_sent_meanwhile_is_followed(
    database: str, tmp_path: Path
) -> None:
    async with (
        FilteredNetwork(collections=[LIKE]) as network,
        local_jetstream(network) as jetstream,
        followed(database, tmp_path, network, jetstream) as daemon,
        health_checks(daemon) as health,
    ):
        account = network.create_account("ada.test")
        like(account)
        await wait_until_equal(daemon)
        await jetstream.stop()
        reason = await health.wait_for_reason("no Jetstream is connected")
        assert reason["code"] == "relay-disconnected"
        like(account, "missed")
        await jetstream.start()
        await wait_until_equal(daemon)


def lies(network: FilteredNetwork, random: Random) -> Callable[[dict[str, Any]], Iterable[Message | dict[str, Any]]]:
    """Return a function that mixes each true event with lies, and that omits some, repeats some, and delays some."""
    delayed: list[dict[str, Any]] = []
    numbers = count()

    garbage: list[Message] = [
        b"\x81\x00\xff",
        b"{",
        "",
        "null",
        "[" * 5_000,
        '{"did":"did:plc:x","x":"' + "y" * 3_000_000,
    ]
    odd: list[Any] = [None, 7, [], "x" * 5_000]

    def invented() -> Iterable[Message | dict[str, Any]]:
        dids = [*network.accounts, did_of(f"nobody{next(numbers)}.test"), "did:web:nobody.test", "did:plc:x"]
        did = random.choice(dids)
        rev = tid_of(random.choice([micros(), micros() - HOUR_MICROS, micros() + HOUR_MICROS, 2**54 - 1, 1]))
        commit = {"rev": rev, "operation": "create", "collection": LIKE, "rkey": random.choice(["a", "../x", "é", ""])}
        event = {"did": did, "time_us": random.choice([micros(), 1, 2**62, -1]), "kind": "commit", "commit": commit}
        yield event
        yield event | {"commit": commit | {random.choice(list(commit)): random.choice(odd)}}
        yield event | {"kind": random.choice(["identity", "sync", None]), "identity": {"handle": "evil.test"}}
        yield event | {"kind": "account", "account": {"active": False, "status": random.choice(["deleted", 7, "x\0"])}}
        yield random.choice(garbage)

    def rewrite(event: dict[str, Any]) -> Iterable[Message | dict[str, Any]]:
        yield from invented()
        match random.choice(["send", "omit", "repeat", "delay"]):
            case "send":
                yield event
            case "repeat":
                yield from [event] * 3
            case "delay":
                delayed.append(event)
        if len(delayed) > 3:
            random.shuffle(delayed)
            yield from delayed
            delayed.clear()

    return rewrite


async def test_liar_stores_nothing_unproven_and_the_next_true_hint_repairs_what_it_omitted(
    database: str, tmp_path: Path
) -> None:
    async with (
        FilteredNetwork(collections=[LIKE]) as network,
        local_jetstream(network) as jetstream,
        followed(database, tmp_path, network, jetstream) as daemon,
    ):
        accounts = [network.create_account(f"account{number}.test") for number in range(4)]
        for account in accounts:
            like(account)
        await wait_until_equal(daemon)
        random = Random(46)
        jetstream.rewrite = lies(network, random)
        written = {(account.did, path) for account in accounts for path in account.records}
        for step in range(60):
            account = random.choice(accounts)
            if step % 3 == 2:
                account.delete(next(iter(account.records)))
            written.add((account.did, like(account, step)))
            await daemon.execute("update indexer.repo set next_attempt_at = null where next_attempt_at < 'infinity'")
        subscriptions = len(jetstream.queries)
        jetstream.say("x" * 30_000_000)
        await until(lambda: len(jetstream.queries) > subscriptions)
        jetstream.rewrite = honest
        for account in accounts:
            like(account, "true")

        async def settled() -> bool:
            await daemon.execute("update indexer.repo set next_attempt_at = null where did = any($1::text[])", dids)
            return not [found for found in await compare(network, daemon.db) if found.startswith(("at://", *dids))]

        dids = [account.did for account in accounts]
        await until(settled)
        rows = await daemon.execute("select did, collection || '/' || rkey as path from indexer.record")
        assert {tuple(row) for row in rows} <= written | {(one.did, path) for one in accounts for path in one.records}
        changes = await daemon.execute(
            "select did, collection || '/' || rkey as path from indexer.change where rkey is not null"
        )
        assert {tuple(row) for row in changes} <= written | {
            (one.did, path) for one in accounts for path in one.records
        }
        assert await daemon.dead_letters() == []
        [(hidden,)] = await daemon.execute("select count(*) from indexer.repo where not active and rev is not null")
        assert hidden == 0, "only the host of an account says so"
        await assert_change_log_consistent(database)


async def test_cost_of_a_liar_is_bounded(database: str, tmp_path: Path) -> None:
    async with (
        FilteredNetwork(collections=[LIKE]) as network,
        local_jetstream(network) as jetstream,
        followed(database, tmp_path, network, jetstream, new_accounts_per_host="10") as daemon,
    ):
        account = network.create_account("ada.test")
        like(account)
        await wait_until_equal(daemon)
        before = requests(daemon)

        async def no_resync_is_due() -> bool:
            due = "sync_status <> 'synchronized' and coalesce(next_attempt_at, '-infinity') < now() + interval '10 s'"
            return not await daemon.execute(f"select from indexer.repo where {due}")

        def tell(did: str, **fields: Any) -> None:
            commit = {"rev": tid_of(micros()), "operation": "create", "collection": LIKE, "rkey": "x"} | fields
            jetstream.tell({"did": did, "kind": "commit", "commit": commit})

        for number in range(300):
            tell(account.did)
            tell(account.did, rev=tid_of(micros() + HOUR_MICROS))
            jetstream.tell({"did": account.did, "kind": "identity"})
            tell(did_of(f"nobody{number}.test"))
        await until(lambda: daemon.counter_sum("events") >= 1_200)
        await until(no_resync_is_due)
        [(added,)] = await daemon.execute("select count(*) from indexer.repo where did <> $1", account.did)
        assert added == 9, "the account was the tenth"
        assert requests(daemon) - before < 100
        row = await daemon.repo_row(account)
        assert row["attempts"] > 0
        assert row["wait"] is None or row["wait"] > 30


async def test_feed_of_another_daemon_is_a_jetstream(database: str, postgres: DatabaseServer, tmp_path: Path) -> None:
    second = postgres.create(migrated=True)
    try:
        async with (
            FilteredNetwork(collections=[LIKE]) as network,
            feed(database, tmp_path / "first", network) as (first, address),
            running_daemon(
                second, tmp_path / "second", network, tuning=TUNING, collections=LIKE,
                upstream="jetstream", jetstreams=f"ws://{address}",
            ) as daemon,
        ):  # fmt: skip
            await until(lambda: first.stages.jetstream_reader.subscribers > 0)
            account = network.create_account("ada.test")
            path = like(account)
            await wait_until_equal(daemon)
            account.create(POST, {"$type": POST})
            account.update(path, {"$type": LIKE, "changed": True})
            await wait_until_equal(daemon)
            account.delete(path)
            like(account, "last")
            await wait_until_equal(daemon)
            assert (await daemon.repo_row(account))["attempts"] == 0
    finally:
        postgres.drop(second)
