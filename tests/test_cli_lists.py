"""Commands that read the lists of a small network's hosts, as a user runs them."""

import asyncio
import os
import pty
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from time import time

import pytest

from indexer.cli import main
from indexer.localnet.network import LocalNetwork
from indexer.reasons import Desync
from indexer.service import sweep
from indexer.store import Store
from indexer.sync.listing import Listing
from indexer.sync.repo import SyncStatus
from tests.serving import saved, serving, settings_for, until
from tests.test_cli import ROOT

pytestmark = pytest.mark.slow

NOTE = "com.example.note"


@pytest.fixture
async def net() -> AsyncIterator[LocalNetwork]:
    async with LocalNetwork() as network:
        for name in ("ada", "bob", "cyd"):
            network.create_account(f"{name}.test").create(f"com.example.{name}", {"text": "hello"})
        yield network


class Commands:
    """On one network and one database."""

    def __init__(self, net: LocalNetwork, dsn: str, directory: Path) -> None:
        given = {"DATABASE_URL": dsn, "RELAYS": net.relay_url, "PLC_URL": net.plc_url, "DATA_DIR": str(directory)}
        free = {"HOST_RATE": "1000", "ALLOW_PRIVATE_HOSTS": "true", "LOG_LEVEL": "error"}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("INDEXER_")}
        self.environment = inherited | {f"INDEXER_{name}": value for name, value in (given | free).items()}

    async def __call__(self, *arguments: str, stderr: int = asyncio.subprocess.PIPE) -> tuple[int | None, str, str]:
        """Exit code, stdout, stderr."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "indexer", *arguments),
            cwd=ROOT,
            env=self.environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
        )
        written, complained = await asyncio.wait_for(process.communicate(), 60)
        return process.returncode, written.decode(), (complained or b"").decode()


@pytest.fixture
def indexer(net: LocalNetwork, database: str, tmp_path: Path) -> Commands:
    return Commands(net, database, tmp_path)


async def test_discover_tracks_all_that_the_relay_lists(net: LocalNetwork, indexer: Commands, store: Store) -> None:
    code, written, complained = await indexer("discover")
    assert (code, complained) == (0, "")
    assert written == f"all accounts of {net.relay.url}: 3 listed, 3 added\n"
    assert (await store.repos(list(net.accounts))).keys() == net.accounts.keys()
    _, written, _ = await indexer("discover", "--relay", f"{net.relay_url}/")
    assert written == f"all accounts of {net.relay.url}: 3 listed, 0 added\n"


async def test_discover_of_collections_and_of_a_pds(net: LocalNetwork, indexer: Commands, store: Store) -> None:
    ada, bob, cyd = net.accounts.values()
    code, written, _ = await indexer("discover", "--collection", "com.example.ada", "--collection", "com.example.bob")
    assert code == 0
    assert [line.rpartition(": ")[2] for line in written.splitlines()] == ["1 listed, 1 added"] * 2
    assert (await store.repos(list(net.accounts))).keys() == {ada.did, bob.did}
    code, _, _ = await indexer("discover", "--pds", cyd.pds.url)
    assert code == 0
    assert cyd.did in await store.repos([cyd.did])


async def test_discover_goes_on_where_it_was_left(net: LocalNetwork, indexer: Commands, store: Store) -> None:
    await store.save_listing(Listing("discover", net.relay.url, "", "2", 2, 2, began_at=time()))
    code, written, complained = await indexer("discover")
    assert (code, written) == (0, f"all accounts of {net.relay.url}: 3 listed, 3 added\n")
    assert complained == f"all accounts of {net.relay.url}: goes on behind 2 accounts\n"
    *_, cyd = net.accounts
    assert (await store.repos(list(net.accounts))).keys() == {cyd}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--relay", "https://a.example", "--pds", "https://b.example"], "Name a --relay or a --pds, not both"),
        (["--relay", "a.example"], "Invalid value for '--relay': 'a.example' is not the URL of a host"),
        (["--pds", "https://a.example/xrpc"], "Invalid value for '--pds': 'https://a.example/xrpc' is not"),
        (["--pds", "https://[::1"], "Invalid value for '--pds'"),
        (["--collection", "notes"], "Invalid value for '--collection': 'notes' is not an NSID"),
        (["everything"], "Got unexpected extra argument (everything)"),
    ],
)
def test_bad_arguments(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["discover", *arguments]) == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.startswith(f"indexer: {complaint}")
    assert written.err.count("\n") == 1


async def test_sweep_marks_what_the_stream_did_not_bring(
    net: LocalNetwork,
    indexer: Commands,
    store: Store,
    database: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with serving(settings_for(net.relay_url, net.plc_url, tmp_path / "daemon"), database) as running:
        await saved(running, net.relay_url, net.relay.log[-1].seq)
        await until(lambda: synchronized(store, net))
    ada, *_ = net.accounts.values()
    ada.create(NOTE, {"text": "while nobody listens"})
    monkeypatch.setattr(sweep, "Pause", partial(sweep.Pause, settle=0.1))
    for name, value in indexer.environment.items():
        monkeypatch.setenv(name, value)
    capsys.readouterr()
    assert await asyncio.to_thread(main, ["sweep"]) == 0
    assert capsys.readouterr().out == "3 listed, 1 differ and are fetched again\n"
    repos = await store.repos(list(net.accounts))
    assert {did: repo.reason for did, repo in repos.items() if repo.reason} == {ada.did: Desync.BEHIND}


async def synchronized(store: Store, net: LocalNetwork) -> bool:
    repos = await store.repos(list(net.accounts))
    return {repo.status for repo in repos.values()} == {SyncStatus.SYNCHRONIZED}


async def test_progress_is_for_terminals(net: LocalNetwork, indexer: Commands) -> None:
    terminal, inner = pty.openpty()
    code, written, _ = await indexer("discover", stderr=inner)
    os.close(inner)
    shown = os.read(terminal, 100_000)
    os.close(terminal)
    assert code == 0
    assert "3 added" in written
    assert b"all accounts of" in shown
    assert b"3 found" in shown
