"""The relay's list held against our repos: what is behind is fetched, what only seems so is left alone."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from time import time
from typing import Any

import asyncpg
import orjson
import pytest
import stamina

from indexer.atproto.syntax import tid_of
from indexer.errors import UnavailableError
from indexer.metrics import Metrics
from indexer.outbound import Outbound
from indexer.reasons import Desync
from indexer.service import sweep as sweeping
from indexer.service.sweep import Pause, Sweep
from indexer.store import Store
from indexer.sync.listing import Listing
from indexer.sync.plan import Batch, RepoWrite
from indexer.sync.planning import TOMBSTONED
from indexer.sync.repo import Repo, SyncStatus
from tests.outbound.host import Host, answer
from tests.service.lists import BROKEN, asked, page, path
from tests.serving import PATIENCE, until
from tests.store.rows import did, head, in_progress, insert, synchronized

OLD, OURS, NEWER = "3laaaaaaaaa22", "3laaaaaaaab22", "3laaaaaaaac22"
DAY = 86_400.0
AT_ONCE = Pause(settle=0.0, retry=0.0)


def ours(name: object, **fields: Any) -> Repo:
    return synchronized(name, head=head(OURS), **fields)


def sweep_of(store: Any, outbound: Outbound, host: Host, *, interval: float = DAY, pause: Pause = AT_ONCE) -> Sweep:
    return Sweep(store, outbound, Metrics(), host.url, interval=interval, drift=300.0, pause=pause)


def quiet(_listing: Listing) -> None:
    pass


async def behind(sql: asyncpg.Connection) -> dict[str, str]:
    rows = await sql.fetch("select did, heard_rev from indexer.repo where reason = 'behind'")
    return {row["did"]: row["heard_rev"] for row in rows}


async def test_what_is_behind_is_fetched_again_and_nothing_else(
    store: Store, sql: asyncpg.Connection, host: Host, outbound: Outbound
) -> None:
    gone = ours("gone", active=False, hosting_status=TOMBSTONED)
    alone = [ours("equal"), ours("ahead"), gone, ours("future"), ours("not listed")]
    broken = replace(ours("broken"), status=SyncStatus.DESYNCHRONIZED, reason=Desync.CHAIN_BREAK)
    held = await in_progress(store, "held", now=time())
    await insert(store, ours("behind"), broken, *alone)
    late = tid_of(int((time() + 3_600) * 1_000_000))
    listed = {"equal": OURS, "ahead": OLD, "gone": NEWER, "future": late, "broken": NEWER, "held": NEWER}
    host.pages[path()] = page(*[(did(name), rev) for name, rev in listed.items()], cursor="x")
    host.pages[path("x")] = page((did("behind"), NEWER), (did("unknown"), NEWER))
    sweep = sweep_of(store, outbound, host)
    listing = await sweep.sweep(quiet)
    assert (listing.listed, listing.found) == (8, 1)
    assert await behind(sql) == {did("behind"): NEWER}
    assert await store.repos([repo.did for repo in alone]) == {repo.did: repo for repo in alone}
    assert await store.repos([broken.did, held.did, did("unknown")]) == {broken.did: broken, held.did: held}
    marked = (await store.repos([did("behind")]))[did("behind")]
    assert (marked.status, marked.head, marked.next_attempt_at) == (SyncStatus.DESYNCHRONIZED, head(OURS), None)


def status(host: Host, name: str, *, active: bool) -> None:
    said = {"did": did(name), "active": active} | ({} if active else {"status": "deactivated"})
    host.pages[f"/xrpc/com.atproto.sync.getRepoStatus?did={did(name)}"] = answer(orjson.dumps(said))


async def test_an_account_that_came_back_unheard_is_shown_and_fetched(
    store: Store, sql: asyncpg.Connection, host: Host, outbound: Outbound
) -> None:
    hidden = {"active": False, "hosting_status": "deactivated", "hosting_relay": "wss://r.test", "hosting_seq": 7}
    await insert(store, *[ours(name, **hidden) for name in ("back", "still hidden", "moved")])
    host.pages[path()] = page(*[(did(name), OURS) for name in ("back", "still hidden", "moved")])
    status(host, "back", active=True)
    status(host, "still hidden", active=False)
    host.pages[f"/xrpc/com.atproto.sync.getRepoStatus?did={did('moved')}"] = answer(
        b'{"error": "RepoNotFound"}', status=404
    )
    listing = await sweep_of(store, outbound, host).sweep(quiet)
    assert listing.found == 1
    repos = await store.repos([did(name) for name in ("back", "still hidden", "moved")])
    assert [repo.active for repo in repos.values()].count(True) == 1
    back = repos[did("back")]
    assert (back.active, back.hosting_status, back.hosting_seq) == (True, None, 7)
    assert (back.status, back.reason) == (SyncStatus.DESYNCHRONIZED, Desync.REACTIVATED)
    assert await sql.fetchval("select count(*) from atproto.changes where action = 'visible'") == 1


async def test_what_the_stream_hides_while_the_relay_is_asked_stays_hidden(
    store: Store, host: Host, outbound: Outbound
) -> None:
    await insert(store, ours("back", active=False, hosting_status="deactivated"))
    host.pages[path()] = page((did("back"), OURS))

    async def hide(writer: asyncio.StreamWriter) -> None:
        """The account is deleted just before the answer arrives."""
        await store.amend(did("back"), lambda repo: replace(repo, version=repo.version + 1, hosting_status="deleted"))
        writer.write(answer(orjson.dumps({"did": did("back"), "active": True})))
        await writer.drain()

    host.pages[f"/xrpc/com.atproto.sync.getRepoStatus?did={did('back')}"] = hide
    listing = await sweep_of(store, outbound, host).sweep(quiet)
    assert listing.found == 0
    repo = (await store.repos([did("back")]))[did("back")]
    assert (repo.active, repo.hosting_status) == (False, "deleted")


class Moving:
    """A store in which the stream brings what `did` lacked, once it was seen to be behind."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def different(self, revs: Mapping[str, str]) -> tuple[list[str], list[str]]:
        behind, hidden = await self._store.different(revs)
        for repo in (await self._store.repos(behind)).values():
            after = replace(repo, version=repo.version + 1, head=head(NEWER))
            assert not await self._store.apply(Batch((RepoWrite(repo.version, after),)))
        return behind, hidden


async def test_what_the_stream_brings_meanwhile_is_not_behind(
    store: Store, sql: asyncpg.Connection, host: Host, outbound: Outbound
) -> None:
    await insert(store, ours("late"))
    host.pages[path()] = page((did("late"), NEWER))
    listing = await sweep_of(Moving(store), outbound, host).sweep(quiet)
    assert listing.found == 0
    assert await behind(sql) == {}
    assert (await store.repos([did("late")]))[did("late")].head == head(NEWER)


@asynccontextmanager
async def waiting(sweep: Sweep) -> AsyncIterator[float]:
    """For how many seconds a sweep waits before it looks again; meanwhile it does."""
    asked: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    async def wait(seconds: float) -> None:
        asked.set_result(seconds)
        await asyncio.get_running_loop().create_future()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "_wait", wait)
        task = asyncio.create_task(sweep.sweep(quiet))
        try:
            yield await asyncio.wait_for(asked, PATIENCE)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_the_stream_is_given_its_time(
    store: Store, sql: asyncpg.Connection, host: Host, outbound: Outbound
) -> None:
    await insert(store, ours("behind"))
    host.pages[path()] = page((did("behind"), NEWER))
    async with waiting(sweep_of(store, outbound, host, pause=Pause(settle=600.0))) as seconds:
        assert 590 < seconds <= 600
        assert await behind(sql) == {}
    left = await store.listing("sweep", host.url)
    assert left is not None
    assert (left.listed, left.cursor, left.finished_at) == (0, None, None)


async def test_a_sweep_goes_on_where_it_was_left(store: Store, host: Host, outbound: Outbound) -> None:
    host.pages[path()] = page((did(1), OURS), cursor="x")
    host.pages[path("x")] = BROKEN
    sweep = sweep_of(store, outbound, host)
    with stamina.set_testing(True, attempts=1), pytest.raises(UnavailableError):
        await sweep.sweep(quiet)
    host.pages[path("x")] = page((did(2), OURS))
    listing = await sweep_of(store, outbound, host).sweep(quiet)
    assert asked(host) == [None, "x", "x"]
    assert listing.listed == 2
    assert listing.finished_at is not None


async def test_one_that_was_left_long_ago_begins_anew(store: Store, host: Host, outbound: Outbound) -> None:
    await store.save_listing(Listing("sweep", host.url, "", "x", 7, 3, began_at=time() - DAY - 1))
    host.pages[path()] = page((did(1), OURS))
    listing = await sweep_of(store, outbound, host).sweep(quiet)
    assert asked(host) == [None]
    assert listing.listed == 1


async def test_what_waits_is_bounded(
    store: Store, host: Host, outbound: Outbound, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No third page is read while two wait."""
    monkeypatch.setattr(sweeping, "_MOST_LOOKS", 1)
    await insert(store, *[ours(number) for number in range(3)])
    for number in range(3):
        host.pages[path(str(number) if number else None)] = page((did(number), NEWER), cursor=str(number + 1))
    async with waiting(sweep_of(store, outbound, host, pause=Pause(settle=600.0))):
        assert asked(host) == [None, "1"]


# As a stage of the daemon


@asynccontextmanager
async def running(sweep: Sweep) -> AsyncIterator[None]:
    task = asyncio.create_task(sweep.run())
    try:
        yield
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_the_first_is_an_interval_after_the_start_and_a_restart_leaves_it_there(
    store: Store, host: Host, outbound: Outbound
) -> None:
    host.pages[path()] = page()
    for _ in range(2):
        async with running(sweep_of(store, outbound, host)):
            await until(lambda: begun(store, host))
    first = await store.listing("sweep", host.url)
    assert first is not None
    assert host.requests == []
    await store.save_listing(replace(first, finished_at=time() - DAY - 1))
    async with running(sweep_of(store, outbound, host)):
        await until(lambda: len(host.requests) == 1)


async def begun(store: Store, host: Host) -> bool:
    return await store.listing("sweep", host.url) is not None


async def test_it_is_begun_when_asked_for_and_anew_if_it_is_under_way(
    store: Store, sql: asyncpg.Connection, host: Host, outbound: Outbound
) -> None:
    await insert(store, ours("behind"))
    host.pages[path()] = page((did(1), OURS), cursor="x")
    host.pages[path("x")] = page((did("behind"), NEWER))
    sweep = sweep_of(store, outbound, host, pause=Pause(settle=600.0))
    async with running(sweep):
        sweep.ask()
        await until(lambda: asked(host) == [None, "x"])
        sweep.ask()
        await until(lambda: asked(host) == [None, "x", None, "x"])
    assert await behind(sql) == {}


async def test_a_relay_that_fails_is_asked_again_from_there(store: Store, host: Host, outbound: Outbound) -> None:
    host.pages[path()] = page((did(1), OURS), cursor="x")
    host.pages[path("x")] = BROKEN
    sweep = sweep_of(store, outbound, host)
    with stamina.set_testing(True, attempts=1):
        async with running(sweep):
            sweep.ask()
            await until(lambda: asked(host)[-2:] == ["x", "x"])
            host.pages[path("x")] = page()
            assert sweep.progress == "under way: 1 accounts listed, 0 differ"
            await until(lambda: sweep.progress == "done: 1 accounts listed, 0 differ")
    assert asked(host).count(None) == 1
