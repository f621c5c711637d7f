"""Account and identity changes during a resync, mirrors with old exports, and daemons killed during resyncs."""

import asyncio
from collections.abc import Callable
from functools import partial
from math import inf
from pathlib import Path

import asyncpg
import pytest

from indexer.localnet.http_server import Fault
from indexer.localnet.local_account import LocalAccount
from indexer.localnet.local_network import LocalNetwork
from indexer.localnet.local_pds import CAR_TYPE, GET_LATEST_COMMIT, GET_REPO
from tests.daemon.running_daemon import POST, RunningDaemon, post, running_daemon
from tests.daemon_process import daemon_process, log_tail
from tests.database_checks import assert_change_log_consistent, wait_until_equal
from tests.waiting import until

pytestmark = pytest.mark.slow

WORKERS = "20"
IN_PROGRESS = "select count(*) from indexer.repo where sync_status = 'in-progress'"
BUFFERED = "select count(*) from indexer.buffered_event"


def migrate(account: LocalAccount, network: LocalNetwork, *, sign_again: bool) -> None:
    """Move the account to the other PDS of the network."""
    [to] = [pds for pds in network.pdses if pds is not account.pds]
    account.migrate(to, sign_again=sign_again)


def deactivate_and_activate(account: LocalAccount) -> None:
    account.deactivate()
    account.activate()


def deactivate_write_and_activate(account: LocalAccount) -> None:
    """Create a record while the account is deactivated. A correct host would refuse that."""
    account.deactivate()
    account.create(POST, post("while deactivated"))
    account.activate()


def slow_down_export(account: LocalAccount, seconds: int = 2) -> Fault:
    """Let the account's next export take this long. Its content is the state at the time of the request."""
    fault = Fault(GET_REPO, account.did, rate=sum(map(len, account.repo.export())) // seconds)
    account.pds.faults.append(fault)
    return fault


async def start_slow_resyncs(daemon: RunningDaemon, accounts: dict[str, LocalAccount]) -> None:
    """Lose a commit of each account, and wait until all their exports are being fetched."""
    faults = {name: slow_down_export(account) for name, account in accounts.items()}
    for account in accounts.values():
        daemon.lose_commit(account)
    await until(lambda: all(fault.fired for fault in faults.values()), lambda: faults)


async def test_account_changes_during_a_resync(database: str, tmp_path: Path) -> None:
    async with running_daemon(database, tmp_path, resync_source="pds", resync_workers=WORKERS) as daemon:
        network = daemon.network
        changes: dict[str, Callable[[LocalAccount], None]] = {
            "deleted": lambda account: account.delete_account(),
            "taken down": lambda account: account.takedown(),
            "suspended": lambda account: account.suspend(),
            "deactivated": lambda account: account.deactivate(),
            "deactivated and activated": deactivate_and_activate,
            "written while deactivated": deactivate_write_and_activate,
            "migrated": lambda account: migrate(account, network, sign_again=True),
            "migrated without a new signature": lambda account: migrate(account, network, sign_again=False),
            "key rotated": lambda account: account.rotate_key(),
            "handle changed": lambda account: account.set_handle("renamed.test"),
        }
        accounts = {name: daemon.create_account(f"a{number}.test", records=20) for number, name in enumerate(changes)}
        hidden = {"deleted": "deleted", "taken down": "takendown", "suspended": "suspended"}
        hidden |= {"deactivated": "deactivated"}
        await daemon.wait_until_equal()
        await start_slow_resyncs(daemon, accounts)
        for name, account in accounts.items():
            changes[name](account)
            await asyncio.sleep(0)
        await daemon.wait_for_cursor()
        visible = await daemon.store.visible_repos()
        for name, account in accounts.items():
            row = await daemon.repo_row(account)
            assert (account.did in visible) == (name not in hidden), name
            assert row["hosting_status"] == hidden.get(name), name

        async def no_resync_in_progress() -> bool:
            [(in_progress,)] = await daemon.execute(IN_PROGRESS)
            return bool(in_progress == 0)

        await until(no_resync_in_progress)
        await daemon.execute("update indexer.repo set next_attempt_at = null where next_attempt_at < 'infinity'")
        await daemon.wait_until_equal()
        for name in hidden.keys() - {"deleted"}:
            accounts[name].activate()
        await daemon.wait_for_cursor()
        # A reactivation has the back-off of a break, and the slow resyncs were breaks.
        await daemon.execute("update indexer.repo set next_attempt_at = null where next_attempt_at < 'infinity'")
        await daemon.wait_until_equal()
        assert set(await daemon.store.visible_repos()) == {
            account.did for name, account in accounts.items() if name != "deleted"
        }
        await assert_change_log_consistent(database)


async def test_local_takedown_during_a_resync_hides_the_result(database: str, tmp_path: Path) -> None:
    async with running_daemon(database, tmp_path, resync_source="pds") as daemon:
        account = daemon.create_account("ada.test", records=20)
        await daemon.wait_until_equal()
        await start_slow_resyncs(daemon, {"ada": account})
        assert await daemon.store.set_takedown(account.did, on=True)

        async def synchronized() -> bool:
            return bool((await daemon.repo_row(account))["sync_status"] == "synchronized")

        await until(synchronized)
        assert await daemon.store.visible_repos() == {}
        assert len(await daemon.record_rows(account)) == 22
        assert await daemon.store.set_takedown(account.did, on=False)
        await daemon.wait_until_equal()
        await assert_change_log_consistent(database)


async def test_repo_is_parked_when_only_the_host_reports_the_account_status(database: str, tmp_path: Path) -> None:
    """The relay lost the #account message. The repo stays parked until the next message of the account."""
    async with running_daemon(database, tmp_path, resync_source="pds", resync_workers=WORKERS) as daemon:
        cases: dict[str, tuple[str, Callable[[LocalAccount], None]]] = {
            "deleted": ("repo-not-found", lambda account: account.delete_account()),
            "taken down": ("repo-takendown", lambda account: account.takedown()),
            "suspended": ("repo-suspended", lambda account: account.suspend()),
            "deactivated": ("repo-deactivated", lambda account: account.deactivate()),
        }
        accounts = {name: daemon.create_account(f"a{number}.test") for number, name in enumerate(cases)}
        await daemon.wait_until_equal()
        before = await daemon.execute("select * from indexer.record order by did, collection, rkey")
        for name, (_, change) in cases.items():
            account = accounts[name]
            daemon.network.relay.drop(account.did, 1)
            change(account)
            daemon.lose_commit(account)
        for name, (reason, _) in cases.items():
            await daemon.wait_for_counter("resync", result=reason)
            row = await daemon.repo_row(accounts[name])
            assert (row["sync_status"], row["wait"], row["last_error"].split(":")[0]) == ("desynchronized", inf, reason)
        assert await daemon.execute("select * from indexer.record order by did, collection, rkey") == before
        for account in accounts.values():
            account.activate()
        await daemon.wait_until_equal()
        await assert_change_log_consistent(database)


def freeze_export_of_relay(daemon: RunningDaemon, account: LocalAccount) -> Fault:
    """Let the relay answer with the account's present export from now on."""
    fault = Fault(
        GET_REPO,
        account.did,
        times=None,
        status=200,
        headers={"Content-Type": CAR_TYPE},
        body=b"".join(account.repo.export()),
    )
    daemon.network.relay.faults.append(fault)
    return fault


async def test_old_export_of_a_mirror_makes_the_resync_ask_the_pds(database: str, tmp_path: Path) -> None:
    """The export is older than the stored head, or older than a commit that arrived before the resync."""
    async with running_daemon(database, tmp_path) as daemon:
        account = daemon.create_account("ada.test")
        await daemon.wait_until_equal()
        fault = freeze_export_of_relay(daemon, account)
        account.create(POST, post("not in the export of the mirror"))
        await daemon.wait_until_equal()
        daemon.lose_commit(account)
        await daemon.wait_until_equal()
        assert (fault.fired, account.pds.requests[GET_REPO]) == (1, 1)

        fault.body = b"".join(account.repo.export())
        daemon.lose_commit(account)
        await daemon.wait_for_cursor()
        assert (await daemon.repo_row(account))["wait"] > 0, "the chain broke twice within a short time"
        account.create(POST, post("ignored, but its rev is saved"))
        await daemon.wait_for_cursor()
        row = await daemon.repo_row(account)
        assert (row["sync_status"], row["latest_verified_rev"]) == ("desynchronized", account.rev)
        await daemon.resync_until_equal(account)
        assert fault.fired == 2, "the mirror was asked, and its export was rejected"
        await assert_change_log_consistent(database)


async def test_commit_during_a_fetch_from_an_old_mirror_makes_the_next_attempt_ask_the_pds(
    database: str, tmp_path: Path
) -> None:
    """The buffered commit does not continue the chain of the old export."""
    async with running_daemon(database, tmp_path) as daemon:
        account = daemon.create_account("ada.test", records=20)
        await daemon.wait_until_equal()
        fault = freeze_export_of_relay(daemon, account)
        slow = Fault(GET_LATEST_COMMIT, account.did, rate=50)
        account.pds.faults.append(slow)
        daemon.lose_commit(account)
        await until(lambda: slow.fired == 1)
        account.create(POST, post("during the fetch"))
        await daemon.resync_until_equal(account)
        assert fault.fired >= 1
        assert account.pds.requests[GET_REPO] >= 1
        await assert_change_log_consistent(database)


async def count_is(connection: asyncpg.Connection, statement: str, count: int) -> bool:
    return bool(await connection.fetchval(statement) == count)


@pytest.mark.timeout(180)
async def test_resyncs_are_repeated_after_the_daemon_was_killed(database: str, tmp_path: Path) -> None:
    """The daemon is killed while exports are fetched and events are buffered. The next daemon claims expired leases."""
    async with LocalNetwork() as network:
        accounts = [network.create_account(f"a{number}.test") for number in range(6)]
        for account in accounts:
            for number in range(20):
                account.create(POST, post(number))
        async with daemon_process(network, database, tmp_path):
            await wait_until_equal(network, database)
        connection = await asyncpg.connect(database)
        try:
            for _ in range(2):
                await connection.execute("update indexer.repo set attempts = 0")
                for account in accounts:
                    slow_down_export(account, seconds=60)  # the daemon is killed before its end
                    network.relay.drop(account.did)
                    account.create(POST, post("lost"))
                    account.create(POST, post("after the lost one"))
                async with daemon_process(network, database, tmp_path) as process:
                    await until(partial(count_is, connection, IN_PROGRESS, len(accounts)), partial(log_tail, tmp_path))
                    for account in accounts:
                        account.create(POST, post("during the fetch"))
                    await until(partial(count_is, connection, BUFFERED, len(accounts)), partial(log_tail, tmp_path))
                    process.kill()
                    await process.wait()
                assert await connection.fetchval(IN_PROGRESS) == len(accounts), "no claim was given back"
                await connection.execute(
                    "update indexer.repo set lease_until = now() where sync_status = 'in-progress'"
                )
                async with daemon_process(network, database, tmp_path):
                    await until(partial(count_is, connection, IN_PROGRESS, 0), partial(log_tail, tmp_path))
                    await connection.execute("update indexer.repo set next_attempt_at = null")
                    await wait_until_equal(network, database)
        finally:
            await connection.close()
        await assert_change_log_consistent(database)
