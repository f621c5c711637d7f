"""Make the pictures of the status page in docs/images/: `python -m docs.make_screenshots`, some minutes.

A daemon indexes a local network that is as in `indexer demo`, but has more accounts, and faults: one host fails, one
sends slowly, and the relay passes on forged and malformed messages. So there is something to see. Needs Chromium
(tests/serve/install_chromium.sh).
"""

import argparse
import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, time

import asyncpg

from indexer.app.daemon import Daemon
from indexer.db.migrate import migrate
from indexer.demo.local_pds import GET_REPO
from indexer.demo.local_relay import message_frame
from indexer.demo.scenario import POST, Scenario
from indexer.embedded import database
from indexer.telemetry.log import configure_logging
from tests.chromium import Page, Scheme, open_browser
from tests.daemon_harness import run_daemon, settings_for
from tests.faulty_network import Fault, FaultyAccount, FaultyNetwork

IMAGES = Path(__file__).parent / "images"
PICTURES: tuple[tuple[str, int, int | None, Scheme], ...] = (
    ("status-page.webp", 1280, None, "light"),
    ("status-page-phone.webp", 390, 1300, "dark"),
)
"""The name, width and height in pixels, and color scheme of each picture. None: as high as the page."""
BACKFILL = 1_600
"""Accounts that exist before the daemon starts, and are fetched while it runs."""
MESSAGES_PER_SECOND = 30.0
SLOW_BYTES_PER_SECOND = 60
SAMPLE_SECONDS = 3.0


@asynccontextmanager
async def running_daemon(network: FaultyNetwork, directory: Path) -> AsyncIterator[tuple[Daemon, str]]:
    """Run a daemon that may send only a few requests per second; yield it and the DSN of its database."""
    async with database(None, directory) as dsn:
        await migrate(dsn)
        slow = {"host_rate": "4", "resync_source": "pds", "start": "live", "http_bind": "127.0.0.1:0"}
        async with run_daemon(settings_for(network.relay_url, network.plc_url, directory, **slow), dsn) as daemon:
            yield daemon, dsn


def create_backfill(network: FaultyNetwork) -> list[FaultyAccount]:
    """Create accounts with some posts, on the first two hosts."""
    accounts = [network.create_account(f"early{number}.test", pds=number % 2) for number in range(BACKFILL)]
    for account in accounts:
        for number in range(3):
            account.create(POST, {"$type": POST, "text": f"post {number}"})
    return accounts


def inject_faults(network: FaultyNetwork, accounts: list[FaultyAccount]) -> None:
    """Let the third host fail, and some exports arrive slowly."""
    network.pdses[2].faults.append(Fault(GET_REPO, status=502, times=None))
    for number in range(40):
        account = network.create_account(f"unlucky{number}.test", pds=2)
        account.create(POST, {"$type": POST, "text": "one"})
        accounts.append(account)
    for account in accounts[:BACKFILL:25]:
        account.pds.faults.append(Fault(GET_REPO, did=account.did, rate=SLOW_BYTES_PER_SECOND))


async def act(network: FaultyNetwork, seconds: float) -> None:
    """Let the accounts of a scenario act, now more and now less, and let the relay pass on some bad messages."""
    scenario, began, step, steps = Scenario(network, accounts=24), monotonic(), 0, round(seconds * MESSAGES_PER_SECOND)
    while True:
        scenario.perform(step, steps)
        step += 1
        if step % 150 == 0:
            network.relay.inject(message_frame("#commit", {"seq": network.relay.seq + 1, "repo": "did:plc:x"}))
        if step % 400 == 0:
            network.relay.inject(b"not a message")
        wave = 1 + 0.6 * math.sin((monotonic() - began) / 17)
        await asyncio.sleep(1 / (MESSAGES_PER_SECOND * wave))


async def register_consumers(dsn: str) -> None:
    """Register two consumers of the change log; one reads, and the other one does not."""
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute("select atproto.register_reader('search-index'), atproto.register_reader('feeds')")
        while True:
            await connection.execute("select count(*) from atproto.next_changes('feeds', 1000)")
            await asyncio.sleep(1)
    finally:
        await connection.close()


async def sample(daemon: Daemon) -> None:
    """Take more samples than the daemon does itself, because a few minutes must fill the charts."""
    while True:
        daemon.history.sample(time())
        await asyncio.sleep(SAMPLE_SECONDS)


async def failed_account(dsn: str) -> str:
    """Return the DID of an account whose last resync failed, or of any other one."""
    connection = await asyncpg.connect(dsn)
    try:
        did: str = await connection.fetchval("select did from indexer.repo order by last_error limit 1")
    finally:
        await connection.close()
    return did


async def take_picture(page: Page, url: str, picture: tuple[str, int, int | None, Scheme], did: str) -> None:
    """Open the page, look an account up, and write what a window of this size shows."""
    name, width, height, scheme = picture
    await page.open(url, width=width, scheme=scheme)
    await page.wait_for("Number(document.documentElement.dataset.polled ?? 0) > 1")
    await page.evaluate(f"document.getElementById('account').value = {did!r}")
    await page.evaluate("document.querySelector('#lookup button').click()")
    await page.wait_for("document.querySelector('#account-result dl') !== null")
    await page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    height = height or await page.evaluate("document.documentElement.scrollHeight")
    await page.set_view(width=width, height=height, scheme=scheme)
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / name).write_bytes(await page.screenshot("webp"))
    print(f"{IMAGES / name}: {(IMAGES / name).stat().st_size:,} bytes; problems: {page.problems}")


async def make(seconds: float) -> None:
    """Run the network and the daemon for a while, then take all pictures."""
    with TemporaryDirectory(prefix="indexer-pictures-") as directory:
        async with FaultyNetwork(pds=3) as network:
            accounts = create_backfill(network)
            inject_faults(network, accounts)
            async with running_daemon(network, Path(directory)) as (daemon, dsn), daemon.serve_http() as address:
                await daemon.db.repos.add([account.did for account in accounts])
                work = [act(network, seconds), register_consumers(dsn), sample(daemon)]
                tasks = [asyncio.create_task(one) for one in work]
                await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                async with open_browser() as page:
                    did = await failed_account(dsn)
                    for picture in PICTURES:
                        await take_picture(page, f"http://{address}/", picture, did)
                for task in tasks:
                    task.cancel()
                    with suppress(asyncio.CancelledError):
                        await task


def main() -> None:
    """Make the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=150.0, help="how long the daemon runs before the pictures")
    configure_logging("console", "error")
    asyncio.run(make(parser.parse_args().seconds))


if __name__ == "__main__":
    main()
