"""Ordinary events on the network, roles, and filters: the database becomes equal to the network."""

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from indexer.localnet.scenario import Scenario
from tests.daemon.running_daemon import LIKE, POST, FilteredNetwork, post, running_daemon
from tests.daemon_harness import run_daemon, settings_for
from tests.database_checks import assert_change_log_consistent
from tests.waiting import until

pytestmark = pytest.mark.slow

STEPS = 400


async def test_database_equals_the_network_after_a_scenario(database: str, tmp_path: Path) -> None:
    async with running_daemon(database, tmp_path) as daemon:
        scenario = Scenario(daemon.network, seed=3)
        for step in range(STEPS):
            scenario.perform(step, STEPS)
        assert len(scenario.report.events) == 4
        comparison = await daemon.wait_until_equal()
        assert comparison.repos == scenario.report.accounts - 2
        assert comparison.records > STEPS / 2
        assert daemon.counter_sum("events_received") == daemon.counter_sum("events") >= len(daemon.network.relay.log)
        assert daemon.counter("desynchronized", reason="chain-break") > 0, "the lost commit"
        rotated = {event.did for event in scenario.report.events if event.kind == "rotate key"}
        assert {did for did, _ in await daemon.dead_letters()} <= rotated, (
            "only commits whose key was replaced before they were verified"
        )
        assert daemon.stages.probe.ready() == []
        await assert_change_log_consistent(database)


async def test_lost_commit_breaks_the_chain_and_causes_a_resync(database: str, tmp_path: Path) -> None:
    async with running_daemon(database, tmp_path) as daemon:
        account = daemon.create_account("ada.test")
        await daemon.wait_until_equal()
        assert daemon.export_requests == 0, "the first commit contains the whole tree"
        daemon.lose_commit(account)
        await daemon.wait_until_equal()
        assert daemon.counter("desynchronized", reason="chain-break") == 1
        assert daemon.counter("events", kind="commit", outcome="desynchronized") == 1
        await daemon.wait_for_counter("resync", result="synchronized")
        assert daemon.counter("resync", result="synchronized") == 1
        assert daemon.counter("record_changes", action="create", live="false") == 2
        assert daemon.export_requests == 1
        account.create(POST, post("after the resync"))
        await daemon.wait_until_equal()
        assert daemon.export_requests == 1
        await assert_change_log_consistent(database)


async def test_commits_of_a_desynchronized_repo_are_ignored(database: str, tmp_path: Path) -> None:
    async with running_daemon(database, tmp_path, roles="live") as daemon:
        account = daemon.create_account("ada.test")
        daemon.lose_commit(account)
        for number in range(3):
            account.create(POST, post(number))
        await daemon.wait_for_cursor()
        assert daemon.counter("events", kind="commit", outcome="desynchronized") == 1
        assert daemon.counter("events", kind="commit", outcome="ignored") == 3
        assert daemon.counter("desynchronized", reason="chain-break") == 1


async def test_processes_that_only_resync_fetch_each_repo_once(database: str, tmp_path: Path) -> None:
    """One process with the role live, and three with the role resync."""
    async with AsyncExitStack() as stack:
        daemon = await stack.enter_async_context(running_daemon(database, tmp_path / "live", roles="live"))
        accounts = [daemon.create_account(f"a{number}.test") for number in range(12)]
        await daemon.wait_until_equal()
        for account in accounts:
            daemon.lose_commit(account)
        await daemon.wait_for_cursor()
        assert daemon.export_requests == 0
        relay, plc = daemon.network.relay_url, daemon.network.plc_url
        workers = [
            await stack.enter_async_context(
                run_daemon(settings_for(relay, plc, tmp_path / f"worker {number}", roles="resync"), database)
            )
            for number in range(3)
        ]
        for number, account in enumerate(accounts):
            account.create(POST, post(number))
        await daemon.wait_until_equal()
        assert daemon.export_requests == len(accounts)

        def resynced() -> float:
            counts = [
                worker.metrics.registry.get_sample_value("indexer_resync_total", {"result": "synchronized"})
                for worker in workers
            ]
            return sum(filter(None, counts))

        await until(lambda: resynced() >= len(accounts), resynced)
        assert resynced() == len(accounts)
        await assert_change_log_consistent(database)


async def test_deactivated_account_is_hidden_and_activated_without_an_export(database: str, tmp_path: Path) -> None:
    async with running_daemon(database, tmp_path) as daemon:
        account, other = daemon.create_account("ada.test"), daemon.create_account("bob.test")
        await daemon.wait_until_equal()
        before = await daemon.record_rows(account)
        account.deactivate()
        await daemon.wait_until_equal()
        assert set(await daemon.store.visible_repos()) == {other.did}
        assert await daemon.store.visible_records(account.did) == {}
        assert await daemon.record_rows(account) == before, "the records are hidden, not deleted"
        account.activate()
        await daemon.wait_until_equal()
        await daemon.wait_for_counter("resync", result="unchanged")
        assert daemon.counter("resync", result="unchanged") == 1
        assert daemon.export_requests == 0, "the head was unchanged, so no export was necessary"


async def test_account_that_changed_while_deactivated_is_resynced(database: str, tmp_path: Path) -> None:
    async with running_daemon(database, tmp_path) as daemon:
        account = daemon.create_account("ada.test")
        account.deactivate()
        await daemon.wait_until_equal()
        account.create(POST, post("ignored"))  # a correct host would refuse this
        await daemon.wait_for_cursor()
        assert daemon.counter("events", kind="commit", outcome="ignored") == 1
        account.activate()
        await daemon.wait_until_equal()
        assert len(await daemon.store.visible_records(account.did)) == 6


async def test_a_deleted_account_is_hidden(database: str, tmp_path: Path) -> None:
    async with running_daemon(database, tmp_path) as daemon:
        account, other = daemon.create_account("ada.test"), daemon.create_account("bob.test")
        await daemon.wait_until_equal()
        account.delete_account()
        await daemon.wait_until_equal()
        assert set(await daemon.store.visible_repos()) == {other.did}
        assert await daemon.store.visible_records(account.did) == {}
        assert (await daemon.repo_row(account))["hosting_status"] == "deleted"


async def test_local_takedown_hides_an_account_that_is_still_indexed(database: str, tmp_path: Path) -> None:
    async with running_daemon(database, tmp_path) as daemon:
        account, other = daemon.create_account("ada.test"), daemon.create_account("bob.test")
        await daemon.wait_until_equal()
        [(known,)] = await daemon.execute("select atproto.request_takedown($1, true)", account.did)
        assert known
        assert set(await daemon.store.visible_repos()) == {other.did}
        assert await daemon.store.visible_records(account.did) == {}
        account.create(POST, post("while taken down"))
        await daemon.wait_for_cursor()
        assert set(await daemon.store.visible_repos()) == {other.did}
        await daemon.execute("select atproto.request_takedown($1, false)", account.did)
        await daemon.wait_until_equal()
        assert len(await daemon.store.visible_records(account.did)) == 6
        assert daemon.export_requests == 0


async def test_only_the_configured_collections_are_stored(database: str, tmp_path: Path) -> None:
    """Commits of other collections still continue the chain."""
    async with (
        FilteredNetwork(collections=[POST]) as network,
        running_daemon(database, tmp_path, network, collections=POST) as daemon,
    ):
        account = daemon.create_account("ada.test")
        account.create(LIKE, {"$type": LIKE})
        account.create(POST, post("after the like"))
        await daemon.wait_until_equal()
        assert daemon.counter_sum("desynchronized") == 0
        daemon.lose_commit(account)
        account.create(LIKE, {"$type": LIKE})
        await daemon.wait_until_equal()
        assert daemon.export_requests == 1
        assert {row["collection"] for row in await daemon.record_rows(account)} == {POST}
        assert len(account.records) == len(await daemon.record_rows(account)) + 2


async def test_only_listed_accounts_are_tracked(database: str, tmp_path: Path) -> None:
    async with (
        FilteredNetwork(dids=[]) as network,
        running_daemon(database, tmp_path, network, track="listed") as daemon,
    ):
        listed, other = daemon.create_account("ada.test"), daemon.create_account("bob.test")
        assert (await daemon.wait_until_equal()).repos == 0
        assert daemon.counter("events", kind="commit", outcome="ignored") == len(network.relay.log) - 6
        assert await daemon.execute("select from indexer.repo") == []
        assert network.plc.requests.total() == 0, "no key lookup for accounts that are not tracked"

        network.dids = {listed.did}
        assert await daemon.store.add_repos([listed.did]) == 1
        assert (await daemon.wait_until_equal()).records == 5
        listed.create(POST, post("applied live"))
        other.create(POST, post("still not tracked"))
        assert (await daemon.wait_until_equal()).records == 6
        assert daemon.counter("events", kind="commit", outcome="applied") == 1
        assert daemon.export_requests == 1
        await until(lambda: not daemon.stages.resync_pool.running)
        assert [row["did"] for row in await daemon.execute("select did from indexer.repo")] == [listed.did]
