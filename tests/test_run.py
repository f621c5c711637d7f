"""The composition root: what ends the daemon, and how loudly."""

import asyncio
from pathlib import Path

import pytest

from indexer.errors import BrokenInvariantError
from indexer.localnet.network import LocalNetwork
from indexer.run import daemon
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
