"""The example of the tutorial, a process of its own, on the local network: killed, started again, right in the end."""

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
import cbrrr
import pytest

from indexer.localnet.load import Scenario
from indexer.localnet.network import LocalNetwork
from tests.daemon.stage import LIKE, POST, post, staged
from tests.serving import until

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "appview.py"
STEPS = 300

Post = tuple[str | None, int, int]


def record_of(block: bytes) -> dict[str, Any]:
    record = cbrrr.decode_dag_cbor(block)
    assert isinstance(record, dict)
    return record


def expected(network: LocalNetwork) -> dict[str, Post]:
    """URI to text, replies, likes: from the network itself, the slow way."""
    records: dict[str, dict[str, Any]] = {
        f"at://{account.did}/{path}": record_of(block)
        for account in network.accounts.values()
        if account.status is None
        for path, block in account.records.items()
        if path.partition("/")[0] in (POST, LIKE)
    }
    told = {uri: record for uri, record in records.items() if "\0" not in repr(record).replace("\\x00", "\0")}
    replies = Counter(record["reply"]["parent"]["uri"] for record in told.values() if "reply" in record)
    likes = Counter(record["subject"]["uri"] for record in told.values() if "subject" in record)
    return {
        uri: (told[uri]["text"] if uri in told else None, replies[uri], likes[uri])
        for uri in records
        if f"/{POST}/" in uri
    }


@asynccontextmanager
async def appview(dsn: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(sys.executable, str(EXAMPLE), dsn, "follow", stderr=-1)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.slow
async def test_the_appview_ends_equal_to_the_network(database: str, tmp_path: Path) -> None:
    """As a role that may only read the face and make a schema of its own."""
    async with staged(database, tmp_path) as stage:
        name = urlsplit(database).path[1:]
        await stage.execute(f"create role {name}_board login in role atproto_reader")
        await stage.execute(f"grant create on database {name} to {name}_board")
        dsn = urlunsplit(urlsplit(database)._replace(netloc=f"{name}_board@"))
        scenario = Scenario(stage.network, seed=21)
        try:
            await lives(stage, dsn, scenario)
        finally:
            await stage.execute(f"drop owned by {name}_board")
            await stage.execute(f"drop role {name}_board")


async def lives(stage: Any, dsn: str, scenario: Scenario) -> None:
    async def place() -> int:
        rows = await stage.execute("select seq from atproto.readers")
        return rows[0][0] if rows else -1

    one, two = stage.account("one.test"), stage.account("two.test")
    uri = f"at://{one.did}/{one.create(POST, post('first'))}"
    likes = [account.create(LIKE, {"$type": LIKE, "subject": {"uri": uri}}) for account in (one, two)]
    for step in range(100):
        scenario.perform(step, STEPS)
    await stage.equal()
    for part in (100, 200):
        async with appview(dsn) as process:
            for step in range(part, part + 100):
                scenario.perform(step, STEPS)
                await asyncio.sleep(0)
            two.create(POST, {**post("reply"), "reply": {"parent": {"uri": uri}}})
            before = await place()

            async def moved(before: int = before) -> bool:
                assert process.returncode is None, await process.communicate()
                return await place() > before

            await until(moved)
            process.kill()
    one.delete(likes[0])
    await stage.equal()
    shown: dict[str, Post] = {}

    async with appview(dsn) as process:

        async def same() -> bool:
            nonlocal shown
            assert process.returncode is None, await process.communicate()
            shown = {uri: tuple(rest) for uri, *rest in await posts(stage)}
            return shown == expected(stage.network)

        await until(same, lambda: shown.items() ^ expected(stage.network).items())
    assert len(shown) > 30
    assert shown[uri] == ("first", 2, 1)


async def posts(stage: Any) -> list[asyncpg.Record]:
    rows: list[asyncpg.Record] = await stage.execute("select uri, text, replies, likes from board.post")
    return rows


def test_it_is_small_and_the_tutorial_shows_it_as_it_is() -> None:
    source = EXAMPLE.read_text()
    assert len(source.splitlines()) < 200
    page = (ROOT / "docs" / "appview-tutorial.md").read_text()
    shown = [block for block in re.findall(r"```(?:python|sql)\n(.*?)```", page, re.DOTALL) if "elsewhere" not in block]
    squeezed = re.sub(r"\s+", " ", source)
    assert len(shown) > 4
    for block in shown:
        assert re.sub(r"\s+", " ", block).strip() in squeezed, block
