"""Dead letters: shown and replayed with `indexer rejected`, by a process beside the daemon."""

import asyncio
import sys
from asyncio.subprocess import PIPE
from dataclasses import dataclass
from pathlib import Path

import pytest

from indexer.demo.local_plc import LocalIdentity, did_of
from indexer.demo.local_repo import LocalRepo, Write
from tests.daemon.running_daemon import (
    POST,
    UNKNOWN_KEY,
    RunningDaemon,
    commit_payload,
    post,
    publish_key_silently,
    running_daemon,
)
from tests.daemon_process import daemon_environment
from tests.database_checks import assert_change_log_consistent
from tests.faulty_network import FaultyNetwork


@dataclass(frozen=True)
class RejectedCommand:
    """Runs `indexer rejected` as a separate process, with the settings of the daemon."""

    network: FaultyNetwork
    dsn: str
    directory: Path

    async def __call__(self, *arguments: str) -> tuple[int | None, list[str]]:
        """Return the exit code and the lines of stdout."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "indexer", "rejected", *arguments),
            env=daemon_environment(self.network, self.dsn, self.directory),
            stdout=PIPE,
            stderr=PIPE,
        )
        out, _ = await process.communicate()
        return process.returncode, out.decode().splitlines()


async def dead_letter_ids(daemon: RunningDaemon) -> list[str]:
    return [str(number) for (number,) in await daemon.execute("select id from atproto.rejected order by id")]


@pytest.mark.slow
async def test_dead_letters_are_applied_by_a_replay_when_their_cause_is_gone(database: str, tmp_path: Path) -> None:
    """A key and an identity were not published, and a limit was too low."""
    async with running_daemon(database, tmp_path, narrow={"commit_ops": 2}) as daemon:
        network, command = daemon.network, RejectedCommand(daemon.network, database, tmp_path)
        unpublished, large = daemon.create_account("ada.test"), daemon.create_account("bob.test")
        await daemon.wait_until_equal()
        unpublished.swap_key()
        for number in range(2):
            unpublished.create(POST, post(number))
        large.apply_writes([Write.create(f"{POST}/large{number}", post(number)) for number in range(3)])
        late = did_of("late.test")
        change = LocalRepo(late, UNKNOWN_KEY, network.clock.tid()).first
        daemon.inject("#commit", commit_payload(late, change, network.clock.now()))
        await daemon.wait_for_cursor()
        rejected = {(unpublished.did, "signature-invalid"), (large.did, "too-many-ops"), (late, "no-signing-key")}
        assert set(await daemon.dead_letters()) == rejected
        ids = await dead_letter_ids(daemon)
        code, lines = await command("replay", "--reason", "signature-invalid")
        assert (code, [line.split("  ")[1] for line in lines]) == (1, ["rejected", "rejected"])
        assert await dead_letter_ids(daemon) == ids
        publish_key_silently(network, unpublished)
        network.plc.publish(late, LocalIdentity("late.test", UNKNOWN_KEY.public.did_key(), network.pdses[0].url))
        code, lines = await command("replay", *ids)
        assert (code, sorted(lines)) == (0, sorted(f"{number}  applied" for number in ids))
        assert await daemon.dead_letters() == []
        [row] = await daemon.execute("select sync_status, rev from atproto.repos where did = $1", late)
        assert tuple(row) == ("synchronized", change.commit.rev)
        for account in (unpublished, large):
            assert (await daemon.repo_row(account))["rev"] == account.rev
            account.create(POST, post("after the replay"))
        await daemon.wait_for_cursor()
        assert daemon.export_requests == 0
        await assert_change_log_consistent(database)
