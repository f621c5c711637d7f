"""The shares of the workers: a host, a new account or a large repo leaves enough of them to the others."""

import asyncio
import gc
from collections import Counter
from time import time

import pytest

from indexer.errors import UnavailableError
from indexer.net.new_accounts import NewAccounts
from indexer.net.pds.pds_client import LARGE_BYTES
from indexer.reasons import FetchFailure
from indexer.resync.shares import PostponedError
from indexer.sync.repo import SyncStatus
from indexer.telemetry.conditions import NEW_ACCOUNTS_LIMITED
from tests.resync.running_pool import Download, RunningPool
from tests.waiting import until


@pytest.mark.slow
async def test_many_new_accounts_of_one_host_do_not_keep_one_of_another_host_waiting() -> None:
    """20,000 are first in the queue. They are passed over at once: a pause between two claims would last 15 s."""
    many = [f"did:plc:many{n:020}" for n in range(20_000)]
    single = "did:plc:single"
    async with RunningPool([*many, single], lambda did: f"{did[8:12]}.example", workers=4, idle_interval=60) as running:
        await until(lambda: single in running.attempts.results)
        assert len(set(many) & running.attempts.results.keys()) == 2
        assert len(running.db.claims) < 1.5 * len(many), "each is passed over about once"
        assert all(repo.attempts == 0 for repo in running.db.rows.values())


@pytest.mark.slow
async def test_repos_behind_those_of_a_busy_host_are_not_claimed_before_a_worker_is_free() -> None:
    busy = [f"did:plc:busy{n:020}" for n in range(300)]
    others = [f"did:plc:{n:024}" for n in range(60)]

    def host_of(did: str) -> str:
        return "busy.example" if did in busy else f"{did[8:]}.example"

    async with RunningPool([*busy, *others], host_of, workers=4, idle_interval=60) as running:
        for did in others:
            await until(lambda did=did: did in running.attempts.results)  # type: ignore[misc]
            running.attempts.results[did].set_result("synchronized")
        assert max(running.db.claim_sizes) > 100, "those of the busy host were passed over"
        claims = Counter(running.db.claims)
        assert sum(claims[did] for did in others) < 5 * len(others)
        # `isinstance` would follow weak references, some of which are dead.
        alive = [one for one in gc.get_objects() if type(one) is PostponedError]
        assert len(alive) <= 1, "they refer to no frame, which would refer to them: only the module has one"


async def test_did_web_whose_host_is_unknown_shares_the_slots_of_its_domain() -> None:
    many = [f"did:web:x{number}.evil.example" for number in range(300)]
    single = "did:plc:single"
    async with RunningPool([*many, single], lambda _: "pds.example", workers=4, idle_interval=60) as running:
        running.identities.cached = False
        running.identities.hanging = set(many)
        await until(lambda: single in running.attempts.results)

        def in_progress() -> int:
            return sum(row.sync_status is SyncStatus.IN_PROGRESS for row in running.db.rows.values())

        # Those that wait for a slot are due again after a moment. Then they are claimed, and postponed again.
        await until(lambda: in_progress() == 3, in_progress)


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
        running.db.rows |= {did: running.db.rows[did]._replace(from_stream=True) for did in [*evil, *honest]}
        await until(lambda: {*honest, *listed} <= running.attempts.results.keys())
        await until(lambda: len([row for row in running.db.rows.values() if row.last_error]) == 20)
        assert set(evil[:10]) <= running.attempts.results.keys()
        assert len(running.attempts.started) == 10 + len(listed) + len(honest)
        waiting = [running.db.rows[did] for did in evil[10:]]
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
        running.db.rows[due] = running.db.rows[due]._replace(next_attempt_at=1.0)
        await until(lambda: due in running.attempts.results)


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
            at_most = max(at_most, len(running.pool.shares.running))
            for did in running.attempts.results.keys() & set(honest):
                if not running.attempts.results[did].done():
                    running.attempts.results[did].set_result("synchronized")
            return set(honest) <= set(running.attempts.ended)

        await until(all_honest_ended)
        assert at_most <= 4
        ended = [did for did in drips if (running.db.rows[did].next_attempt_at or 0.0) > 0.0]
        assert len(ended) > 40
        assert all(repo.attempts == 0 for repo in running.db.rows.values())
        assert not running.task.done()


@pytest.mark.slow
async def test_slow_large_exports_leave_their_bytes_to_other_large_repos() -> None:
    drips, honest = [f"did:plc:drip{n:020}" for n in range(3)], f"did:plc:good{0:020}"
    async with RunningPool(
        [*drips, honest], lambda did: f"pds.n{did[8:]}.example", workers=4, fair_time=0.01, large_bytes=4 * LARGE_BYTES
    ) as running:
        running.attempts.downloads = {did: Download(f"{did}:443", large=True) for did in drips}
        running.attempts.downloads[honest] = Download(f"{honest}:443", rate=90_000.0, large=True)
        await until(lambda: honest in running.attempts.results)
        running.attempts.results[honest].set_result("synchronized")
        await until(lambda: running.attempts.ended == [honest])
        assert all(repo.attempts == 0 for repo in running.db.rows.values())


@pytest.mark.slow
async def test_slow_export_ends_only_once_while_its_attempt_is_cleaned_up() -> None:
    drips = [f"did:plc:drip{n:020}" for n in range(8)]
    async with RunningPool(drips, lambda did: f"pds.n{did[8:]}.example", workers=2, fair_time=0.01) as running:
        attempts = running.attempts
        attempts.downloads = {did: Download(f"{did}:443", rate=1_500.0 + n) for n, did in enumerate(drips)}
        attempts.cleaned_up.clear()
        await until(lambda: attempts.cancelled == drips[:1])
        await asyncio.sleep(0.2)
        assert attempts.cancelled == drips[:1], "no other one ends, and the pool goes on"
        assert len(running.pool.shares.running) == 2
        attempts.cleaned_up.set()
        await until(lambda: len(attempts.cancelled) > 1)
        assert not running.task.done()


async def test_slow_export_that_timed_out_is_not_ended_as_well() -> None:
    dids = [f"did:plc:{n:024}" for n in range(4)]
    async with RunningPool(
        dids, lambda did: f"pds.n{did[8:]}.example", workers=1, fair_time=0.02, attempt_timeout=0.01
    ) as running:
        running.attempts.downloads = {did: Download(f"{did}:443", rate=1_500.0 + n) for n, did in enumerate(dids)}
        running.attempts.cleaned_up.clear()
        await until(lambda: running.attempts.cancelled == dids[:1])
        await asyncio.sleep(0.1)
        assert running.attempts.started == dids[:1], "it has the worker until it is cleaned up"
        running.attempts.cleaned_up.set()
        await until(lambda: all(repo.attempts == 1 for repo in running.db.rows.values()))
        assert not running.task.done()


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


async def test_repos_of_a_host_that_asked_for_a_pause_wait_until_its_end() -> None:
    """No request is sent during the pause (tests/net/http/test_host_limits.py), and none of them counts an attempt."""
    dids, began = [f"did:plc:{n:024}" for n in range(20)], time()
    async with RunningPool(dids, lambda _did: "one.example", workers=2) as running:
        throttled = UnavailableError(FetchFailure.THROTTLED, "429", retry_after=600, host="one.example")
        running.identities.failures = dict.fromkeys(dids, throttled)
        rows = running.db.rows
        await until(lambda: all((repo.next_attempt_at or 0) >= began + 600 for repo in rows.values()))
        assert running.attempts.started == []
        assert all(repo.attempts == 0 for repo in rows.values())
