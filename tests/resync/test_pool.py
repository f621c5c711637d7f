"""The workers of resyncs: claims, lost claims, failures, and the end of the pool."""

import asyncio
import re

import pytest
from structlog.testing import capture_logs

from indexer.errors import UnavailableError
from indexer.reasons import FetchFailure
from indexer.sync.repo import SyncStatus
from tests.resync.running_pool import DID, Download, RunningPool
from tests.waiting import until


@pytest.mark.slow
async def test_workers_that_become_free_within_the_gathering_time_share_a_claim() -> None:
    dids = [f"did:plc:{n:024}" for n in range(7)]
    async with RunningPool(dids, lambda did: f"h{did[-1]}.example", workers=5, gathering_time=0.5) as running:
        await until(lambda: len(running.attempts.results) == 5)
        for free, did in enumerate(dids[:2], 1):
            running.attempts.results[did].set_result("synchronized")
            for _ in range(20):
                await asyncio.sleep(0)
            assert running.pool.shares.free_workers == free, "the pool has not waited for another worker"
        await until(lambda: len(running.attempts.started) == 7)
        assert [size for size in running.db.claim_sizes if size] == [5, 2]


async def test_claim_in_flight_at_shutdown_is_given_back() -> None:
    dids = [f"did:plc:{n:024}" for n in range(3)]
    async with RunningPool(dids, lambda _did: "one.example", workers=4) as running:
        running.db.claims_answered.clear()
        await until(lambda: len(running.db.claims) == 3)
    running.db.claims_answered.set()
    await running.pool.give_back()
    assert {repo.sync_status for repo in running.db.rows.values()} == {SyncStatus.DESYNCHRONIZED}
    assert running.attempts.started == []


@pytest.mark.parametrize("database_up", [True, False])
async def test_claims_continue_when_identities_cannot_be_loaded(*, database_up: bool) -> None:
    running = RunningPool([DID], lambda _did: "one.example", workers=2)
    running.identities.database_up = database_up
    async with running:
        await until(lambda: DID in running.attempts.results)
    assert running.identities.preloaded == [database_up], "otherwise the lookup asks the database"


async def test_lost_claim_ends_its_resync() -> None:
    async with RunningPool([DID], lambda _did: "one.example", workers=2, lease=0.03) as running:
        await until(lambda: DID in running.attempts.results)
        running.db.claim_holds = False
        await until(lambda: not running.pool.shares.running)
        assert running.attempts.results[DID].cancelled()
        assert not running.task.done()


async def test_failure_does_not_end_a_newer_claim() -> None:
    """The first resync fails after the repo was claimed again."""
    async with RunningPool([DID], lambda _did: "one.example", workers=4) as running:
        await until(lambda: DID in running.attempts.results)
        first = running.attempts.results.pop(DID)
        running.db.rows[DID] = running.db.rows[DID]._replace(sync_status=SyncStatus.DESYNCHRONIZED)
        await until(lambda: DID in running.attempts.results)
        claimed = running.db.rows[DID]
        first.set_exception(UnavailableError(FetchFailure.TIMEOUT))
        await until(lambda: len(running.pool.shares.running) == 1)
        assert running.db.rows[DID] == claimed


async def test_pool_with_occupied_workers_moves_only_while_an_export_is_received() -> None:
    dids = [f"did:plc:busy{n:020}" for n in range(2)]
    download = Download("192.0.2.1")
    async with RunningPool(dids, lambda did: f"{did[-1]}.example", workers=2) as running:
        stage = running.pool.stage
        running.attempts.downloads[dids[0]] = download
        await until(lambda: running.attempts.results.keys() == set(dids))
        await until(lambda: stage.seconds_without_progress(0) > 0.1, lambda: stage.waits_since)
        stood_since = stage.waits_since or 0
        download.received += 1
        await until(lambda: (stage.waits_since or 0) > stood_since)
        running.attempts.results[dids[0]].set_result("synchronized")
        await until(lambda: stage.waits_since is None)


async def test_endless_attempt_times_out() -> None:
    async with RunningPool([DID], lambda _did: "one.example", workers=1, attempt_timeout=0.05) as running:
        await until(lambda: running.db.rows[DID].last_error is not None)
        assert (running.db.rows[DID].last_error or "").startswith("timeout")
        assert running.db.rows[DID].attempts == 1


async def test_cancelled_resyncs_are_given_back() -> None:
    async with RunningPool([DID], lambda _did: "one.example", workers=1) as running:
        await until(lambda: DID in running.attempts.results)
    assert [run.claimed.did for run in running.pool.shares.running] == [DID]
    await running.pool.give_back()
    row = running.db.rows[DID]
    assert (row.sync_status, row.next_attempt_at, row.attempts) == (SyncStatus.DESYNCHRONIZED, None, 0)


async def test_bug_ends_the_pool_with_its_exception() -> None:
    error = RuntimeError("a bug")
    async with RunningPool([DID], lambda _did: "one.example", workers=1) as running:
        await until(lambda: DID in running.attempts.results)
        running.attempts.results[DID].set_exception(error)
        with pytest.raises(BaseExceptionGroup) as raised:
            await running.task
        assert raised.value.exceptions == (error,)


async def test_failures_of_one_host_with_one_reason_are_one_condition() -> None:
    """Pauses are not failures: no request was sent."""
    dids = [f"did:plc:{n:024}" for n in range(9)]
    reasons = [FetchFailure.TIMEOUT] * 5 + [FetchFailure.BAD_ANSWER] * 3 + [FetchFailure.THROTTLED]
    with capture_logs() as lines:
        async with RunningPool(dids, lambda _did: "one.example", workers=9) as running:
            running.identities.failures = {
                did: UnavailableError(reason, "detail") for did, reason in zip(dids, reasons, strict=True)
            }
            await until(lambda: all(repo.last_error for repo in running.db.rows.values()))
            counts = {condition.subject: condition.count for condition in running.conditions.active()}
    assert counts == {"timeout at one.example": 5, "bad-answer at one.example": 3}
    assert [line["event"] for line in lines if line["log_level"] != "debug"] == ["condition.began"] * 2


@pytest.mark.parametrize(
    ("reason", "what_follows"),
    [
        (FetchFailure.TIMEOUT, r"it is tried again in \d+ s"),
        (FetchFailure.REPO_NOT_FOUND, "it is parked until a message .+ arrives, or for INDEXER_SWEEP_INTERVAL"),
    ],
)
async def test_condition_says_whether_the_repo_is_tried_again_or_parked(
    reason: FetchFailure, what_follows: str
) -> None:
    async with RunningPool([DID], lambda _did: "one.example", workers=1) as running:
        running.identities.failures = {DID: UnavailableError(reason, "detail")}
        await until(lambda: bool(running.conditions.active()))
        [condition] = running.conditions.active()
    assert re.fullmatch(rf"{DID}: {reason}: detail; {what_follows}", condition.message)
