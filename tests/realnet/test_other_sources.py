"""Accounts that a real relay withholds, and methods that a real PDS does not offer."""

import asyncio
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from indexer.app.clients import http_origin, open_outbound_client
from indexer.app.settings import Settings
from indexer.app.tuning import Tuning
from indexer.concurrency.stage_progress import Work
from indexer.live.host_streams import HostStreamSettings
from indexer.net.pds.xrpc import MethodNotOfferedError
from indexer.tasks.hosts import HostSettings
from indexer.tasks.repo_list_pages import repo_list_pages
from indexer.tasks.scope import ScopeSettings
from tests.background import running
from tests.daemon_harness import run_daemon, settings_for
from tests.database_checks import assert_change_log_consistent, fetch
from tests.passed_time import expire_waits
from tests.realnet.compare_with_pdses import records_of, visible_repos, wait_until_equal
from tests.realnet.real_network import RealAccount, real_network
from tests.realnet.real_relay import real_relay, require_relay
from tests.realnet.test_network import NOTE, THING
from tests.waiting import TIMEOUT, until

pytestmark = pytest.mark.proof("realnet")


async def test_accounts_above_the_limit_of_bluesky_relay_stay_visible_and_are_not_called_current(
    database: str, empty_database: str, tmp_path: Path
) -> None:
    """The relay sends `throttled` for two of four accounts, and drops their commits.

    It counts accounts that appear at the same time side by side, so one follows the other.
    """
    require_relay()
    with real_network(1, tmp_path) as network:
        pds = network.pds[0]
        async with real_relay(network, empty_database, tmp_path, max_accounts=2) as relay:
            settings = settings_for(relay.relay_url, network.plc_url, tmp_path, resync_source="pds")
            async with run_daemon(settings, database):
                accounts, expected = [], set[tuple[str, str, str]]()
                for number in range(4):
                    account = await asyncio.to_thread(pds.create_account, f"account{number}")
                    accounts.append(account)
                    await asyncio.to_thread(account.create, THING, {"n": 1})
                    # The relay repeats the status of an account when its host sends one.
                    await asyncio.to_thread(pds.control, "accountEvent", did=account.did, status="active")
                    if number < 2:
                        await wait_until_equal(database, await records_of(*accounts))
                    else:
                        expected.add((account.did, "throttled", "withheld"))
                        await until(partial(is_withheld, database, expected))
                served = await records_of(*accounts)

                async def all_are_visible() -> bool:
                    stored = await visible_repos(database)
                    return {did: records for did, (_, records) in stored.items()} == served

                await until(all_are_visible)
                for account in accounts:
                    await asyncio.to_thread(account.create, THING, {"n": 2})
                await relay.allow_accounts(pds, 10)
                await wait_until_equal(database, await records_of(*accounts))
                await until(lambda: is_withheld(database, set()))
            error = await refused_list(settings, http_origin(relay.relay_url))
            assert (error.definite, error.detail.endswith("404 Not Found")) == (True, True)


async def test_accounts_that_bluesky_relay_withholds_are_found_on_their_host_and_followed(
    database: str, empty_database: str, tmp_path: Path
) -> None:
    """The relay shows three of ten accounts. The daemon starts later, so that its stream names none of the others."""
    require_relay()
    hosts = HostSettings(first_wait=0.0, poll=0.2, follow=0.5, settle=1.0)
    with real_network(1, tmp_path) as network:
        pds = network.pds[0]
        async with real_relay(network, empty_database, tmp_path, max_accounts=3) as relay:
            accounts = []
            for number in range(10):
                accounts.append(await asyncio.to_thread(pds.create_account, f"account{number}"))
                await asyncio.to_thread(accounts[-1].create, THING, {"n": 1})
                await until(partial(relay.counts, pds, number + 1))
            settings = settings_for(relay.relay_url, network.plc_url, tmp_path, start="live", resync_source="pds")
            tuning = Tuning(hosts=hosts, host_streams=HostStreamSettings(interval=0.5, linger=5.0))
            async with (
                run_daemon(settings, database, tuning=tuning) as daemon,
                running(expire_waits(database)),
            ):
                await wait_until_stored(database, accounts)
                await until(lambda: withheld_by_status(database, {"throttled": 7}))
                for account in accounts:
                    await asyncio.to_thread(account.create, THING, {"n": 2})
                await wait_until_stored(database, accounts)
                await until(lambda: withheld_and_synchronized(database, 7))
                for account in accounts:
                    await asyncio.to_thread(account.create, THING, {"live": account.did})
                    await wait_until_stored(database, accounts, seconds=5)
                assert await withheld_and_synchronized(database, 7), "their host's stream brought them"
                await relay.allow_accounts(pds, 20)
                for account in accounts:
                    await asyncio.to_thread(account.create, THING, {"n": 3})
                await wait_until_equal(database, await records_of(*accounts))
                await until(lambda: is_withheld(database, set()))
                await until(lambda: withheld_by_status(database, None))
                await until(lambda: not daemon.host_streams.streams)
    await assert_change_log_consistent(database)
    doubled = "select did, rkey from atproto.changes where action = 'create' group by did, rkey having count(*) > 1"
    assert await fetch(database, doubled) == []


async def wait_until_stored(database: str, accounts: Sequence[RealAccount], seconds: float = TIMEOUT) -> None:
    """Wait until exactly these accounts are visible, with all their records."""
    served = await records_of(*accounts)

    async def equal() -> bool:
        return {did: records for did, (_, records) in (await visible_repos(database)).items()} == served

    async with asyncio.timeout(seconds):
        await until(equal)


async def withheld_and_synchronized(database: str, number: int) -> bool:
    """Return True if so many accounts are synchronized although the relay withholds them."""
    query = "select from atproto.repos where withheld_since is not null and sync_status = 'synchronized'"
    return len(await fetch(database, query)) == number


async def withheld_by_status(database: str, expected: dict[str, int] | None) -> bool:
    """Return True if the public view says so about the only host of the relay."""
    rows = await fetch(database, "select withheld_by_status from atproto.relay_hosts")
    return [row["withheld_by_status"] and json.loads(row["withheld_by_status"]) for row in rows] == [expected]


async def refused_list(settings: Settings, source: str) -> MethodNotOfferedError:
    """Return the error of a list of repos by collection that the source does not offer."""
    async with open_outbound_client(settings) as outbound:
        with pytest.raises(MethodNotOfferedError) as failure:
            await anext(repo_list_pages(outbound, source, NOTE, None, Work()))
    return failure.value


async def is_withheld(database: str, expected: set[tuple[str, str, str]]) -> bool:
    """Return True if the public view says so about these accounts, and about no others."""
    query = "select did, hosting_status, sync_reason from atproto.repos where withheld_since is not null and visible"
    return {tuple(row) for row in await fetch(database, query)} == expected


async def test_collection_is_added_although_bluesky_pds_does_not_list_repos_by_collection(
    database: str, tmp_path: Path
) -> None:
    """It answers 400 InvalidRequest; with an AppView in its settings, it answers 401 AuthMissing."""
    with real_network(1, tmp_path) as network:
        pds = network.pds[0]
        accounts = [await asyncio.to_thread(pds.create_account, f"account{n}") for n in range(3)]
        for account in accounts:
            await asyncio.to_thread(account.create, THING, {"n": 1})
            await asyncio.to_thread(account.create, NOTE, {"n": 2})
        settings = settings_for(pds.stream_url, network.plc_url, tmp_path, resync_source="pds", collections=THING)
        async with run_daemon(settings, database, tuning=Tuning(scope=ScopeSettings(settle=0.1))) as running:
            expected = await records_of(*accounts)
            things = {
                did: {path: record for path, record in records.items() if path.startswith(THING)}
                for did, records in expected.items()
            }
            await wait_until_equal(database, things)
            await running.db.scope.change(collections=[THING, NOTE])
            await wait_until_equal(database, expected)
        error = await refused_list(settings, pds.url)
        assert (error.definite, "No service configured for" in error.detail) == (True, True)
