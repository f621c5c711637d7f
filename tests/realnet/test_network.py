"""The daemon indexes Bluesky's own PDS and directory; the database must equal what the PDS lists."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from indexer.app.daemon import Daemon
from indexer.app.tuning import Tuning
from indexer.reasons import GapReason
from indexer.sync.stream import Gap
from tests.daemon_harness import run_daemon, settings_for, wait_for_cursor
from tests.database_checks import fetch
from tests.quick_tuning import QUICK
from tests.realnet.compare_with_pdses import records_of, visible_repos, wait_until_equal
from tests.realnet.real_network import RealAccount, RealPds, real_network
from tests.waiting import until

pytestmark = pytest.mark.proof("realnet")

THING, NOTE = "com.example.thing", "com.example.note"


def play_scenario(pds: RealPds) -> tuple[list[RealAccount], list[RealAccount]]:
    """Create accounts and records, and return the accounts that are active at the end and those that are not."""
    active = [pds.create_account(f"stay{n}") for n in range(6)]
    writer, editor, batcher, renamer, rotator, pausing = active
    for n in range(30):
        writer.create(THING, {"n": n}, rkey=f"n{n}")
    for n in range(0, 30, 3):
        writer.delete(THING, f"n{n}")
    for n in range(10):
        editor.put(NOTE, "same", {"n": n, "bytes": {"$bytes": "AAEC"}})
    batcher.apply([make_write("create", f"{THING}/b{n}", {"n": n}) for n in range(100)])
    batcher.apply(
        [make_write("update", f"{THING}/b1", {"n": -1}), make_write("delete", f"{THING}/b2"), *two_writes_per_path()]
    )
    batcher.apply([])
    renamer.create(THING, {"before": True})
    renamer.set_handle("renamed")
    renamer.create(THING, {"after": True})
    rotator.create(THING, {"key": "old"})
    rotator.rotate_key()
    rotator.create(THING, {"key": "new"})
    pausing.create(THING, {"paused": "not yet"})
    pausing.deactivate()
    pausing.activate()
    pausing.create(THING, {"paused": "no longer"})
    inactive = [pds.create_account(f"leave{n}") for n in range(2)]
    for account in inactive:
        account.create(THING, {"here": True})
    inactive[0].deactivate()
    inactive[1].delete_account()
    writer.write_silently([{"action": "create", "collection": THING, "rkey": "lost", "record": {"$type": THING}}])
    writer.create(THING, {"sent": True}, rkey="sent")
    return active, inactive


def make_write(action: str, path: str, value: dict[str, Any] | None = None) -> dict[str, Any]:
    collection, rkey = path.split("/")
    operation = {"$type": f"com.atproto.repo.applyWrites#{action}", "collection": collection, "rkey": rkey}
    return operation if value is None else operation | {"value": {"$type": collection, **value}}


def two_writes_per_path() -> list[dict[str, Any]]:
    """Return a create followed by a delete, and a delete followed by a create."""
    return [
        make_write("create", f"{THING}/temporary", {}),
        make_write("delete", f"{THING}/temporary"),
        make_write("delete", f"{THING}/b3"),
        make_write("create", f"{THING}/b3", {"created": "again"}),
    ]


async def test_scenario_on_a_real_pds_is_indexed_from_its_stream_and_its_list(database: str, tmp_path: Path) -> None:
    with real_network(1, tmp_path) as network:
        pds = network.pds[0]
        settings = settings_for(pds.stream_url, network.plc_url, tmp_path, resync_source="pds")
        async with run_daemon(settings, database) as running:
            active, inactive = await asyncio.to_thread(play_scenario, pds)
            expected = await records_of(*active)
            await wait_for_cursor(running, pds.stream_url, last_seq(pds))
            await wait_until_equal(database, expected)
            metric: Callable[..., float | None] = running.metrics.registry.get_sample_value
            assert metric("indexer_desynchronized_total", {"reason": "chain-break"}) == 1, "the lost commit"
            await until(lambda: bool(metric("indexer_resync_total", {"result": "synchronized"})))
            assert f"{THING}/lost" in expected[active[0].did]
            silent = {"action": "create", "collection": NOTE, "rkey": "silent", "record": {"$type": NOTE}}
            await asyncio.to_thread(active[1].write_silently, [silent])
            expected[active[1].did] = await asyncio.to_thread(active[1].records)
            assert f"{NOTE}/silent" in expected[active[1].did]
            await running.open_gaps.open(Gap(pds.stream_url, "0/1", GapReason.CURSOR_OUTDATED))
            await wait_until_equal(database, expected)
            assert running.reconciliation.progress is not None
            assert running.reconciliation.progress.endswith("different: 1")
            assert not {account.did for account in inactive} & (await visible_repos(database)).keys()


def last_seq(pds: RealPds) -> int:
    seq = last_event(pds)["seq"]
    assert isinstance(seq, int)
    return seq


def last_event(pds: RealPds) -> dict[str, Any]:
    event: dict[str, Any] = pds.control("events", limit=100_000)["events"][-1]
    return event


async def test_account_that_migrates_to_another_pds_needs_no_resync(database: str, tmp_path: Path) -> None:
    """The new PDS announces the migration with a `#sync` of the old commit, which is invalid and rejected.

    The next commit continues the chain. Messages of the old PDS are rejected. See docs/protocol.md#edge-cases.
    """
    with real_network(2, tmp_path) as network:
        old, new = network.pds
        async with indexing(old, tmp_path, database) as running:
            account = await asyncio.to_thread(old.create_account, "migrating")
            await asyncio.to_thread(account.create, THING, {"at": "old"}, "one")
            await wait_for_cursor(running, stream_url(old), last_seq(old))
            head = (await running.db.repos.load([account.did]))[account.did].head
        await asyncio.to_thread(account.migrate, new)
        async with indexing(new, tmp_path, database) as running:
            await wait_for_cursor(running, stream_url(new), last_seq(new))
            counted: Callable[..., float | None] = running.metrics.registry.get_sample_value
            rejected = {"kind": "sync", "outcome": "rejected"}
            assert counted("indexer_events_total", rejected) == 1, (
                "a PDS that sends a valid #sync makes this test unnecessary"
            )
            assert (await running.db.repos.load([account.did]))[account.did].head == head
            await asyncio.to_thread(account.create, THING, {"at": "new"}, "two")
            await wait_for_cursor(running, stream_url(new), last_seq(new))
            await wait_until_equal(database, await records_of(account))
            assert counted("indexer_events_total", {"kind": "commit", "outcome": "applied"}) == 1
            assert counted("indexer_resync_seconds_count") == 0
        async with indexing(old, tmp_path, database) as running:
            await wait_for_cursor(running, stream_url(old), last_seq(old))
            counted = running.metrics.registry.get_sample_value
            assert counted("indexer_rejected_total", {"reason": "wrong-host"}) == 1, (
                "the #account message of the old PDS"
            )
            await until(lambda: not running.open_gaps.gaps)
            await wait_until_equal(database, await records_of(account))


async def test_account_that_leaves_the_only_pds_is_not_hidden(database: str, tmp_path: Path) -> None:
    """The old PDS says that it is deactivated, on its stream and in its list. It does not host the account any more."""
    with real_network(2, tmp_path) as network:
        old, new = network.pds
        async with indexing(old, tmp_path, database) as running:
            account = await asyncio.to_thread(old.create_account, "leaving")
            await asyncio.to_thread(account.create, THING, {"at": "old"}, "one")
            await wait_for_cursor(running, stream_url(old), last_seq(old))
        # The first daemon would not refresh the identity again for a minute.
        async with indexing(old, tmp_path, database) as running:
            await asyncio.to_thread(account.migrate, new)
            assert last_event(old)["eventType"] == "account"
            await wait_for_cursor(running, stream_url(old), last_seq(old))
            await running.open_gaps.open(Gap(stream_url(old), "0/1", GapReason.CURSOR_OUTDATED))
            await until(lambda: not running.open_gaps.gaps)
            counted: Callable[..., float | None] = running.metrics.registry.get_sample_value
            assert counted("indexer_rejected_total", {"reason": "wrong-host"}) == 1
            await wait_until_equal(database, await records_of(account))


async def test_pds_that_was_quiet_for_a_day_opens_no_gap(database: str, tmp_path: Path) -> None:
    """It calls the cursor outdated only because its last message, which is stored, is older than a day.

    Once a message that is not stored is that old as well, it is a gap.
    """
    with real_network(1, tmp_path) as network:
        pds = network.pds[0]
        quick = replace(QUICK, proof_timeout=2.0)
        account = await asyncio.to_thread(pds.create_account, "quiet")
        await let_a_day_pass(pds)
        async with indexing(pds, tmp_path, database, tuning=quick) as running:
            await until(lambda: running.probe.not_ready() == [], running.probe.not_ready)
            assert await gaps(database) == [], "it was asked for all that it has"
            await asyncio.to_thread(account.create, THING, {"n": 1}, "one")
            await wait_for_cursor(running, stream_url(pds), last_seq(pds))
        await let_a_day_pass(pds)
        async with indexing(pds, tmp_path, database, tuning=quick) as running:
            await until(lambda: running.probe.not_ready() == [], running.probe.not_ready)
            assert await gaps(database) == []
        await asyncio.to_thread(account.create, THING, {"n": 2}, "two")
        async with indexing(pds, tmp_path, database) as running:
            await wait_for_cursor(running, stream_url(pds), last_seq(pds))
            assert await gaps(database) == []
        await asyncio.to_thread(account.create, THING, {"n": 3}, "three")
        await let_a_day_pass(pds)
        async with indexing(pds, tmp_path, database):
            await until(lambda: is_gap(database, GapReason.CURSOR_OUTDATED))
            await wait_until_equal(database, await records_of(account))


async def let_a_day_pass(pds: RealPds) -> None:
    """Make all events of the PDS older than its window, which is a day."""
    await asyncio.to_thread(pds.control, "ageEvents", upTo=last_seq(pds), sequencedAt="2024-01-01T00:00:00.000Z")


async def gaps(dsn: str) -> list[str]:
    return [reason for (reason,) in await fetch(dsn, "select reason from atproto.gaps")]


async def is_gap(dsn: str, reason: GapReason) -> bool:
    return await gaps(dsn) == [reason]


def indexing(
    pds: RealPds, directory: Path, dsn: str, tuning: Tuning | None = None
) -> AbstractAsyncContextManager[Daemon]:
    """Run the daemon on the stream of this PDS."""
    settings = settings_for(stream_url(pds), pds.network.plc_url, directory, upstream="pds", resync_source="pds")
    return run_daemon(settings, dsn, tuning=tuning)


def stream_url(pds: RealPds) -> str:
    """Return the URL of the stream, with the host name that the DID documents contain."""
    return pds.stream_url.replace("127.0.0.1", "localhost")


async def test_key_rotations_without_identity_messages(database: str, tmp_path: Path) -> None:
    """One account publishes its new key before its next commit, and the other one after it."""
    with real_network(1, tmp_path) as network:
        pds = network.pds[0]
        async with indexing(pds, tmp_path, database) as running:
            prompt, late = [await asyncio.to_thread(pds.create_account, name) for name in ("prompt", "late")]
            for account in (prompt, late):
                await asyncio.to_thread(account.create, THING, {"key": "old"}, "one")
            await wait_for_cursor(running, stream_url(pds), last_seq(pds))
            counted: Callable[..., float | None] = running.metrics.registry.get_sample_value
            assert counted("indexer_events_total", {"kind": "commit", "outcome": "rejected"}) == 0
            before = last_seq(pds)
            await asyncio.to_thread(prompt.swap_key)
            await asyncio.to_thread(prompt.publish_key)
            await asyncio.to_thread(prompt.create, THING, {"key": "new"}, "two")
            await wait_for_cursor(running, stream_url(pds), last_seq(pds))
            await wait_until_equal(database, await records_of(prompt, late))
            assert counted("indexer_identity_refreshes_total", {"cause": "signature", "result": "asked"}) == 1
            assert counted("indexer_resync_seconds_count") == 0
            await asyncio.to_thread(late.swap_key)
            await asyncio.to_thread(late.create, THING, {"key": "unknown"}, "two")
            await wait_for_cursor(running, stream_url(pds), last_seq(pds))
            assert counted("indexer_rejected_total", {"reason": "signature-invalid"}) == 1
            await asyncio.to_thread(late.publish_key)
            kinds = [event["eventType"] for event in pds.control("events", after=before)["events"]]
            assert set(kinds) == {"append"}, "no other messages than commits"
        # The running daemon would not refresh the identity again for a minute.
        async with indexing(pds, tmp_path, database) as running:
            await asyncio.to_thread(late.create, THING, {"key": "known"}, "three")
            await wait_for_cursor(running, stream_url(pds), last_seq(pds))
            await wait_until_equal(database, await records_of(prompt, late))
            counted = running.metrics.registry.get_sample_value
            assert counted("indexer_desynchronized_total", {"reason": "chain-break"}) == 1
