"""Lenient mode: undecidable commits are applied at once, and a later resync finds what they hide."""

from dataclasses import replace
from pathlib import Path

import pytest

from indexer.demo.local_repo import Write
from indexer.resync.queue import MaintenanceSettings
from tests.daemon.running_daemon import POST, RunningDaemon, commit_payload, post, running_daemon
from tests.database_checks import assert_change_log_consistent
from tests.faulty_network import FaultyAccount, FaultyNetwork
from tests.quick_tuning import QUICK
from tests.sync.hidden_deletion import hide_deletion, high_path

pytestmark = pytest.mark.slow

ACCOUNTS = 5
HIDDEN = {f"{POST}/110": high_path(f"{POST}/100-"), f"{POST}/160": high_path(f"{POST}/050-")}
"""The posts that each account deletes, with the posts that the same commits create."""
PER_SEARCH = 2


def account_with_posts(network: FaultyNetwork, number: int) -> FaultyAccount:
    account = network.create_account(f"a{number}.test")
    account.apply_writes([Write.create(f"{POST}/{rkey:03}", post(rkey)) for rkey in range(180)])
    return account


def hide_deletions(daemon: RunningDaemon, account: FaultyAccount) -> None:
    """Make commits of two writes each, of which the relay announces only the creation; then a complete commit."""
    for deleted, created in HIDDEN.items():
        change = account.apply_writes([Write.create(created, post("high")), Write.delete(deleted)], lost=True)
        payload = commit_payload(account.did, hide_deletion(change, deleted), daemon.network.clock.now())
        daemon.inject("#commit", payload)
    account.create(POST, post("proven"))


async def stored_hidden(daemon: RunningDaemon, account: FaultyAccount) -> list[str]:
    """Return those records of the account that are stored although they were deleted."""
    stored = {f"{row['collection']}/{row['rkey']}" for row in await daemon.record_rows(account)}
    return [path for path in HIDDEN if path in stored]


async def test_deletions_hidden_in_lenient_commits_are_found_without_an_operator(database: str, tmp_path: Path) -> None:
    """The marks survive a restart. Each repo is fetched once, however many of its commits were undecidable."""
    async with FaultyNetwork() as network:
        async with running_daemon(database, tmp_path, network, inversion="lenient", resync_source="pds") as first:
            accounts = [account_with_posts(network, number) for number in range(ACCOUNTS)]
            await first.wait_until_equal()
            exports = first.export_requests
            for account in accounts:
                hide_deletions(first, account)
            await first.wait_for_cursor()
            for account in accounts:
                row = await first.repo_row(account)
                assert (row["sync_status"], row["rev"]) == ("synchronized", account.rev), "consumers are current"
                assert await stored_hidden(first, account) == list(HIDDEN)
                assert row["unproven_since"] is not None
        settings = MaintenanceSettings(unproven_after=0.0, unproven_interval=0.05, unproven_per_search=PER_SEARCH)
        tuning = replace(QUICK, maintenance=settings)
        async with running_daemon(
            database, tmp_path, network, tuning=tuning, inversion="lenient", resync_source="pds"
        ) as second:
            await second.wait_until_equal()
            for account in accounts:
                assert await stored_hidden(second, account) == []
                assert (await second.repo_row(account))["unproven_since"] is None
            assert second.export_requests == exports + ACCOUNTS
            assert second.counter("desynchronized", reason="lenient-commit") == ACCOUNTS
            await assert_change_log_consistent(database)
