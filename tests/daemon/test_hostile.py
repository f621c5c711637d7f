"""Hostile exports: refused by name, in bounded time and memory; nothing changes, and the next true one heals."""

import asyncio
import tracemalloc
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from time import process_time

import pytest

from indexer.atproto.cid import cid_of
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.errors import UnavailableError, UpstreamError
from indexer.localnet.pds import CAR_TYPE, GET_REPO
from indexer.localnet.server import Fault
from indexer.pds import Spool
from indexer.sync.verify import Snapshot, verify_snapshot
from tests.daemon.exports import BROKEN, ODD, TOO_MUCH, Signed, fan_out, packed
from tests.daemon.stage import POST, post, staged
from tests.serving import until
from tests.sync.people import Person
from tests.test_crash import assert_nothing_doubled

MOST_SECONDS = 2.0  # of work on one of them
MOST_BYTES = 12 << 20  # of memory beside the export itself
RECORDS = "select * from indexer.record order by did, collection, rkey"
FAILED = "select count(*) from indexer.repo where status = 'desynchronized' and last_error is not null"
JUDGED_LATER = {"without its last block", "a commit of the future"}  # by the resync, which knows more than the export


@pytest.fixture(scope="module")
def host() -> Signed:
    person = Person()
    for number in range(40):
        person.post(f"{number:03}")
    return Signed(person.repo, person.key)


def proven(export: bytes, host: Signed, directory: Path) -> Snapshot:
    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(export), 65_536):
            yield export[start : start + 65_536]

    with Spool(directory, DEFAULT_LIMITS) as spool:
        asyncio.run(spool.fill(pieces()))
        return verify_snapshot(host.repo.did, spool.root, spool.block, host.key.public, DEFAULT_LIMITS)


@pytest.mark.parametrize("name", sorted(BROKEN.keys() - JUDGED_LATER))
def test_a_broken_export_is_refused_within_bounds(host: Signed, tmp_path: Path, name: str) -> None:
    make, reason = BROKEN[name]
    export = make(host)
    tracemalloc.start()
    began = process_time()
    try:
        with pytest.raises((UpstreamError, UnavailableError)) as refused:
            proven(export, host, tmp_path)
        assert process_time() - began < MOST_SECONDS
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()
    assert f"export-rejected: {refused.value}".startswith(reason) or str(refused.value).startswith(reason)


@pytest.mark.parametrize("name", ODD)
def test_an_odd_export_is_as_good_as_any(host: Signed, tmp_path: Path, name: str) -> None:
    snapshot = proven(ODD[name](host), host, tmp_path)
    assert (snapshot.head.rev, snapshot.count) == (host.repo.head.rev, 40)


def test_a_fan_of_trees_is_not_walked(host: Signed) -> None:
    """Its subtrees come again and again, and no key may: the second time is the last."""
    root, *others = fan_out()
    blocks = {cid_of(block): block for block in (root, *others, host.commit(cid_of(root)))}
    asked: list[bytes] = []

    def block_of(cid: bytes) -> bytes | None:
        asked.append(cid)
        return blocks.get(cid)

    with pytest.raises(UpstreamError, match="beyond the keys beside it"):
        verify_snapshot(host.repo.did, next(reversed(blocks)), block_of, host.key.public, DEFAULT_LIMITS)
    assert len(asked) <= len(blocks) + 1


@pytest.mark.slow
async def test_no_broken_export_changes_anything_and_the_next_true_one_heals(database: str, tmp_path: Path) -> None:
    async with staged(database, tmp_path, resync_source="pds", repo_bytes="20000000", repo_blocks="20000") as stage:
        cases = BROKEN | TOO_MUCH
        accounts = {name: stage.account(f"a{place}.test", records=20) for place, name in enumerate(cases)}
        await stage.equal()
        before = await stage.execute(RECORDS)
        faults = {}
        for name, (make, _) in cases.items():
            account = accounts[name]
            stage.lose_commit(account)
            body = make(Signed(account.repo, account.key))
            faults[name] = Fault(GET_REPO, account.did, status=200, headers={"Content-Type": CAR_TYPE}, body=body)
            account.pds.faults.append(faults[name])
            await asyncio.sleep(0)

        async def all_failed() -> bool:
            [(failed,)] = await stage.execute(FAILED)
            return bool(failed == len(cases))

        await until(all_failed, lambda: [name for name, fault in faults.items() if not fault.fired])
        for name, (_, reason) in cases.items():
            row = await stage.repo(accounts[name])
            assert row["last_error"].startswith(reason), (name, row["last_error"])
            assert (row["status"], row["reason"]) == ("desynchronized", "chain-break"), name
        assert await stage.execute(RECORDS) == before
        assert not list((tmp_path / "spool").iterdir())
        await stage.execute("update indexer.repo set next_attempt_at = null where status = 'desynchronized'")
        await stage.equal()
        assert {fault.fired for fault in faults.values()} == {1}
        await assert_nothing_doubled(database)


@pytest.mark.slow
async def test_two_states_with_one_revision(database: str, tmp_path: Path) -> None:
    """A mirror's word is not enough; what the host itself says is taken, and flagged."""
    async with staged(database, tmp_path) as stage:
        account = stage.account("ada.test")
        await stage.equal()
        before = await stage.stored(account)
        host = Signed(account.repo, account.key)
        other = Fault(GET_REPO, status=200, headers={"Content-Type": CAR_TYPE}, body=host.export(packed([f"{POST}/a"])))
        stage.network.relay.faults.append(other)
        assert await stage.running.store.mark_resync([account.did])
        await stage.counted(0, "resync", result="synchronized")
        assert other.fired == 1
        assert await stage.stored(account) == before

        again = replace(other, times=2, fired=0)  # by way of the relay, too
        account.pds.faults.append(again)
        assert await stage.running.store.mark_resync([account.did])
        await stage.counted(1, "resync", result="synchronized")
        assert again.fired == 2
        assert [row["rkey"] for row in await stage.stored(account)] == ["a"]
        assert stage.metric("desynchronized", reason="equivocation") == 1
        account.create(POST, post("back to one history"))
        await stage.healed(account)
