import asyncio
import json
from pathlib import Path

import asyncpg
import pytest

from indexer.db import Database
from indexer.sync.changes import Batch
from indexer.sync.events import MAX_SEQ
from indexer.sync.shard import Shard
from indexer.sync.stream import Cursor
from tests.cli.command_line import Session, error_line
from tests.daemon.running_daemon import POST, post, running_daemon
from tests.faulty_network import FaultyNetwork
from tests.waiting import until

RELAY = "wss://one.example"
CURSORS = "select relay, shard, epoch, seq, event_time from indexer.cursor order by relay, shard"
GAPS = "select relay, shard, reason, closed_at from indexer.gap order by id"


async def rows(sql: asyncpg.Connection, statement: str) -> list[tuple[object, ...]]:
    return [tuple(row) for row in await sql.fetch(statement)]


@pytest.mark.slow
@pytest.mark.usefixtures("stored_account")
def test_show_prints_cursors_and_open_gaps(session: Session) -> None:
    assert session("cursor", "reset", RELAY, "--to", "5", "--yes").returncode == 0
    shown = json.loads(session("cursor", "show", "--json").stdout)
    [cursor], [gap] = shown["cursors"], shown["open_gaps"]
    assert (cursor["relay"], cursor["seq"], cursor["epoch"], cursor["lag_seconds"]) == (RELAY, 5, 1, None)
    assert (gap["relay"], gap["shard"], gap["reason"]) == (RELAY, "0/1", "cursor-reset")
    text = session("cursor", "show").stdout
    assert "cursor-reset" in text
    assert RELAY in text


async def test_reset_applies_to_all_present_shards_and_opens_a_gap_for_each(
    db: Database, sql: asyncpg.Connection, session: Session
) -> None:
    for shard in ("0/1", "0/2", "1/2"):
        await db.write(Batch(cursors=(Cursor(RELAY, shard, MAX_SEQ, None),)))
    await db.write(Batch(cursors=(Cursor("wss://two.example", "0/2", 9, None),)))
    assert (await session.run("cursor", "reset", RELAY, "--to", "7", "--yes")).returncode == 0
    assert await rows(sql, CURSORS) == [
        (RELAY, "0/1", 0, MAX_SEQ, None),
        (RELAY, "0/2", 1, 7, None),
        (RELAY, "1/2", 1, 7, None),
        ("wss://two.example", "0/2", 0, 9, None),
    ]
    assert await rows(sql, GAPS) == [(RELAY, shard, "cursor-reset", None) for shard in ("0/2", "1/2")]


@pytest.mark.slow
@pytest.mark.usefixtures("stored_account")
async def test_reset_is_refused_while_a_daemon_holds_a_shard_without_confirmation_and_of_an_unknown_relay(
    db: Database, sql: asyncpg.Connection, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await rows(sql, CURSORS)
    assert before != []
    async with db.shard_locks.open(Shard(1, 4).positions) as lock:
        assert await lock.claim()
        result = await session.run("cursor", "reset", RELAY, "--yes")
    assert (result.returncode, error_line(result)) == (
        1,
        "a daemon is running; stop all daemons of this database first",
    )
    monkeypatch.setattr("click.termui.visible_prompt_func", lambda _prompt: "n")
    assert (await session.run("cursor", "reset", RELAY)).returncode == 2, "there is no terminal to answer"
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    assert (await session.run("cursor", "reset", RELAY)).returncode == 130
    assert (await session.run("cursor", "reset", "wss://other.example", "--yes")).returncode == 4
    assert await rows(sql, CURSORS) == before


@pytest.mark.slow
@pytest.mark.parametrize("target", ["oldest", "live"])
async def test_reset_repairs_a_cursor_above_all_messages(
    database: str, sql: asyncpg.Connection, tmp_path: Path, session: Session, target: str
) -> None:
    """The next daemon reads the stream again, and closes the gap."""
    async with FaultyNetwork() as network:
        async with running_daemon(database, tmp_path, network) as daemon:
            account = daemon.create_account("one.test")
            await daemon.wait_until_equal()
            await daemon.execute("update indexer.cursor set seq = $1", MAX_SEQ)
        await until(lambda: network.relay.subscribers == 0)
        reset = asyncio.create_task(session.run("cursor", "reset", network.relay_url, f"--to={target}", "--yes"))
        if target == "live":
            await until(lambda: network.relay.subscribers > 0)
            account.create(POST, post("live"))
        assert (await reset).returncode == 0
        async with running_daemon(database, tmp_path, network) as daemon:
            account.create(POST, post("after the reset"))
            await daemon.wait_until_equal()
        assert await rows(sql, "select reason from atproto.gaps where reason = 'cursor-reset'") == [("cursor-reset",)]
