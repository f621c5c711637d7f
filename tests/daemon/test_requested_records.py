"""A service sees what an account just wrote, with the stream or without it, and nothing is logged twice."""

from contextlib import AsyncExitStack
from pathlib import Path
from time import time
from typing import Any

import pytest

from indexer.atproto.syntax import tid_of
from indexer.demo.local_pds import GET_BLOCKS, GET_RECORD
from indexer.resync.apply import COSTLY_BYTES
from tests.daemon.running_daemon import LIKE, POST, FilteredNetwork, RunningDaemon, post, running_daemon
from tests.database_checks import assert_change_log_consistent
from tests.faulty_network import Fault, FaultyAccount
from tests.local_jetstream import local_jetstream
from tests.waiting import until

pytestmark = pytest.mark.slow

REQUEST = "select atproto.request_record($1, $2)"
WAIT = "select reached, stored_rev from atproto.wait_for($1, $2, '30 seconds')"
LOGGED = "select action, live from atproto.changes where did = $1 and rkey = $2 order by seq"


async def request(daemon: RunningDaemon, account: FaultyAccount, path: str, rev: str | None = None) -> bool:
    [(requested,)] = await daemon.execute(REQUEST, f"at://{account.did}/{path}", rev)
    return bool(requested)


async def see(daemon: RunningDaemon, account: FaultyAccount, path: str) -> list[Any]:
    """Request the record as it is now, and return its values in the public view."""
    assert await request(daemon, account, path, account.rev)
    [(reached, rev)] = await daemon.execute(WAIT, account.did, account.rev)
    assert (reached, rev) == (True, account.rev)
    collection, rkey = path.split("/")
    rows = await daemon.execute(
        "select value->>'text' from atproto.records where did = $1 and collection = $2 and rkey = $3",
        account.did, collection, rkey,
    )  # fmt: skip
    return [value for (value,) in rows]


@pytest.mark.parametrize("upstream", ["relay", "relay with all collections", "jetstream"])
async def test_requested_record_is_shown_while_the_stream_is_stopped(
    database: str, tmp_path: Path, upstream: str
) -> None:
    """It costs a request to the PDS, and another one at the border of a collection. Then the commits change nothing."""
    is_wide = upstream == "relay with all collections"
    settings: dict[str, Any] = {"collections": "*" if is_wide else POST, "resync_source": "pds"}
    async with FilteredNetwork(collections=None if is_wide else [POST]) as network, AsyncExitStack() as stack:
        stream: Any = network.relay
        if upstream == "jetstream":
            stream = await stack.enter_async_context(local_jetstream(network))
            settings |= {"upstream": "jetstream", "jetstreams": stream.ws_url}
        daemon = await stack.enter_async_context(running_daemon(database, tmp_path, network, **settings))
        await until(lambda: bool(stream.queries if upstream == "jetstream" else stream.subscribers))
        account = daemon.create_account("ada.test", records=300)
        account.create(LIKE, {"$type": LIKE})
        account.create(POST, post("last"))
        assert (await daemon.execute(WAIT, account.did, account.rev))[0]["reached"], "the stream brings it"
        await stream.stop()
        account.pds.requests.clear()
        path = account.create(POST, post("new"))
        assert await see(daemon, account, path) == ["new"]
        assert account.pds.requests[GET_RECORD] + account.pds.requests[GET_BLOCKS] == (1 if is_wide else 2)
        assert not await request(daemon, account, path, account.rev), "it is stored"
        account.update(path, post("changed"))
        assert await see(daemon, account, path) == ["changed"]
        account.delete(path)
        assert await see(daemon, account, path) == []
        assert daemon.export_requests == 0
        account.pds.requests.clear()
        for _ in range(3):
            assert await request(daemon, account, path), "the rev is not known"
            await until(lambda: is_synchronized(daemon, account))
        assert account.pds.requests.total() == account.pds.requests[GET_RECORD] == 3
        replayed = daemon.counter("events", kind="commit", outcome="replayed")
        await stream.start()
        await daemon.wait_for_counter("events", above=replayed + 2, kind="commit", outcome="replayed")
        rows = await daemon.execute(LOGGED, account.did, path.split("/")[1])
        assert [tuple(row) for row in rows] == [("create", True), ("update", True), ("delete", True)]
        assert (await daemon.repo_row(account))["attempts"] == 0
        await assert_change_log_consistent(database)


async def test_request_during_a_resync_is_answered_by_the_next_one(database: str, tmp_path: Path) -> None:
    """The first resync has read the repo before the second write. Notifications that nobody sent change nothing."""
    async with (
        FilteredNetwork(collections=[POST]) as network,
        running_daemon(database, tmp_path, network, collections=POST, resync_source="pds") as daemon,
    ):
        account = daemon.create_account("ada.test")
        await daemon.wait_until_equal()
        await network.relay.stop()
        first = account.create(POST, post("first"))
        account.pds.faults.append(slow := Fault(GET_RECORD, rate=1_000))
        assert await request(daemon, account, first, account.rev)
        await until(lambda: slow.fired > 0)
        second = account.create(POST, post("second"))
        assert not await request(daemon, account, second), "this resync does not fetch it"
        for text in ("", " ", account.did, f"{account.did} x", f"{account.did} {POST}/gone", "did:plc:a \x7f"):
            await daemon.execute("select pg_notify('indexer_requests', $1)", text)
        assert await see(daemon, account, second) == ["second"]
        assert daemon.counter("resync", result="hinted") == 1, "the first one ends behind the rev"
        await assert_change_log_consistent(database)


@pytest.mark.parametrize("rev", ["true", "made up"])
async def test_requests_cannot_cause_export_after_export(database: str, tmp_path: Path, rev: str) -> None:
    """A large export, and a rev that the host does not have, count as a break. The repo still follows its stream."""
    async with (
        FilteredNetwork() as network,
        running_daemon(database, tmp_path, network, sparse_resync="never", resync_source="pds") as daemon,
    ):
        account = daemon.create_account("ada.test")
        for number in range(10):
            account.create(POST, post(f"{number}" * (COSTLY_BYTES // 10 if rev == "true" else 1)))
        await daemon.wait_until_equal()
        await network.relay.stop()
        caused = 0
        for number in range(20):
            path = account.create(POST, post(number))
            told = account.rev if rev == "true" else tid_of(int((time() + 200) * 1_000_000))
            caused += await request(daemon, account, path, told)
            await until(lambda: is_synchronized(daemon, account))
        assert (caused, daemon.export_requests) == (1, 1)
        await network.relay.start()
        await daemon.wait_until_equal()
        assert daemon.export_requests == 1


@pytest.mark.parametrize("buffered", [0, 3])
async def test_failed_request_does_not_stop_a_repo_from_following_its_stream(
    database: str, tmp_path: Path, buffered: int
) -> None:
    """The PDS ends its connections before or after commits have arrived. Only further requests wait."""
    async with (
        FilteredNetwork() as network,
        running_daemon(database, tmp_path, network, collections="*", resync_source="pds") as daemon,
    ):
        account = daemon.create_account("ada.test")
        await daemon.wait_until_equal()
        account.pds.faults.append(slow := Fault(GET_RECORD, rate=20, times=None))
        assert await request(daemon, account, f"{POST}/nothing")
        await until(lambda: slow.fired > 0)
        for text in range(buffered):
            account.create(POST, post(text))

        async def is_buffered() -> bool:
            return bool((await daemon.repo_row(account))["buffered_events"] == buffered)

        await until(is_buffered)
        await account.pds.stop()
        await until(lambda: is_synchronized(daemon, account))
        account.create(POST, post("after"))
        await daemon.wait_until_equal()
        assert not await request(daemon, account, f"{POST}/nothing")
        row = await daemon.repo_row(account)
        assert (row["attempts"], row["sync_reason"], row["rev"]) == (1, None, account.rev)


async def is_synchronized(daemon: RunningDaemon, account: FaultyAccount) -> bool:
    return bool((await daemon.repo_row(account))["sync_status"] == "synchronized")
