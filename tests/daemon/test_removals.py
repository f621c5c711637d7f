"""Operators redact records, accounts and collections, and hide records: their content is nowhere, and never comes back.

The repos stay synchronized, and all their other records are those of the network.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from indexer.atproto.car import car_section
from indexer.atproto.cid import cid_of
from indexer.demo.local_account import commit_payload
from indexer.demo.local_network import RecordsByRepo
from indexer.demo.local_pds import GET_RECORD, GET_REPO
from indexer.demo.local_repo import Write
from tests.cli.command_line import run_indexer
from tests.daemon.running_daemon import LIKE, POST, FilteredNetwork, RunningDaemon, post, running_daemon
from tests.database_checks import assert_change_log_consistent, fetch
from tests.faulty_network import Fault, FaultyAccount
from tests.readers.jetstream_client import subscribed
from tests.readers.tap_client import channel
from tests.waiting import until

pytestmark = pytest.mark.slow

MARKER = "unmistakable-content"
LINKED = f"at://did:plc:aaaaaaaaaaaaaaaaaaaaaaaa/{POST}/{MARKER}"
SECRET = {"$type": POST, "text": f"{MARKER}, in a text", "subject": {"uri": LINKED, "cid": "bafkreibm"}, "via": LINKED}
TABLES = """
    select quote_ident(table_schema) || '.' || quote_ident(table_name) as name from information_schema.tables
    where table_schema not in ('pg_catalog', 'information_schema')
"""


class NetworkWithoutRemoved(FilteredNetwork):
    """A network of which the database must contain everything but some AT-URIs, accounts and collections."""

    def __init__(self) -> None:
        super().__init__()
        self.removed = set[str]()

    def expected_records(self) -> RecordsByRepo:
        return {
            did: {
                path: cid
                for path, cid in records.items()
                if not self.removed & {f"at://{did}/{path}", path.partition("/")[0]}
            }
            for did, records in super().expected_records().items()
            if did not in self.removed
        }


async def found(dsn: str, directory: Path, content: str = MARKER) -> list[str]:
    """Return the tables and files that have the content, as text or as bytes, in any column or place."""
    has_it = "where position($1 in t::text) + position($2 in t::text) > 0"
    names = [name for (name,) in await fetch(dsn, TABLES)]
    each = [f"select '{name}' as name where exists (select from {name} t {has_it})" for name in names]  # noqa: S608
    places = [name for (name,) in await fetch(dsn, " union all ".join(each), content, content.encode().hex())]
    files = [path for path in directory.rglob("*") if path.is_file() and content.encode() in path.read_bytes()]
    return sorted([*places, *map(str, files)])


async def replayed(daemon: RunningDaemon, last: str) -> str:
    """Return all that the feeds send from the beginning of the log up to the record with this key, as text."""
    events = list[str]()
    async with daemon.stages.serve_http() as address, subscribed(address, ("cursor", 0)) as jetstream:
        while not any(f"'rkey': '{last}'" in event for event in events):
            events.append(str(await jetstream.next()))
        async with aiohttp.ClientSession(f"http://{address}") as session, channel(session) as client:
            while f"'rkey': '{last}'" not in str(await client.process(1)):
                pass
            return "".join([*events, str(client.received)])


async def indexer(dsn: str, *arguments: str, code: int = 0) -> str:
    """Run a command; return its output."""
    result = await asyncio.to_thread(run_indexer, *arguments, INDEXER_DATABASE_URL=dsn)
    assert result.returncode == code, result.stderr
    return result.stdout + result.stderr


async def leave_in_queues(daemon: RunningDaemon, account: FaultyAccount) -> None:
    """Store the content also where faults and clients leave it: dead letters, and events that were set aside."""
    for relay, sender in (("wss://one.test", account.did), ("wss://two.test", None)):
        await daemon.execute(
            "insert into indexer.dead_letter (bucket, relay, seq, did, kind, reason, detail, frame) "
            "values (1, $1, 1, $2, 'commit', 'signature-invalid', '', $3)",
            relay, sender, f"{account.did} {POST}/secret {MARKER}".encode(),
        )  # fmt: skip
    await daemon.execute(
        "insert into indexer.feed_set_aside (consumer_id, reason, did, collection, rkey, rev, action, attempts, since, "
        "failure) values (1, 'refused', $1, $2, 'secret', '', 'create', 1, now(), $3)",
        account.did, POST, MARKER,
    )  # fmt: skip


@asynccontextmanager
async def resyncing(daemon: RunningDaemon, account: FaultyAccount, **fault: Any) -> AsyncIterator[None]:
    """Let a resync of the account take long during the block."""
    account.pds.faults[:] = [Fault(path, account.did, times=None, **fault) for path in (GET_REPO, GET_RECORD)]
    assert await daemon.db.repos.request_resyncs([account.did]) == 1
    await until(lambda: has_status(daemon, account, "in-progress"))
    yield
    account.pds.faults.clear()


async def leave_behind(daemon: RunningDaemon, account: FaultyAccount, collection: str) -> None:
    """Store a record that is redacted, as a process might that was killed. The next resync deletes it."""
    await daemon.execute(
        "insert into indexer.record (did, collection, rkey, bucket, cid, rev, value) "
        "select did, $2, 'secret', bucket, cid, rev, to_jsonb($3::text) from indexer.record where did = $1 limit 1",
        account.did, collection, MARKER,
    )  # fmt: skip


async def has_status(daemon: RunningDaemon, account: FaultyAccount, status: str) -> bool:
    return bool((await daemon.repo_row(account))["sync_status"] == status)


async def resync(daemon: RunningDaemon, account: FaultyAccount) -> None:
    assert await daemon.db.repos.request_resyncs([account.did]) == 1
    await daemon.resync_until_equal(account)


LEXICON = {
    "lexicon": 1,
    "id": POST,
    "defs": {
        "main": {
            "type": "record",
            "key": "any",
            "record": {"type": "object", "properties": {"text": {"type": "string"}}},
        }
    },
}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"core": "python", "sparse_resync": "never"}, id="exports"),
        pytest.param({"core": "auto", "sparse_resync": "never"}, id="native core"),
        pytest.param({"core": "auto", "sparse_resync": "always", "collections": POST}, id="sparse"),
    ],
)
async def test_redacted_record_is_nowhere_and_never_comes_back(
    database: str, tmp_path: Path, settings: dict[str, Any]
) -> None:
    data, lexicon = tmp_path / "data", tmp_path / "lexicon.json"
    lexicon.write_text(json.dumps(LEXICON))
    async with (
        NetworkWithoutRemoved() as network,
        running_daemon(
            database, data, network, links=True, roles="live,resync,feed", http_bind="127.0.0.1:0", **settings
        ) as daemon,
    ):
        ada, bob = daemon.create_account("ada.test"), daemon.create_account("bob.test")
        uri = f"at://{ada.did}/{POST}/secret"
        ada.create(POST, SECRET, rkey="secret")
        await daemon.wait_until_equal()
        await indexer(database, "lexicon", "add", str(lexicon))
        await leave_in_queues(daemon, ada)
        async with resyncing(daemon, ada, hang=True):
            ada.update(f"{POST}/secret", SECRET | {"again": MARKER})
            ada.create(POST, post("other"), rkey="other")
            stored = {
                "indexer.record", "indexer.record_link", "indexer.target_count", "indexer.dead_letter",
                "indexer.feed_set_aside", "indexer.buffered_event", f'lexicon."{POST}"', "atproto.records",
            }  # fmt: skip
            await until(lambda: has_found(database, data, stored))
            output = await indexer(database, "redact", uri, "--yes", "--reason", "court order")
            assert "2 dead letters deleted" in output
            assert "VACUUM" in output
            assert await found(database, data) == []
        network.removed.add(uri)
        await daemon.wait_until_equal()
        ada.update(f"{POST}/secret", SECRET | {"again": 3})
        bob.create(POST, post("fine"), rkey="secret")
        await daemon.wait_until_equal()
        async with resyncing(daemon, ada, rate=2_000):
            ada.update(f"{POST}/secret", SECRET | {"again": 4})
            ada.create(POST, post("other"))
            await daemon.wait_for_cursor()
            assert await found(database, data) == [], "the frame is buffered without it"
        await daemon.resync_until_equal(ada)
        ada.delete(f"{POST}/secret")
        ada.create(POST, SECRET, rkey="secret")
        daemon.lose_commit(ada)
        await resync(daemon, ada)
        await daemon.wait_until_equal()
        await daemon.execute("delete from indexer.record where did = $1", ada.did)
        await resync(daemon, ada)
        await leave_behind(daemon, ada, POST)
        await resync(daemon, ada)
        ada.create(POST, post("last"), rkey="last")
        await daemon.wait_until_equal()
        assert await found(database, data) == []
        assert MARKER not in await replayed(daemon, "last")
        assert MARKER not in await indexer(database, "export", "--collection", POST)


async def has_found(database: str, directory: Path, places: set[str]) -> bool:
    return places <= set(await found(database, directory))


async def test_redacted_account_and_collection_are_nowhere_and_never_come_back(database: str, tmp_path: Path) -> None:
    async with (
        NetworkWithoutRemoved() as network,
        running_daemon(database, tmp_path, network, sparse_resync="never") as daemon,
    ):
        ada, bob = daemon.create_account("ada.test"), daemon.create_account(f"{MARKER}.test")
        ada.create(LIKE, SECRET, rkey="secret")
        bob.create(POST, SECRET, rkey="secret")
        await daemon.wait_until_equal()
        await until(lambda: has_found(database, tmp_path, {"indexer.record", "indexer.identity"}))
        async with resyncing(daemon, ada, hang=True):
            ada.update(f"{LIKE}/secret", SECRET | {"again": 1})
            await until(lambda: has_found(database, tmp_path, {"indexer.buffered_event"}))
            for target in (LIKE, bob.did):
                await indexer(database, "redact", target, "--yes")
                network.removed.add(target)
            assert await found(database, tmp_path) == []
        bob.create(POST, SECRET)
        bob.set_handle(f"other-{MARKER}.test")
        assert await daemon.db.scope.track([bob.did]) == 0
        assert await daemon.db.repos.add([bob.did]) == 0
        await resync(daemon, ada)
        ada.update(f"{LIKE}/secret", SECRET | {"again": 2})
        new = daemon.create_account("new.test")
        new.create(LIKE, SECRET, rkey="secret")
        daemon.lose_commit(new)
        await daemon.wait_for_cursor()
        await daemon.resync_until_equal(new)
        async with resyncing(daemon, new, rate=2_000):
            new.create(LIKE, SECRET)
            await daemon.wait_for_cursor()
            assert await found(database, tmp_path) == [], "the frame is buffered without it"
        await daemon.resync_until_equal(new)
        await daemon.execute("delete from indexer.record where did = $1", new.did)
        await resync(daemon, new)
        await leave_behind(daemon, new, LIKE)
        await resync(daemon, new)
        await daemon.db.scope.change(collections=["app.bsky.*"])
        await daemon.wait_until_equal()
        assert await found(database, tmp_path) == []
        assert await daemon.db.identities.load([bob.did]) == {}


@pytest.mark.parametrize("core", ["python", "auto"])
@pytest.mark.parametrize("collection", [False, True], ids=["record", "collection"])
async def test_account_that_always_writes_what_is_removed_is_synchronized(
    database: str, tmp_path: Path, core: str, *, collection: bool
) -> None:
    """The messages are buffered without the content, so the first resync whose export is complete ends the work."""
    async with (
        NetworkWithoutRemoved() as network,
        running_daemon(database, tmp_path, network, sparse_resync="never", core=core) as daemon,
    ):
        ada = daemon.create_account("ada.test", records=50)
        ada.create(LIKE, SECRET, rkey="secret")
        target = LIKE if collection else f"at://{ada.did}/{LIKE}/secret"
        await daemon.wait_until_equal()
        await indexer(database, "redact", target, "--yes")
        network.removed.add(target)
        await daemon.wait_until_equal()
        before = daemon.export_requests
        async with resyncing(daemon, ada, rate=4_000):
            for n in range(20):
                ada.update(f"{LIKE}/secret", SECRET | {"again": n})
                ada.create(POST, post(f"{n}"), rkey=f"n{n}")
            await daemon.wait_for_cursor()
            row = await daemon.repo_row(ada)
            assert (row["sync_status"], row["buffered_events"]) == ("in-progress", 40)
            assert await found(database, tmp_path) == []
        await until(lambda: has_status(daemon, ada, "synchronized"))
        await daemon.wait_until_equal()
        assert (daemon.export_requests - before, await daemon.dead_letters()) == (1, [])
        assert await found(database, tmp_path) == []


async def test_messages_of_tiny_blocks_do_not_block_the_event_loop(database: str, tmp_path: Path) -> None:
    """The account of a redacted record may be hostile. `run_daemon` fails the test if the event loop is blocked."""
    tiny = b"".join(car_section(cid_of(block) + block) for block in [b"\xa2\x61e%06d" % n for n in range(40_000)])
    async with (
        NetworkWithoutRemoved() as network,
        running_daemon(database, tmp_path, network, sparse_resync="never") as daemon,
    ):
        eve = daemon.create_account("eve.test", records=50)
        eve.create(LIKE, SECRET, rkey="secret")
        await daemon.wait_until_equal()
        uri = f"at://{eve.did}/{LIKE}/secret"
        network.removed.add(uri)
        assert await daemon.db.removals.add(uri, "redact")
        await daemon.wait_until_equal()
        async with resyncing(daemon, eve, rate=100):
            daemon.stages.shard_ownership.owned.clear()  # the writer waits, so that all are in one batch
            for n in range(6):
                change = eve.apply_writes([Write.update(f"{LIKE}/secret", SECRET | {"again": n})], lost=True)
                payload = commit_payload(eve.did, change, "2026-11-30T00:00:00Z")
                eve.pds.emit(eve.did, "#commit", payload | {"blocks": change.blocks + tiny})
            daemon.stages.shard_ownership.owned.set()
            await daemon.wait_for_cursor()
            assert (await daemon.repo_row(eve))["buffered_events"] == 6
            assert await found(database, tmp_path) == []
            for fault in eve.pds.faults:
                fault.rate = 1 << 30  # the rest is sent at once
        await until(lambda: has_status(daemon, eve, "synchronized"))
        await daemon.wait_until_equal()


async def test_hidden_record_is_shown_again(database: str, tmp_path: Path) -> None:
    """The record is deleted and created in the log. A commit that changes it meanwhile is applied."""
    async with (
        NetworkWithoutRemoved() as network,
        running_daemon(database, tmp_path, network, collections=POST, sparse_resync="always") as daemon,
    ):
        ada = daemon.create_account("ada.test")
        ada.create(POST, SECRET, rkey="self")
        await daemon.wait_until_equal()
        uri = f"at://{ada.did}/{POST}/self"
        assert await daemon.execute("select atproto.request_takedown($1, true)", uri)
        network.removed.add(uri)
        await daemon.wait_until_equal()
        assert await found(database, tmp_path) == []
        ada.update(f"{POST}/self", SECRET | {"text": "changed"})
        daemon.lose_commit(ada)
        await daemon.resync_until_equal(ada)
        assert daemon.export_requests == 0, "its value is not missing"
        await indexer(database, "takedown", uri, "--reverse", "--reason", "by mistake")
        network.removed.clear()
        await daemon.resync_until_equal(ada)
        log = await daemon.execute("select action from atproto.changes where rkey = 'self' order by seq")
        assert [action for (action,) in log] == ["create", "delete", "create"]
        rows = await daemon.execute("select action, target, reason from indexer.removal order by id")
        assert list(map(tuple, rows)) == [("hide", uri, None), ("show", uri, "by mistake")]
        await assert_change_log_consistent(database)
