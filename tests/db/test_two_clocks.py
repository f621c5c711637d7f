"""Times that processes store are compared with times of one clock, although that of the database is wrong by a day."""

from pathlib import Path
from time import time

import asyncpg
import pytest

from indexer.db import Database
from indexer.db.change_log_segments import RetentionPolicy, load_state
from indexer.reasons import FetchFailure
from indexer.sync.changes import Batch
from indexer.sync.identity import HostState, StoredIdentity
from indexer.sync.repo import Repo
from indexer.sync.stream import Cursor
from tests.crashes.shifted_clock import Offset
from tests.db.change_log_helpers import change, log
from tests.db.repo_rows import did, insert

pytestmark = [pytest.mark.slow, pytest.mark.one_server("the test changes one clock")]

ALL, DAY = range(256), 86_400
DAYS = pytest.mark.parametrize("days", [-1, 1])
"""The clock of the database is a day behind, or ahead."""


async def set_clock(database: str, directory: Path, days: int) -> None:
    offset = Offset(directory / "offset")
    await offset.include_database(database)
    await offset.set(days * DAY)


@pytest.mark.parametrize("ahead", [-DAY, DAY])
async def test_lease_is_over_only_after_its_time_whichever_process_looks(
    db: Database, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    """The clock of the process that claims the repo differs from that of the process that ends expired leases."""
    await insert(db, Repo(did(1), version=1))

    def wrong() -> float:
        return time() + ahead

    with monkeypatch.context() as patched:
        patched.setattr("indexer.db.resync_queue.time", wrong)
        [claimed] = await db.resyncs.claim(1, ALL, 60.0, wrong())
    assert await db.resyncs.expire_leases(ALL, time()) == 0
    assert await db.resyncs.renew(did(1), claimed.lease, 120.0)
    assert await db.resyncs.expire_leases(ALL, time() + 90) == 0
    assert await db.resyncs.expire_leases(ALL, time() + 150) == 1


@DAYS
async def test_changes_are_trimmed_by_their_age(
    db: Database, database: str, sql: asyncpg.Connection, tmp_path: Path, days: int
) -> None:
    """No consumer is cut off because of the difference of two clocks."""
    await set_clock(database, tmp_path, days)
    await sql.execute("select atproto.register_reader('reader', 0)")
    await log(sql, change("a"))
    now = time()
    state = await load_state(sql)
    [consumer] = state.consumers
    assert consumer.lag(now) < 60.0
    newest = max(segment.last_time for segment in state.segments if segment.last_time is not None)
    assert newest == pytest.approx(now, abs=60)
    policy = RetentionPolicy(DAY / 2, 1_000_000_000, DAY / 2)
    _, plan = await db.segments.trim(policy, now)
    assert (plan.disconnect, plan.truncate) == ((), ())


@DAYS
async def test_pause_of_a_host_ends_by_the_clock_of_the_processes(
    db: Database, database: str, tmp_path: Path, days: int
) -> None:
    await set_clock(database, tmp_path, days)
    paused = HostState("paused.example", 3, 0, 0, time() + 60, FetchFailure.THROTTLED, None, None)
    ended = HostState("ended.example", 3, 0, 0, time() - 60, FetchFailure.THROTTLED, None, None)
    await db.hosts.save([paused, ended])
    assert [state.host for state in await db.hosts.load()] == ["paused.example"]
    assert [host["host"] for host in (await db.reports.state())[0]["hosts"]] == ["paused.example"]


@DAYS
async def test_new_handle_is_due_to_be_checked_at_once(db: Database, database: str, tmp_path: Path, days: int) -> None:
    await set_clock(database, tmp_path, days)
    await db.identities.save([StoredIdentity(did(1), "ada.test", "https://pds.test", "key", time())])
    claims, _ = await db.identities.due_handles(ALL, 1, time())
    assert [claim.did for claim in claims] == [did(1)]


@DAYS
async def test_cursor_was_stored_when_its_process_stored_it(
    db: Database, database: str, tmp_path: Path, days: int
) -> None:
    """The times of events are compared with this time, to find out until when everything is stored."""
    await set_clock(database, tmp_path, days)
    await db.write(Batch(cursors=(Cursor("wss://relay.test", "0/1", 5),)))
    [cursor] = await db.gaps.cursors()
    assert cursor.updated_at == pytest.approx(time(), abs=60)
