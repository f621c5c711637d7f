"""Two processes divide the repo lists and the streams of hosts as they divide accounts."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import pytest

from indexer.demo.local_pds import LIST_REPOS
from indexer.demo.local_plc import did_of
from indexer.demo.local_relay import LIST_HOSTS
from indexer.live.host_streams import HostStreamSettings
from indexer.net.http.http_client import host_of
from indexer.sync.shard import Shard
from indexer.tasks.hosts import HostSettings
from tests.daemon.running_daemon import POST, RunningDaemon, post, running_daemon
from tests.daemon.test_host_streams import World
from tests.faulty_network import FaultyAccount
from tests.quick_tuning import QUICK
from tests.waiting import until
from tests.withholding_network import WithholdingNetwork

LISTS = HostSettings(first_wait=0.0, poll=0.05, settle=1.0, follow=1e6)
FOLLOWED = replace(LISTS, follow=0.05)
NEXT_PASS = "update indexer.host_list set ended_at = ended_at - interval '1 day'"


def shard_of(text: str) -> int:
    """Return the number of the process, 0 or 1, that owns a DID or the name of a host."""
    return int(Shard(1, 2).owns(text))


@dataclass
class Processes:
    """A network, and the database of two processes that index it.

    Attributes:
        remaining: The number of the process that reads the list of the first host. The test stops the other one.
    """

    network: WithholdingNetwork
    database: str
    directory: Path
    hosts: HostSettings

    def __post_init__(self) -> None:
        self.remaining = shard_of(host_of(self.network.host.url))
        self.stopped = 1 - self.remaining

    @asynccontextmanager
    async def running(self, number: int) -> AsyncIterator[RunningDaemon]:
        """Run a process."""
        tuning = replace(QUICK, hosts=self.hosts, host_streams=HostStreamSettings(interval=0.05))
        directory, shard = self.directory / str(number), f"{number}/2"
        async with running_daemon(self.database, directory, self.network, tuning=tuning, shard=shard) as daemon:
            yield daemon

    async def count_lacking(self, daemon: RunningDaemon, expected: Sequence[int]) -> None:
        """Let all lists be read, and wait until so many accounts of each host are known that no relay passes on."""
        await daemon.execute(NEXT_PASS)

        async def counted() -> bool:
            rows = await daemon.execute("select url, lacking from indexer.host_list")
            lacking = {row["url"]: row["lacking"] for row in rows}
            return [lacking[pds.url] for pds in self.network.pdses] == expected

        await until(counted)

    def create_account(self, shard: int, pds: int, *, hidden: bool = False) -> FaultyAccount:
        """Create an account of a shard; a hidden one is never mentioned by the relay."""
        handles = (f"account{number}.test" for number in count(len(self.network.accounts)))
        handle = next(
            one for one in handles if shard_of(did_of(one)) == shard and did_of(one) not in self.network.accounts
        )
        if hidden:
            self.network.relay.withheld.add(did_of(handle))
        account = self.network.create_account(handle, pds=pds)
        account.create(POST, post("first"))
        return account


@pytest.mark.proof("daemon")
async def test_processes_read_each_page_of_each_list_once(database: str, tmp_path: Path) -> None:
    """Both before and while one of them is restarted; and each export is fetched once, by the owner of the account."""
    async with WithholdingNetwork(pds=6) as network:
        processes = Processes(network, database, tmp_path, LISTS)
        for pds in range(6):
            for shard in range(2):
                processes.create_account(shard, pds, hidden=True)
        names = [host_of(pds.url) for pds in network.pdses]
        owned = [[shard_of(name) for name in names].count(shard) for shard in range(2)]

        async with processes.running(processes.remaining) as remaining:

            def lists(daemon: RunningDaemon) -> float:
                return daemon.counter("host_lists", result="complete")

            async with processes.running(processes.stopped) as stopped:
                await until(lambda: lists(remaining) + lists(stopped) == 6)
                assert [lists(remaining), lists(stopped)] == [owned[processes.remaining], owned[processes.stopped]]
                await remaining.wait_until_equal()
                assert [pds.requests[LIST_REPOS] for pds in network.pdses] == [2] * 6, "two pages each"
                await until(lambda: [remaining.counter_sum("resync"), stopped.counter_sum("resync")] == [6, 6])
            before, late = lists(remaining), processes.create_account(processes.stopped, 0, hidden=True)
            await remaining.execute(NEXT_PASS)
            await until(lambda: lists(remaining) == before + owned[processes.remaining])
            assert (await remaining.repo_row(late))["sync_status"] == "desynchronized", "its process does not run"
            async with processes.running(processes.stopped) as stopped:
                await until(lambda: lists(stopped) == owned[processes.stopped])
                await stopped.wait_until_equal()
                assert [pds.requests[LIST_REPOS] for pds in network.pdses] == [4] * 6
                assert (network.relay.requests[LIST_HOSTS], remaining.export_requests) == (1, 13)
                await until(lambda: [remaining.counter_sum("resync"), stopped.counter_sum("resync")] == [6, 1])


@pytest.mark.slow
async def test_process_reads_only_streams_of_hosts_with_withheld_accounts_of_its_own(
    database: str, tmp_path: Path
) -> None:
    """Nothing is lost, doubled or fetched again, also while one of the two processes is restarted."""
    async with WithholdingNetwork(pds=3) as network:
        processes = Processes(network, database, tmp_path, FOLLOWED)
        one = processes.remaining
        withheld = [processes.create_account(shard, pds) for shard, pds in ((one, 2), (0, 0), (1, 0), (0, 1), (1, 1))]
        shown = [processes.create_account(shard, pds) for pds in range(3) for shard in range(2)]
        async with processes.running(one) as remaining:

            async def all_followed(daemon: RunningDaemon) -> None:
                for account in withheld:
                    await World(daemon, network, account, account).wait_until_followed()

            def write() -> None:
                for account in [*withheld, *shown]:
                    account.create(POST, post("another"))

            async with processes.running(processes.stopped) as stopped:
                await remaining.wait_until_equal()
                await stopped.wait_until_equal()
                network.relay.withhold(withheld[0])
                await World(remaining, network, withheld[0], withheld[0]).wait_until_followed()
                await processes.count_lacking(remaining, [0, 0, 1])
                for account in withheld[1:]:
                    network.relay.withhold(account)
                await all_followed(stopped)
                await processes.count_lacking(remaining, [2, 2, 1])
                assert [pds.events.subscribers for pds in network.pdses] == [2, 2, 1]
                subscribed = await remaining.execute("select * from indexer.subscribed_host order by id")
                exports = remaining.export_requests
                for _ in range(5):
                    write()
                await all_followed(stopped)
                await remaining.wait_until_equal()
                await stopped.wait_until_equal()
            write()
            lists = remaining.counter("host_lists", result="complete")

            def are_read() -> bool:
                """Let the stream of the remaining process not lag; return True if it has read each list twice."""
                shown[one].create(POST, post("another"))
                return remaining.counter("host_lists", result="complete") > lists + 6

            await until(are_read)
            async with processes.running(processes.stopped) as stopped:
                await all_followed(stopped)
                write()
                await all_followed(stopped)
                await remaining.wait_until_equal()
                await stopped.wait_until_equal()
                assert [pds.events.subscribers for pds in network.pdses] == [2, 2, 1]
                assert remaining.export_requests == exports, "the streams bring everything"
                assert await remaining.execute("select * from indexer.subscribed_host order by id") == subscribed
                for daemon in (remaining, stopped):
                    await World(daemon, network, withheld[0], shown[0]).assert_nothing_doubled()
