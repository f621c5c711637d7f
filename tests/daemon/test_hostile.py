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
from indexer.localnet.local_pds import CAR_TYPE, GET_REPO
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


@pytest.mark.parametrize("name", sorted(INVALID_EXPORTS.keys() - REJECTED_BY_THE_RESYNC))
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


@pytest.mark.slow
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


@pytest.mark.slow
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
