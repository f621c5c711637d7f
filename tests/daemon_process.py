"""Run `indexer run` as a separate process."""

import asyncio
import os
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol


class Network(Protocol):
    """A relay and a directory."""

    @property
    def relay_url(self) -> str: ...

    @property
    def plc_url(self) -> str: ...


def daemon_environment(network: Network, dsn: str, directory: Path) -> dict[str, str]:
    """Return the environment of a daemon on this network, without the settings of the user who runs the tests."""
    return {name: value for name, value in os.environ.items() if not name.startswith("INDEXER_")} | {
        "INDEXER_DATABASE_URL": dsn,
        "INDEXER_DATA_DIR": str(directory),
        "INDEXER_RELAYS": network.relay_url,
        "INDEXER_PLC_URL": network.plc_url,
        "INDEXER_TRACK": "all",
        "INDEXER_START": "oldest",
        "INDEXER_ALLOW_PRIVATE_HOSTS": "true",
        "INDEXER_PLC_RATE": "1000",
        "INDEXER_HANDLE_RATE": "0",
        "INDEXER_HOST_RATE": "1000",
        "INDEXER_HTTP_BIND": "127.0.0.1:0",
    }


def daemon_process(
    network: Network, dsn: str, directory: Path, module: str = "indexer", **settings: str
) -> AbstractAsyncContextManager[Process]:
    """Run a daemon for the duration of the block.

    `module` is the module that runs as the command `indexer`. `settings` are more environment variables.
    """
    environment = daemon_environment(network, dsn, directory)
    environment |= {f"INDEXER_{name.upper()}": value for name, value in settings.items()}
    return indexer_run(directory, environment, "--no-migrate", module=module)


@asynccontextmanager
async def indexer_run(
    directory: Path, environment: Mapping[str, str], *arguments: str, module: str = "indexer", **options: Any
) -> AsyncIterator[Process]:
    """Run `indexer run` for the duration of the block, with its output in the directory.

    It is killed at the end, without a chance to drain. `options` are those of the new process.
    """
    with (directory / "daemon.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, "run", *arguments, env=environment, stderr=log, stdout=log, **options
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def log_tail(directory: Path) -> str:
    """Return the end of the log of the daemons that ran with this directory."""
    return (directory / "daemon.log").read_text()[-2_000:]
