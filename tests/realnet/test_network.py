"""Bluesky's own PDS and directory, live: what people do there must end in the database as it ends there."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from indexer.outbound import Outbound, Rates
from indexer.run import Daemon
from indexer.service import sweep
from indexer.service.discovery import Discovery
from indexer.store import Store
from tests.realnet.network import Account, Pds, real_network
from tests.serving import saved, serving, settings_for, until

THING, NOTE = "com.example.thing", "com.example.note"


@pytest.fixture
async def outbound() -> AsyncIterator[Outbound]:
    client = Outbound(user_agent="test", allow_private_hosts=True, rates=Rates(host=1_000, total=1_000))
    yield client
    await client.close()


def truth(pds: Pds, account: Account) -> dict[str, str]:
    """Path to CID, as the host itself lists them."""
    records: dict[str, str] = {}
    for collection in pds.query("com.atproto.repo.describeRepo", repo=account.did)["collections"]:
        cursor: dict[str, str] = {}
        while True:
            page = pds.query(
                "com.atproto.repo.listRecords", repo=account.did, collection=collection, limit=100, **cursor
            )
            for record in page["records"]:
                records[record["uri"].removeprefix(f"at://{account.did}/")] = record["cid"]
            if not page["records"] or "cursor" not in page:
                break
            cursor = {"cursor": page["cursor"]}
    return records


async def shown(dsn: str) -> dict[str, tuple[str, dict[str, str]]]:
    """DID to sync status and records, as readers see them."""
    connection = await asyncpg.connect(dsn)
    try:
        repos = await connection.fetch("select did, sync_status from atproto.repos where visible")
        rows = await connection.fetch("select did, collection || '/' || rkey as path, cid from atproto.records")
    finally:
        await connection.close()
    found: dict[str, tuple[str, dict[str, str]]] = {row["did"]: (row["sync_status"], {}) for row in repos}
    for row in rows:
        found[row["did"]][1][row["path"]] = row["cid"]
    return found


def live_a_little(pds: Pds) -> tuple[list[Account], list[Account]]:
    """Those who stay, and those who leave."""
    stayers = [pds.create_account(f"stay{n}") for n in range(6)]
    writer, editor, batcher, renamer, rotator, sleeper = stayers
    for n in range(30):
        writer.create(THING, {"n": n}, rkey=f"n{n}")
    for n in range(0, 30, 3):
        writer.delete(THING, f"n{n}")
    for n in range(10):
        editor.put(NOTE, "same", {"n": n, "bytes": {"$bytes": "AAEC"}})
    batcher.apply([write("create", f"{THING}/b{n}", {"n": n}) for n in range(100)])
    batcher.apply([write("update", f"{THING}/b1", {"n": -1}), write("delete", f"{THING}/b2"), *twice()])
    batcher.apply([])
    renamer.create(THING, {"before": True})
    renamer.set_handle("renamed")
    renamer.create(THING, {"after": True})
    rotator.create(THING, {"key": "old"})
    rotator.rotate_key()
    rotator.create(THING, {"key": "new"})
    sleeper.create(THING, {"awake": True})
    sleeper.deactivate()
    sleeper.activate()
    sleeper.create(THING, {"awake": "again"})
    leavers = [pds.create_account(f"leave{n}") for n in range(2)]
    for leaver in leavers:
        leaver.create(THING, {"here": True})
    leavers[0].deactivate()
    leavers[1].delete_account()
    writer.write_silently([{"action": "create", "collection": THING, "rkey": "unheard", "record": {"$type": THING}}])
    writer.create(THING, {"heard": True}, rkey="heard")
    return stayers, leavers


def write(action: str, path: str, value: dict[str, Any] | None = None) -> dict[str, Any]:
    collection, rkey = path.split("/")
    made = {"$type": f"com.atproto.repo.applyWrites#{action}", "collection": collection, "rkey": rkey}
    return made if value is None else made | {"value": {"$type": collection, **value}}


def twice() -> list[dict[str, Any]]:
    """One path named twice in a batch, in both ways."""
    return [
        write("create", f"{THING}/fleeting", {}),
        write("delete", f"{THING}/fleeting"),
        write("delete", f"{THING}/b3"),
        write("create", f"{THING}/b3", {"reborn": True}),
    ]


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_people_on_a_real_pds(database: str, tmp_path: Path) -> None:
    with real_network(1, tmp_path) as network:
        pds = network.pds[0]
        settings = settings_for(pds.stream_url, network.plc_url, tmp_path, resync_source="pds")
        async with serving(settings, database) as running:
            stayers, leavers = await asyncio.to_thread(live_a_little, pds)
            wanted = {account.did: await asyncio.to_thread(truth, pds, account) for account in stayers}
            await saved(running, pds.stream_url, last_seq(pds))
            await settled(database, wanted)
            metric: Callable[..., float | None] = running.metrics.registry.get_sample_value
            assert metric("indexer_desynchronized_total", {"reason": "chain-break"}) == 1, "the commit written silently"
            await until(lambda: bool(metric("indexer_resync_total", {"result": "synchronized"})))  # it mended that
            assert not {leaver.did for leaver in leavers} & (await shown(database)).keys()
            assert f"{THING}/unheard" in wanted[stayers[0].did]


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_what_only_its_list_tells(
    database: str, tmp_path: Path, store: Store, outbound: Outbound, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accounts that were there before we came, and a commit that was never heard of."""
    monkeypatch.setattr(sweep, "Pause", partial(sweep.Pause, settle=0.1))
    with real_network(1, tmp_path) as network:
        pds = network.pds[0]
        stayers, leavers = await asyncio.to_thread(live_a_little, pds)
        settings = settings_for(pds.stream_url, network.plc_url, tmp_path, start="live", resync_source="pds")
        async with serving(settings, database) as running:
            discovery = Discovery(store, outbound)
            listing = await discovery.run(await discovery.begin(pds.url, ""), lambda _: None)
            assert (listing.found, discovery.refused) == (len(stayers), 0)
            wanted = {account.did: await asyncio.to_thread(truth, pds, account) for account in stayers}
            await settled(database, wanted)
            writer = stayers[0]
            silent = {"action": "create", "collection": NOTE, "rkey": "silent", "record": {"$type": NOTE}}
            await asyncio.to_thread(writer.write_silently, [silent])
            wanted[writer.did] = await asyncio.to_thread(truth, pds, writer)
            assert f"{NOTE}/silent" in wanted[writer.did]
            running.sweep.ask()
            await settled(database, wanted)
            assert running.sweep.progress is not None
            assert running.sweep.progress.endswith("1 differ")
            assert not {leaver.did for leaver in leavers} & (await shown(database)).keys()


async def settled(dsn: str, wanted: dict[str, dict[str, str]]) -> None:
    state: dict[str, tuple[str, dict[str, str]]] = {}

    async def equal() -> bool:
        state.clear()
        state.update(await shown(dsn))
        return all(state.get(did) == ("synchronized", records) for did, records in wanted.items())

    def report() -> list[str]:
        return [
            f"{did}: {state.get(did, ('unknown',))[0]}, {len(state.get(did, ('', {}))[1])} of {len(records)}"
            for did, records in wanted.items()
            if state.get(did) != ("synchronized", records)
        ]

    await until(equal, report)


def last_seq(pds: Pds) -> int:
    seq = pds.control("events", limit=100_000)["events"][-1]["seq"]
    assert isinstance(seq, int)
    return seq


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_move_to_another_pds(database: str, tmp_path: Path) -> None:
    """The new host announces the move by a #sync that holds the old commit (spec §4.10): refused, and harmless.

    The head is kept, the next commit chains, and nothing that the old host still says counts any more.
    """
    with real_network(2, tmp_path) as network:
        old, new = network.pds
        async with reading(old, tmp_path, database) as running:
            mover = await asyncio.to_thread(old.create_account, "mover")
            await asyncio.to_thread(mover.create, THING, {"at": "old"}, "one")
            await saved(running, stream(old), last_seq(old))
            head = (await running.store.repos([mover.did]))[mover.did].head
        await asyncio.to_thread(mover.migrate, new)
        async with reading(new, tmp_path, database) as running:
            await saved(running, stream(new), last_seq(new))
            counted: Callable[..., float | None] = running.metrics.registry.get_sample_value
            refused = {"kind": "sync", "outcome": "rejected"}
            assert counted("indexer_events_total", refused) == 1, "a PDS that sends it right needs this test no more"
            assert (await running.store.repos([mover.did]))[mover.did].head == head
            await asyncio.to_thread(mover.create, THING, {"at": "new"}, "two")
            await saved(running, stream(new), last_seq(new))
            await settled(database, {mover.did: await asyncio.to_thread(truth, new, mover)})
            assert counted("indexer_events_total", {"kind": "commit", "outcome": "applied"}) == 1
            assert counted("indexer_resync_seconds_count") == 0
        async with reading(old, tmp_path, database) as running:
            await saved(running, stream(old), last_seq(old))
            counted = running.metrics.registry.get_sample_value
            assert counted("indexer_rejected_total", {"reason": "wrong-host"}) == 1, "that the account is deactivated"
            await settled(database, {mover.did: await asyncio.to_thread(truth, new, mover)})


def reading(pds: Pds, directory: Path, dsn: str) -> AbstractAsyncContextManager[Daemon]:
    """The daemon on this host's own stream."""
    settings = settings_for(stream(pds), pds.network.plc_url, directory, upstream="pds", resync_source="pds")
    return serving(settings, dsn)


def stream(pds: Pds) -> str:
    """Its address by the name that DID documents have it by."""
    return pds.stream_url.replace("127.0.0.1", "localhost")


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_keys_that_change_without_a_word(database: str, tmp_path: Path) -> None:
    """One account's directory entry changes with its key; of the other a commit is out before the directory knows."""
    with real_network(1, tmp_path) as network:
        pds = network.pds[0]
        async with reading(pds, tmp_path, database) as running:
            prompt, late = [await asyncio.to_thread(pds.create_account, name) for name in ("prompt", "late")]
            for account in (prompt, late):
                await asyncio.to_thread(account.create, THING, {"key": "old"}, "one")
            await saved(running, stream(pds), last_seq(pds))
            counted: Callable[..., float | None] = running.metrics.registry.get_sample_value
            assert counted("indexer_events_total", {"kind": "commit", "outcome": "rejected"}) == 0
            said = last_seq(pds)
            await asyncio.to_thread(prompt.swap_key)
            await asyncio.to_thread(prompt.publish_key)
            await asyncio.to_thread(prompt.create, THING, {"key": "new"}, "two")
            await saved(running, stream(pds), last_seq(pds))
            await settled(database, {prompt.did: await asyncio.to_thread(truth, pds, prompt)})
            assert counted("indexer_identity_refreshes_total", {"cause": "signature", "result": "asked"}) == 1
            assert counted("indexer_resync_seconds_count") == 0
            await asyncio.to_thread(late.swap_key)
            await asyncio.to_thread(late.create, THING, {"key": "unknown"}, "two")
            await saved(running, stream(pds), last_seq(pds))
            assert counted("indexer_rejected_total", {"reason": "signature-invalid"}) == 1
            await asyncio.to_thread(late.publish_key)
            kinds = [event["eventType"] for event in pds.control("events", after=said)["events"]]
            assert set(kinds) == {"append"}, "nothing but commits"
        async with reading(pds, tmp_path, database) as running:  # its memory would keep the old key for a minute
            await asyncio.to_thread(late.create, THING, {"key": "known"}, "three")
            await saved(running, stream(pds), last_seq(pds))
            await settled(database, {late.did: await asyncio.to_thread(truth, pds, late)})
            counted = running.metrics.registry.get_sample_value
            assert counted("indexer_desynchronized_total", {"reason": "chain-break"}) == 1
