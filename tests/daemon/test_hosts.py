"""A daemon whose relay withholds accounts: it finds them on their hosts, and follows them there."""

from dataclasses import replace
from pathlib import Path

import pytest

from indexer.demo.local_network import RecordsByRepo
from indexer.tasks.hosts import HostSettings
from tests.background import running
from tests.daemon_harness import run_daemon, settings_for
from tests.database_checks import assert_change_log_consistent, fetch
from tests.passed_time import expire_waits
from tests.quick_tuning import QUICK
from tests.tasks.host_crawl import HostNetwork
from tests.waiting import until

pytestmark = pytest.mark.slow

NOTE = "com.example.note"
OFTEN = replace(QUICK, hosts=HostSettings(first_wait=0.0, poll=0.05, follow=0.1, settle=0.3))


async def stored_records(dsn: str) -> RecordsByRepo:
    """Return the records of the visible repos."""
    records: RecordsByRepo = {row["did"]: {} for row in await fetch(dsn, "select did from atproto.repos where visible")}
    for row in await fetch(dsn, "select did, collection || '/' || rkey as path, cid from indexer.record"):
        records[row["did"]][row["path"]] = row["cid"]
    return records


async def test_withheld_accounts_equal_their_host_before_and_after_the_relay_shows_them(
    database: str, tmp_path: Path
) -> None:
    async with HostNetwork(pds=2) as network:
        shown, *hidden = [network.create_account(pds=0) for _ in range(5)]
        network.relay.withheld.update(account.did for account in hidden)
        late = network.create_account(pds=0)
        accounts = [shown, *hidden, late]

        def write() -> None:
            for account in accounts:
                account.create(NOTE, {"text": "hello"})

        async def equal() -> bool:
            return await stored_records(database) == network.expected_records()

        write()
        settings = settings_for(network.relay_url, network.plc_url, tmp_path, start="live", resync_source="pds")
        async with run_daemon(settings, database, tuning=OFTEN) as daemon, running(expire_waits(database)):
            await until(equal)
            write()
            await until(equal)
            await until(lambda: throttled(database, len(hidden)))
            assert {(one.kind.name, one.subject) for one in daemon.conditions.active()} == {
                ("accounts-withheld", network.pdses[0].url.partition("://")[2])
            }
            network.relay.withheld.clear()
            for account in hidden:
                account.set_status(None)
            write()
            await until(lambda: all_synchronized(database, len(accounts)))
            await until(equal)
            await until(lambda: not daemon.conditions.active())
    await assert_change_log_consistent(database)
    doubled = "select did, rkey from atproto.changes where action = 'create' group by did, rkey having count(*) > 1"
    assert await fetch(database, doubled) == []


async def throttled(dsn: str, number: int) -> bool:
    rows = await fetch(dsn, "select withheld_by_status->>'throttled' as number from atproto.relay_hosts")
    return {row["number"] for row in rows} == {str(number), None}


async def all_synchronized(dsn: str, number: int) -> bool:
    rows = await fetch(dsn, "select from atproto.repos where sync_status = 'synchronized' and withheld_since is null")
    return len(rows) == number
