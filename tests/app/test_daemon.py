"""The composition root: errors of stages end the daemon, and the limits of connections."""

import asyncio
import gc
import weakref
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from indexer.app.daemon import open_daemon
from indexer.app.process_setup import StopRequest
from indexer.app.tuning import Tuning
from indexer.core.core import CommitsBeingVerified, NativeCore
from indexer.errors import BrokenInvariantError
from indexer.live.batch_writer import BATCH_SIZE, BatchWriter
from indexer.resync.apply import LARGE_TURNS, TURNS
from indexer.resync.pool import WorkerPool
from indexer.sync.repo import Repo
from indexer.tasks.retention import ChangeLogRetention
from tests.batch_sizes import first_batch_size
from tests.daemon_harness import run_daemon, settings_for
from tests.faulty_network import FaultyNetwork
from tests.native_module import CountingCore, module_core
from tests.waiting import until

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("stage", [BatchWriter, WorkerPool, ChangeLogRetention])
async def test_broken_invariant_in_any_stage_ends_the_daemon(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: type[Any]
) -> None:
    async def breaks(_: object) -> None:
        raise BrokenInvariantError("a broken rule")

    monkeypatch.setattr(stage, "run", breaks)
    async with (
        FaultyNetwork() as network,
        open_daemon(settings_for(network.relay_url, network.plc_url, tmp_path), database) as running,
    ):
        with pytest.raises(BrokenInvariantError, match="a broken rule"):
            await asyncio.wait_for(running.run(StopRequest()), 30)


async def test_panic_in_a_thread_of_the_native_core_ends_the_daemon(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = module_core(2)
    monkeypatch.setattr(NativeCore, "begin_verification", lambda *_: CommitsBeingVerified([], core.panic(2)))
    async with (
        FaultyNetwork() as network,
        open_daemon(settings_for(network.relay_url, network.plc_url, tmp_path, core="native"), database) as running,
    ):
        account = network.create_account("ada.test")
        ended = asyncio.create_task(running.run(StopRequest()))
        while not ended.done():
            account.create("app.bsky.feed.post", {"text": "a commit after the first export"})
            await asyncio.wait([ended], timeout=0.1)
        with pytest.raises(BaseException, match="the test asked for a panic"):
            await ended


async def test_daemon_uses_the_native_core_for_frames_and_commits(database: str, tmp_path: Path) -> None:
    counting, stop = CountingCore(), StopRequest()
    async with FaultyNetwork() as network:
        settings = settings_for(network.relay_url, network.plc_url, tmp_path)
        async with open_daemon(settings, database, core=counting) as running:
            account = network.create_account("ada.test")
            account.create("app.bsky.feed.post", {"text": "a commit"})
            ended = asyncio.create_task(running.run(stop))
            await until(lambda: ended.done() or (counting.decoded > 0 and counting.asked > 0))
            stop.set()
            await ended
    assert counting.decoded > 0


async def test_broken_invariant_while_draining_is_raised(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = StopRequest()

    async def breaks_at_the_end(_: object) -> None:
        await until(lambda: running.inbox.unsettled > 0)
        stop.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        raise BrokenInvariantError("a broken rule")

    monkeypatch.setattr(BatchWriter, "run", breaks_at_the_end)
    async with (
        FaultyNetwork() as network,
        open_daemon(settings_for(network.relay_url, network.plc_url, tmp_path), database) as running,
    ):
        network.create_account("ada.test")
        with pytest.raises(BrokenInvariantError, match="a broken rule"):
            await asyncio.wait_for(running.run(stop), 30)


@pytest.mark.one_server("tests/citus/test_batches_on_a_cluster.py has the size on a cluster")
async def test_batches_have_the_size_for_one_server(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await first_batch_size(database, tmp_path, monkeypatch) == BATCH_SIZE


async def test_there_are_connections_for_all_turns_and_for_the_other_stages(database: str, tmp_path: Path) -> None:
    settings = settings_for("ws://127.0.0.1:1", "http://127.0.0.1:1", tmp_path)
    async with open_daemon(settings, database) as running, AsyncExitStack() as writing, asyncio.timeout(20):
        for number in range(TURNS + LARGE_TURNS):
            await writing.enter_async_context(running.db.resyncs.transaction(Repo(f"did:plc:{number:024}")))
        assert await running.db.repos.load([]) == {}


class Cycle:
    """An object that only the garbage collector frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.proof("daemon")
async def test_garbage_is_collected_without_load(database: str, tmp_path: Path) -> None:
    """A lost connection with its prepared statements is such garbage, and usually in the oldest generation."""
    old = Cycle()
    freed = weakref.ref(old)
    gc.collect()
    gc.collect()
    gc.disable()
    try:
        del old
        async with (
            FaultyNetwork() as network,
            run_daemon(
                settings_for(network.relay_url, network.plc_url, tmp_path),
                database,
                tuning=Tuning(garbage_interval=0.1),
            ),
        ):
            await until(lambda: freed() is None)
    finally:
        gc.enable()
