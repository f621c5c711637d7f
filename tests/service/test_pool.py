import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self

import pytest

from indexer.atproto.crypto import PrivateKey
from indexer.errors import UnavailableError
from indexer.identity import Known
from indexer.metrics import Metrics
from indexer.reasons import FetchFailure
from indexer.service.pool import Pace, Pool, Run
from indexer.store import DatabaseError, Store
from indexer.sync.plan import Batch
from indexer.sync.repo import Repo, SyncStatus
from indexer.sync.shard import Shard
from tests.serving import until
from tests.sync.people import EVERYTHING

QUICK = Pace(idle=0.01, lease=30.0)
KEY = PrivateKey.from_seed("k256", b"anyone's").public
DID = "did:plc:" + "a" * 24


class Rows:
    """A store of rows in memory, as the pool knows it."""

    def __init__(self, dids: Sequence[str]) -> None:
        self.rows = {did: Repo(did, version=1) for did in dids}
        self.claims: list[str] = []
        self.held = True
        self.answers = asyncio.Event()
        self.answers.set()

    async def expire_leases(self, _buckets: range, _now: float) -> int:
        return 0

    async def claim(self, count: int, _buckets: range, _seconds: float, now: float) -> list[Repo]:
        due = [
            repo
            for repo in self.rows.values()
            if repo.status is SyncStatus.DESYNCHRONIZED and (repo.next_attempt_at or 0) <= now
        ][:count]
        claimed = [
            replace(repo, status=SyncStatus.IN_PROGRESS, version=repo.version + 1, lease=repo.lease + 1) for repo in due
        ]
        self.rows.update({repo.did: repo for repo in claimed})
        self.claims += [repo.did for repo in claimed]
        await self.answers.wait()
        return claimed

    async def renew(self, _did: str, _lease: int, _seconds: float) -> bool:
        return self.held

    async def repos(self, dids: Sequence[str]) -> dict[str, Repo]:
        return {did: self.rows[did] for did in dids}

    amend = Store.amend

    async def apply(self, batch: Batch) -> frozenset[str]:
        for write in batch.writes:
            assert self.rows[write.repo.did].version == write.expected
            self.rows[write.repo.did] = write.repo
        return frozenset()


class Hosts:
    """Identities of which only the host matters."""

    def __init__(self, host_of: Callable[[str], str]) -> None:
        self.host_of = host_of
        self.cached = True
        self.stored = True
        self.down: dict[str, UnavailableError] = {}

    def known(self, did: str) -> Known:
        return Known(KEY, f"https://{self.host_of(did)}", problem=None, fetched_at=0, stale=False)

    async def warm(self, _dids: Sequence[str]) -> None:
        if not self.stored:
            raise DatabaseError(FetchFailure.TIMEOUT, "just now")

    def peek(self, did: str) -> Known | None:
        return self.known(did) if self.cached else None

    async def lookup(self, did: str, *, refresh: bool = False) -> Known:  # noqa: ARG002
        if did in self.down:
            raise self.down[did]
        return self.known(did)


class Resyncs:
    """Resyncs that end when they are told to, as they are told to."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.gates: dict[str, asyncio.Future[str]] = {}
        self.large: set[str] = set()

    async def attempt(self, claimed: Repo, _known: Known, large: Callable[[], None]) -> str:
        self.begun.append(claimed.did)
        if claimed.did in self.large:
            large()
        gate: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.gates[claimed.did] = gate
        result = await gate
        self.rows.rows[claimed.did] = replace(
            self.rows.rows[claimed.did], status=SyncStatus.SYNCHRONIZED, version=claimed.version + 1
        )
        self.ended.append(claimed.did)
        return result


class Running:
    """A pool at work on all this; cancelled at the end."""

    def __init__(self, dids: Sequence[str], host_of: Callable[[str], str], workers: int, pace: Pace = QUICK) -> None:
        self.store = Rows(dids)
        self.resyncs = Resyncs(self.store)
        self.identities = Hosts(host_of)
        store: Any = self.store
        identities: Any = self.identities
        resync: Any = self.resyncs
        self.pool = Pool(store, identities, resync, EVERYTHING, Shard(), Metrics(), workers=workers, pace=pace)

    async def __aenter__(self) -> Self:
        self.task = asyncio.create_task(self.pool.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def test_a_slow_host_with_many_repos_starves_nobody() -> None:
    slow = [f"did:plc:slow{n:020}" for n in range(600)]
    quick = [f"did:plc:quick{n:019}" for n in range(3)]
    async with Running([*slow, *quick], lambda did: did[8:12], workers=4) as running:
        await until(lambda: set(quick) & set(running.resyncs.begun) != set())
        for did in quick:
            await until(lambda did=did: did in running.resyncs.gates)  # type: ignore[misc]
            running.resyncs.gates[did].set_result("synchronized")
        await until(lambda: len(running.resyncs.ended) == 3)
        assert set(running.resyncs.ended) == set(quick)
        assert len([did for did in running.resyncs.begun if did in slow]) == 3
        assert all(repo.attempts == 0 for repo in running.store.rows.values())


async def test_a_host_that_is_learned_only_by_the_look_up_has_its_share_too() -> None:
    dids = [f"did:plc:{n:024}" for n in range(20)]
    async with Running(dids, lambda _did: "one.example", workers=4) as running:
        running.identities.cached = False
        await until(lambda: len(running.resyncs.begun) == 3)
        await until(lambda: sum(repo.next_attempt_at is not None for repo in running.store.rows.values()) > 5)
        assert len(running.resyncs.begun) == 3


async def test_a_pause_that_a_host_asked_for_holds_for_all_of_its_repos() -> None:
    dids = [f"did:plc:{n:024}" for n in range(20)]
    async with Running(dids, lambda _did: "one.example", workers=1) as running:
        await until(lambda: len(running.resyncs.gates) == 1)
        failure = UnavailableError(FetchFailure.THROTTLED, "429", retry_after=600, host="one.example")
        running.resyncs.gates[running.resyncs.begun[0]].set_exception(failure)
        await until(lambda: all(repo.next_attempt_at is not None for repo in running.store.rows.values()))
        assert len(running.resyncs.begun) == 1
        assert all(repo.attempts == 0 for repo in running.store.rows.values())


async def test_a_directory_that_is_down_for_one_holds_up_no_other() -> None:
    """Before the look-up, all that are not known yet are of the same host, none."""
    dids = [f"did:plc:{n:024}" for n in range(20)]
    down = UnavailableError(FetchFailure.IDENTITY_UNAVAILABLE, "429", retry_after=600)
    async with Running(dids, lambda did: f"{did[-2:]}.example", workers=1) as running:
        running.identities.cached = False
        running.identities.down = {dids[0]: down}
        for did in dids[1:]:
            await until(lambda did=did: did in running.resyncs.gates)  # type: ignore[misc]
            running.resyncs.gates[did].set_result("synchronized")
        await until(lambda: len(running.resyncs.ended) == len(dids) - 1)


async def test_a_claim_that_is_under_way_at_the_end_is_given_back() -> None:
    dids = [f"did:plc:{n:024}" for n in range(3)]
    async with Running(dids, lambda _did: "one.example", workers=4) as running:
        running.store.answers.clear()
        await until(lambda: len(running.store.claims) == 3)
    running.store.answers.set()
    await running.pool.give_back()
    assert {repo.status for repo in running.store.rows.values()} == {SyncStatus.DESYNCHRONIZED}
    assert running.resyncs.begun == []


async def test_large_repos_leave_their_places_to_small_ones() -> None:
    large = [f"did:plc:large{n:019}" for n in range(3)]
    small = [f"did:plc:small{n:019}" for n in range(5)]
    hosts = iter(range(1_000))
    async with Running([*large, *small], lambda _did: f"h{next(hosts)}.example", workers=4) as running:
        running.resyncs.large.update(large)
        await until(lambda: len(running.resyncs.gates) == 5)
        assert [run.claimed.did for run in running.pool.running if run.large] == large[:1]
        assert running.pool.free == 0
        later = [running.store.rows[did] for did in large[1:]]
        assert all(repo.status is SyncStatus.DESYNCHRONIZED and repo.next_attempt_at is not None for repo in later)
        assert all(repo.attempts == 0 for repo in later)


def all_ended(resyncs: Resyncs, count: int) -> bool:
    """Ends those that run, and tells whether so many have ended."""
    while resyncs.gates:
        resyncs.gates.popitem()[1].set_result("synchronized")
    return len(resyncs.ended) == count


async def test_a_repo_that_is_known_to_be_large_has_its_place_before_it_is_fetched() -> None:
    """Eight of them, and two places: six begin in vain, and only once, however often they come up meanwhile."""
    dids = [f"did:plc:{n:024}" for n in range(8)]
    async with Running(dids, lambda did: f"{did}.example", workers=8) as running:
        running.resyncs.large.update(dids)
        await until(lambda: sum(running.store.claims.count(did) > 2 for did in dids) == 6)
        assert sorted(running.resyncs.begun) == dids
        assert running.pool.free == 8, "none of them has a small one's place"
        await until(lambda: all_ended(running.resyncs, 8))
        assert len(running.resyncs.begun) == 8 + 6
        assert all(repo.status is SyncStatus.SYNCHRONIZED for repo in running.store.rows.values())
        assert all(repo.attempts == 0 for repo in running.store.rows.values())


async def test_claims_whose_identities_can_not_be_loaded_go_on_all_the_same() -> None:
    running = Running([DID], lambda _did: "one.example", workers=2)
    running.identities.stored = False
    async with running:
        await until(lambda: DID in running.resyncs.gates)


async def test_a_claim_that_is_lost_ends_its_resync() -> None:
    async with Running([DID], lambda _did: "one.example", workers=2, pace=Pace(idle=0.01, lease=0.03)) as running:
        await until(lambda: DID in running.resyncs.gates)
        running.store.held = False
        await until(lambda: not running.pool.running)
        assert running.resyncs.gates[DID].cancelled()
        assert not running.task.done()


async def test_one_repo_claimed_twice_by_one_process_ends_nothing_else() -> None:
    """Its lease ran out while the database was away, and the former resync has not noticed yet."""
    async with Running([DID], lambda _did: "one.example", workers=3) as running:
        await until(lambda: DID in running.resyncs.gates)
        former = running.resyncs.gates.pop(DID)
        running.store.rows[DID] = replace(running.store.rows[DID], status=SyncStatus.DESYNCHRONIZED)
        await until(lambda: DID in running.resyncs.gates)
        former.set_result("synchronized")
        await until(lambda: len(running.pool.running) == 1)
        running.resyncs.gates[DID].set_result("synchronized")
        await until(lambda: not running.pool.running)
        assert not running.task.done()


async def test_a_failure_ends_no_claim_but_its_own() -> None:
    """As above: by the time the former one fails, the repo is another's."""
    async with Running([DID], lambda _did: "one.example", workers=3) as running:
        await until(lambda: DID in running.resyncs.gates)
        former = running.resyncs.gates.pop(DID)
        running.store.rows[DID] = replace(running.store.rows[DID], status=SyncStatus.DESYNCHRONIZED)
        await until(lambda: DID in running.resyncs.gates)
        claimed = running.store.rows[DID]
        former.set_exception(UnavailableError(FetchFailure.TIMEOUT))
        await until(lambda: len(running.pool.running) == 1)
        assert running.store.rows[DID] == claimed


async def test_an_attempt_without_an_end_is_ended() -> None:
    pace = Pace(idle=0.01, lease=30.0, attempt=0.05)
    async with Running([DID], lambda _did: "one.example", workers=1, pace=pace) as running:
        await until(lambda: running.store.rows[DID].last_error is not None)
        assert (running.store.rows[DID].last_error or "").startswith("timeout")
        assert running.store.rows[DID].attempts == 1


async def test_what_is_cancelled_is_given_back() -> None:
    async with Running([DID], lambda _did: "one.example", workers=1) as running:
        await until(lambda: DID in running.resyncs.gates)
    assert [run.claimed.did for run in running.pool.running] == [DID]
    await running.pool.give_back()
    row = running.store.rows[DID]
    assert (row.status, row.next_attempt_at, row.attempts) == (SyncStatus.DESYNCHRONIZED, None, 0)


@pytest.mark.parametrize("error", [RuntimeError("a bug")])
async def test_an_error_of_ours_is_loud(error: Exception) -> None:
    async with Running([DID], lambda _did: "one.example", workers=1) as running:
        await until(lambda: DID in running.resyncs.gates)
        running.resyncs.gates[DID].set_exception(error)
        with pytest.raises(BaseExceptionGroup) as raised:
            await running.task
        assert raised.value.exceptions == (error,)


def test_runs_are_told_apart() -> None:
    assert Run(Repo(DID), 0.0) != Run(Repo(DID), 0.0)
