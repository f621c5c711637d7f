import os
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from indexer.db import Database
from indexer.demo.local_repo import Write
from indexer.sync.changes import Batch, RecordChange, RepoWrite
from indexer.sync.identity import HandleCheck, HandleClaim, StoredIdentity
from indexer.sync.repo import Head, Repo, SyncStatus
from indexer.sync.stream import Cursor
from tests.cli.audit_world import POST, AuditWorld, audit_world
from tests.cli.command_line import Session
from tests.cli.stored_account import CID, DID, HANDLE, REV
from tests.db.test_values import COLLECTION as UNUSUAL_COLLECTION
from tests.db.test_values import ODD as UNUSUAL_RECORDS
from tests.faulty_network import FaultyAccount


@pytest.fixture
def session_without_database(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Session:
    """Run commands that fail if they connect, without configuring the logging of the test process."""
    for name in os.environ:
        if name.startswith("INDEXER_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr("indexer.telemetry.log.configure_logging", lambda *_: None)
    session = Session(capsys, monkeypatch)
    session.configure(INDEXER_DATABASE_URL="postgresql://127.0.0.1:1/none", INDEXER_DNS_SERVERS="127.0.0.1:1")
    return session


@pytest.fixture
def session(session_without_database: Session, database: str) -> Session:
    """Run commands on an empty database."""
    session_without_database.configure(INDEXER_DATABASE_URL=database)
    return session_without_database


@pytest.fixture
def short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure rates over a short time."""
    monkeypatch.setattr("indexer.cli.status_commands.SAMPLE_SECONDS", 0.01)


@pytest.fixture
async def stored_account(database: str) -> None:
    """Store an account with one record, and a cursor of five seconds ago."""
    now = datetime.now(UTC)
    record = RecordChange(
        "create", "com.example.note", "one", REV, CID, '{"$type": "com.example.note", "text": "\u202eé"}'
    )
    repo = Repo(DID, 1, SyncStatus.SYNCHRONIZED, None, Head(REV, CID, CID), active=True)
    db = await Database.open(database, connections=1)
    try:
        cursor = Cursor("wss://one.example", "0/1", 77, (now - timedelta(seconds=5)).isoformat())
        await db.write(Batch((RepoWrite(Repo(repo.did), repo, (record,)),), cursors=(cursor,)))
        await db.identities.save([StoredIdentity(DID, HANDLE, "https://pds.example", None, now.timestamp())])
        await db.identities.save_handle_check(
            HandleCheck(HandleClaim(DID, HANDLE, None, 0), HANDLE, 0, now.timestamp())
        )
    finally:
        await db.close()


@pytest.fixture
async def world(database: str, tmp_path: Path) -> AsyncIterator[AuditWorld]:
    async with audit_world(database, tmp_path) as world:
        yield world


@pytest.fixture
def world_session(world: AuditWorld, session: Session) -> Session:
    """Run commands on the database of the world, with the settings of its network."""
    session.configure(**world.environment())
    return session


@pytest.fixture
async def ada(world: AuditWorld) -> FaultyAccount:
    """Create a synchronized account with unusual records."""
    ada = world.create_account("ada")
    ada.create(POST, {"$type": POST, "on": True, "n": 1, "big": -(2**63), "text": "é 雨"}, rkey="odd")
    ada.create(f"{POST}.more", {"$type": f"{POST}.more", "longer": 1, "b": []}, rkey="1")
    ada.create("app.bsky.feed-x.post", {"$type": "app.bsky.feed-x.post"}, rkey="1")
    ada.apply_writes(
        [
            Write.create(f"{UNUSUAL_COLLECTION}/{number}", block)
            for number, (name, (block, *_)) in enumerate(UNUSUAL_RECORDS.items())
            if name not in {"nothing", "bottomless"}  # hosts do not send the one; the other is slow to decode
        ]
    )
    ada.create("nowhere", {"$type": "nowhere"}, rkey="a path that names no record")
    await world.synchronize()
    return ada
