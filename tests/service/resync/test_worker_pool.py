import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import pytest
from structlog.testing import capture_logs

from indexer.atproto.crypto import PrivateKey
from indexer.errors import UnavailableError
from indexer.identity import CachedIdentity
from indexer.monitoring.conditions import NEW_ACCOUNTS_LIMITED, Conditions
from indexer.monitoring.metrics import Metrics
from indexer.reasons import FetchFailure
from indexer.service.new_accounts import NewAccounts
from indexer.service.resync.admission import Postponed
from indexer.service.resync.attempt import ExportSlots
from indexer.service.resync.phase import Phase
from indexer.service.resync.worker_pool import CLUSTER_WORKERS, WorkerPool, WorkerPoolSettings, pool_settings
from indexer.store import DatabaseError, Store
from indexer.store.apply_batch import AppliedBatch
from indexer.sync.plans import Batch
from indexer.sync.repo_state import Repo, SyncStatus
from indexer.sync.shard import Shard
from tests.sync.signing_account import STORE_ALL
from tests.waiting import until

KEY = PrivateKey.from_seed("k256", b"anyone's").public
DID = "did:plc:" + "a" * 24


class MemoryStore:
    """Repo rows in memory, with the methods that the pool uses."""

    def __init__(self, dids: Sequence[str]) -> None:
        self.rows = {did: Repo(did, version=1) for did in dids}
        self.claims: list[str] = []
        self.claim_sizes: list[int] = []
        self.claim_holds = True
        self.claims_answered = asyncio.Event()
        self.claims_answered.set()

    async def claim(self, count: int, _buckets: range, _seconds: float, now: float) -> list[Repo]:
        due = [
            repo
            for repo in self.rows.values()
            if repo.sync_status is SyncStatus.DESYNCHRONIZED and (repo.next_attempt_at or 0) <= now
        ][:count]
        claimed = [
            repo._replace(sync_status=SyncStatus.IN_PROGRESS, version=repo.version + 1, lease=repo.lease + 1)
            for repo in due
        ]
        self.rows.update({repo.did: repo for repo in claimed})
        self.claims += [repo.did for repo in claimed]
        self.claim_sizes.append(len(claimed))
        await self.claims_answered.wait()
        return claimed

    async def renew(self, _did: str, _lease: int, _seconds: float) -> bool:
        return self.claim_holds

    async def repos(self, dids: Sequence[str]) -> dict[str, Repo]:
        return {did: self.rows[did] for did in dids}

    update_repo = Store.update_repo

    async def write(self, batch: Batch) -> AppliedBatch:
        for write in batch.writes:
            assert self.rows[write.repo.did].version == write.expected_version
            self.rows[write.repo.did] = write.repo
        return AppliedBatch(frozenset(), Counter())


class FixedIdentities:
    """An identity for every DID; only its host differs."""

    def __init__(self, host_of: Callable[[str], str]) -> None:
        self.host_of = host_of
        self.cached = True
        self.database_up = True
        self.failures: dict[str, UnavailableError] = {}
        self.hanging: set[str] = set()
        self.preloaded: list[bool] = []

    def known(self, did: str) -> CachedIdentity:
        return CachedIdentity(KEY, f"https://{self.host_of(did)}", problem=None, fetched_at=0, stale=False)

    async def preload(self, _dids: Sequence[str]) -> None:
        if not self.database_up:
            raise DatabaseError(FetchFailure.TIMEOUT, "just now")

    def peek(self, did: str) -> CachedIdentity | None:
        return self.known(did) if self.cached else None

    async def lookup(self, did: str, *, preloaded: bool, **_: object) -> CachedIdentity:
        self.preloaded.append(preloaded)
        if did in self.failures:
            raise self.failures[did]
        if did in self.hanging:
            await asyncio.Event().wait()
        return self.known(did)


@dataclass
class Download:
    """An export that `server` sends slowly."""

    server: str | None
    rate: float = 1_500.0
    complete: bool = False
    received: int = 0


class ControlledAttempts:
    """Attempts that end when a test completes their future in `results`."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.started: list[str] = []
        self.ended: list[str] = []
        self.results: dict[str, asyncio.Future[str]] = {}
        self.large: set[str] = set()
        self.downloads: dict[str, Download] = {}
        self.slots: dict[str, ExportSlots] = {}

    async def attempt(self, claimed: Repo, _identity: CachedIdentity, slots: ExportSlots) -> str | Postponed:
        self.started.append(claimed.did)
        self.slots[claimed.did] = slots
        download: Any = self.downloads.get(claimed.did)
        if download and (postponed := slots.open_export(download)):
            return postponed
        if claimed.did in self.large and (postponed := slots.enlarge()):
            return postponed
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.results[claimed.did] = future
        result = await future
        self.store.rows[claimed.did] = self.store.rows[claimed.did]._replace(
            sync_status=SyncStatus.SYNCHRONIZED, version=claimed.version + 1
        )
        self.ended.append(claimed.did)
        return result


class RunningPool:
    """A pool with controlled collaborators; cancelled at the end of the block."""

    def __init__(
        self,
        dids: Sequence[str],
        host_of: Callable[[str], str],
        workers: int,
        *,
        new_accounts: NewAccounts | None = None,
        max_writing: int = 0,
        **settings: float,
    ) -> None:
        self.store = MemoryStore(dids)
        self.metrics = Metrics()
        self.attempts = ControlledAttempts(self.store)
        self.identities = FixedIdentities(host_of)
        store: Any = self.store
        identities: Any = self.identities
        attempts: Any = self.attempts
        times = {"idle_interval": 0.01, "lease": 30.0} | settings
        used = WorkerPoolSettings(workers=workers, max_writing=max_writing, **times)
        self.conditions = Conditions()
        self.pool = WorkerPool(
            store,
            identities,
            attempts,
            STORE_ALL.deletion_grace,
            Shard(),
            self.metrics,
            self.conditions,
            used,
            new_accounts,
        )

    async def __aenter__(self) -> Self:
        self.task = asyncio.create_task(self.pool.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def test_slow_host_with_many_repos_does_not_delay_other_hosts() -> None:
    slow = [f"did:plc:slow{n:020}" for n in range(600)]
    quick = [f"did:plc:quick{n:019}" for n in range(3)]
    async with RunningPool([*slow, *quick], lambda did: did[8:12], workers=4) as running:
        await until(lambda: set(quick) & set(running.attempts.started) != set())
        for did in quick:
            await until(lambda did=did: did in running.attempts.results)  # type: ignore[misc]
            running.attempts.results[did].set_result("synchronized")
        await until(lambda: len(running.attempts.ended) == 3)
        assert set(running.attempts.ended) == set(quick)
        assert len([did for did in running.attempts.started if did in slow]) == 2
        assert all(repo.attempts == 0 for repo in running.store.rows.values())


@pytest.mark.slow
async def test_many_new_accounts_of_one_host_do_not_keep_one_of_another_host_waiting() -> None:
    """20,000 are first in the queue. They are passed over at once: a pause between two claims would last 15 s."""
    many = [f"did:plc:many{n:020}" for n in range(20_000)]
    single = "did:plc:single"
    async with RunningPool([*many, single], lambda did: f"{did[8:12]}.example", workers=4, idle_interval=60) as running:
        await until(lambda: single in running.attempts.results)
        assert len(set(many) & running.attempts.results.keys()) == 2
        assert len(running.store.claims) < 1.5 * len(many), "each is passed over about once"
        assert all(repo.attempts == 0 for repo in running.store.rows.values())


async def test_did_web_whose_host_is_unknown_shares_the_slots_of_its_domain() -> None:
    many = [f"did:web:x{number}.evil.example" for number in range(300)]
    single = "did:plc:single"
    async with RunningPool([*many, single], lambda _: "pds.example", workers=4, idle_interval=60) as running:
        running.identities.cached = False
        running.identities.hanging = set(many)
        await until(lambda: single in running.attempts.results)
        assert len([row for row in running.store.rows.values() if row.sync_status is SyncStatus.IN_PROGRESS]) == 3


@pytest.mark.parametrize("cached", [True, False])
async def test_new_accounts_beyond_the_limit_of_their_host_wait_without_a_request(*, cached: bool) -> None:
    """Accounts of other hosts, and those that a repo list named, do not wait."""
    evil = [f"did:plc:evil{n:020}" for n in range(30)]
    honest = [f"did:plc:good{n:020}" for n in range(3)]
    listed = [f"did:plc:evil-listed{n:013}" for n in range(4)]
    async with RunningPool(
        [*evil, *listed, *honest], lambda did: f"{did[8:12]}.example", workers=100, new_accounts=NewAccounts(10)
    ) as running:
        running.identities.cached = cached
        running.store.rows |= {did: running.store.rows[did]._replace(from_stream=True) for did in [*evil, *honest]}
        await until(lambda: {*honest, *listed} <= running.attempts.results.keys())
        await until(lambda: len([row for row in running.store.rows.values() if row.last_error]) == 20)
        assert set(evil[:10]) <= running.attempts.results.keys()
        assert len(running.attempts.started) == 10 + len(listed) + len(honest)
        waiting = [running.store.rows[did] for did in evil[10:]]
        assert {row.sync_status for row in waiting} == {SyncStatus.DESYNCHRONIZED}
        assert all((row.last_error or "").startswith("new-accounts: evil.example") for row in waiting)
        times = [row.next_attempt_at or 0.0 for row in waiting]
        assert times == sorted(times)
        assert times[-1] - times[0] == pytest.approx(19 * 360, abs=60)
        assert [row.attempts for row in waiting] == [0] * 20
        value = running.metrics.registry.get_sample_value("indexer_resync_total", {"result": "new-accounts"})
        assert value == 20
        assert running.conditions.is_active(NEW_ACCOUNTS_LIMITED, "evil.example")
        due = evil[10]
        running.store.rows[due] = running.store.rows[due]._replace(next_attempt_at=1.0)
        await until(lambda: due in running.attempts.results)


async def test_slow_exports_of_few_names_leave_workers_to_others() -> None:
    """12 accounts, three names, one machine."""
    drips = [f"did:plc:drip{n:020}" for n in range(12)]
    honest = [f"did:plc:good{n:020}" for n in range(4)]
    names = {"drip": "pds.evil{}.example", "good": "pds{}.honest.example"}

    def host_of(did: str) -> str:
        return names[did[8:12]].format(int(did[12:]) % 3)

    async with RunningPool([*drips, *honest], host_of, workers=8) as running:
        running.attempts.downloads = {did: Download("192.0.2.1:443") for did in drips}
        await until(lambda: set(honest) <= running.attempts.results.keys())
        assert len(set(drips) & running.attempts.results.keys()) == 4
        assert all(repo.attempts == 0 for repo in running.store.rows.values())


@pytest.mark.slow
async def test_slow_exports_of_many_names_end_for_others() -> None:
    """Enough names and machines for all workers. Every honest repo gets a turn, and what runs is bounded."""
    drips = [f"did:plc:drip{n:020}" for n in range(60)]
    honest = [f"did:plc:good{n:020}" for n in range(10)]
    async with RunningPool(
        [*drips, *honest], lambda did: f"pds.n{did[8:]}.example", workers=4, fair_time=0.05
    ) as running:
        running.attempts.downloads = {did: Download(f"{did}:443") for did in drips}
        at_most = 0

        def all_honest_ended() -> bool:
            nonlocal at_most
            at_most = max(at_most, len(running.pool.running))
            for did in running.attempts.results.keys() & set(honest):
                if not running.attempts.results[did].done():
                    running.attempts.results[did].set_result("synchronized")
            return set(honest) <= set(running.attempts.ended)

        await until(all_honest_ended)
        assert at_most <= 3 * 4
        ended = [did for did in drips if (running.store.rows[did].next_attempt_at or 0.0) > 0.0]
        assert len(ended) > 40
        assert all(repo.attempts == 0 for repo in running.store.rows.values())
        assert not running.task.done()


async def test_slow_large_exports_leave_their_slots_to_other_large_repos() -> None:
    drips, honest = [f"did:plc:drip{n:020}" for n in range(3)], f"did:plc:good{0:020}"
    async with RunningPool(
        [*drips, honest], lambda did: f"pds.n{did[8:]}.example", workers=4, fair_time=0.01
    ) as running:
        running.attempts.downloads = {did: Download(f"{did}:443") for did in drips}
        running.attempts.large = {*drips, honest}
        await until(lambda: honest in running.attempts.results)
        running.attempts.results[honest].set_result("synchronized")
        await until(lambda: running.attempts.ended == [honest])
        assert all(repo.attempts == 0 for repo in running.store.rows.values())


async def test_slow_export_continues_aside_while_others_wait() -> None:
    dids = [f"did:plc:{n:024}" for n in range(2)]
    async with RunningPool(dids, lambda did: f"h{did[-1]}.example", workers=1, fair_time=0.02) as running:
        running.attempts.downloads = {did: Download(None) for did in dids}
        await until(lambda: set(dids) == running.attempts.results.keys())
        running.attempts.results[dids[0]].set_result("synchronized")
        await until(lambda: running.attempts.ended == dids[:1])
        assert running.attempts.started == dids, "no export starts twice"


@pytest.mark.slow
async def test_workers_that_become_free_within_the_gathering_time_share_a_claim() -> None:
    dids = [f"did:plc:{n:024}" for n in range(7)]
    async with RunningPool(dids, lambda did: f"h{did[-1]}.example", workers=5, gathering_time=2) as running:
        await until(lambda: len(running.attempts.results) == 5)
        for free, did in enumerate(dids[:2], 1):
            running.attempts.results[did].set_result("synchronized")
            for _ in range(20):
                await asyncio.sleep(0)
            assert running.pool.free_workers == free, "the pool has not waited for another worker"
        await until(lambda: len(running.attempts.started) == 7)
        assert [size for size in running.store.claim_sizes if size] == [5, 2]


async def test_claim_does_not_wait_longer_when_all_workers_are_free() -> None:
    dids = [f"did:plc:{n:024}" for n in range(4)]
    async with RunningPool(dids, lambda did: f"h{did[-1]}.example", workers=2, gathering_time=3_600) as running:
        await until(lambda: len(running.attempts.results) == 2)
        for did in dids[:2]:
            running.attempts.results[did].set_result("synchronized")
        await until(lambda: running.attempts.started == dids)


async def test_repos_that_wait_for_a_shared_transaction_leave_their_workers_to_others() -> None:
    dids = [f"did:plc:{n:024}" for n in range(5)]
    async with RunningPool(dids, lambda did: f"h{did[-1]}.example", workers=1, max_writing=2) as running:
        for count in (1, 2, 3):
            await until(lambda count=count: len(running.attempts.started) == count)  # type: ignore[misc]
            running.attempts.slots[dids[count - 1]].start_writing()
        for _ in range(20):
            await asyncio.sleep(0.01)
        assert running.attempts.started == dids[:3], "two wait without a worker, and the third one keeps it"
        running.attempts.results[dids[0]].set_result("synchronized")
        running.attempts.results[dids[2]].set_result("synchronized")
        await until(lambda: running.attempts.started == dids[:4])
        assert len(running.pool.running) == 2


def test_pool_has_more_workers_on_a_cluster_and_claims_for_several_at_once() -> None:
    plain, cluster = (pool_settings(8, 0.25, distributed=distributed) for distributed in (False, True))
    assert plain == WorkerPoolSettings(workers=8, share=0.25)
    assert (plain.gathering_time, plain.max_writing) == (0.0, 0)
    assert (cluster.workers, cluster.max_writing, cluster.share) == (8 * CLUSTER_WORKERS, 8 * CLUSTER_WORKERS, 0.25)
    assert cluster.gathering_time > 0


def test_attempt_may_take_longer_than_the_download_of_an_export_that_the_settings_allow() -> None:
    default, longer = (pool_settings(8, 0.5, seconds, distributed=False) for seconds in (600.0, 7_200.0))
    assert default == WorkerPoolSettings(workers=8)
    assert longer.attempt_timeout == default.attempt_timeout + 2 * (7_200.0 - 600.0)


async def test_running_resync_names_its_phase_and_ended_ones_are_counted() -> None:
    [did] = dids = ["did:plc:" + "0" * 24]
    async with RunningPool(dids, lambda _did: "one.example", workers=1) as running:
        await until(lambda: did in running.attempts.results)
        [resync] = running.pool.running
        assert resync.slot.phase is Phase.IDENTITY
        running.attempts.slots[did].enter(Phase.DOWNLOAD)
        assert (resync.slot.phase, resync.slot.phase_since >= resync.slot.started_at) == (Phase.DOWNLOAD, True)
        running.attempts.results[did].set_result("synchronized")
        await until(lambda: running.pool.ended == 1)


async def test_host_limit_holds_for_hosts_that_only_the_lookup_finds() -> None:
    dids = [f"did:plc:{n:024}" for n in range(20)]
    async with RunningPool(dids, lambda _did: "one.example", workers=4) as running:
        running.identities.cached = False
        await until(lambda: len(running.attempts.started) == 2)
        await until(lambda: sum(repo.next_attempt_at is not None for repo in running.store.rows.values()) > 5)
        assert len(running.attempts.started) == 2


async def test_pause_requested_by_a_host_postpones_all_its_repos() -> None:
    dids = [f"did:plc:{n:024}" for n in range(20)]
    async with RunningPool(dids, lambda _did: "one.example", workers=1) as running:
        await until(lambda: len(running.attempts.results) == 1)
        failure = UnavailableError(FetchFailure.THROTTLED, "429", retry_after=600, host="one.example")
        running.attempts.results[running.attempts.started[0]].set_exception(failure)
        await until(lambda: all(repo.next_attempt_at is not None for repo in running.store.rows.values()))
        assert len(running.attempts.started) == 1
        assert all(repo.attempts == 0 for repo in running.store.rows.values())


@pytest.mark.slow
async def test_failed_lookup_of_one_repo_pauses_no_other() -> None:
    """Before their lookups, repos of unknown hosts share one host slot counter."""
    dids = [f"did:plc:{n:024}" for n in range(20)]
    down = UnavailableError(FetchFailure.IDENTITY_UNAVAILABLE, "429", retry_after=600)
    async with RunningPool(dids, lambda did: f"{did[-2:]}.example", workers=1) as running:
        running.identities.cached = False
        running.identities.failures = {dids[0]: down}
        for did in dids[1:]:
            await until(lambda did=did: did in running.attempts.results)  # type: ignore[misc]
            running.attempts.results[did].set_result("synchronized")
        await until(lambda: len(running.attempts.ended) == len(dids) - 1)


async def test_claim_in_flight_at_shutdown_is_given_back() -> None:
    dids = [f"did:plc:{n:024}" for n in range(3)]
    async with RunningPool(dids, lambda _did: "one.example", workers=4) as running:
        running.store.claims_answered.clear()
        await until(lambda: len(running.store.claims) == 3)
    running.store.claims_answered.set()
    await running.pool.give_back()
    assert {repo.sync_status for repo in running.store.rows.values()} == {SyncStatus.DESYNCHRONIZED}
    assert running.attempts.started == []


async def test_large_repos_leave_their_workers_to_small_ones() -> None:
    large = [f"did:plc:large{n:019}" for n in range(3)]
    small = [f"did:plc:small{n:019}" for n in range(5)]
    hosts = iter(range(1_000))
    async with RunningPool([*large, *small], lambda _did: f"h{next(hosts)}.example", workers=4) as running:
        running.attempts.large.update(large)
        await until(lambda: len(running.attempts.results) == 5)
        assert [run.claimed.did for run in running.pool.running if run.slot.large] == large[:1]
        assert running.pool.free_workers == 0
        later = [running.store.rows[did] for did in large[1:]]
        assert all(repo.sync_status is SyncStatus.DESYNCHRONIZED and repo.next_attempt_at is not None for repo in later)
        assert all(repo.attempts == 0 for repo in later)


def complete_all(attempts: ControlledAttempts, count: int) -> bool:
    """Complete all attempts in progress; return True once `count` have ended."""
    while attempts.results:
        attempts.results.popitem()[1].set_result("synchronized")
    return len(attempts.ended) == count


@pytest.mark.slow
async def test_known_large_repo_is_not_fetched_before_it_has_a_slot() -> None:
    """Eight large repos and two slots: six are fetched in vain, each only once, however often they are claimed."""
    dids = [f"did:plc:{n:024}" for n in range(8)]
    async with RunningPool(dids, lambda did: f"n{did[8:]}.example", workers=8) as running:
        running.attempts.large.update(dids)
        await until(lambda: sum(running.store.claims.count(did) > 2 for did in dids) == 6)
        assert sorted(running.attempts.started) == dids
        assert running.pool.free_workers == 8, "large repos occupy no worker"
        await until(lambda: complete_all(running.attempts, 8))
        assert len(running.attempts.started) == 8 + 6
        assert all(repo.sync_status is SyncStatus.SYNCHRONIZED for repo in running.store.rows.values())
        assert all(repo.attempts == 0 for repo in running.store.rows.values())


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
        running.store.claim_holds = False
        await until(lambda: not running.pool.running)
        assert running.attempts.results[DID].cancelled()
        assert not running.task.done()


async def test_repo_claimed_twice_by_one_process_runs_twice() -> None:
    """The lease expired while the database was down, and the first resync has not noticed yet."""
    async with RunningPool([DID], lambda _did: "one.example", workers=4) as running:
        await until(lambda: DID in running.attempts.results)
        first = running.attempts.results.pop(DID)
        running.store.rows[DID] = running.store.rows[DID]._replace(sync_status=SyncStatus.DESYNCHRONIZED)
        await until(lambda: DID in running.attempts.results)
        first.set_result("synchronized")
        await until(lambda: len(running.pool.running) == 1)
        running.attempts.results[DID].set_result("synchronized")
        await until(lambda: not running.pool.running)
        assert not running.task.done()


async def test_failure_does_not_end_a_newer_claim() -> None:
    """The first resync fails after the repo was claimed again."""
    async with RunningPool([DID], lambda _did: "one.example", workers=4) as running:
        await until(lambda: DID in running.attempts.results)
        first = running.attempts.results.pop(DID)
        running.store.rows[DID] = running.store.rows[DID]._replace(sync_status=SyncStatus.DESYNCHRONIZED)
        await until(lambda: DID in running.attempts.results)
        claimed = running.store.rows[DID]
        first.set_exception(UnavailableError(FetchFailure.TIMEOUT))
        await until(lambda: len(running.pool.running) == 1)
        assert running.store.rows[DID] == claimed


async def test_pool_with_occupied_workers_moves_only_while_an_export_is_received() -> None:
    dids = [f"did:plc:busy{n:020}" for n in range(2)]
    download = Download("192.0.2.1")
    async with RunningPool(dids, lambda did: f"{did[-1]}.example", workers=2) as running:
        stage = running.pool.stage
        running.attempts.downloads[dids[0]] = download
        await until(lambda: running.attempts.results.keys() == set(dids))
        await until(lambda: stage.seconds_without_progress(0) > 0.2, lambda: stage.waits_since)
        stood_since = stage.waits_since or 0
        download.received += 1
        await until(lambda: (stage.waits_since or 0) > stood_since)
        running.attempts.results[dids[0]].set_result("synchronized")
        await until(lambda: stage.waits_since is None)


async def test_endless_attempt_times_out() -> None:
    async with RunningPool([DID], lambda _did: "one.example", workers=1, attempt_timeout=0.05) as running:
        await until(lambda: running.store.rows[DID].last_error is not None)
        assert (running.store.rows[DID].last_error or "").startswith("timeout")
        assert running.store.rows[DID].attempts == 1


async def test_cancelled_resyncs_are_given_back() -> None:
    async with RunningPool([DID], lambda _did: "one.example", workers=1) as running:
        await until(lambda: DID in running.attempts.results)
    assert [run.claimed.did for run in running.pool.running] == [DID]
    await running.pool.give_back()
    row = running.store.rows[DID]
    assert (row.sync_status, row.next_attempt_at, row.attempts) == (SyncStatus.DESYNCHRONIZED, None, 0)


@pytest.mark.parametrize("error", [RuntimeError("a bug")])
async def test_bug_ends_the_pool_with_its_exception(error: Exception) -> None:
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
            await until(lambda: all(repo.last_error for repo in running.store.rows.values()))
            counts = {condition.subject: condition.count for condition in running.conditions.active()}
    assert counts == {"timeout at one.example": 5, "bad-answer at one.example": 3}
    assert [line["event"] for line in lines if line["log_level"] != "debug"] == ["condition.began"] * 2
