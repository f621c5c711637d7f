"""Tests of the AppView of the tutorial, run as a separate process on the local network."""

import asyncio
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from indexer.demo.scenario import Scenario
from tests.daemon.running_daemon import LIKE, POST, post, running_daemon
from tests.demo.independent_decoder import decode_all
from tests.faulty_network import FaultyNetwork
from tests.waiting import until

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "appview.py"
STEPS = 300

Post = tuple[str | None, int, int]
"""Text, number of replies, number of likes."""


def decode(block: bytes) -> dict[str, Any]:
    (record,) = decode_all(block)
    assert isinstance(record, dict)
    return record


def expected_posts(network: FaultyNetwork) -> dict[str, Post]:
    """Return the posts by URI, computed from the accounts of the network."""
    records: dict[str, dict[str, Any]] = {
        f"at://{account.did}/{path}": decode(block)
        for account in network.accounts.values()
        if account.status is None
        for path, block in account.records.items()
        if path.partition("/")[0] in (POST, LIKE)
    }
    replies = Counter(record["reply"]["parent"]["uri"] for record in records.values() if "reply" in record)
    likes = Counter(record["subject"]["uri"] for record in records.values() if "subject" in record)
    # jsonb cannot contain U+0000: the value has U+FFFD in its place.
    return {
        uri: (record["text"].replace("\0", "\ufffd"), replies[uri], likes[uri])
        for uri, record in records.items()
        if f"/{POST}/" in uri
    }


@asynccontextmanager
async def running_appview(dsn: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(sys.executable, str(EXAMPLE), dsn, "follow", stderr=-1)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.slow
async def test_appview_equals_the_network_after_it_was_killed(database: str, tmp_path: Path) -> None:
    """The AppView runs as a role that may only read the public schema and create a schema of its own."""
    async with running_daemon(database, tmp_path) as daemon:
        name = urlsplit(database).path[1:]
        await daemon.execute(f"create role {name}_board login in role atproto_reader")
        await daemon.execute(f"grant create on database {name} to {name}_board")
        dsn = urlunsplit(urlsplit(database)._replace(netloc=f"{name}_board@"))
        scenario = Scenario(daemon.network, seed=21)
        try:
            await kill_and_compare(daemon, dsn, scenario)
        finally:
            await daemon.execute(f"drop owned by {name}_board")
            await daemon.execute(f"drop role {name}_board")


async def kill_and_compare(daemon: Any, dsn: str, scenario: Scenario) -> None:
    async def consumer_position() -> int:
        rows = await daemon.execute("select seq from atproto.readers")
        return rows[0][0] if rows else -1

    one, two = daemon.create_account("one.test"), daemon.create_account("two.test")
    uri = f"at://{one.did}/{one.create(POST, post('first'))}"
    likes = [account.create(LIKE, {"$type": LIKE, "subject": {"uri": uri}}) for account in (one, two)]
    for step in range(100):
        scenario.perform(step, STEPS)
    await daemon.wait_until_equal()
    for first_step in (100, 200):
        async with running_appview(dsn) as process:
            for step in range(first_step, first_step + 100):
                scenario.perform(step, STEPS)
                await asyncio.sleep(0)
            two.create(POST, {**post("reply"), "reply": {"parent": {"uri": uri}}})
            before = await consumer_position()

            async def advanced(before: int = before) -> bool:
                assert process.returncode is None, await process.communicate()
                return await consumer_position() > before

            await until(advanced)
            process.kill()
    one.delete(likes[0])
    await daemon.wait_until_equal()
    shown: dict[str, Post] = {}

    async with running_appview(dsn) as process:

        async def equal() -> bool:
            nonlocal shown
            assert process.returncode is None, await process.communicate()
            shown = {uri: tuple(rest) for uri, *rest in await shown_posts(daemon)}
            return shown == expected_posts(daemon.network)

        await until(equal, lambda: shown.items() ^ expected_posts(daemon.network).items())
    assert len(shown) > 30
    assert shown[uri] == ("first", 2, 1)


async def shown_posts(daemon: Any) -> list[asyncpg.Record]:
    rows: list[asyncpg.Record] = await daemon.execute("select uri, text, replies, likes from board.post")
    return rows


def test_tutorial_quotes_the_example() -> None:
    source = EXAMPLE.read_text()
    assert len(source.splitlines()) < 200
    page = (ROOT / "docs" / "appview-tutorial.md").read_text()
    blocks = re.findall(r"```(?:python|sql)\n(.*?)```", page, re.DOTALL)
    quotes = [block for block in blocks if "create role" not in block]
    normalized_source = re.sub(r"\s+", " ", source)
    assert len(quotes) > 4
    for quote in quotes:
        assert re.sub(r"\s+", " ", quote).strip() in normalized_source, quote
