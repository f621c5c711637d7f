"""The commands that read the repo lists of hosts, on a small network."""

import asyncio
import os
import pty
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from time import time

import pytest

from indexer.cli.main import main
from indexer.localnet.local_network import LocalNetwork
from indexer.reasons import Desync
from indexer.service.crawl.reconcile import ReconciliationSettings
from indexer.store import Store
from indexer.sync.crawl_progress import CrawlProgress
from indexer.sync.repo_state import SyncStatus
from tests.cli.command_line import PROJECT, Session, environment_without_settings, error_line
from tests.daemon_harness import run_daemon, settings_for, wait_for_cursor
from tests.waiting import until

pytestmark = pytest.mark.slow

NOTE = "com.example.note"


@pytest.fixture
async def network() -> AsyncIterator[LocalNetwork]:
    """Run a network of three accounts, each with a record in a collection of its own."""
    async with LocalNetwork() as network:
        for name in ("ada", "bob", "cyd"):
            network.create_account(f"{name}.test").create(f"com.example.{name}", {"text": "hello"})
        yield network


class CommandRunner:
    """Runs commands in processes of their own, with the settings of a network and a database."""

    def __init__(self, network: LocalNetwork, dsn: str, directory: Path) -> None:
        settings = {
            "INDEXER_DATABASE_URL": dsn,
            "INDEXER_RELAYS": network.relay_url,
            "INDEXER_PLC_URL": network.plc_url,
            "INDEXER_DATA_DIR": str(directory),
            "INDEXER_HOST_RATE": "1000",
            "INDEXER_ALLOW_PRIVATE_HOSTS": "true",
            "INDEXER_LOG_LEVEL": "error",
        }
        self.environment = environment_without_settings() | settings

    async def __call__(self, *arguments: str, stderr: int = asyncio.subprocess.PIPE) -> tuple[int | None, str, str]:
        """Run a command; return its exit code, stdout and stderr."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "indexer", *arguments),
            cwd=PROJECT,
            env=self.environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
        )
        output, errors = await asyncio.wait_for(process.communicate(), 60)
        return process.returncode, output.decode(), (errors or b"").decode()


@pytest.fixture
def run(network: LocalNetwork, database: str, tmp_path: Path) -> CommandRunner:
    return CommandRunner(network, database, tmp_path)


async def test_discover_adds_all_accounts_that_the_relay_lists(
    network: LocalNetwork, run: CommandRunner, store: Store
) -> None:
    code, output, errors = await run("discover")
    assert (code, errors) == (0, "")
    assert output == f"all accounts of {network.relay.url}: 3 listed, 3 added\n"
    assert (await store.repos(list(network.accounts))).keys() == network.accounts.keys()
    _, output, _ = await run("discover", "--relay", f"{network.relay_url}/")
    assert output == f"all accounts of {network.relay.url}: 3 listed, 0 added\n"


async def test_discover_adds_accounts_by_collection_and_by_pds(
    network: LocalNetwork, run: CommandRunner, store: Store
) -> None:
    ada, bob, cyd = network.accounts.values()
    code, output, _ = await run("discover", "--collection", "com.example.ada", "--collection", "com.example.bob")
    assert code == 0
    assert [line.rpartition(": ")[2] for line in output.splitlines()] == ["1 listed, 1 added"] * 2
    assert (await store.repos(list(network.accounts))).keys() == {ada.did, bob.did}
    code, _, _ = await run("discover", "--pds", cyd.pds.url)
    assert code == 0
    assert cyd.did in await store.repos([cyd.did])


async def test_interrupted_discover_continues_at_its_cursor(
    network: LocalNetwork, run: CommandRunner, store: Store
) -> None:
    await store.save_crawl_progress(CrawlProgress("discover", network.relay.url, "", "2", 2, 2, began_at=time()))
    code, output, errors = await run("discover")
    assert (code, output) == (0, f"all accounts of {network.relay.url}: 3 listed, 3 added\n")
    assert errors == f"all accounts of {network.relay.url}: continuing; accounts listed before: 2\n"
    *_, cyd = network.accounts
    assert (await store.repos(list(network.accounts))).keys() == {cyd}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--relay", "https://a.example", "--pds", "https://b.example"], "Give either --relay or --pds, not both"),
        (["--relay", "a.example"], "Invalid value for '--relay': 'a.example' is not the URL of a host"),
        (["--pds", "https://a.example/xrpc"], "Invalid value for '--pds': 'https://a.example/xrpc' is not"),
        (["--pds", "https://[::1"], "Invalid value for '--pds'"),
        (["--collection", "notes"], "Invalid value for '--collection': 'notes' is not an NSID"),
        (["everything"], "Got unexpected extra argument (everything)"),
    ],
)
def test_bad_argument_has_exit_code_2(arguments: list[str], expected: str, session_without_database: Session) -> None:
    result = session_without_database("discover", *arguments)
    assert result.returncode == 2
    assert error_line(result).startswith(expected)


async def test_sweep_requests_a_resync_for_repos_that_are_behind(
    network: LocalNetwork,
    run: CommandRunner,
    store: Store,
    database: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with run_daemon(settings_for(network.relay_url, network.plc_url, tmp_path / "daemon"), database) as daemon:
        await wait_for_cursor(daemon, network.relay_url, network.relay.log[-1].seq)
        await until(lambda: all_synchronized(store, network))
    ada, *_ = network.accounts.values()
    ada.create(NOTE, {"text": "written while no daemon runs"})
    monkeypatch.setattr(
        "indexer.cli.crawl_commands.ReconciliationSettings", partial(ReconciliationSettings, settle=0.1)
    )
    monkeypatch.setattr("indexer.monitoring.log.configure_logging", lambda *_: None)
    for name, value in run.environment.items():
        monkeypatch.setenv(name, value)
    capsys.readouterr()
    assert await asyncio.to_thread(main, ["sweep"]) == 0
    assert capsys.readouterr().out == "accounts: 3 listed, 1 different (resync requested)\n"
    repos = await store.repos(list(network.accounts))
    assert {did: repo.sync_reason for did, repo in repos.items() if repo.sync_reason} == {ada.did: Desync.BEHIND}


async def all_synchronized(store: Store, network: LocalNetwork) -> bool:
    repos = await store.repos(list(network.accounts))
    return {repo.sync_status for repo in repos.values()} == {SyncStatus.SYNCHRONIZED}


async def test_progress_is_shown_on_a_terminal(run: CommandRunner) -> None:
    terminal, inner = pty.openpty()
    code, output, _ = await run("discover", stderr=inner)
    os.close(inner)
    shown = os.read(terminal, 100_000)
    os.close(terminal)
    assert code == 0
    assert "3 added" in output
    assert b"all accounts of" in shown
    assert b"3 added" in shown
