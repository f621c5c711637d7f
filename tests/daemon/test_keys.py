"""Signing keys: they change, they can't be had, they are forged."""

import asyncio
from copy import copy
from dataclasses import replace
from pathlib import Path
from time import monotonic

import pytest

from indexer.identity import Resolver
from indexer.localnet.account import Account
from indexer.localnet.network import LocalNetwork, did_of
from indexer.localnet.repo import Change, Repo, Write
from indexer.localnet.server import Fault
from indexer.run import daemon
from indexer.sync.identity import StoredIdentity
from tests.daemon.stage import FORGER, POST, Stage, commit_payload, post, staged
from tests.serving import settings_for, until

pytestmark = pytest.mark.slow


def found(stage: Stage) -> float:
    return stage.metric("identity_lookups", method="plc", result="found")


async def test_a_rotation_that_is_announced(database: str, tmp_path: Path) -> None:
    async with staged(database, tmp_path) as stage:
        account = stage.account("ada.test")
        await stage.equal()
        before, lookups = stage.network.plc.identities[account.did], found(stage)
        account.rotate_key("p256")
        account.create(POST, post("by the new key"))
        after = stage.network.plc.identities[account.did]
        assert before != after
        await stage.equal()
        assert found(stage) == lookups + 1
        assert stage.metric("events", kind="sync", outcome="applied") == 1
        assert await stage.rejected() == []
        assert stage.exports == 0


async def test_a_rotation_that_nobody_announces(database: str, tmp_path: Path) -> None:
    """A signature that the known key doesn't verify has the directory asked once."""
    async with staged(database, tmp_path) as stage:
        account = stage.account("ada.test")
        await stage.equal()
        lookups = found(stage)
        rotate_silently(stage, account)
        account.create(POST, post("by the new key"))
        assert [sent.kind for sent in stage.network.relay.log[-2:]] == ["#commit", "#commit"]
        await stage.equal()
        assert found(stage) == lookups + 1
        assert await stage.rejected() == []
        assert stage.exports == 0


def rotate_silently(stage: Stage, account: Account) -> None:
    identity = stage.network.plc.identities[account.did]
    assert identity is not None
    account.swap_key()
    stage.network.plc.identities[account.did] = replace(identity, key=account.key.public.did_key())


async def test_a_rotation_that_the_first_export_tells_of(database: str, tmp_path: Path) -> None:
    """A new repo whose key is known already, or was: one look-up more, and no attempt lost."""
    async with LocalNetwork() as network:
        account = network.create_account("ada.test")
        async with staged(database, tmp_path, network, start="live", resync_source="pds") as stage:
            await stage.running.identities.lookup(account.did)
            lookups = found(stage)
            rotate_silently(stage, account)
            network.relay.drop(account.did)
            account.create(POST, post("by the new key, and not heard of"))
            await stage.running.store.add([account.did])
            await until(lambda: stage.total("resync") > 0)
            assert stage.metric("resync", result="synchronized") == stage.total("resync") == 1
            assert found(stage) == lookups + 1
            assert set(await stage.running.store.visible_records(account.did)) == set(account.records)


@pytest.mark.slow
async def test_two_rotations_within_a_minute(database: str, tmp_path: Path) -> None:
    async with staged(database, tmp_path) as stage:
        account = stage.account("ada.test")
        await stage.equal()
        for text in ("by the second key", "by the third key"):
            account.rotate_key()
            account.create(POST, post(text))
            await stage.read()
        await stage.nothing_lost(account)


@pytest.mark.slow
async def test_a_rotation_while_the_directory_is_down(database: str, tmp_path: Path) -> None:
    async with staged(database, tmp_path) as stage:
        account = stage.account("ada.test")
        await stage.equal()
        fault = down(stage)
        account.rotate_key()
        account.create(POST, post("by the new key"))
        await stage.read()
        assert fault.fired > 0
        stage.network.plc.faults.clear()
        await stage.nothing_lost(account)


def down(stage: Stage) -> Fault:
    """The directory fails from now on, until its faults are cleared."""
    fault = Fault("", status=502, times=None)
    stage.network.plc.faults.append(fault)
    return fault


@pytest.mark.slow
async def test_the_directory_is_down_for_a_while(database: str, tmp_path: Path) -> None:
    """Accounts whose keys are known go on; the others wait, and nothing of them is lost."""
    async with staged(database, tmp_path) as stage:
        known = stage.account("ada.test")
        await stage.equal()
        fault = down(stage)
        known.create(POST, post("needs no directory"))
        fresh = stage.account("bob.test")
        await stage.read()
        assert set(await stage.running.store.visible_records(known.did)) == set(known.records)
        await stage.counted(0, "resync", result="identity-unavailable")
        assert fault.fired >= 2, "for the commit, and for the resync"
        row = await stage.repo(fresh)
        assert (row["status"], row["last_error"].split(":")[0]) == ("desynchronized", "identity-unavailable")
        assert 40 < row["wait"] < 80
        assert await stage.rejected() == []
        stage.network.plc.faults.clear()
        await stage.healed(fresh)  # by hand: it would be tried again within that minute
        fresh.create(POST, post("live again"))
        await stage.equal()
        assert stage.exports == 1


@pytest.mark.slow
async def test_the_directory_is_not_there_at_all(database: str, tmp_path: Path) -> None:
    """Its connections are refused; and the daemon is started meanwhile."""
    async with staged(database, tmp_path) as stage:
        known, network = stage.account("ada.test"), stage.network
        await stage.equal()
        await network.plc.stop()
        fresh = stage.account("bob.test")
        await stage.counted(0, "resync", result="identity-unavailable")
        known.create(POST, post("needs no directory"))
        await stage.read()
        assert (await stage.repo(known))["rev"] == known.rev
        await network.plc.start()
        await stage.healed(fresh)


async def test_forged_messages_are_refused_and_fetch_nothing(database: str, tmp_path: Path) -> None:
    async with staged(database, tmp_path) as stage:
        account = stage.account("ada.test")
        await stage.equal()
        before, now = await stage.stored(account), stage.network.clock.now()
        stage.inject("#commit", commit_payload(account.did, forged(stage, account), now))
        repo = copy(account.repo)
        repo.write([], FORGER, stage.network.clock.tid())
        stage.inject("#sync", {"did": account.did, "rev": repo.head.rev, "blocks": repo.sync(), "time": now})
        unknown = did_of("nobody.test")
        change = Repo(unknown, FORGER, stage.network.clock.tid()).first
        stage.inject("#commit", commit_payload(unknown, change, now))
        await stage.counted(0, "rejected", reason="no-signing-key")
        assert sorted(await stage.rejected()) == sorted(
            [(account.did, "signature-invalid"), (account.did, "signature-invalid"), (unknown, "no-signing-key")]
        )
        assert stage.metric("rejected", reason="signature-invalid") == 2
        assert await stage.stored(account) == before
        assert {row["did"] for row in await stage.execute("select did from indexer.repo")} == {account.did}
        account.create(POST, post("unmoved"))
        await stage.equal()
        assert stage.exports == 0
        assert stage.network.relay.requests.total() == 0, "of HTTP"
        assert stage.network.plc.requests.total() <= 3


def forged(stage: Stage, account: Account) -> Change:
    """A commit that fits behind the account's last one, but for who signed it."""
    return copy(account.repo).write([Write.create(f"{POST}/forged", post("x"))], FORGER, stage.network.clock.tid())


async def test_a_flood_of_forgeries_asks_the_directory_once(database: str, tmp_path: Path) -> None:
    async with staged(database, tmp_path) as stage:
        account = stage.account("ada.test")
        await stage.equal()
        lookups = stage.network.plc.requests.total()
        for _ in range(50):
            stage.inject("#commit", commit_payload(account.did, forged(stage, account), stage.network.clock.now()))
        account.create(POST, post("behind the flood"))
        await stage.equal()
        assert stage.metric("rejected", reason="signature-invalid") == 50
        assert stage.network.plc.requests.total() == lookups + 1
        assert stage.exports == 0


@pytest.mark.slow
async def test_forgeries_for_many_accounts_leave_the_directory_to_new_ones(database: str, tmp_path: Path) -> None:
    """At most the configured refreshes: half of five a second, a tenth for one host's accounts, ten seconds at once."""
    async with LocalNetwork(pds=2) as network:
        async with staged(database, tmp_path, network) as stage:
            forged_for = [stage.account(f"known{number}.test", records=1) for number in range(30)]
            await stage.equal()
        before, began = network.plc.requests.copy(), monotonic()
        async with staged(database, tmp_path, network, plc_rate="5") as stage:
            for _ in range(5):
                for account in forged_for:
                    stage.inject("#commit", commit_payload(account.did, forged(stage, account), network.clock.now()))
            fresh = stage.account("fresh.test")
            await stage.equal()
            assert stage.metric("rejected", reason="signature-invalid") == 150
            assert stage.exports == 0, "the new account's first commit was checked when it came"
            refreshes = network.plc.requests - before
            assert 0 < refreshes.pop(f"/{fresh.did}") <= 2
            assert refreshes.total() <= 2 * (5 + 0.5 * (monotonic() - began))
            assert refreshes.total() == stage.metric("identity_refreshes", cause="signature", result="asked")
            assert stage.metric("identity_refreshes", cause="signature", result="over-budget") > 0
            assert set(await stage.rejected()) == {(account.did, "signature-invalid") for account in forged_for}


async def test_a_bug_in_a_look_up_ends_the_daemon(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the messages that wait for the key are the last ones."""

    async def bug(_self: Resolver, _did: str) -> StoredIdentity:
        raise ZeroDivisionError

    monkeypatch.setattr(Resolver, "resolve", bug)
    async with LocalNetwork() as network:
        settings = settings_for(network.relay_url, network.plc_url, tmp_path, roles="live")
        async with daemon(settings, database) as running:
            network.create_account("ada.test")
            with pytest.raises(ZeroDivisionError):
                await asyncio.wait_for(running.run(asyncio.Event()), 30)


async def test_a_signature_over_other_bytes(database: str, tmp_path: Path) -> None:
    """The account's own key, and an envelope that says more than was signed."""
    async with staged(database, tmp_path) as stage:
        account, other = stage.account("ada.test"), stage.account("bob.test")
        await stage.equal()
        change = copy(account.repo).write(
            [Write.create(f"{POST}/x", post("x"))], account.key, stage.network.clock.tid()
        )
        now = stage.network.clock.now()
        stage.inject("#commit", commit_payload(account.did, change, now, rev=stage.network.clock.tid()))
        stage.inject("#commit", commit_payload(other.did, change, now))
        account.create(POST, post("the true one"))
        await stage.read()
        assert sorted(await stage.rejected()) == sorted(
            [(account.did, "envelope-mismatch"), (other.did, "envelope-mismatch")]
        )
        await stage.equal()
        assert stage.exports == 0
