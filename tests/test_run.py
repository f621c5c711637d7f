"""The composition root: what ends the daemon, and how loudly."""

import asyncio
import resource
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from indexer.errors import BrokenInvariantError
from indexer.localnet.network import LocalNetwork
from indexer.run import MOST_FILES, connections, daemon, open_many_files
from indexer.service.lane import places_of_large
from indexer.store import RESERVED
from indexer.sync.repo import Repo
from tests.serving import settings_for, until


@pytest.mark.parametrize("stage", ["writer", "reader", "pool", "retention", "erasure", "keys"])
async def test_a_broken_invariant_of_any_stage_ends_the_daemon(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    async def breaks() -> None:
        raise BrokenInvariantError("ours")

    async with (
        LocalNetwork() as network,
        daemon(settings_for(network.relay_url, network.plc_url, tmp_path), database) as running,
    ):
        monkeypatch.setattr(getattr(running, stage), "run", breaks)
        with pytest.raises(BrokenInvariantError, match="ours"):
            await asyncio.wait_for(running.run(asyncio.Event()), 10)


async def test_a_broken_invariant_while_draining_is_loud(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = asyncio.Event()

    async def breaks_at_the_end() -> None:
        await until(lambda: running.inbox.held > 0)
        stop.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        raise BrokenInvariantError("ours")

    async with (
        LocalNetwork() as network,
        daemon(settings_for(network.relay_url, network.plc_url, tmp_path), database) as running,
    ):
        monkeypatch.setattr(running.writer, "run", breaks_at_the_end)
        network.create_account("ada.test")
        with pytest.raises(BrokenInvariantError, match="ours"):
            await asyncio.wait_for(running.run(stop), 10)


async def test_all_resyncs_can_write_at_once_and_others_too(database: str, tmp_path: Path) -> None:
    """Those of eight workers, and of two large repos beside them."""
    settings = settings_for("ws://127.0.0.1:1", "http://127.0.0.1:1", tmp_path, resync_workers="8")
    async with daemon(settings, database) as running, AsyncExitStack() as writing, asyncio.timeout(20):
        for number in range(10):
            await writing.enter_async_context(running.store.resync(Repo(f"did:plc:{number:024}")))
        assert await running.store.repos([]) == {}


def test_connections_are_bounded_and_never_all_for_large_repos() -> None:
    assert [connections(workers) for workers in (1, 8, 28, 30, 31, 1_000)] == [5, 13, 38, 40, 40, 40]
    assert all(places_of_large(workers) < connections(workers) - RESERVED for workers in range(1, 1_001))


def test_as_many_files_as_the_system_allows() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        open_many_files()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert hard == before[1]
    assert soft == MOST_FILES or soft == hard < MOST_FILES
