"""A long random scenario on two of Bluesky's PDSes behind Bluesky's relay: the database equals what the PDSes say.

`make proof PART=realnet STEPS=1000` runs a longer one, and with SEED=… one again.
"""

import asyncio
import os
import signal
from pathlib import Path
from random import Random

import pytest

from tests.background import running
from tests.daemon_process import daemon_process, log_tail
from tests.database_checks import assert_change_log_consistent, fetch
from tests.passed_time import expire_waits
from tests.realnet.compare_with_pdses import records_of, visible_repos, wait_until_equal
from tests.realnet.random_steps import RandomSteps
from tests.realnet.real_network import real_network
from tests.realnet.real_relay import real_relay, require_relay
from tests.waiting import until

STEPS = int(os.environ.get("REALNET_STEPS") or 250)
SEED = int(os.environ.get("REALNET_SEED") or Random().randrange(2**32))
STARTS = 2
"""Starts of the daemon."""
DAEMON = "tests.realnet.hurried_daemon"


@pytest.mark.proof("realnet")
@pytest.mark.timeout(900 + STEPS)
async def test_database_equals_the_pdses_after_a_random_scenario(
    database: str,
    empty_database: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """The daemon is killed and the relay restarted while the accounts act."""
    require_relay()
    monkeypatch.setattr("tests.waiting.TIMEOUT", 240.0 + STEPS / 2)
    replay = f"make proof PART=realnet STEPS={STEPS} SEED={SEED}"
    request.node.add_report_section("call", "replay", replay)  # shown if it fails
    with real_network(2, tmp_path) as network:
        async with real_relay(network, empty_database, tmp_path) as relay, running(expire_waits(database)):
            steps = RandomSteps(network.pds, SEED)
            scenario = asyncio.create_task(asyncio.to_thread(steps.run, STEPS))
            async with daemon_process(relay, database, tmp_path, DAEMON) as daemon:
                await until(lambda: scenario.done() or steps.count > STEPS // 3)
                await until(lambda: stores_records(database), lambda: log_tail(tmp_path))
                daemon.kill()
                assert await daemon.wait() == -signal.SIGKILL
            assert not scenario.done()
            async with daemon_process(relay, database, tmp_path, DAEMON) as daemon:
                await until(lambda: scenario.done() or steps.count > STEPS * 2 // 3)
                await relay.restart()
                assert not scenario.done()
                await scenario
                await wait_until_equal(database, await records_of(*steps.active))
                await wait_until_hidden(database, steps.statuses())
                await until(lambda: no_resync_is_running(database), lambda: log_tail(tmp_path))
                assert daemon.returncode is None, log_tail(tmp_path)
            connections = (tmp_path / "daemon.log").read_text().count("relay.connected")
            assert connections > STARTS, "the daemon did not notice the restart of the relay"
    await assert_change_log_consistent(database)
    assert all(steps.taken.values())


async def stores_records(dsn: str) -> bool:
    return any(records for _, records in (await visible_repos(dsn)).values())


async def no_resync_is_running(dsn: str) -> bool:
    """Return True if the resyncs have ended, also those of accounts that were hidden meanwhile."""
    return not await fetch(dsn, "select from atproto.repos where sync_status = 'in-progress'")


async def hidden_accounts(dsn: str) -> dict[str, str]:
    """Return the hosting status of each hidden account, by DID."""
    rows = await fetch(dsn, "select did, hosting_status from atproto.repos where not visible")
    return {row["did"]: row["hosting_status"] for row in rows}


async def wait_until_hidden(dsn: str, statuses: dict[str, str]) -> None:
    """Wait until exactly these accounts are hidden, each for its reason.

    A deleted account may be unknown: nothing is stored of one that is deleted before the daemon hears of it.
    """
    hidden: dict[str, str] = {}

    async def equal() -> bool:
        nonlocal hidden
        hidden = await hidden_accounts(dsn)
        missing = statuses.keys() - hidden.keys()
        return statuses == hidden | dict.fromkeys(missing, "deleted")

    await until(equal, lambda: f"hidden are {hidden}, not {statuses}")
