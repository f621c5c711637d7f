"""Invalid exports are rejected with their reason, within bounds of time and memory, and change nothing."""

import asyncio
import tracemalloc
from dataclasses import replace
from pathlib import Path
from time import process_time

import pytest

from indexer.atproto.cid import cid_of
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.errors import UnavailableError, UpstreamError
from indexer.localnet.http_server import Fault
from indexer.localnet.local_network import LocalNetwork
from indexer.localnet.local_pds import CAR_TYPE, GET_REPO
from indexer.localnet.local_relay import message_frame
from indexer.monitoring.conditions import NEW_ACCOUNTS_LIMITED
from indexer.pds import Spool
from indexer.sync.verify import Snapshot, verify_snapshot
from tests.daemon.crafted_exports import (
    INVALID_EXPORTS,
    TOO_LARGE_EXPORTS,
    UNUSUAL_VALID_EXPORTS,
    SignedRepo,
    node_of_keys,
    tree_with_repeated_subtrees,
)
from tests.daemon.running_daemon import POST, post, running_daemon
from tests.database_checks import assert_change_log_consistent
from tests.sync.signing_account import SigningAccount
from tests.waiting import until

pytestmark = pytest.mark.slow

MAX_CPU_SECONDS = 2.0
MAX_MEMORY_BYTES = 12 << 20
"""Memory in addition to the export itself."""
RECORDS = "select * from indexer.record order by did, collection, rkey"
FAILED = "select count(*) from indexer.repo where sync_status = 'desynchronized' and last_error is not null"
REJECTED_BY_THE_RESYNC = {"last record missing", "rev in the future"}
"""Exports that are valid by themselves: the resync rejects them."""


@pytest.fixture(scope="module")
def source() -> SignedRepo:
    account = SigningAccount()
    for number in range(40):
        account.commit_post(f"{number:03}")
    return SignedRepo(account.repo, account.key)


def verify_export(export: bytes, source: SignedRepo, directory: Path) -> Snapshot:
    with Spool(directory, DEFAULT_LIMITS) as spool:
        for start in range(0, len(export), 65_536):
            spool.write(export[start : start + 65_536])
        spool.finish()
        return verify_snapshot(source.repo.did, spool.root, spool.block, source.key.public, DEFAULT_LIMITS)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if "000" in name else [])  # many nodes or entries
        for name in sorted(INVALID_EXPORTS.keys() - REJECTED_BY_THE_RESYNC)
    ],
)
def test_invalid_export_is_rejected_within_bounds_of_time_and_memory(
    source: SignedRepo, tmp_path: Path, name: str
) -> None:
    make, reason = INVALID_EXPORTS[name]
    export = make(source)
    tracemalloc.start()
    began = process_time()
    try:
        with pytest.raises((UpstreamError, UnavailableError)) as error:
            verify_export(export, source, tmp_path)
        assert process_time() - began < MAX_CPU_SECONDS
        assert tracemalloc.get_traced_memory()[1] < MAX_MEMORY_BYTES
    finally:
        tracemalloc.stop()
    assert f"export-rejected: {error.value}".startswith(reason) or str(error.value).startswith(reason)


@pytest.mark.parametrize("name", UNUSUAL_VALID_EXPORTS)
def test_unusual_export_is_accepted(source: SignedRepo, tmp_path: Path, name: str) -> None:
    snapshot = verify_export(UNUSUAL_VALID_EXPORTS[name](source), source, tmp_path)
    assert (snapshot.head.rev, snapshot.count) == (source.repo.head.rev, 40)


def test_walk_of_repeated_subtrees_stops_at_the_first_repetition(source: SignedRepo) -> None:
    """No key may occur twice, so the walk stops after few blocks instead of exponentially many."""
    root, *others = tree_with_repeated_subtrees()
    blocks = {cid_of(block): block for block in (root, *others, source.sign_commit(cid_of(root)))}
    requested: list[bytes] = []

    def block_of(cid: bytes) -> bytes | None:
        requested.append(cid)
        return blocks.get(cid)

    with pytest.raises(UpstreamError, match="beyond the keys beside it"):
        verify_snapshot(source.repo.did, next(reversed(blocks)), block_of, source.key.public, DEFAULT_LIMITS)
    assert len(requested) <= len(blocks) + 1


async def test_invalid_exports_change_nothing_and_the_next_valid_ones_are_applied(
    database: str, tmp_path: Path
) -> None:
    async with running_daemon(
        database, tmp_path, resync_source="pds", repo_bytes="20000000", repo_blocks="20000"
    ) as daemon:
        cases = INVALID_EXPORTS | TOO_LARGE_EXPORTS
        accounts = {name: daemon.create_account(f"a{number}.test", records=20) for number, name in enumerate(cases)}
        await daemon.wait_until_equal()
        before = await daemon.execute(RECORDS)
        faults = {}
        for name, (make, _) in cases.items():
            account = accounts[name]
            daemon.lose_commit(account)
            body = make(SignedRepo(account.repo, account.key))
            faults[name] = Fault(GET_REPO, account.did, status=200, headers={"Content-Type": CAR_TYPE}, body=body)
            account.pds.faults.append(faults[name])
            await asyncio.sleep(0)

        async def all_failed() -> bool:
            [(failed,)] = await daemon.execute(FAILED)
            return bool(failed == len(cases))

        await until(all_failed, lambda: [name for name, fault in faults.items() if not fault.fired])
        for name, (_, reason) in cases.items():
            row = await daemon.repo_row(accounts[name])
            assert row["last_error"].startswith(reason), (name, row["last_error"])
            assert (row["sync_status"], row["sync_reason"]) == ("desynchronized", "chain-break"), name
        assert await daemon.execute(RECORDS) == before
        assert not list((tmp_path / "spool").iterdir())
        await daemon.execute("update indexer.repo set next_attempt_at = null where sync_status = 'desynchronized'")
        await daemon.wait_until_equal()
        assert {fault.fired for fault in faults.values()} == {1}
        await assert_change_log_consistent(database)


async def test_second_state_with_the_same_rev_is_accepted_only_from_the_pds(database: str, tmp_path: Path) -> None:
    """The export of a mirror is rejected. The export of the PDS is stored and counted as equivocation."""
    async with running_daemon(database, tmp_path) as daemon:
        account = daemon.create_account("ada.test")
        await daemon.wait_until_equal()
        before = await daemon.record_rows(account)
        source = SignedRepo(account.repo, account.key)
        fault = Fault(
            GET_REPO,
            status=200,
            headers={"Content-Type": CAR_TYPE},
            body=source.export_tree(node_of_keys([f"{POST}/a"])),
        )
        daemon.network.relay.faults.append(fault)
        assert await daemon.store.request_resyncs([account.did])
        await daemon.wait_for_counter("resync", result="synchronized")
        assert fault.fired == 1
        assert await daemon.record_rows(account) == before

        again = replace(fault, times=2, fired=0)  # the relay redirects to the PDS, then the PDS itself is asked
        account.pds.faults.append(again)
        assert await daemon.store.request_resyncs([account.did])
        await daemon.wait_for_counter("resync", above=1, result="synchronized")
        assert again.fired == 2
        assert [row["rkey"] for row in await daemon.record_rows(account)] == ["a"]
        assert daemon.counter("desynchronized", reason="equivocation") == 1
        account.create(POST, post("a single history again"))
        await daemon.resync_until_equal(account)


async def test_slow_exports_of_one_machine_leave_half_of_the_workers_to_others(database: str, tmp_path: Path) -> None:
    """12 accounts on three names of one machine need a minute per export; those of the other host are all fetched."""
    async with LocalNetwork(pds=2) as network:
        hostile = network.pdses[0]
        port = hostile.url.rpartition(":")[2]
        names = [f"http://{name}:{port}" for name in ("localhost", "127.0.0.1", "[::ffff:127.0.0.1]")]
        drips = [network.create_account(f"drip{number}.test", pds=0) for number in range(12)]
        others = [network.create_account(f"good{number}.test", pds=1) for number in range(12)]
        for number, account in enumerate(drips):
            identity = network.plc.identities[account.did]
            assert identity is not None
            network.plc.identities[account.did] = replace(identity, pds=names[number % 3])
            account.create(POST, post("x" * 90_000))
        hostile.faults.append(Fault(GET_REPO, rate=1_500, times=None))
        async with running_daemon(
            database, tmp_path, network, resync_source="pds", resync_workers="8", start="live"
        ) as daemon:
            assert await daemon.store.add_repos([account.did for account in drips])
            await until(lambda: hostile.requests[GET_REPO] >= 4)
            assert await daemon.store.add_repos([account.did for account in others])
            await daemon.wait_for_counter("resync", above=len(others) - 1, result="synchronized")
            for account in others:
                assert (await daemon.repo_row(account))["sync_status"] == "synchronized"
            hung = [await daemon.repo_row(account) for account in drips]
            assert all(row["sync_status"] != "synchronized" and row["attempts"] == 0 for row in hung)
            assert len(daemon.stages.resync_pool.running) == 4


@pytest.mark.parametrize("time", ["1970-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "noon" * 1_000])
async def test_wrong_clock_of_one_account_does_not_decide_readiness(database: str, tmp_path: Path, time: str) -> None:
    async with running_daemon(database, tmp_path) as daemon:
        account, other = daemon.create_account("honest.test"), daemon.create_account("evil.test")
        await daemon.wait_until_equal()
        daemon.inject("#identity", {"did": other.did, "time": time})
        await daemon.wait_for_cursor()
        lag = daemon.stages.batch_writer.lag
        assert lag is not None
        assert 0 <= lag < 60
        assert [reason for reason in daemon.stages.probe.ready() if reason.code.startswith("lag")] == []
        [(stored,)] = await daemon.execute("select event_time from atproto.cursors")
        assert stored is None or len(stored) <= 64
        account.create(POST, post("later"))
        await daemon.wait_until_equal()


@pytest.mark.parametrize("time", ["1970-01-01T00:00:00Z", "2023-01-01T00:00:00Z", "9999-12-31T23:59:59Z"])
async def test_wrong_clocks_of_many_accounts_of_one_host_do_not_decide_readiness(
    database: str, tmp_path: Path, time: str
) -> None:
    """After a restart, each honest account is behind 15 of the 300 accounts of the hostile host."""
    async with LocalNetwork(pds=4) as network:
        async with running_daemon(database, tmp_path, network) as daemon:
            honest = [daemon.create_account(f"honest{number}.test", records=1) for number in range(20)]
            await daemon.wait_until_equal()
        for number, account in enumerate(honest):
            for evil in range(15):
                name = f"did:web:x{number}-{evil}.evil.example"
                payload = {"did": name, "time": time, "seq": network.relay.seq + 1}
                network.relay.inject(message_frame("#identity", payload))
            account.create(POST, post("with the right time"))
        async with running_daemon(database, tmp_path, network) as daemon:
            await daemon.wait_for_cursor()
            lag = daemon.stages.batch_writer.lag
            assert lag is not None
            assert 0 <= lag < 60
            assert [reason for reason in daemon.stages.probe.ready() if reason.code.startswith("lag")] == []


async def test_new_accounts_of_one_host_beyond_its_limit_wait_until_a_list_names_them(
    database: str, tmp_path: Path
) -> None:
    """Nothing of them is fetched or stored, their rows say why, and the account of the other host is not delayed."""
    async with (
        LocalNetwork(pds=2) as network,
        running_daemon(database, tmp_path, network, new_accounts_per_host="3") as daemon,
    ):
        evil = []
        for number in range(8):
            account = network.create_account(f"evil{number}.test", pds=0)
            account.create(POST, post(number))
            evil.append(account)
            await daemon.wait_for_cursor()
        honest = network.create_account("honest.test", pds=1)
        honest.create(POST, post("hello"))
        await daemon.wait_for_cursor()

        async def settled() -> bool:
            [(waiting,)] = await daemon.execute(
                "select count(*) from atproto.repos where sync_status = 'desynchronized' "
                "and last_error like 'new-accounts: %' and next_attempt_at > now() + interval '10 minutes'"
            )
            return bool(waiting == 5 and (await daemon.repo_row(honest))["sync_status"] == "synchronized")

        await until(settled)
        assert daemon.export_requests == 0
        assert sum([len(await daemon.record_rows(account)) for account in evil]) == 3
        assert daemon.counter("resync", result="new-accounts") == 5
        assert await daemon.store.add_repos([account.did for account in evil]) == 0
        await daemon.wait_until_equal()


async def test_unknown_did_web_of_one_domain_add_a_limited_number_of_repos(database: str, tmp_path: Path) -> None:
    """Their messages are ignored and counted, and cause no lookup. Those of other domains add their repos."""
    async with running_daemon(database, tmp_path, new_accounts_per_host="3") as daemon:
        for number in range(10):
            daemon.inject("#identity", {"did": f"did:web:x{number}.evil.example", "time": "2026-01-01T00:00:00Z"})
            await daemon.wait_for_cursor()
        daemon.inject("#identity", {"did": "did:web:honest.example", "time": "2026-01-01T00:00:00Z"})
        await daemon.wait_for_cursor()
        rows = await daemon.execute("select did from indexer.repo")
        assert sorted(did for (did,) in rows) == [
            "did:web:honest.example",
            *[f"did:web:x{number}.evil.example" for number in range(3)],
        ]
        assert daemon.counter("events", kind="identity", outcome="ignored") == 7
        assert daemon.counter("refused_accounts") == 7
        assert daemon.stages.conditions.is_active(NEW_ACCOUNTS_LIMITED, "did:web evil.example")
