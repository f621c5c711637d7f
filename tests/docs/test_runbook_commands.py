"""Every command of the runbook works: it is run by bash, with a daemon, its database and a network.

In a block with the info string `console`, a line that begins with `$ ` is a command; a backslash at its end
continues it.
"""

import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from indexer.embedded.cluster import find_binaries
from tests.cli.command_line import PROJECT
from tests.daemon_process import daemon_environment, daemon_process
from tests.database_checks import wait_until_equal
from tests.faulty_network import FaultyNetwork

RUNBOOK = PROJECT / "docs" / "runbook.md"
PROGRAMS = ("bash", "curl")
WITHOUT_DAEMON = ("indexer cursor reset",)
"""Commands that the page runs after stopping all daemons."""
COMMAND_TIMEOUT = 180.0

BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands(page: str) -> Iterator[str]:
    """Yield the commands of all console blocks."""
    for block in BLOCK.findall(page):
        lines = block.replace("\\\n", "\\\0").splitlines()
        yield from (line[2:].replace("\\\0", "\\\n") for line in lines if line.startswith("$ "))


async def run_command(command: str, environment: dict[str, str], directory: Path) -> str | None:
    """Run a command; return what went wrong, or None."""
    done = await asyncio.to_thread(
        subprocess.run, ["bash", "-euo", "pipefail", "-c", command], cwd=directory, env=environment, check=False,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=COMMAND_TIMEOUT,
    )  # fmt: skip
    return f"{command}\n  exit code {done.returncode}: {done.stdout.decode()[-500:]}" if done.returncode else None


@pytest.mark.proof("daemon")
@pytest.mark.timeout(1_800)
async def test_every_command_of_the_runbook_succeeds(database: str, empty_database: str, tmp_path: Path) -> None:
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        pytest.skip(f"needs {', '.join(missing)}: apt-get install {' '.join(missing)}")
    data, work, backup = tmp_path / "data", tmp_path / "work", tmp_path / "backup"
    for directory in (data, work, backup):
        directory.mkdir()
    page = list(commands(RUNBOOK.read_text()))
    assert len(page) > 20
    async with FaultyNetwork() as network:
        account = network.create_account("ada.test")
        for number in range(5):
            account.create("com.example.note", {"text": f"{number}"})
        path = os.pathsep.join([str(Path(sys.executable).parent), str(find_binaries()), os.environ["PATH"]])
        environment = daemon_environment(network, database, data) | {
            "PATH": path,
            "DID": account.did,
            "RELAY": network.relay_url,
            "NEW_DATABASE_URL": empty_database,
            "BACKUP": str(backup),
        }
        async with daemon_process(network, database, data):
            await wait_until_equal(network, database, min_records=5)
            health = re.search(r'"health":"([^"]+)"', (data / "daemon.log").read_text())
            assert health
            environment["DAEMON"] = health[1]
            problems = [
                await run_command(command, environment, work)
                for command in page
                if not command.startswith(WITHOUT_DAEMON)
            ]
        problems += [
            await run_command(command, environment, work) for command in page if command.startswith(WITHOUT_DAEMON)
        ]
    assert [problem for problem in problems if problem is not None] == []
