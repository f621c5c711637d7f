"""The stream is faster than the database: memory stays bounded, the socket is slowed, and nothing is skipped.

`make proof PART=overload MINUTES=10` does this for longer.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from random import Random

import httpx
import pytest

from indexer.app.daemon import INBOX_BYTES
from indexer.demo.scenario import NOTE
from tests.background import running
from tests.daemon_forks import DaemonFork
from tests.daemon_process import daemon_environment
from tests.database_checks import assert_change_log_consistent, fetch, wait_until_equal
from tests.database_proxy import DatabaseProxy
from tests.faulty_network import FaultyNetwork
from tests.quick_tuning import MORTAL

MAX_MIB = 300
"""Messages of 16 MiB in the inbox, decoded and with the rows of the batch that is written, and 100 MiB without any."""
ACCOUNTS = 400
"""More than the commits of a batch: of several changes of a record in a batch, only the last one is written."""
RECORD_CHARACTERS = 60_000
DATABASE_BYTES_PER_SECOND = 500_000
"""The rate at which the proxy forwards to the database: 8 commits per second."""
FIRST_RATE, RATE = 100, 20
"""Commits per second until the daemon falls behind, and then."""
MAX_LAG = 500
"""Messages that a subscriber may be behind; then the relay ends the stream with ConsumerTooSlow."""
FEW = 100
"""Messages that a relay keeps which forgets some."""
TOO_SLOW = "ConsumerTooSlow"

_COMMITS = "select count(*) from indexer.change where action = 'update'"
_GAPS = "select count(*) from indexer.gap"
_OPEN_GAPS = "select count(*) from indexer.gap where closed_at is null"


class Load:
    """Accounts that write large records all the time. Each one has a single record, which it changes.

    Attributes:
        commits: The number of changes.
    """

    def __init__(self, network: FaultyNetwork) -> None:
        self._random = Random(5)
        self._accounts = [network.create_account(f"a{number}.test") for number in range(ACCOUNTS)]
        self.commits = 0
        for account in self._accounts:
            account.create(NOTE, {"text": "first"}, rkey="only")

    async def run(self, rate: float, done: Callable[[], bool]) -> None:
        """Write at this rate, in commits per second, until `done` returns True."""
        clock, before = asyncio.get_running_loop().time, self.commits
        began = clock()
        while not done():
            while self.commits - before < rate * (clock() - began):
                text = self._random.randbytes(RECORD_CHARACTERS // 2).hex()
                self._accounts[self.commits % ACCOUNTS].update(f"{NOTE}/only", {"text": text})
                self.commits += 1
            await asyncio.sleep(0.01)


class Samples:
    """The memory and the inbox of a daemon, measured once per second.

    Attributes:
        memory: Its resident memory in MiB.
        peak: The most resident memory that it has ever had, in MiB.
        inbox: The bytes in its inbox.
    """

    def __init__(self, daemon: DaemonFork) -> None:
        self._status = Path(f"/proc/{daemon.pid}/status")
        self._url = f"{daemon.health_url()}/metrics"
        self.memory: list[int] = []
        self.peak = 0
        self.inbox = [0]

    async def run(self) -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            while True:
                status = self._status.read_text()
                self.memory.append(int(value_of("VmRSS:", status)) >> 10)
                self.peak = int(value_of("VmHWM:", status)) >> 10
                self.inbox.append(int(float(value_of("indexer_queue_bytes", (await client.get(self._url)).text))))
                await asyncio.sleep(1)


def value_of(name: str, lines: str) -> str:
    """Return the second word of the line that begins with this word."""
    [value] = [words[1] for words in map(str.split, lines.splitlines()) if words[:1] == [name]]
    return value


@pytest.mark.proof("overload")
@pytest.mark.timeout(0)  # it runs for as long as the option says, and each wait has a limit
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the memory is read from /proc")
@pytest.mark.parametrize("window", [None, FEW], ids=["the relay keeps all messages", "the relay forgets some"])
async def test_stream_faster_than_the_database(
    database: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
    window: int | None,
) -> None:
    monkeypatch.setattr("tests.waiting.TIMEOUT", 900.0)  # all that has piled up is written at the end
    seconds = 60 * request.config.getoption("--minutes")
    clock, proxy = asyncio.get_running_loop().time, DatabaseProxy(database)
    async with proxy.serve(), FaultyNetwork() as network:
        network.relay.max_lag = MAX_LAG
        load = Load(network)
        daemon = DaemonFork(daemon_environment(network, proxy.dsn, tmp_path), tmp_path, MORTAL)
        daemon.start()
        try:
            await wait_until_equal(network, database, min_records=ACCOUNTS)
            network.relay.window = window
            samples = Samples(daemon)

            def is_slowed() -> bool:
                return max(samples.inbox) >= INBOX_BYTES and TOO_SLOW in daemon.log.read_text()

            def gives_up() -> bool:
                return clock() > gives_up_at or samples.peak >= MAX_MIB

            async with running(samples.run()):
                proxy.rate = DATABASE_BYTES_PER_SECOND
                gives_up_at = clock() + 300
                await load.run(FIRST_RATE, lambda: is_slowed() or gives_up())
                assert is_slowed(), (max(samples.inbox), samples.peak, daemon.log_tail())
                ends_at = clock() + seconds
                await load.run(RATE, lambda: clock() > ends_at)
                meanwhile = await count(database, _COMMITS)
                proxy.rate = None
                await wait_until_equal(network, database, min_records=ACCOUNTS)
        finally:
            daemon.close()
    log, gaps = daemon.log.read_text(), await count(database, _GAPS)
    times, applied = log.count(TOO_SLOW), await count(database, _COMMITS)
    record_property(
        "overload",
        f"{load.commits} commits, {meanwhile} of them applied under load and {applied} in the end, {TOO_SLOW} {times} "
        f"times, {gaps} gaps; MiB every 30 s: {samples.memory[::30]}, at most {samples.peak} of {MAX_MIB}",
    )
    assert meanwhile < load.commits / 2, "the database was not slower than the stream"
    assert samples.peak < MAX_MIB
    assert daemon.ended == 0, daemon.log_tail()
    assert (gaps > 0) == (window is not None), daemon.log_tail()
    assert await count(database, _OPEN_GAPS) == 0
    assert applied == load.commits or window is not None, "each commit was applied, by itself"
    await assert_change_log_consistent(database)


async def count(dsn: str, statement: str) -> int:
    [(number,)] = await fetch(dsn, statement)
    return int(number)
