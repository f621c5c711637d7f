"""Key rotations, an unavailable PLC directory, and forged messages."""

import json
from copy import copy
from dataclasses import replace
from pathlib import Path
from time import monotonic

import pytest
from aiohttp import web

from indexer.demo.local_plc import LocalPlc, did_of
from indexer.demo.local_repo import LocalChange, LocalRepo, Write
from indexer.demo.plc_operations import sign
from indexer.net.http.host_limits import HostPauses
from tests.atproto.plc_oracle import cid_of
from tests.background import running
from tests.daemon.running_daemon import (
    POST,
    UNKNOWN_KEY,
    RunningDaemon,
    commit_payload,
    post,
    publish_key_silently,
    running_daemon,
)
from tests.daemon_harness import run_daemon, settings_for
from tests.faulty_network import Fault, FaultyAccount, FaultyNetwork
from tests.passed_time import expire_waits
from tests.quick_tuning import QUICK
from tests.waiting import until


def successful_lookups(daemon: RunningDaemon) -> float:
    return daemon.counter("identity_lookups", method="plc", result="found")


@pytest.mark.slow
async def test_key_rotation_costs_one_lookup(database: str, tmp_path: Path) -> None:
    """One is announced, and one is detected by an invalid signature."""
    async with running_daemon(database, tmp_path) as daemon:
        announcing, silent = daemon.create_account("ada.test"), daemon.create_account("bob.test")
        await daemon.wait_until_equal()
        lookups = successful_lookups(daemon)
        announcing.rotate_key("p256")
        announcing.create(POST, post("signed with the new key"))
        await daemon.wait_until_equal()
        assert successful_lookups(daemon) == lookups + 1
        assert daemon.counter("events", kind="sync", outcome="applied") == 1
        rotate_key_silently(daemon, silent)
        silent.create(POST, post("signed with the new key"))
        assert daemon.network.relay.log[-1].kind == "#commit"
        await daemon.wait_until_equal()
        assert successful_lookups(daemon) == lookups + 2
        assert await daemon.dead_letters() == []
        assert daemon.export_requests == 0


def rotate_key_silently(daemon: RunningDaemon, account: FaultyAccount) -> None:
    account.swap_key()
    publish_key_silently(daemon.network, account)


@pytest.mark.slow
async def test_forged_messages_are_rejected_and_cause_no_export(database: str, tmp_path: Path) -> None:
    """A commit and a sync that another key signed, a commit of an unknown DID, and fields that the key did not sign."""
    async with running_daemon(database, tmp_path) as daemon:
        account, other = daemon.create_account("ada.test"), daemon.create_account("bob.test")
        await daemon.wait_until_equal()
        before, now, clock = await daemon.record_rows(account), daemon.network.clock.now(), daemon.network.clock
        daemon.inject("#commit", commit_payload(account.did, forged_commit(daemon, account), now))
        repo = copy(account.repo)
        repo.write([], UNKNOWN_KEY, clock.tid())
        daemon.inject("#sync", {"did": account.did, "rev": repo.head.rev, "blocks": repo.sync(), "time": now})
        unknown = did_of("unknown.test")
        change = LocalRepo(unknown, UNKNOWN_KEY, clock.tid()).first
        daemon.inject("#commit", commit_payload(unknown, change, now))
        authentic = copy(account.repo).write([Write.create(f"{POST}/x", post("x"))], account.key, clock.tid())
        daemon.inject("#commit", commit_payload(account.did, authentic, now, rev=clock.tid()))
        daemon.inject("#commit", commit_payload(other.did, authentic, now))
        await daemon.wait_for_cursor()  # they may be rejected in any order: each waits for the keys of its account
        assert sorted(await daemon.dead_letters()) == sorted(
            [
                (account.did, "signature-invalid"),
                (account.did, "signature-invalid"),
                (unknown, "no-signing-key"),
                (account.did, "envelope-mismatch"),
                (other.did, "envelope-mismatch"),
            ]
        )
        assert daemon.counter("rejected", reason="signature-invalid") == 2
        assert await daemon.record_rows(account) == before
        rows = await daemon.execute("select did from indexer.repo")
        assert {row["did"] for row in rows} == {account.did, other.did}
        account.create(POST, post("after the forged messages"))
        await daemon.wait_until_equal()
        assert daemon.export_requests == 0
        assert daemon.network.relay.requests.total() == 0, "no HTTP request"
        assert daemon.network.plc.requests.total() <= 4


class LyingPlc(LocalPlc):
    """A directory that has another key for each DID, with an operation that no rotation key has signed."""

    def __init__(self, honest: LocalPlc) -> None:
        super().__init__()
        self._honest = honest

    async def audit_log(self, request: web.Request) -> web.Response:
        response = await self._honest.audit_log(request)
        *first, last = json.loads(response.text or "")
        unsigned = {name: value for name, value in last["operation"].items() if name != "sig"}
        operation = sign(unsigned | {"verificationMethods": {"atproto": UNKNOWN_KEY.public.did_key()}}, UNKNOWN_KEY)
        return web.json_response([*first, last | {"operation": operation, "cid": cid_of(operation)}])


async def test_directory_that_lies_changes_nothing(database: str, tmp_path: Path) -> None:
    """The honest one is asked next. Alone, the liar delays an account."""
    async with FaultyNetwork() as network:
        liar = LyingPlc(network.plc)
        await liar.start()
        both = settings_for(network.relay_url, f"{liar.url},{network.plc_url}", tmp_path)
        async with run_daemon(both, database, tuning=QUICK) as stages:
            daemon = RunningDaemon(network, stages, database, both.limits)
            account = daemon.create_account("ada.test", records=1)
            await daemon.wait_until_equal()
            daemon.inject("#commit", commit_payload(account.did, forged_commit(daemon, account), network.clock.now()))
            await daemon.wait_for_cursor()
            assert await daemon.dead_letters() == [(account.did, "signature-invalid")]
            verified = daemon.counter("plc_logs", directory=network.plc_url, result="verified")
            assert 0 < verified == daemon.counter("plc_logs", directory=liar.url, result="log-signature-invalid")
        async with run_daemon(settings_for(network.relay_url, liar.url, tmp_path), database, tuning=QUICK) as stages:
            daemon = RunningDaemon(network, stages, database, both.limits)
            fresh = daemon.create_account("bob.test", records=1)
            await daemon.wait_for_counter("resync", result="identity-unavailable")
            row = await daemon.repo_row(fresh)
            assert row["sync_status"] == "desynchronized"
            assert "log-signature-invalid" in row["last_error"]
        await liar.stop()


def forged_commit(daemon: RunningDaemon, account: FaultyAccount) -> LocalChange:
    """Return a commit that continues the chain of the account, but is signed with another key."""
    return copy(account.repo).write(
        [Write.create(f"{POST}/forged", post("x"))], UNKNOWN_KEY, daemon.network.clock.tid()
    )


def break_directory(daemon: RunningDaemon) -> Fault:
    """Let the directory answer every request with status 502, until its faults are cleared."""
    fault = Fault("", status=502, times=None)
    daemon.network.plc.faults.append(fault)
    return fault


@pytest.mark.proof("daemon")
async def test_failing_directory_delays_only_accounts_with_unknown_keys(database: str, tmp_path: Path) -> None:
    """It delays a new account, and one whose key has changed."""
    tuning = replace(QUICK, host_pauses=HostPauses(first=0.2, max_configured=0.5))
    async with running_daemon(database, tmp_path, tuning=tuning) as daemon:
        known, rotated = daemon.create_account("ada.test"), daemon.create_account("eve.test")
        await daemon.wait_until_equal()
        fault = break_directory(daemon)
        known.create(POST, post("needs no lookup"))
        fresh = daemon.create_account("bob.test")
        rotated.rotate_key()
        rotated.create(POST, post("signed with the new key"))
        await daemon.wait_for_cursor()
        assert set(await daemon.db.reports.visible_records(known.did)) == set(known.records)
        await daemon.wait_for_counter("resync", result="identity-unavailable")
        assert fault.fired > 0  # the commit and the resync share one lookup if they need it at the same time
        row = await daemon.repo_row(fresh)
        assert (row["sync_status"], row["last_error"].split(":")[0]) == ("desynchronized", "identity-unavailable")
        assert 40 < row["wait"] < 80
        row = await daemon.repo_row(rotated)
        assert row["rev"] == rotated.rev or row["sync_status"] != "synchronized", await daemon.dead_letters()
        daemon.network.plc.faults.clear()
        async with running(expire_waits(database)):
            await daemon.wait_until_equal()


@pytest.mark.proof("daemon")
async def test_forged_commits_of_many_accounts_do_not_delay_new_accounts(database: str, tmp_path: Path) -> None:
    """Refreshes may use half of the five lookups per second, and those of one host a tenth, in bursts of 10 s."""
    async with FaultyNetwork(pds=2) as network:
        async with running_daemon(database, tmp_path, network) as daemon:
            forged_for = [daemon.create_account(f"known{number}.test", records=1) for number in range(30)]
            await daemon.wait_until_equal()
        before, began = network.plc.requests.copy(), monotonic()
        async with running_daemon(database, tmp_path, network, plc_rate="5") as daemon:
            for _ in range(5):
                for account in forged_for:
                    daemon.inject(
                        "#commit", commit_payload(account.did, forged_commit(daemon, account), network.clock.now())
                    )
            fresh = daemon.create_account("fresh.test")
            await daemon.wait_until_equal()
            assert daemon.counter("rejected", reason="signature-invalid") == 150
            assert daemon.export_requests == 0, "the first commit of the new account was verified and applied"
            refreshes = network.plc.requests - before
            assert 0 < refreshes.pop(f"/{fresh.did}/log/audit") <= 2
            assert refreshes.total() <= 2 * (5 + 0.5 * (monotonic() - began))
            assert refreshes.total() == daemon.counter("identity_refreshes", cause="signature", result="asked")
            assert daemon.counter("identity_refreshes", cause="signature", result="over-budget") > 0
            assert set(await daemon.dead_letters()) == {(account.did, "signature-invalid") for account in forged_for}


@pytest.mark.proof("daemon")
@pytest.mark.timeout(400)
async def test_made_up_dids_do_not_starve_real_new_accounts(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory's rate is used up for minutes by DIDs that it does not know; known accounts do not notice that."""
    monkeypatch.setattr("tests.waiting.TIMEOUT", 240.0)  # a repo of an unknown host may wait for two minutes
    tuning = replace(QUICK, key_lookup_timeout=3.0)
    async with running_daemon(database, tmp_path, tuning=tuning, plc_rate="5", resync_source="pds") as daemon:
        known, network = daemon.create_account("known.test"), daemon.network
        await daemon.wait_until_equal()
        for number in range(400):
            made_up = did_of(f"account{number}.hostile.test")
            daemon.inject("#account", {"did": made_up, "active": True, "time": network.clock.now()})
        for number in range(500):
            made_up = did_of(f"commit{number}.hostile.test")
            change = LocalRepo(made_up, UNKNOWN_KEY, network.clock.tid()).first
            daemon.inject("#commit", commit_payload(made_up, change, network.clock.now()))
        honest = [daemon.create_account(f"honest{number}.test", records=2) for number in range(4)]
        known.rotate_key()
        known.create(POST, post("signed with the new key"))
        await daemon.wait_for_cursor()
        assert set(await daemon.db.reports.visible_records(known.did)) == set(known.records)
        for account in honest:
            row = await daemon.repo_row(account)
            assert row["sync_status"] == "synchronized" or row["wait"] is None or row["wait"] < 150
            account.create(POST, post("after the flood"))

        async def equal() -> bool:
            return all([set(await daemon.db.reports.visible_records(one.did)) == set(one.records) for one in honest])

        await until(equal, daemon.stages.status.document)
        made_up_lookups = network.plc.requests.total() - sum(
            network.plc.requests[f"/{one.did}/log/audit"] for one in honest
        )
        assert made_up_lookups < 800, "the real accounts did not wait for all the others"
