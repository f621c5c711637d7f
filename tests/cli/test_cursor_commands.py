import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest

from indexer.localnet.local_network import LocalNetwork
from indexer.store import Store
from indexer.sync.frames import MAX_SEQ
from indexer.sync.plans import Batch, Cursor
from indexer.sync.shard import Shard
from tests.cli.command_line import Session, error_line
from tests.daemon.running_daemon import POST, post, running_daemon
from tests.waiting import until

RELAY = "wss://one.example"


@pytest.fixture
async def store(database: str) -> AsyncIterator[Store]:
    store = await Store.open(database, connections=2)
    yield store
    await store.close()


async def rows(database: str, statement: str) -> list[tuple[object, ...]]:
    connection = await asyncpg.connect(database)
    try:
        return [tuple(row) for row in await connection.fetch(statement)]
    finally:
        await connection.close()


CURSORS = "select relay, shard, epoch, seq, event_time from indexer.cursor order by relay, shard"
GAPS = "select relay, shard, reason, closed_at from indexer.gap order by id"


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


@pytest.mark.usefixtures("store")
def test_show_says_that_no_cursor_is_stored(session: Session) -> None:
    assert session("cursor", "show").stdout.startswith("No cursor is stored.")


async def test_reset_applies_to_all_present_shards_and_opens_a_gap_for_each(
    store: Store, database: str, session: Session
) -> None:
    for shard in ("0/1", "0/2", "1/2"):
        await store.write(Batch(cursor=Cursor(RELAY, shard, MAX_SEQ, None)))
    await store.write(Batch(cursor=Cursor("wss://two.example", "0/2", 9, None)))
    assert (await asyncio.to_thread(session, "cursor", "reset", RELAY, "--to", "7", "--yes")).returncode == 0
    assert await rows(database, CURSORS) == [
        (RELAY, "0/1", 0, MAX_SEQ, None),
        (RELAY, "0/2", 1, 7, None),
        (RELAY, "1/2", 1, 7, None),
        ("wss://two.example", "0/2", 0, 9, None),
    ]
    assert await rows(database, GAPS) == [(RELAY, shard, "cursor-reset", None) for shard in ("0/2", "1/2")]


@pytest.mark.usefixtures("stored_account")
async def test_reset_is_refused_while_a_daemon_holds_a_shard(store: Store, database: str, session: Session) -> None:
    before = await rows(database, CURSORS)
    async with store.shard_lock(Shard(1, 4).positions) as lock:
        assert await lock.claim()
        result = await asyncio.to_thread(session, "cursor", "reset", RELAY, "--yes")
    assert (result.returncode, error_line(result)) == (
        1,
        "a daemon is running; stop all daemons of this database first",
    )
    assert await rows(database, CURSORS) == before


@pytest.mark.usefixtures("stored_account")
def test_reset_asks_for_confirmation(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("click.termui.visible_prompt_func", lambda _prompt: "n")
    assert session("cursor", "reset", RELAY).returncode == 130
    assert json.loads(session("cursor", "show", "--json").stdout)["cursors"][0]["seq"] == 77


@pytest.mark.usefixtures("stored_account")
@pytest.mark.parametrize("target", ["yesterday", "-1", "1" * 30, str(2**63)])
def test_reset_refuses_other_targets(session: Session, target: str) -> None:
    assert session("cursor", "reset", RELAY, f"--to={target}", "--yes").returncode == 2


@pytest.mark.usefixtures("stored_account")
def test_reset_of_an_unknown_relay_names_the_command_that_lists_them(session: Session) -> None:
    result = session("cursor", "reset", "wss://other.example", "--yes")
    assert result.returncode == 4
    assert "indexer cursor show" in error_line(result)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["oldest", "live"])
async def test_reset_repairs_a_cursor_above_all_messages(
    database: str, tmp_path: Path, session: Session, target: str
) -> None:
    """The next daemon reads the stream again, and closes the gap."""
    async with LocalNetwork() as network:
        async with running_daemon(database, tmp_path, network) as daemon:
            account = daemon.create_account("one.test")
            await daemon.wait_until_equal()
            await daemon.execute("update indexer.cursor set seq = $1", MAX_SEQ)
        reset = asyncio.to_thread(session, "cursor", "reset", network.relay_url, f"--to={target}", "--yes")
        result = asyncio.create_task(reset)
        if target == "live":
            await until(lambda: network.relay.subscribers > 0)
            account.create(POST, post("live"))
        assert (await result).returncode == 0
        async with running_daemon(database, tmp_path, network) as daemon:
            account.create(POST, post("after the reset"))
            await daemon.wait_until_equal()
            [gap] = await rows(database, "select reason from atproto.gaps where reason = 'cursor-reset'")
            assert gap
