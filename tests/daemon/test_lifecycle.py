"""Ordinary events on the network, roles, and filters: the database becomes equal to the network."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from indexer.demo.local_pds import GET_REPO
from indexer.demo.scenario import Scenario
from tests.background import running
from tests.daemon.running_daemon import POST, post, running_daemon
from tests.database_checks import assert_change_log_consistent
from tests.faulty_network import Fault, FaultyAccount, FaultyNetwork
from tests.passed_time import expire_waits
from tests.waiting import until

STEPS = 400


@pytest.mark.slow
async def test_database_equals_the_network_after_a_scenario(database: str, tmp_path: Path) -> None:
    async with running_daemon(database, tmp_path) as daemon:
        scenario = Scenario(daemon.network, seed=3)
        for step in range(STEPS):
            scenario.perform(step, STEPS)
        assert len(scenario.report.events) == 4
        await daemon.wait_until_equal()
        expected = daemon.network.expected_records()
        assert len(expected) == scenario.report.accounts - 2
        assert sum(map(len, expected.values())) > STEPS / 2
        assert daemon.counter_sum("events_received") == daemon.counter_sum("events") >= len(daemon.network.relay.log)
        rotated = {event.did for event in scenario.report.events if event.kind == "rotate key"}
        assert {did for did, _ in await daemon.dead_letters()} <= rotated, (
            "only commits whose key was replaced before they were verified"
        )
        assert daemon.stages.probe.not_ready() == []
        await assert_change_log_consistent(database)


@pytest.mark.slow
async def test_accounts_are_hidden_as_long_as_the_network_or_the_operator_says_so(
    database: str, tmp_path: Path
) -> None:
    async with running_daemon(database, tmp_path) as daemon:
        names = ("deactivated", "changed", "deleted", "taken-down")
        deactivated, changed, deleted, taken_down = (daemon.create_account(f"{name}.test") for name in names)
        await daemon.wait_until_equal()
        before = await daemon.record_rows(deactivated)
        for account in (deactivated, changed):
            account.deactivate()
        deleted.delete_account()
        [(known,)] = await daemon.execute("select atproto.request_takedown($1, true)", taken_down.did)
        assert known
        await daemon.wait_for_cursor()
        assert await daemon.db.reports.visible_repos() == {}
        assert await daemon.record_rows(deactivated) == before, "the records are hidden, not deleted"
        assert (await daemon.repo_row(deleted))["hosting_status"] == "deleted"
        changed.create(POST, post("ignored"))  # a correct host would refuse this
        taken_down.create(POST, post("while taken down"))
        await daemon.wait_for_cursor()
        assert daemon.counter("events", kind="commit", outcome="ignored") == 1
        assert await daemon.db.reports.visible_repos() == {}
        deactivated.activate()
        changed.activate()
        await daemon.execute("select atproto.request_takedown($1, false)", taken_down.did)
        await daemon.wait_until_equal()
        assert len(await daemon.db.reports.visible_records(changed.did)) == 6
        assert len(await daemon.db.reports.visible_records(taken_down.did)) == 6
        await daemon.wait_for_counter("resync", result="unchanged")
        assert daemon.export_requests == 1, "the head of the other account was unchanged"
        await assert_change_log_consistent(database)


def migrate(account: FaultyAccount, network: FaultyNetwork, *, sign_again: bool) -> None:
    """Move the account to the other PDS of the network."""
    [to] = [pds for pds in network.pdses if pds is not account.pds]
    account.migrate(to, sign_again=sign_again)


def deactivate_and_activate(account: FaultyAccount) -> None:
    account.deactivate()
    account.activate()


def deactivate_write_and_activate(account: FaultyAccount) -> None:
    """Create a record while the account is deactivated. A correct host would refuse that."""
    account.deactivate()
    account.create(POST, post("while deactivated"))
    account.activate()


def slow_down_export(account: FaultyAccount, seconds: int = 2) -> Fault:
    """Let the account's next export take this long. Its content is the state at the time of the request."""
    fault = Fault(GET_REPO, account.did, rate=sum(map(len, account.repo.export())) // seconds)
    account.pds.faults.append(fault)
    return fault


@pytest.mark.proof("daemon")
async def test_account_changes_during_a_resync(database: str, tmp_path: Path) -> None:
    async with running_daemon(database, tmp_path, resync_source="pds", resync_workers="20") as daemon:
        network = daemon.network
        changes: dict[str, Callable[[FaultyAccount], None]] = {
            "deleted": lambda account: account.delete_account(),
            "taken down": lambda account: account.set_status("takendown"),
            "suspended": lambda account: account.set_status("suspended"),
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
        faults = [slow_down_export(account) for account in accounts.values()]
        for account in accounts.values():
            daemon.lose_commit(account)
        await until(lambda: all(fault.fired for fault in faults), lambda: faults)
        for name, account in accounts.items():
            changes[name](account)
            await asyncio.sleep(0)
        await daemon.wait_for_cursor()
        visible = await daemon.db.reports.visible_repos()
        for name, account in accounts.items():
            row = await daemon.repo_row(account)
            assert (account.did in visible) == (name not in hidden), name
            assert row["hosting_status"] == hidden.get(name), name

        async with running(expire_waits(database)):
            await daemon.wait_until_equal()
            for name in hidden.keys() - {"deleted"}:
                accounts[name].activate()
            await daemon.wait_until_equal()
        assert set(await daemon.db.reports.visible_repos()) == {
            account.did for name, account in accounts.items() if name != "deleted"
        }
        await assert_change_log_consistent(database)
