"""Accounts that leave, come back, or move while their repos are fetched; and mirrors that are behind."""

import asyncio
from collections.abc import Callable
from functools import partial
from math import inf
from pathlib import Path

import asyncpg
import pytest

from indexer.localnet.account import Account
from indexer.localnet.network import LocalNetwork
from indexer.localnet.pds import CAR_TYPE, GET_LATEST_COMMIT, GET_REPO
from indexer.localnet.server import Fault
from tests.daemon.stage import POST, Stage, post, staged
from tests.serving import until
from tests.test_crash import assert_nothing_doubled, daemon_process, equal, log_of

WORKERS = "20"
RUNNING = "select count(*) from indexer.repo where status = 'in-progress'"
KEPT = "select count(*) from indexer.kept_event"


def move(account: Account, network: LocalNetwork, *, resign: bool) -> None:
    [to] = [pds for pds in network.pdses if pds is not account.pds]
    account.migrate(to, resign=resign)


def away_for_a_moment(account: Account) -> None:
    account.deactivate()
    account.activate()


def away_and_busy(account: Account) -> None:
    """A host that goes on while the account is deactivated."""
    account.deactivate()
    account.create(POST, post("while away"))
    account.activate()


def in_a_slow_fetch(account: Account) -> Fault:
    """The account's next export takes some two seconds, and holds what it held when it was asked for."""
    fault = Fault(GET_REPO, account.did, rate=sum(map(len, account.repo.export())) // 2)
    account.pds.faults.append(fault)
    return fault


async def all_fetching(stage: Stage, accounts: dict[str, Account]) -> None:
    """A commit of each is lost, and its export is under way."""
    faults = {name: in_a_slow_fetch(account) for name, account in accounts.items()}
    for account in accounts.values():
        stage.lose_commit(account)
    await until(lambda: all(fault.fired for fault in faults.values()), lambda: faults)


@pytest.mark.slow
async def test_accounts_that_change_in_the_middle_of_their_resync(database: str, tmp_path: Path) -> None:
    async with staged(database, tmp_path, resync_source="pds", resync_workers=WORKERS) as stage:
        network = stage.network
        doings: dict[str, Callable[[Account], None]] = {
            "deleted": lambda account: account.delete_account(),
            "taken down": lambda account: account.takedown(),
            "suspended": lambda account: account.suspend(),
            "deactivated": lambda account: account.deactivate(),
            "away for a moment": away_for_a_moment,
            "away and busy": away_and_busy,
            "moved": lambda account: move(account, network, resign=True),
            "moved and not signed anew": lambda account: move(account, network, resign=False),
            "a new key": lambda account: account.rotate_key(),
            "a new name": lambda account: account.set_handle("renamed.test"),
        }
        accounts = {name: stage.account(f"a{place}.test", records=20) for place, name in enumerate(doings)}
        hidden = {"deleted": "deleted", "taken down": "takendown", "suspended": "suspended"}
        hidden |= {"deactivated": "deactivated"}
        await stage.equal()
        await all_fetching(stage, accounts)
        for name, account in accounts.items():
            doings[name](account)
            await asyncio.sleep(0)
        await stage.read()
        visible = await stage.running.store.visible_repos()
        for name, account in accounts.items():
            row = await stage.repo(account)
            assert (account.did in visible) == (name not in hidden), name
            assert row["hosting_status"] == hidden.get(name), name

        async def none_running() -> bool:
            [(running,)] = await stage.execute(RUNNING)
            return bool(running == 0)

        await until(none_running)
        await stage.execute("update indexer.repo set next_attempt_at = null where next_attempt_at < 'infinity'")
        await stage.equal()
        for name in hidden.keys() - {"deleted"}:
            accounts[name].activate()
        await stage.equal()
        assert set(await stage.running.store.visible_repos()) == {
            account.did for name, account in accounts.items() if name != "deleted"
        }
        await assert_nothing_doubled(database)


@pytest.mark.slow
async def test_a_local_takedown_in_the_middle_of_a_resync(database: str, tmp_path: Path) -> None:
    async with staged(database, tmp_path, resync_source="pds") as stage:
        account = stage.account("ada.test", records=20)
        await stage.equal()
        await all_fetching(stage, {"ada": account})
        assert await stage.running.store.takedown(account.did, on=True)

        async def synchronized() -> bool:
            return bool((await stage.repo(account))["status"] == "synchronized")

        await until(synchronized)
        assert await stage.running.store.visible_repos() == {}
        assert len(await stage.stored(account)) == 22
        assert await stage.running.store.takedown(account.did, on=False)
        await stage.equal()
        await assert_nothing_doubled(database)


@pytest.mark.slow
async def test_accounts_of_whose_leaving_only_the_host_tells(database: str, tmp_path: Path) -> None:
    """The relay lost the message: the repo is left with the host's reason, until the account is heard of again."""
    async with staged(database, tmp_path, resync_source="pds", resync_workers=WORKERS) as stage:
        told: dict[str, tuple[str, Callable[[Account], None]]] = {
            "deleted": ("repo-not-found", lambda account: account.delete_account()),
            "taken down": ("repo-takendown", lambda account: account.takedown()),
            "suspended": ("repo-suspended", lambda account: account.suspend()),
            "deactivated": ("repo-deactivated", lambda account: account.deactivate()),
        }
        accounts = {name: stage.account(f"a{place}.test") for place, name in enumerate(told)}
        await stage.equal()
        before = await stage.execute("select * from indexer.record order by did, collection, rkey")
        for name, (_, doing) in told.items():
            account = accounts[name]
            stage.network.relay.drop(account.did, 1)
            doing(account)
            stage.lose_commit(account)
        for name, (reason, _) in told.items():
            await stage.counted(0, "resync", result=reason)
            row = await stage.repo(accounts[name])
            assert (row["status"], row["wait"], row["last_error"].split(":")[0]) == ("desynchronized", inf, reason)
        assert await stage.execute("select * from indexer.record order by did, collection, rkey") == before
        for account in accounts.values():
            account.activate()
        await stage.equal()
        await assert_nothing_doubled(database)


def behind(stage: Stage, account: Account) -> Fault:
    """From now on the relay answers with the account's export of this moment."""
    fault = Fault(
        GET_REPO,
        account.did,
        times=None,
        status=200,
        headers={"Content-Type": CAR_TYPE},
        body=b"".join(account.repo.export()),
    )
    stage.network.relay.faults.append(fault)
    return fault


@pytest.mark.slow
async def test_a_mirror_that_is_behind_is_not_the_end(database: str, tmp_path: Path) -> None:
    """Behind our own state, and behind a commit that came while the repo waited for its resync."""
    async with staged(database, tmp_path) as stage:
        account = stage.account("ada.test")
        await stage.equal()
        fault = behind(stage, account)
        account.create(POST, post("behind the mirror's"))
        await stage.equal()
        stage.lose_commit(account)
        await stage.equal()
        assert (fault.fired, account.pds.requests[GET_REPO]) == (1, 1)

        fault.body = b"".join(account.repo.export())
        stage.lose_commit(account)
        await stage.read()
        assert (await stage.repo(account))["wait"] > 0, "it broke not long ago, too"
        account.create(POST, post("ignored, and remembered"))
        await stage.read()
        row = await stage.repo(account)
        assert (row["status"], row["seen_rev"]) == ("desynchronized", account.rev)
        await stage.healed(account)
        assert fault.fired == 2, "the mirror was asked, and was not enough"
        await assert_nothing_doubled(database)


@pytest.mark.slow
async def test_commits_during_the_fetch_from_a_mirror_that_is_behind(database: str, tmp_path: Path) -> None:
    """They don't follow its export: the next attempt knows what was seen, and goes on to the host."""
    async with staged(database, tmp_path) as stage:
        account = stage.account("ada.test", records=20)
        await stage.equal()
        fault = behind(stage, account)
        slow = Fault(GET_LATEST_COMMIT, account.did, rate=50)
        account.pds.faults.append(slow)
        stage.lose_commit(account)
        await until(lambda: slow.fired == 1)
        account.create(POST, post("meanwhile"))
        await stage.healed(account)
        assert fault.fired >= 1
        assert account.pds.requests[GET_REPO] >= 1
        await assert_nothing_doubled(database)


async def counted(connection: asyncpg.Connection, statement: str, count: int) -> bool:
    return bool(await connection.fetchval(statement) == count)


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_killed_in_the_middle_of_resyncs(database: str, tmp_path: Path) -> None:
    """kill -9 while exports come and commits are kept; the leases run out, and the next daemon ends what was begun."""
    async with LocalNetwork() as network:
        accounts = [network.create_account(f"a{number}.test") for number in range(6)]
        for account in accounts:
            for number in range(20):
                account.create(POST, post(number))
        async with daemon_process(network, database, tmp_path):
            await equal(network, database)
        connection = await asyncpg.connect(database)
        try:
            for _ in range(2):
                await connection.execute("update indexer.repo set attempts = 0")
                for account in accounts:
                    in_a_slow_fetch(account)
                    network.relay.drop(account.did)
                    account.create(POST, post("lost"))
                    account.create(POST, post("behind the lost one"))
                async with daemon_process(network, database, tmp_path) as process:
                    await until(partial(counted, connection, RUNNING, len(accounts)), partial(log_of, tmp_path))
                    for account in accounts:
                        account.create(POST, post("while it is fetched"))
                    await until(partial(counted, connection, KEPT, len(accounts)), partial(log_of, tmp_path))
                    process.kill()
                    await process.wait()
                assert await connection.fetchval(RUNNING) == len(accounts), "nobody gave them back"
                await connection.execute("update indexer.repo set lease_until = now() where status = 'in-progress'")
                async with daemon_process(network, database, tmp_path):
                    await until(partial(counted, connection, RUNNING, 0), partial(log_of, tmp_path))
                    await connection.execute("update indexer.repo set next_attempt_at = null")  # or a minute later
                    await equal(network, database)
        finally:
            await connection.close()
        await assert_nothing_doubled(database)
