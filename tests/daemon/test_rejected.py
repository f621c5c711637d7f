"""Letters that came about on a stream, and what an operator does with them, beside the daemon or after it."""

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

from indexer.localnet.account import Account
from indexer.localnet.network import LocalNetwork, did_of
from indexer.localnet.plc import Identity
from indexer.localnet.repo import Repo, Write
from indexer.reasons import Rejection
from tests.daemon.stage import FORGER, POST, Stage, commit_payload, post, staged
from tests.daemon.test_keys import forged
from tests.serving import until
from tests.store.following import connected
from tests.store.rows import held_up
from tests.test_crash import assert_nothing_doubled, environment_of, equal

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Operator:
    """Runs commands, each in a process of its own, with the daemon's settings."""

    network: LocalNetwork
    dsn: str
    directory: Path
    plc_rate: str = "1000"

    async def start(self, *arguments: str) -> Process:
        environment = environment_of(self.network, self.dsn, self.directory) | {"INDEXER_PLC_RATE": self.plc_rate}
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "indexer", "rejected", *arguments, env=environment, stdout=PIPE, stderr=PIPE
        )

    async def __call__(self, *arguments: str) -> tuple[int | None, list[str]]:
        """The exit code, and the lines on stdout."""
        process = await self.start(*arguments)
        out, _ = await process.communicate()
        return process.returncode, out.decode().splitlines()


@asynccontextmanager
async def operated(database: str, directory: Path, **settings: Any) -> AsyncIterator[tuple[Stage, Operator]]:
    async with staged(database, directory, **settings) as stage:
        yield stage, Operator(stage.network, database, directory)


async def numbers(stage: Stage) -> list[str]:
    return [str(number) for (number,) in await stage.execute("select id from atproto.rejected order by id")]


async def test_commits_by_a_key_that_the_directory_learns_later(database: str, tmp_path: Path) -> None:
    async with operated(database, tmp_path) as (stage, operator):
        account = stage.account("ada.test")
        await stage.equal()
        await refuse_commits(stage, account, "by the new key", "and another")
        first, second = await numbers(stage)
        code, lines = await operator("replay", first, second)
        sentence = Rejection.SIGNATURE_INVALID.text
        assert (code, lines) == (
            1,
            [f"{number}  rejected  signature-invalid: {sentence}" for number in (first, second)],
        )
        assert await numbers(stage) == [first, second]

        publish(stage.network, account)
        code, lines = await operator("replay", "--reason", "signature-invalid")
        assert (code, lines) == (0, [f"{first}  applied", f"{second}  applied"])
        await stage.equal()
        assert await stage.rejected() == []
        assert stage.exports == 0
        assert await operator("replay", second) == (4, [f"{second}  unknown"])
        await assert_nothing_doubled(database)


async def refuse_commits(stage: Stage, account: Account, *texts: str) -> None:
    """Commits by a key that the directory doesn't know."""
    account.swap_key()
    for text in texts:
        account.create(POST, post(text))
    await stage.read()
    assert await stage.rejected() == [(account.did, "signature-invalid")] * len(texts)


def publish(network: LocalNetwork, account: Account) -> None:
    """The directory knows the key now, and nobody says so."""
    identity = network.plc.identities[account.did]
    assert identity is not None
    network.plc.identities[account.did] = replace(identity, key=account.key.public.did_key())


async def test_as_many_keys_are_asked_for_as_there_are_letters(database: str, tmp_path: Path) -> None:
    """The budget is for what strangers cause: of one host's accounts it would have five of these asked for."""
    async with operated(database, tmp_path) as (stage, operator):
        accounts = [stage.network.create_account(f"a{n}.test", pds=0) for n in range(7)]
        await stage.equal()
        for account in accounts:
            account.swap_key()
            account.create(POST, post("by the new key"))
        await stage.read()
        assert len(await numbers(stage)) == 7
        for account in accounts:
            publish(stage.network, account)
        code, lines = await replace(operator, plc_rate="5")("replay", "--reason", "signature-invalid")
        assert (code, len(lines)) == (0, 7)
        await stage.equal()


async def test_an_account_that_the_directory_learns_of_later(database: str, tmp_path: Path) -> None:
    """However shortly before it said that there is none."""
    async with operated(database, tmp_path) as (stage, operator):
        did, network = did_of("late.test"), stage.network
        change = Repo(did, FORGER, network.clock.tid()).first
        stage.inject("#commit", commit_payload(did, change, network.clock.now()))
        await stage.counted(0, "rejected", reason="no-signing-key")
        [number] = await numbers(stage)
        network.plc.identities[did] = Identity("late.test", FORGER.public.did_key(), network.pdses[0].url)
        assert await operator("replay", number) == (0, [f"{number}  applied"])
        [row] = await stage.execute("select sync_status, rev from atproto.repos where did = $1", did)
        assert tuple(row) == ("synchronized", change.commit.rev)


async def test_a_commit_over_a_limit_that_was_widened(database: str, tmp_path: Path) -> None:
    async with operated(database, tmp_path, commit_ops="2") as (stage, operator):
        account = stage.account("ada.test")
        await stage.equal()
        account.apply_writes([Write.create(f"{POST}/{n}", post(n)) for n in range(3)])
        await stage.read()
        assert await stage.rejected() == [(account.did, "too-many-ops")]
        [number] = await numbers(stage)
        assert await operator("replay", number) == (0, [f"{number}  applied"])
        await stage.equal()
        account.create(POST, post("the daemon goes on behind it"))
        await stage.equal()
        assert stage.exports == 0
        await assert_nothing_doubled(database)


async def test_what_has_become_of_it_meanwhile(database: str, tmp_path: Path) -> None:
    """A commit that an export has brought since, a forged one, and one whose frame is not kept whole."""
    async with operated(database, tmp_path, commit_ops="2") as (stage, operator):
        account, other = stage.account("ada.test"), stage.account("bob.test")
        await stage.equal()
        account.apply_writes([Write.create(f"{POST}/{n}", post(n)) for n in range(3)])
        now = stage.network.clock.now()
        stage.inject("#commit", commit_payload(other.did, forged(stage, other), now))
        large = replace(forged(stage, other), blocks=bytes(200_000))
        stage.inject("#commit", commit_payload(other.did, large, now))
        await stage.read()
        superseded, false, cut = await numbers(stage)

        await stage.running.store.mark_resync([account.did])
        await stage.equal()
        before = await stage.execute("select * from indexer.repo order by did")
        code, lines = await operator("replay", cut, false, superseded, "77")
        assert code == 4
        assert [line.split("  ")[:2] for line in lines] == [
            [superseded, "replayed"],
            [false, "rejected"],
            [cut, "untried"],
            ["77", "unknown"],
        ]
        assert "not kept whole" in lines[2]
        assert await numbers(stage) == [false, cut]
        assert await stage.execute("select * from indexer.repo order by did") == before
        await assert_nothing_doubled(database)

        _, [shown] = await operator("show", cut, "--json")
        report = json.loads(shown)
        assert (report["whole"], report["frame_bytes"], report["payload"]) == (False, 100_000, None)
        assert "a map with the keys 't', 'op', then" in report["unreadable"]


async def test_a_directory_that_is_down(database: str, tmp_path: Path) -> None:
    async with operated(database, tmp_path) as (stage, operator):
        account = stage.account("ada.test")
        await stage.equal()
        await refuse_commits(stage, account, "by the new key")
        before = await stage.repo(account)
        await stage.network.plc.stop()
        code, [line] = await operator("replay", "1")
        assert (code, line.split("  ")[:2]) == (1, ["1", "untried"])
        assert "identity-unavailable" in line
        assert (await numbers(stage), await stage.repo(account)) == (["1"], before)
        await stage.network.plc.start()
        publish(stage.network, account)
        assert await operator("replay", "1") == (0, ["1  applied"])
        await stage.equal()


EDGES = {
    "before its effect": ("select from indexer.repo for update", False),
    "between its effect and the letter's end": ("select from indexer.dead_letter for update", False),
    "in the commit": ("lock table indexer.turn in share update exclusive mode", True),
}


@pytest.mark.slow
@pytest.mark.parametrize("edge", EDGES)
async def test_killed_it_leaves_the_letter_or_its_effect(database: str, tmp_path: Path, edge: str) -> None:
    lock, settled = EDGES[edge]
    async with LocalNetwork() as network:
        async with staged(database, tmp_path, network) as stage:
            account = stage.account("ada.test")
            await stage.equal()
            await refuse_commits(stage, account, "by the new key")
            before = (await stage.repo(account))["rev"]
        publish(network, account)
        operator = Operator(network, database, tmp_path)
        async with connected(database) as blocker, connected(database) as sql:
            async with blocker.transaction():
                await blocker.execute(lock)
                process = await operator.start("replay", "1")
                await until(lambda: held_up(sql, 1))
                process.kill()
                await process.wait()

            async def gone() -> bool:
                return not await sql.fetchval(
                    "select count(*) from pg_stat_activity where application_name = 'indexer'"
                )

            await until(gone)
            letters = await sql.fetchval("select count(*) from indexer.dead_letter")
            rev = await sql.fetchval("select rev from indexer.repo")
        assert (letters, rev) == ((0, account.rev) if settled else (1, before))
        assert await operator("replay", "1") == ((4, ["1  unknown"]) if settled else (0, ["1  applied"]))
        await equal(network, database, least=6)
        await assert_nothing_doubled(database)


async def test_two_at_once_beside_the_daemon(database: str, tmp_path: Path) -> None:
    """Each letter is settled by one of them, while its repo changes for other reasons, too."""
    async with operated(database, tmp_path, commit_ops="2") as (stage, operator):
        accounts = [stage.account(f"a{n}.test") for n in range(8)]
        await stage.equal()
        for account in accounts:
            account.apply_writes([Write.create(f"{POST}/{n}", post(n)) for n in range(3)])
        await stage.read()
        letters = await numbers(stage)
        assert len(letters) == 8

        async def move() -> None:
            for on in cycle((True, False)):
                for account in accounts:
                    await stage.running.store.takedown(account.did, on=on)

        moving = asyncio.create_task(move())
        ends = await asyncio.gather(*[operator("replay", "--reason", "too-many-ops") for _ in range(2)])
        moving.cancel()
        await asyncio.gather(moving, return_exceptions=True)
        ends.append(await operator("replay", "--reason", "too-many-ops"))
        assert ends[-1][0] == 0
        applied = [line.split("  ")[0] for _, lines in ends for line in lines if line.endswith("  applied")]
        assert sorted(applied) == letters, ends
        for account in accounts:
            await stage.running.store.takedown(account.did, on=False)
        await stage.equal()
        assert stage.exports == 0
        await assert_nothing_doubled(database)
