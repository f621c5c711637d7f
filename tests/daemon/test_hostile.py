"""Hosts and accounts with false clocks, slow exports, or very many accounts."""

from dataclasses import replace
from pathlib import Path

import pytest

from indexer.demo.local_pds import GET_REPO
from indexer.demo.local_relay import message_frame
from indexer.telemetry.conditions import NEW_ACCOUNTS_LIMITED
from tests.daemon.running_daemon import POST, post, running_daemon
from tests.faulty_network import Fault, FaultyNetwork
from tests.waiting import until

pytestmark = pytest.mark.proof("daemon")


@pytest.mark.proof("daemon")
async def test_slow_exports_of_one_machine_leave_half_of_the_workers_to_others(database: str, tmp_path: Path) -> None:
    """12 accounts on three names of one machine need a minute per export; those of the other host are all fetched."""
    async with FaultyNetwork(pds=2) as network:
        hostile = network.pdses[0]
        port = hostile.url.rpartition(":")[2]
        names = [f"http://{name}:{port}" for name in ("localhost", "127.0.0.1", "[::ffff:127.0.0.1]")]
        drips = [network.create_account(f"drip{number}.test", pds=0) for number in range(12)]
        others = [network.create_account(f"good{number}.test", pds=1) for number in range(12)]
        for number, account in enumerate(drips):
            identity = network.plc.identities[account.did]
            assert identity is not None
            network.plc.publish(account.did, replace(identity, pds=names[number % 3]))
            account.create(POST, post("x" * 90_000))
        hostile.faults.append(Fault(GET_REPO, rate=1_500, times=None))
        async with running_daemon(
            database, tmp_path, network, resync_source="pds", resync_workers="8", start="live"
        ) as daemon:
            assert await daemon.db.repos.add([account.did for account in drips])
            await until(lambda: hostile.requests[GET_REPO] >= 4)
            assert await daemon.db.repos.add([account.did for account in others])
            await daemon.wait_for_counter("resync", above=len(others) - 1, result="synchronized")
            for account in others:
                assert (await daemon.repo_row(account))["sync_status"] == "synchronized"
            hung = [await daemon.repo_row(account) for account in drips]
            assert all(row["sync_status"] != "synchronized" and row["attempts"] == 0 for row in hung)
            assert len(daemon.stages.resync_pool.shares.running) == 4


@pytest.mark.proof("daemon")
@pytest.mark.parametrize("time", ["1970-01-01T00:00:00Z", "2023-01-01T00:00:00Z", "9999-12-31T23:59:59Z"])
async def test_wrong_clocks_of_many_accounts_of_one_host_do_not_decide_readiness_when_no_message_waits(
    database: str, tmp_path: Path, time: str
) -> None:
    """After a restart, each honest account is behind 15 of the 300 accounts of the hostile host."""
    async with FaultyNetwork(pds=4) as network:
        async with running_daemon(database, tmp_path, network) as daemon:
            honest = [daemon.create_account(f"honest{number}.test", records=1) for number in range(20)]
            await daemon.wait_until_equal()
        for number, account in enumerate(honest):
            for evil in range(15):
                name = f"did:web:x{number}-{evil}.evil.example"
                payload = {"did": name, "time": time, "seq": network.relay.seq + 1}
                network.relay.inject(message_frame("#identity", payload))
            account.create(POST, post("with the right time"))
        async with running_daemon(database, tmp_path, network) as daemon:
            await daemon.wait_for_cursor()
            writer = daemon.stages.batch_writer
            await until(lambda: writer.lag is not None and 0 <= writer.lag < 60)
            assert [reason for reason in daemon.stages.probe.not_ready() if reason.code.startswith("lag")] == []


@pytest.mark.proof("daemon")
async def test_new_accounts_of_one_host_beyond_its_limit_wait_until_a_list_names_them(
    database: str, tmp_path: Path
) -> None:
    """Nothing of them is fetched or stored, their rows say why, and the account of the other host is not delayed."""
    async with (
        FaultyNetwork(pds=2) as network,
        running_daemon(database, tmp_path, network, new_accounts_per_host="3") as daemon,
    ):
        evil = []
        for number in range(8):
            account = network.create_account(f"evil{number}.test", pds=0)
            account.create(POST, post(number))
            evil.append(account)
            await daemon.wait_for_cursor()
        honest = network.create_account("honest.test", pds=1)
        honest.create(POST, post("hello"))
        await daemon.wait_for_cursor()

        async def settled() -> bool:
            [(waiting,)] = await daemon.execute(
                "select count(*) from atproto.repos where sync_status = 'desynchronized' "
                "and last_error like 'new-accounts: %' and next_attempt_at > now() + interval '10 minutes'"
            )
            return bool(waiting == 5 and (await daemon.repo_row(honest))["sync_status"] == "synchronized")

        await until(settled)
        assert daemon.export_requests == 0
        assert sum([len(await daemon.record_rows(account)) for account in evil]) == 3
        assert daemon.counter("resync", result="new-accounts") == 5
        assert await daemon.db.repos.add([account.did for account in evil]) == 0
        await daemon.wait_until_equal()


@pytest.mark.proof("daemon")
async def test_unknown_did_web_of_one_domain_add_a_limited_number_of_repos(database: str, tmp_path: Path) -> None:
    """Their messages are ignored, and cause no lookup. Those of other domains add their repos."""
    async with running_daemon(database, tmp_path, new_accounts_per_host="3") as daemon:
        for number in range(10):
            daemon.inject("#identity", {"did": f"did:web:x{number}.evil.example", "time": "2026-01-01T00:00:00Z"})
            await daemon.wait_for_cursor()
        daemon.inject("#identity", {"did": "did:web:honest.example", "time": "2026-01-01T00:00:00Z"})
        await daemon.wait_for_cursor()
        rows = await daemon.execute("select did from indexer.repo")
        assert sorted(did for (did,) in rows) == [
            "did:web:honest.example",
            *[f"did:web:x{number}.evil.example" for number in range(3)],
        ]
        assert daemon.counter("events", kind="identity", outcome="ignored") == 7
        assert daemon.stages.conditions.is_active(NEW_ACCOUNTS_LIMITED, "did:web evil.example")
