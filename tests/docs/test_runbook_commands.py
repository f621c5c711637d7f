"""Every command of the runbook works: it is run by bash, with a daemon, its database and a network.

In a block with the info string `console`, a line that begins with `$ ` is a command; a backslash at its end
continues it. The info string `console no-run` marks blocks that need another machine; they are listed here with the
reason.
"""

import asyncio
import json
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from indexer.localnet.local_network import LocalNetwork
from indexer.store.embedded.cluster import find_binaries
from tests.cli.command_line import PROJECT
from tests.daemon_process import daemon_environment, daemon_process, log_tail
from tests.database_checks import wait_until_equal
from tests.waiting import until

RUNBOOK = PROJECT / "docs" / "runbook.md"
NOT_RUN: dict[str, str] = {}
"""The commands of the blocks that are not run, with the reason."""
PROGRAMS = ("bash", "curl")
WITHOUT_DAEMON = ("indexer cursor reset",)
"""Commands that the page runs after stopping all daemons."""
COMMAND_TIMEOUT = 180.0

BLOCK = re.compile(r"^```(console[^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
EXAMPLE = """
```console
$ one \\
    --more
output
$ two
```

```sql
$ three
```

```console no-run
$ four
```
"""


def commands(page: str, info: str = "console") -> Iterator[str]:
    """Yield the commands of all blocks with this info string."""
    for found, block in BLOCK.findall(page):
        if found == info:
            lines = block.replace("\\\n", "\\\0").splitlines()
            yield from (line[2:].replace("\\\0", "\\\n") for line in lines if line.startswith("$ "))


def test_commands_are_the_lines_with_a_prompt_in_console_blocks() -> None:
    assert list(commands(EXAMPLE)) == ["one \\\n    --more", "two"]
    assert list(commands(EXAMPLE, "console no-run")) == ["four"]


def test_every_command_that_is_not_run_has_a_reason() -> None:
    page = RUNBOOK.read_text()
    assert {info for info, _ in BLOCK.findall(page)} <= {"console", "console no-run"}
    assert set(commands(page, "console no-run")) == NOT_RUN.keys()
    assert list(commands(page))


@asynccontextmanager
async def daemon_with_health(network: LocalNetwork, dsn: str, directory: Path) -> AsyncIterator[str]:
    """Run a daemon; yield the address of its health checks."""
    log = directory / "daemon.log"
    log.write_text("")

    def addresses() -> list[str]:
        lines = (json.loads(line) for line in log.read_text().splitlines() if line.startswith("{"))
        return [line["health"] for line in lines if line["event"] == "daemon.started"]

    async with daemon_process(network, dsn, directory):
        await until(lambda: addresses() != [], lambda: log_tail(directory))
        yield addresses()[0]


async def run_command(command: str, environment: dict[str, str], directory: Path) -> str | None:
    """Run a command; return what went wrong, or None."""
    process = await asyncio.create_subprocess_exec(
        "bash", "-euo", "pipefail", "-c", command,
        cwd=directory, env=environment, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = await asyncio.wait_for(process.communicate(), COMMAND_TIMEOUT)
    except TimeoutError:
        process.kill()
        await process.wait()
        return f"{command}\n  does not end"
    return f"{command}\n  exit code {process.returncode}: {output.decode()[-500:]}" if process.returncode else None


@pytest.mark.slow
@pytest.mark.timeout(1_800)
async def test_every_command_of_the_runbook_succeeds(database: str, empty_database: str, tmp_path: Path) -> None:
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        pytest.skip(f"needs {', '.join(missing)}: apt-get install {' '.join(missing)}")
    data, work, backup = tmp_path / "data", tmp_path / "work", tmp_path / "backup"
    for directory in (data, work, backup):
        directory.mkdir()
    page = list(commands(RUNBOOK.read_text()))
    async with LocalNetwork() as network:
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
        async with daemon_with_health(network, database, data) as address:
            await wait_until_equal(network, database, min_records=5)
            environment["DAEMON"] = address
            problems = [
                await run_command(command, environment, work)
                for command in page
                if not command.startswith(WITHOUT_DAEMON)
            ]
        problems += [
            await run_command(command, environment, work) for command in page if command.startswith(WITHOUT_DAEMON)
        ]
    assert [problem for problem in problems if problem is not None] == []
