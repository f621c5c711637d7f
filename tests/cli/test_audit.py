"""Audits of repos that were resynchronized, then changed in the database, or whose hosts fail."""

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from indexer.atproto.cid import cid_of, cid_text
from indexer.atproto.syntax import tid_of
from indexer.cli.audit import MAX_CONCURRENCY, AuditTimeouts, audit_concurrency
from indexer.cli.audit_result import RepoAudit
from indexer.localnet.http_server import Fault
from indexer.localnet.local_account import LocalAccount
from indexer.localnet.local_pds import GET_REPO
from indexer.localnet.local_repo import Write
from indexer.pds import PdsClient, Spool
from indexer.reasons import FetchFailure
from indexer.store import DatabaseError, Store, consistent_read
from tests.cli.audit_world import LIKE, NO_WAIT, OF_POST, POST, AuditWorld, audit_world
from tests.daemon_harness import run_daemon
from tests.store.test_values import COLLECTION as UNUSUAL_COLLECTION
from tests.waiting import until

pytestmark = pytest.mark.slow


async def test_resynchronized_repo_with_unusual_records_is_equal(
    world: AuditWorld, ada: LocalAccount, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consistent_read, "CHUNK_SIZE", 4)
    result = (await world.audit(ada))[ada.did]
    [[problems]] = await world.sql("select count(distinct value_problem) from indexer.record")
    assert problems >= 9, "the account has many kinds of unusual records"
    assert result == RepoAudit(ada.did, records=len(ada.records) - 1)


RECORD = f"{POST}/001"
DIFFERENT_VALUE = f"{RECORD} different value"
DIFFERENT_ODD_VALUE = f"{POST}/odd different value"
ROW_CHANGES: dict[str, tuple[str, str, list[str]]] = {
    "a row deleted": ("delete from indexer.record", "= '001'", [f"{RECORD} missing in the database"]),
    "rows deleted": (
        "delete from indexer.record",
        "< 'n'",
        [f"{POST}/{n:03} missing in the database" for n in range(5)],
    ),
    "an extra row": (
        "insert into indexer.record (did, collection, rkey, bucket, cid, rev) "  # noqa: ISC004 - one statement
        "select did, collection, 'zzz', bucket, cid, rev from indexer.record",
        "= '001'",
        [f"{POST}/zzz not in the repo"],
    ),
    "a row whose key is invalid": (
        "update indexer.record set rkey = E'\\x1b[2J'",
        "= '001'",
        [f"{POST}/\x1b\\[2J not in the repo", f"{RECORD} missing in the database"],
    ),
    "a row whose path is out of order": (
        "update indexer.record set collection = collection || '/a', rkey = '1'",
        "= '001'",
        ["did:.+ stored paths out of order: .+"],
    ),
    "another CID": (
        "update indexer.record set cid = decode('01711220', 'hex') || sha256('')",
        "= '001'",
        [f"{RECORD} different CID: database {cid_text(cid_of(b''))}, host b.+"],
    ),
    "the CID of another record": (
        "update indexer.record set cid = (select cid from indexer.record where rkey = '000')",
        "= '001'",
        [f"{RECORD} different CID: database b.+, host b.+"],
    ),
    "a truncated CID": (
        "update indexer.record set cid = substr(cid, 1, 20)",
        "= '001'",
        [f"{RECORD} different CID: database b.+, host b.+"],
    ),
    "another value": ("""update indexer.record set value = '{"text": "one"}'""", "= '001'", [DIFFERENT_VALUE]),
    "an additional field": (
        """update indexer.record set value = value || '{"a": null}'""",
        "= '001'",
        [DIFFERENT_VALUE],
    ),
    "no value": ("update indexer.record set value = null", "= '001'", [DIFFERENT_VALUE]),
    "a value that is null": ("update indexer.record set value = 'null'", "= '001'", [DIFFERENT_VALUE]),
    "a value marked as missing": (
        "update indexer.record set value = null, value_problem = 'missing'",
        "= '001'",
        [DIFFERENT_VALUE],
    ),
    "1 for true": ("update indexer.record set value = jsonb_set(value, '{on}', '1')", "= 'odd'", [DIFFERENT_ODD_VALUE]),
    "true for 1": (
        "update indexer.record set value = jsonb_set(value, '{n}', 'true')",
        "= 'odd'",
        [DIFFERENT_ODD_VALUE],
    ),
    "1.0 for 1": ("update indexer.record set value = jsonb_set(value, '{n}', '1.0')", "= 'odd'", []),
    "a number that differs by one": (
        "update indexer.record set value = jsonb_set(value, '{big}', '-9223372036854775807')",
        "= 'odd'",
        [DIFFERENT_ODD_VALUE],
    ),
    "a value nested too deeply": (
        "update indexer.record set value = (repeat('[', 2000) || repeat(']', 2000))::jsonb",
        "= 'odd'",
        [DIFFERENT_ODD_VALUE],
    ),
    "an additional problem": ("update indexer.record set value_problem = 'no-type'", "= '001'", [DIFFERENT_VALUE]),
    "an additional original": ("update indexer.record set original = ''", "= '001'", [DIFFERENT_VALUE]),
    "no original": (
        "update indexer.record set original = null",
        "is not null or value_problem = 'nul-character' and rkey = '4'",
        [f"{UNUSUAL_COLLECTION}/4 different value"],
    ),
}


async def test_every_change_to_stored_rows_is_found(
    world: AuditWorld, ada: LocalAccount, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consistent_read, "CHUNK_SIZE", 3)
    await world.sql("create table original as table indexer.record")
    for change, (statement, condition, expected) in ROW_CHANGES.items():
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
    await world.sql(f"select atproto.set_collections(array['{LIKE}'])")
    lines = await world.differences(ada, store_values="false")
    assert lines == [
        f"{LIKE}/1 missing in the database",
        *[f"{POST}/{n:03} not in a selected collection" for n in range(2)],
    ]


async def test_values_from_before_store_values_was_disabled_are_compared(world: AuditWorld, ada: LocalAccount) -> None:
    assert await world.differences(ada, store_values="false") == []
    await world.sql("update indexer.record set value = '{}' where rkey = '001'")
    assert await world.differences(ada, store_values="false") == [DIFFERENT_VALUE]


def publish_another_key(account: LocalAccount) -> None:
    """Publish a key that did not sign the last commit."""
    account.swap_key()
    account.publish_key()


def commit_with_future_rev(account: LocalAccount) -> None:
    account.repo.write([], account.key, tid_of(2**52))


SKIPPED: dict[str, tuple[Callable[[AuditWorld, LocalAccount], Any], str]] = {
    "the host is unreachable": (lambda _, ada: ada.pds.stop(), "unreachable: "),
    "the host returns a server error": (
        lambda _, ada: ada.pds.faults.append(Fault(GET_REPO, status=500)),
        "http-status: 500",
    ),
    "the host asks for a pause": (
        lambda _, ada: ada.pds.faults.append(Fault(GET_REPO, status=429, headers={"Retry-After": "9"})),
        "throttled: ",
    ),
    "the host does not know the repo": (lambda _, ada: ada.delete_account(), "repo-not-found: "),
    "the connection breaks": (lambda _, ada: ada.pds.faults.append(Fault(GET_REPO, cut=700)), "unreachable: "),
    "the export is incomplete": (
        lambda _, ada: ada.pds.faults.append(Fault(GET_REPO, sections=3)),
        "export-incomplete: no node ",
    ),
    "the export lacks a record": (
        lambda _, ada: ada.pds.faults.append(Fault(GET_REPO, sections=len(list(ada.repo.export())) - 1)),
        "export-lacks-records: 1 records",
    ),
    "the export is not a CAR file": (
        lambda _, ada: ada.pds.faults.append(Fault(GET_REPO, status=200, body=bytes(100))),
        "export-rejected: car-malformed",
    ),
    "the signing key is another one": (lambda _, ada: publish_another_key(ada), "export-rejected: signature-invalid"),
    "the rev is in the future": (lambda _, ada: commit_with_future_rev(ada), "export-rejected: future-rev"),
    "the DID does not exist": (
        lambda world, ada: world.network.plc.identities.pop(ada.did),
        "identity-missing: not registered",
    ),
    "the account is taken down upstream": (
        lambda world, ada: world.sql(
            "update indexer.repo set active = false, hosting_status = 'takendown' where did = $1 returning did",
            ada.did,
        ),
        "inactive: takendown",
    ),
    "the repo is not synchronized": (
        lambda world, ada: world.store.request_resyncs([ada.did]),
        "not synchronized: requested",
    ),
    "the host is paused": (
        lambda world, ada: world.sql(
            "update indexer.host set paused_until = now() + interval '1 hour', pause_reason = 'host-paused' "
            "where host = $1 returning host",
            ada.pds.url.removeprefix("http://"),
        ),
        "host-paused: ",
    ),
}


async def test_skipped_repos_have_a_reason_and_do_not_delay_the_others(database: str, tmp_path: Path) -> None:
    async with audit_world(database, tmp_path, hosts=len(SKIPPED) + 1) as world:
        accounts = {case: world.create_account(f"account{number}") for number, case in enumerate(SKIPPED)}
        bob = world.create_account("bob")
        await world.synchronize()
        for case, account in accounts.items():
            changing = SKIPPED[case][0](world, account)
            assert not asyncio.iscoroutine(changing) or await changing != [], case
        before = await world.all_rows()
        not_comparable = [
            accounts[case] for case in ("the account is taken down upstream", "the repo is not synchronized")
        ]
        exports = [account.pds.requests[GET_REPO] for account in not_comparable]
        results = await world.audit(*accounts.values(), bob)
        assert await world.all_rows() == before
        assert [account.pds.requests[GET_REPO] for account in not_comparable] == exports, "no needless export"
    for case, account in accounts.items():
        result = results[account.did]
        assert (result.reason_skipped or "").startswith(SKIPPED[case][1]), (case, result.reason_skipped)
        assert result.differences == 0
        assert all(fault.fired == 1 for fault in account.pds.faults), case
    assert results[bob.did] == RepoAudit(bob.did, records=5)


async def test_repo_is_skipped_if_the_plc_directory_is_unreachable(world: AuditWorld) -> None:
    ada = world.create_account("ada")
    await world.synchronize()
    await world.network.plc.stop()
    assert (await world.reason_skipped(ada)).startswith("identity-unavailable: unreachable: ")


async def test_repo_with_a_local_takedown_is_compared(world: AuditWorld) -> None:
    ada = world.create_account("ada")
    await world.synchronize()
    await world.store.set_takedown(ada.did, on=True)
    assert await world.differences(ada) == []


async def test_value_missing_in_database_and_export_is_not_a_difference(world: AuditWorld) -> None:
    ada = world.create_account("ada")
    await world.synchronize()
    last = list(ada.repo.export())[-1]
    [[rkey]] = await world.sql(
        "update indexer.record set value = null, value_problem = 'missing' where position(cid in $1) > 0 "
        "returning rkey",
        last,
    )
    assert await world.differences(ada) == [f"{POST}/{rkey} different value"]
    ada.pds.faults.append(Fault(GET_REPO, sections=len(list(ada.repo.export())) - 1))
    assert await world.differences(ada) == []


def outdated_export(account: LocalAccount, times: int | None) -> Fault:
    """Return a fault that sends the present export instead of newer ones, `times` times (None: always)."""
    headers = {"Content-Type": "application/vnd.ipld.car"}
    return Fault(GET_REPO, times=times, status=200, headers=headers, body=b"".join(account.repo.export()))


@pytest.mark.parametrize("times", [1, 4])
async def test_export_older_than_the_stored_rev_is_fetched_again(world: AuditWorld, times: int) -> None:
    ada = world.create_account("ada")
    fault = outdated_export(ada, times)
    ada.create(POST, {"$type": POST, "text": "newer"})
    await world.synchronize()
    ada.pds.faults.append(fault)
    before = ada.pds.requests[GET_REPO]
    assert await world.differences(ada) == []
    assert (fault.fired, ada.pds.requests[GET_REPO] - before) == (times, times + 1)


async def test_host_with_an_older_rev_is_fetched_a_limited_number_of_times(world: AuditWorld) -> None:
    ada = world.create_account("ada")
    older, fault = ada.rev, outdated_export(ada, None)
    ada.create(POST, {"$type": POST, "text": "newer"})
    await world.synchronize()
    ada.pds.faults.append(fault)
    assert await world.reason_skipped(ada) == f"export-stale: {older} < {ada.rev}"
    assert fault.fired == NO_WAIT.max_fetches


async def test_audit_waits_until_the_daemon_has_stored_the_newer_rev(
    world: AuditWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada = world.create_account("ada")
    await world.synchronize()
    ada.create(POST, {"$type": POST, "text": "newer"})
    [line] = await world.differences(ada)
    assert re.fullmatch(rf"{ada.did} behind: database \S+, host {ada.rev}", line)
    reads = 0
    consistent_read = Store.consistent_read

    def count_read(self: Store, did: str) -> Any:
        nonlocal reads
        reads += 1
        return consistent_read(self, did)

    monkeypatch.setattr(Store, "consistent_read", count_read)
    timeouts = AuditTimeouts(catch_up_seconds=60.0, poll_seconds=0.01)
    auditing = asyncio.create_task(world.audit(ada, timeouts=timeouts))
    await until(lambda: reads > 3)
    assert not auditing.done()
    async with run_daemon(world.settings(), world.dsn):
        result = (await auditing)[ada.did]
    assert result == RepoAudit(ada.did, records=6)


async def test_repo_that_becomes_desynchronized_during_the_audit_is_skipped(
    world: AuditWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada = world.create_account("ada")
    await world.synchronize()
    ada.create(POST, {"$type": POST, "text": "newer"})
    fetch = PdsClient.fetch_export

    @asynccontextmanager
    async def fetch_and_request_resync(self: PdsClient, did: str, host: str) -> AsyncIterator[Spool]:
        async with fetch(self, did, host) as spool:
            await world.store.request_resyncs([did])
            yield spool

    monkeypatch.setattr(PdsClient, "fetch_export", fetch_and_request_resync)
    assert await world.reason_skipped(ada) == "not synchronized: requested"


async def test_commits_during_the_audit_are_not_differences(world: AuditWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon stores the commits of an account that keeps writing; each audit compares one point in time."""
    monkeypatch.setattr(consistent_read, "CHUNK_SIZE", 1)
    ada = world.create_account("ada")
    await world.synchronize()
    async with run_daemon(world.settings(), world.dsn):

        async def write() -> None:
            for number in range(10_000):
                ada.apply_writes(
                    [
                        Write.update(f"{POST}/{number % 5:03}", {"$type": POST, "text": f"again {number}"}),
                        Write.create(f"{POST}/new{number}", {"$type": POST}),
                        *([Write.delete(f"{POST}/new{number - 5}")] if number >= 5 else []),
                    ]
                )
                await asyncio.sleep(0.2)

        writing = asyncio.create_task(write())
        timeouts = AuditTimeouts(max_fetches=20, catch_up_seconds=30.0, poll_seconds=0.01)
        try:
            for _ in range(10):
                result = (await world.audit(ada, timeouts=timeouts))[ada.did]
                assert (result.differences, result.reason_skipped) == (0, None)
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)


async def test_number_of_concurrent_audits_is_limited(world: AuditWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    accounts = [world.create_account(f"account{number}") for number in range(7)]
    await world.synchronize()
    running, max_running, limit = 0, 0, 3
    fetch = PdsClient.fetch_export

    @asynccontextmanager
    async def count_fetch(self: PdsClient, did: str, host: str) -> AsyncIterator[Spool]:
        nonlocal running, max_running
        running += 1
        max_running = max(max_running, running)
        try:
            await until(lambda: max_running == limit)
            async with fetch(self, did, host) as spool:
                yield spool
        finally:
            running -= 1

    monkeypatch.setattr(PdsClient, "fetch_export", count_fetch)
    results = await world.audit(*accounts, resync_workers=str(limit))
    assert results == {account.did: RepoAudit(account.did, records=5) for account in accounts}
    assert max_running == limit
    assert audit_concurrency(world.settings(resync_workers="1000")) == MAX_CONCURRENCY


async def test_database_error_ends_all_audits(world: AuditWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """No task and no thread of an audit is left."""
    accounts = [world.create_account(f"account{number}") for number in range(4)]
    await world.synchronize()

    def fail(*_: object) -> None:
        raise DatabaseError(FetchFailure.UNREACHABLE, "no database")

    monkeypatch.setattr(Store, "consistent_read", fail)
    with pytest.raises(DatabaseError, match="no database"):
        await world.audit(*accounts)
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("audit of")]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("audit")]
