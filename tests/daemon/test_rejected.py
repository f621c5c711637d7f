"""The commands that show and replay dead letters, with and without a running daemon."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from indexer.localnet.local_account import LocalAccount
from indexer.localnet.local_network import LocalNetwork, did_of
from indexer.localnet.local_plc import LocalIdentity
from indexer.localnet.local_repo import LocalRepo, Write
from indexer.reasons import Rejection
from tests.daemon.running_daemon import (
    POST,
    UNKNOWN_KEY,
    RunningDaemon,
    commit_payload,
    post,
    publish_key_silently,
    running_daemon,
)
from tests.daemon.test_keys import forged_commit
from tests.daemon_process import daemon_environment
from tests.database_checks import assert_change_log_consistent, wait_until_equal
from tests.store.change_log_helpers import connected
from tests.store.repo_rows import waiting_for_locks
from tests.waiting import until

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class RejectedCommand:
    """Runs `indexer rejected` as a separate process, with the settings of the daemon."""

    network: LocalNetwork
    dsn: str
    directory: Path
    plc_rate: str = "1000"

    async def start(self, *arguments: str) -> Process:
        environment = daemon_environment(self.network, self.dsn, self.directory) | {"INDEXER_PLC_RATE": self.plc_rate}
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "indexer", "rejected", *arguments, env=environment, stdout=PIPE, stderr=PIPE
        )

    async def __call__(self, *arguments: str) -> tuple[int | None, list[str]]:
        """Return the exit code and the lines of stdout."""
        process = await self.start(*arguments)
        out, _ = await process.communicate()
        return process.returncode, out.decode().splitlines()


@asynccontextmanager
async def daemon_and_command(
    database: str, directory: Path, **settings: Any
) -> AsyncIterator[tuple[RunningDaemon, RejectedCommand]]:
    async with running_daemon(database, directory, **settings) as daemon:
        yield daemon, RejectedCommand(daemon.network, database, directory)


async def dead_letter_ids(daemon: RunningDaemon) -> list[str]:
    return [str(number) for (number,) in await daemon.execute("select id from atproto.rejected order by id")]


async def test_commits_are_applied_by_a_replay_after_their_key_was_published(database: str, tmp_path: Path) -> None:
    async with daemon_and_command(database, tmp_path) as (daemon, command):
        account = daemon.create_account("ada.test")
        await daemon.wait_until_equal()
        await send_commits_with_unpublished_key(
            daemon, account, "signed with the new key", "signed with the new key, too"
        )
        first, second = await dead_letter_ids(daemon)
        code, lines = await command("replay", first, second)
        sentence = Rejection.SIGNATURE_INVALID.text
        assert (code, lines) == (
            1,
            [f"{number}  rejected  signature-invalid: {sentence}" for number in (first, second)],
        )
        assert await dead_letter_ids(daemon) == [first, second]

        publish_key_silently(daemon.network, account)
        code, lines = await command("replay", "--reason", "signature-invalid")
        assert (code, lines) == (0, [f"{first}  applied", f"{second}  applied"])
        await daemon.wait_until_equal()
        assert await daemon.dead_letters() == []
        assert daemon.export_requests == 0
        assert await command("replay", second) == (4, [f"{second}  unknown"])
        await assert_change_log_consistent(database)


async def send_commits_with_unpublished_key(daemon: RunningDaemon, account: LocalAccount, *texts: str) -> None:
    """Create posts with a key that is not in the directory, and wait until their commits are rejected."""
    account.swap_key()
    for text in texts:
        account.create(POST, post(text))
    await daemon.wait_for_cursor()
    assert await daemon.dead_letters() == [(account.did, "signature-invalid")] * len(texts)


@pytest.mark.proof("daemon")
async def test_replay_refreshes_identities_without_a_limit(database: str, tmp_path: Path) -> None:
    """The refresh budget of the daemon would allow only five lookups for the accounts of one host."""
    async with daemon_and_command(database, tmp_path) as (daemon, command):
        accounts = [daemon.network.create_account(f"a{n}.test", pds=0) for n in range(7)]
        await daemon.wait_until_equal()
        for account in accounts:
            account.swap_key()
            account.create(POST, post("signed with the new key"))
        await daemon.wait_for_cursor()
        assert len(await dead_letter_ids(daemon)) == 7
        for account in accounts:
            publish_key_silently(daemon.network, account)
        code, lines = await replace(command, plc_rate="5")("replay", "--reason", "signature-invalid")
        assert (code, len(lines)) == (0, 7)
        await daemon.wait_until_equal()


@pytest.mark.proof("daemon")
async def test_replay_looks_an_identity_up_again_that_was_missing_before(database: str, tmp_path: Path) -> None:
    async with daemon_and_command(database, tmp_path) as (daemon, command):
        did, network = did_of("late.test"), daemon.network
        change = LocalRepo(did, UNKNOWN_KEY, network.clock.tid()).first
        daemon.inject("#commit", commit_payload(did, change, network.clock.now()))
        await daemon.wait_for_counter("rejected", reason="no-signing-key")
        [number] = await dead_letter_ids(daemon)
        network.plc.identities[did] = LocalIdentity("late.test", UNKNOWN_KEY.public.did_key(), network.pdses[0].url)
        assert await command("replay", number) == (0, [f"{number}  applied"])
        [row] = await daemon.execute("select sync_status, rev from atproto.repos where did = $1", did)
        assert tuple(row) == ("synchronized", change.commit.rev)


async def test_commit_over_a_limit_is_applied_by_a_replay_after_the_limit_was_raised(
    database: str, tmp_path: Path
) -> None:
    async with daemon_and_command(database, tmp_path, commit_ops="2") as (daemon, command):
        account = daemon.create_account("ada.test")
        await daemon.wait_until_equal()
        account.apply_writes([Write.create(f"{POST}/{n}", post(n)) for n in range(3)])
        await daemon.wait_for_cursor()
        assert await daemon.dead_letters() == [(account.did, "too-many-ops")]
        [number] = await dead_letter_ids(daemon)
        assert await command("replay", number) == (0, [f"{number}  applied"])
        await daemon.wait_until_equal()
        account.create(POST, post("after the replay"))
        await daemon.wait_until_equal()
        assert daemon.export_requests == 0
        await assert_change_log_consistent(database)


async def test_replay_reports_an_outcome_for_each_dead_letter(database: str, tmp_path: Path) -> None:
    """One is older than the stored head, one is forged, and the frame of one is stored only in part."""
    async with daemon_and_command(database, tmp_path, commit_ops="2") as (daemon, command):
        account, other = daemon.create_account("ada.test"), daemon.create_account("bob.test")
        await daemon.wait_until_equal()
        account.apply_writes([Write.create(f"{POST}/{n}", post(n)) for n in range(3)])
        now = daemon.network.clock.now()
        daemon.inject("#commit", commit_payload(other.did, forged_commit(daemon, other), now))
        large = replace(forged_commit(daemon, other), blocks=bytes(200_000))
        daemon.inject("#commit", commit_payload(other.did, large, now))
        await daemon.wait_for_cursor()
        superseded, invalid, truncated = await dead_letter_ids(daemon)

        await daemon.store.request_resyncs([account.did])
        await daemon.wait_until_equal()
        before = await daemon.execute("select * from indexer.repo order by did")
        code, lines = await command("replay", truncated, invalid, superseded, "77")
        assert code == 4
        assert [line.split("  ")[:2] for line in lines] == [
            [superseded, "replayed"],
            [invalid, "rejected"],
            [truncated, "untried"],
            ["77", "unknown"],
        ]
        assert "the stored frame is incomplete" in lines[2]
        assert await dead_letter_ids(daemon) == [invalid, truncated]
        assert await daemon.execute("select * from indexer.repo order by did") == before
        await assert_change_log_consistent(database)

        _, [shown] = await command("show", truncated, "--json")
        report = json.loads(shown)
        assert (report["complete"], report["frame_bytes"], report["payload"]) == (False, 100_000, None)
        assert "a map with the keys 't', 'op', then" in report["unreadable"]


@pytest.mark.proof("daemon")
async def test_replay_without_a_directory_changes_nothing(database: str, tmp_path: Path) -> None:
    async with daemon_and_command(database, tmp_path) as (daemon, command):
        account = daemon.create_account("ada.test")
        await daemon.wait_until_equal()
        await send_commits_with_unpublished_key(daemon, account, "signed with the new key")
        before = await daemon.repo_row(account)
        await daemon.network.plc.stop()
        code, [line] = await command("replay", "1")
        assert (code, line.split("  ")[:2]) == (1, ["1", "untried"])
        assert "identity-unavailable" in line
        assert (await dead_letter_ids(daemon), await daemon.repo_row(account)) == (["1"], before)
        await daemon.network.plc.start()
        publish_key_silently(daemon.network, account)
        assert await command("replay", "1") == (0, ["1  applied"])
        await daemon.wait_until_equal()


KILL_POINTS = {
    "before the commit is applied": ("select from indexer.repo for update", False),
    "before the dead letter is deleted": ("select from indexer.dead_letter for update", False),
    "while the transaction commits": ("lock table indexer.numbering_lock in share update exclusive mode", True),
}


@pytest.mark.proof("daemon")
@pytest.mark.one_server("sees which session waits for a lock, which may be one of a worker")
@pytest.mark.parametrize("kill_point", KILL_POINTS)
async def test_killed_replay_leaves_either_the_dead_letter_or_its_effect(
    database: str, tmp_path: Path, kill_point: str
) -> None:
    lock, committed = KILL_POINTS[kill_point]
    async with LocalNetwork() as network:
        async with running_daemon(database, tmp_path, network) as daemon:
            account = daemon.create_account("ada.test")
            await daemon.wait_until_equal()
            await send_commits_with_unpublished_key(daemon, account, "signed with the new key")
            before = (await daemon.repo_row(account))["rev"]
        publish_key_silently(network, account)
        command = RejectedCommand(network, database, tmp_path)
        async with connected(database) as blocker, connected(database) as sql:
            async with blocker.transaction():
                await blocker.execute(lock)
                process = await command.start("replay", "1")
                await until(lambda: waiting_for_locks(sql, 1))
                process.kill()
                await process.wait()

            async def connection_closed() -> bool:
                return not await sql.fetchval(
                    "select count(*) from pg_stat_activity where application_name = 'indexer'"
                )

            await until(connection_closed)
            dead_letters = await sql.fetchval("select count(*) from indexer.dead_letter")
            rev = await sql.fetchval("select rev from indexer.repo")
        assert (dead_letters, rev) == ((0, account.rev) if committed else (1, before))
        assert await command("replay", "1") == ((4, ["1  unknown"]) if committed else (0, ["1  applied"]))
        await wait_until_equal(network, database, min_records=6)
        await assert_change_log_consistent(database)


@pytest.mark.proof("daemon")
async def test_two_concurrent_replays_apply_each_dead_letter_once(database: str, tmp_path: Path) -> None:
    """The rows of the repos change for other reasons at the same time."""
    async with daemon_and_command(database, tmp_path, commit_ops="2") as (daemon, command):
        accounts = [daemon.create_account(f"a{n}.test") for n in range(8)]
        await daemon.wait_until_equal()
        for account in accounts:
            account.apply_writes([Write.create(f"{POST}/{n}", post(n)) for n in range(3)])
        await daemon.wait_for_cursor()
        dead_letters = await dead_letter_ids(daemon)
        assert len(dead_letters) == 8

        async def change_takedowns() -> None:
            for on in cycle((True, False)):
                for account in accounts:
                    await daemon.store.set_takedown(account.did, on=on)

        changing = asyncio.create_task(change_takedowns())
        results = await asyncio.gather(*[command("replay", "--reason", "too-many-ops") for _ in range(2)])
        changing.cancel()
        await asyncio.gather(changing, return_exceptions=True)
        results.append(await command("replay", "--reason", "too-many-ops"))
        assert results[-1][0] == 0
        applied = [line.split("  ")[0] for _, lines in results for line in lines if line.endswith("  applied")]
        assert sorted(applied) == dead_letters, results
        for account in accounts:
            await daemon.store.set_takedown(account.did, on=False)
        await daemon.wait_until_equal()
        assert daemon.export_requests == 0
        await assert_change_log_consistent(database)
