"""The command that imports identities from a directory or a file."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from indexer.db import Database
from indexer.db.shard_lock import OPERATIONS
from tests.cli.command_line import Session
from tests.faulty_network import FaultyNetwork
from tests.plc_directory import to_text

pytestmark = pytest.mark.slow


@pytest.fixture
async def network(session: Session, tmp_path: Path) -> AsyncIterator[FaultyNetwork]:
    async with FaultyNetwork() as network:
        session.configure(
            INDEXER_PLC_URL=network.plc_url, INDEXER_DATA_DIR=str(tmp_path), INDEXER_ALLOW_PRIVATE_HOSTS="true"
        )
        for name in ("ada", "bob"):
            network.create_account(f"{name}.test")
        yield network


async def result(session: Session, *options: str) -> dict[str, int]:
    ended = await session.run("identities", "import", "--json", *options)
    assert (ended.returncode, ended.stderr) == (0, "")
    found: dict[str, int] = json.loads(ended.stdout)
    return {name: found[name] for name in ("operations", "proven")}


async def test_import_of_tracked_repos_then_of_later_ones_then_of_all(
    network: FaultyNetwork, session: Session, db: Database, tmp_path: Path
) -> None:
    ada, bob = network.accounts
    await db.repos.add([ada])
    file = tmp_path / "export"
    file.write_bytes(to_text([one.line() for one in network.plc.operations[:3]]))
    assert await result(session, "--file", str(file)) == {"operations": 3, "proven": 2}
    assert await result(session) == {"operations": 2, "proven": 0}
    assert await result(session) == {"operations": 1, "proven": 0}, "only the last operation is read again"
    await db.repos.add([bob])
    assert await result(session, "--again") == {"operations": 4, "proven": 2}
    assert await result(session, "--all") == {"operations": 4, "proven": 0}
    ended = await session.run("identities", "import")
    assert ended.stdout.startswith("operations: 1 read, 0 proven, ")
    identities = await db.identities.stored([ada, bob])
    assert [identities[did].handle for did in (ada, bob)] == ["ada.test", "bob.test"]


async def test_import_waits_for_no_other_process(network: FaultyNetwork, session: Session, db: Database) -> None:
    async with db.shard_locks.open(OPERATIONS) as lock:
        assert await lock.claim()
        ended = await session.run("identities", "import")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "another process reads the operations of the directory: session " in ended.stderr
    assert network.plc.requests.total() == 0
