"""Audits of repos that were resynchronized, then changed in the database, or whose hosts fail."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from indexer.atproto.cid import cid_of, cid_text
from indexer.atproto.syntax import tid_of
from indexer.cli.audit import (
    BEING_DELETED,
    BEING_FETCHED,
    MAX_CONCURRENCY,
    MAX_FETCHES,
    RepoAudit,
    audit_concurrency,
)
from indexer.db import DatabaseError
from indexer.db.exports import Exports
from indexer.demo.local_pds import CAR_TYPE, GET_BLOCKS, GET_RECORD, GET_REPO
from indexer.net.pds.pds_client import ExportDownload, PdsClient
from indexer.reasons import FetchFailure
from tests.cli.audit_world import LIKE, OF_POST, POST, AuditWorld, audit_world
from tests.daemon_harness import run_daemon, wait_for_cursor
from tests.db.test_values import COLLECTION as UNUSUAL_COLLECTION
from tests.faulty_network import Fault, FaultyAccount
from tests.waiting import until

pytestmark = pytest.mark.slow

CAR = {"Content-Type": CAR_TYPE}


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the daemon no time to store the rev of the export."""
    monkeypatch.setattr("indexer.cli.audit.CATCH_UP_SECONDS", 0.0)


async def test_resynchronized_repo_with_unusual_records_is_equal(world: AuditWorld, ada: FaultyAccount) -> None:
    result = (await world.audit(ada))[ada.did]
    [[problems]] = await world.sql("select count(distinct value_problem) from indexer.record")
    assert problems >= 9, "the account has many kinds of unusual records"
    count = len(ada.records) - 1
    assert result == RepoAudit(ada.did, records=count, proofs={"export": count})


RECORD = f"{POST}/001"
DIFFERENT_VALUE = f"{RECORD} different value"
DIFFERENT_ODD_VALUE = f"{POST}/odd different value"
EXTRA_ROW = "(did, collection, rkey, bucket, cid, rev) select did, collection, 'zzz', bucket, cid, rev"
DEEP = "set value = (repeat('[', 2000) || repeat(']', 2000))::jsonb"
ROW_CHANGES: list[tuple[str, str, list[str]]] = [
    (f"insert into indexer.record {EXTRA_ROW} from indexer.record", "= '001'", [f"{POST}/zzz not in the repo"]),
    ("set rkey = E'\\x1b[2J'", "= '001'", [f"{POST}/\x1b\\[2J not in the repo", f"{RECORD} missing in the database"]),
    ("set collection = collection || '/a', rkey = '1'", "= '001'",
     [f"{RECORD} missing in the database", f"{POST}/a/1 not in the repo"]),
    ("set cid = decode('01711220', 'hex') || sha256('')", "= '001'",
     [f"{RECORD} different CID: database {cid_text(cid_of(b''))}, host b.+"]),
    ("set cid = substr(cid, 1, 20)", "= '001'", [f"{RECORD} different CID: database b.+, host b.+"]),
    ("set value = jsonb_set(value, '{on}', '1')", "= 'odd'", [DIFFERENT_ODD_VALUE]),
    ("set value = jsonb_set(value, '{n}', '1.0')", "= 'odd'", []),
    ("set value = jsonb_set(value, '{big}', '-9223372036854775807')", "= 'odd'", [DIFFERENT_ODD_VALUE]),
    (DEEP, "= 'odd'", [DIFFERENT_ODD_VALUE]),
    ("set original = null", "is not null or value_problem = 'nul-character' and rkey = '4'",
     [f"{UNUSUAL_COLLECTION}/4 different value"]),
]  # fmt: skip
"""Changes of rows that the property test of the comparison does not make, which rows, and the differences."""


async def test_every_change_to_stored_rows_is_found(world: AuditWorld, ada: FaultyAccount) -> None:
    await world.sql("create table original as table indexer.record")
    for change, condition, expected in ROW_CHANGES:
        statement = f"update indexer.record {change}" if change.startswith("set") else change
        assert await world.sql(f"{statement} {OF_POST} {condition} returning rkey", ada.did), change
        lines = await world.differences(ada)
        assert len(lines) == len(expected), (change, lines)
        for line, pattern in zip(lines, expected, strict=True):
            assert re.fullmatch(pattern, line), (change, line)
        await world.sql("truncate indexer.record")
        await world.sql("insert into indexer.record table original")
        assert await world.differences(ada) == [], change


async def test_different_head_is_found(world: AuditWorld) -> None:
    ada = world.create_account("ada")
    await world.synchronize()
    await world.sql("update indexer.repo set data = commit")
    [line] = await world.differences(ada)
    root = ada.repo.head
    assert line == f"{ada.did} different data: database {cid_text(root.cid)}, host {cid_text(root.data)}"
    await world.delete_post(ada, "002")
    assert await world.differences(ada) == [line, f"{POST}/002 missing in the database"]
    await world.sql("update indexer.repo set rev = '3aaaaaaaaaaaa'")
    assert await world.differences(ada) == [f"{ada.did} behind: database 3aaaaaaaaaaaa, host {ada.rev}"]


async def test_settings_and_stored_scope_decide_what_is_compared(world: AuditWorld) -> None:
    ada = world.create_account("ada", posts=2)
    ada.create(LIKE, {"$type": LIKE}, rkey="1")
    await world.synchronize(collections=POST, store_values="false")
    assert await world.differences(ada, store_values="false") == []
    assert await world.differences(ada) == [f"{POST}/{n:03} different value" for n in range(2)]


async def test_collection_that_is_still_being_fetched_or_deleted_is_no_difference(world: AuditWorld) -> None:
    """Nothing is damaged, so the exit code is not 5, but the repo is not compared completely."""
    ada = world.create_account("ada", posts=2)
    ada.create(LIKE, {"$type": LIKE}, rkey="1")
    await world.synchronize(collections=POST)
    await world.sql(f"select atproto.set_collections(array['{POST}', '{LIKE}'])")
    assert await world.reason_skipped(ada) == f"{BEING_FETCHED}: 1 records"
    await world.delete_post(ada, "001")
    [result] = (await world.audit(ada)).values()
    assert [one["description"] for one in result.listed] == ["missing in the database"], (
        "a record that was complete is damage"
    )
    await world.sql(f"select atproto.set_collections(array['{LIKE}'])")
    assert await world.reason_skipped(ada) in {f"{BEING_FETCHED}: 1 records", f"{BEING_DELETED}: 1 records"}
    await world.db.scope.untrack([ada.did])
    assert await world.reason_skipped(ada) == "not tracked"


async def test_rows_with_values_and_of_a_repo_with_a_local_takedown_are_compared(world: AuditWorld) -> None:
    """The values were stored before INDEXER_STORE_VALUES was disabled."""
    ada = world.create_account("ada")
    await world.synchronize()
    await world.db.repos.set_takedown(ada.did, on=True)
    assert await world.differences(ada, store_values="false") == []
    await world.sql("update indexer.record set value = '{}' where rkey = '001'")
    assert await world.differences(ada, store_values="false") == [DIFFERENT_VALUE]


async def test_changed_rows_of_each_proof_are_found_with_and_without_an_export(world: AuditWorld) -> None:
    """The chosen records are fetched with their proof, or as in a resync the export if the host sends no valid one."""
    ada, chosen = world.create_account("ada", posts=1), {"collections": POST, "sparse_resync": "always"}
    ada.create(LIKE, {"$type": LIKE}, rkey="1")
    await world.synchronize(**chosen)
    ada.create(POST, {"$type": POST}, rkey="001")
    await world.db.repos.request_resyncs([ada.did])
    await world.synchronize(**chosen | {"sparse_resync": "never"})
    ada.create(POST, {"$type": POST}, rkey="002")
    async with run_daemon(world.settings(**chosen), world.dsn) as daemon:
        await wait_for_cursor(daemon, world.network.relay_url, world.network.relay.seq)
    await world.sql("create table original as table indexer.record")
    malformed = Fault(GET_BLOCKS, times=None, status=200, headers=CAR, body=bytes(100))
    for choice, faults, fetched in (
        ("always", [], {GET_RECORD, GET_BLOCKS}),
        ("always", [Fault(GET_RECORD, sections=2, times=None)], {GET_RECORD, GET_REPO}),
        ("always", [malformed], {GET_RECORD, GET_BLOCKS, GET_REPO}),
        ("never", [], {GET_REPO}),
    ):
        ada.pds.faults, before = faults, ada.pds.requests.copy()
        result = (await world.audit(ada, sparse_resync=choice))[ada.did]
        assert result == RepoAudit(ada.did, records=3, proofs={"range": 1, "export": 1, "commit": 1})
        assert set(ada.pds.requests - before) == fetched
        changes = {"set value = '{}'": "different value", "set cid = substr(cid, 1, 20)": "different CID"}
        for change, difference in changes.items():
            await world.sql(f"update indexer.record {change}")
            for store_values in ("true", "false"):
                lines = await world.differences(ada, sparse_resync=choice, store_values=store_values)
                assert [line.partition(":")[0] for line in lines] == [f"{POST}/{n:03} {difference}" for n in range(3)]
            await world.sql("truncate indexer.record")
            await world.sql("insert into indexer.record table original")


async def test_chosen_records_of_an_older_rev_are_fetched_again_as_export(world: AuditWorld) -> None:
    ada, chosen = world.create_account("ada"), {"collections": POST, "sparse_resync": "always"}
    older = Fault(GET_RECORD, times=None, status=200, headers=CAR, body=b"".join(ada.repo.export()))
    ada.create(LIKE, {"$type": LIKE}, rkey="1")
    await world.synchronize(**chosen)
    ada.pds.faults.append(older)
    assert await world.differences(ada, **chosen) == []
    assert (older.fired, ada.pds.requests[GET_REPO]) == (1, 1)


@pytest.mark.parametrize("choice", ["proof", "export after hints", "export"])
async def test_newer_rev_alone_is_no_difference_if_no_event_tells_of_it(world: AuditWorld, choice: str) -> None:
    """But records are: a missing one, and one that the host has deleted."""
    ada, chosen = world.create_account("ada"), {"collections": POST, "sparse_resync": "always"}
    await world.synchronize(**chosen)
    if choice != "proof":
        ada.pds.faults.append(Fault(GET_RECORD, sections=2, times=None))
    if choice == "export after hints":
        await world.sql("insert into indexer.cursor (relay, shard, seq) values ('jetstream', '0/1', 1)")
    behind = f"{ada.did} behind: database {ada.rev}, host "
    ada.create(LIKE, {"$type": LIKE})
    expected = [behind + ada.rev] if choice == "export" else []
    assert await world.differences(ada, start="live") == expected
    ada.create(POST, {"$type": POST}, rkey="new")
    ada.delete(f"{POST}/000")
    expected = [f"{POST}/000 not in the repo", f"{POST}/new missing in the database"]
    assert await world.differences(ada, start="live") == ([behind + ada.rev] if choice == "export" else expected)


def publish_another_key(_: AuditWorld, account: FaultyAccount) -> None:
    """Publish a key that did not sign the last commit."""
    account.swap_key()
    account.publish_key()


def send_no_last_record(_: AuditWorld, account: FaultyAccount) -> None:
    account.pds.faults.append(Fault(GET_REPO, sections=len(list(account.repo.export())) - 1))


def fault(**values: Any) -> Callable[[AuditWorld, FaultyAccount], Any]:
    return lambda _, ada: ada.pds.faults.append(Fault(GET_REPO, **values))


TAKEN_DOWN, REQUESTED = "inactive: takendown", "not synchronized: requested"
TAKE_DOWN = "update indexer.repo set active = false, hosting_status = 'takendown' where did = $1 returning did"
PAUSE = (
    "update indexer.host set paused_until = now() + interval '1 hour', pause_reason = 'host-paused' "
    "where host = $1 returning host"
)
SKIPPED: dict[str, Callable[[AuditWorld, FaultyAccount], Any]] = {
    "unreachable: ": lambda _, ada: ada.pds.stop(),
    "throttled: ": fault(status=429, headers={"Retry-After": "9"}),
    "repo-not-found: ": lambda _, ada: ada.delete_account(),
    "export-incomplete: no node ": fault(sections=3),
    "export-lacks-records: 1 records": send_no_last_record,
    "export-rejected: car-malformed": fault(status=200, body=bytes(100)),
    "export-rejected: signature-invalid": publish_another_key,
    "export-rejected: future-rev": lambda _, ada: ada.repo.write([], ada.key, tid_of(2**52)),
    "identity-missing: not registered": lambda world, ada: world.network.plc.forget(ada.did),
    TAKEN_DOWN: lambda world, ada: world.sql(TAKE_DOWN, ada.did),
    REQUESTED: lambda world, ada: world.db.repos.request_resyncs([ada.did]),
    "host-paused: ": lambda world, ada: world.sql(PAUSE, ada.pds.url.removeprefix("http://")),
}
"""The reasons why repos are skipped, and what causes them."""


async def test_skipped_repos_have_a_reason_and_do_not_delay_the_others(database: str, tmp_path: Path) -> None:
    async with audit_world(database, tmp_path, hosts=len(SKIPPED) + 1) as world:
        accounts = {reason: world.create_account(f"account{number}") for number, reason in enumerate(SKIPPED)}
        bob = world.create_account("bob")
        await world.synchronize()
        for reason, account in accounts.items():
            causing = SKIPPED[reason](world, account)
            assert not asyncio.iscoroutine(causing) or await causing != [], reason
        before = await world.all_rows()
        not_comparable = [accounts[reason].pds for reason in (TAKEN_DOWN, REQUESTED)]
        exports = [pds.requests[GET_REPO] for pds in not_comparable]
        results = await world.audit(*accounts.values(), bob)
        assert await world.all_rows() == before
        assert [pds.requests[GET_REPO] for pds in not_comparable] == exports, "no needless export"
        await world.network.plc.stop()
        assert (await world.reason_skipped(bob)).startswith("identity-unavailable: unreachable: ")
    for reason, account in accounts.items():
        result = results[account.did]
        assert (result.reason_skipped or "").startswith(reason), (reason, result.reason_skipped)
        assert result.differences == 0
        assert all(fault.fired == 1 for fault in account.pds.faults), reason
    assert results[bob.did] == RepoAudit(bob.did, records=5, proofs={"export": 5})


@pytest.mark.parametrize("times", [1, MAX_FETCHES - 1, None])
async def test_export_older_than_the_stored_rev_is_fetched_again_a_limited_number_of_times(
    world: AuditWorld, times: int | None
) -> None:
    ada = world.create_account("ada")
    older = ada.rev
    fault = Fault(GET_REPO, times=times, status=200, headers=CAR, body=b"".join(ada.repo.export()))
    ada.create(POST, {"$type": POST, "text": "newer"})
    await world.synchronize()
    ada.pds.faults.append(fault)
    before = ada.pds.requests[GET_REPO]
    if times is not None:
        assert await world.differences(ada) == []
        assert (fault.fired, ada.pds.requests[GET_REPO] - before) == (times, times + 1)
        return
    assert await world.reason_skipped(ada) == f"export-stale: {older} < {ada.rev}"
    assert fault.fired == MAX_FETCHES


async def test_audit_waits_until_the_daemon_has_stored_the_newer_rev(
    world: AuditWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada = world.create_account("ada")
    await world.synchronize()
    ada.create(POST, {"$type": POST, "text": "newer"})
    [line] = await world.differences(ada)
    assert re.fullmatch(rf"{ada.did} behind: database \S+, host {ada.rev}", line)
    reads = 0
    consistent_read = Exports.consistent_read

    def count_read(self: Exports, did: str) -> Any:
        nonlocal reads
        reads += 1
        return consistent_read(self, did)

    monkeypatch.setattr(Exports, "consistent_read", count_read)
    monkeypatch.setattr("indexer.cli.audit.CATCH_UP_SECONDS", 60.0)
    monkeypatch.setattr("indexer.cli.audit.POLL_SECONDS", 0.01)
    auditing = asyncio.create_task(world.audit(ada))
    await until(lambda: reads > 3)
    assert not auditing.done()
    async with run_daemon(world.settings(), world.dsn):
        result = (await auditing)[ada.did]
    assert result == RepoAudit(ada.did, records=6, proofs={"export": 5, "commit": 1})


async def test_repo_that_becomes_desynchronized_during_the_audit_is_skipped(
    world: AuditWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada = world.create_account("ada")
    await world.synchronize()
    ada.create(POST, {"$type": POST, "text": "newer"})
    fetch = PdsClient.open_export

    @asynccontextmanager
    async def fetch_and_request_resync(self: PdsClient, did: str, host: str) -> AsyncIterator[ExportDownload]:
        async with fetch(self, did, host) as download:
            await world.db.repos.request_resyncs([did])
            yield download

    monkeypatch.setattr(PdsClient, "open_export", fetch_and_request_resync)
    assert await world.reason_skipped(ada) == "not synchronized: requested"


async def test_number_of_concurrent_audits_is_limited(world: AuditWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    accounts = [world.create_account(f"account{number}") for number in range(7)]
    await world.synchronize()
    running, max_running, limit = 0, 0, 3
    fetch = PdsClient.open_export

    @asynccontextmanager
    async def count_fetch(self: PdsClient, did: str, host: str) -> AsyncIterator[ExportDownload]:
        nonlocal running, max_running
        running += 1
        max_running = max(max_running, running)
        try:
            await until(lambda: max_running == limit)
            async with fetch(self, did, host) as download:
                yield download
        finally:
            running -= 1

    monkeypatch.setattr(PdsClient, "open_export", count_fetch)
    results = await world.audit(*accounts, resync_workers=str(limit))
    expected = RepoAudit("", records=5, proofs={"export": 5})
    assert results == {account.did: replace(expected, did=account.did) for account in accounts}
    assert max_running == limit
    assert audit_concurrency(world.settings(resync_workers="1000")) == MAX_CONCURRENCY


async def test_database_error_ends_all_audits(world: AuditWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """No task of an audit is left."""
    accounts = [world.create_account(f"account{number}") for number in range(4)]
    await world.synchronize()

    def fail(*_: object) -> None:
        raise DatabaseError(FetchFailure.UNREACHABLE, "no database")

    monkeypatch.setattr(Exports, "consistent_read", fail)
    with pytest.raises(DatabaseError, match="no database"):
        await world.audit(*accounts)
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("audit ")]
