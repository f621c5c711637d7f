"""The demo is self-contained: settings of the user do not change it."""

import asyncio
import re
import signal
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import aiohttp
import pytest

from tests.cli.command_line import PROJECT, environment_without_settings, run_indexer

pytestmark = pytest.mark.slow


async def test_demo_writes_into_the_database_that_it_is_given(database: str) -> None:
    result = await asyncio.to_thread(run_indexer, "demo", "--seconds", "5", "--database", database)
    assert "EQUAL" in result.stdout
    assert "DIFFERENT" not in result.stdout
    assert result.returncode == 0, result.stderr
    repeated = await asyncio.to_thread(run_indexer, "demo", "--seconds", "5", "--database", database)
    assert repeated.returncode == 2
    assert "the database has repos: the demo needs one without" in repeated.stderr


def test_demo_ignores_the_settings_of_the_shell_and_the_settings_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("collections = ['com.example.none']\nshard = '1/2'\n")
    result = run_indexer(
        "demo", "--seconds", "5", "--config", str(file),
        INDEXER_CONFIG=str(tmp_path / "missing.toml"),
        INDEXER_RELAYS="wss://relay.example,wss://other.example",
        INDEXER_UPSTREAM="pds",
        INDEXER_COLLECTIONS="app.bsky.actor.profile,com.example.*",
        INDEXER_TRACK="listed",
        INDEXER_SHARD="1/2",
        INDEXER_ROLES="resync",
        INDEXER_DATABASE_URL="postgresql://127.0.0.1:1/none",
        INDEXER_DATA_DIR="/dev/null/none",
        INDEXER_HTTP_BIND="192.0.2.1:1",
        INDEXER_RECORD_BYTES="1",
        INDEXER_STORE_VALUES="false",
    )  # fmt: skip
    assert "EQUAL" in result.stdout
    assert "DIFFERENT" not in result.stdout
    assert result.returncode == 0, result.stderr


def test_demo_ignores_settings_that_have_no_effect_on_it() -> None:
    result = run_indexer("demo", "--seconds", "5", INDEXER_RESYNC_WORKERS="many", INDEXER_UNKNOWN="1")
    assert "EQUAL" in result.stdout
    assert result.returncode == 0, result.stderr


def test_demo_uses_the_log_settings_of_the_shell() -> None:
    result = run_indexer("demo", "--seconds", "5", INDEXER_LOG_LEVEL="info", INDEXER_LOG_FORMAT="json")
    assert '"event":"relay.connected"' in result.stderr
    assert "Status page: run `indexer demo --keep`" in result.stdout
    assert "Look up an account: did:plc:" in result.stdout
    assert result.returncode == 0


async def test_demo_can_keep_running_with_its_status_page_until_it_is_interrupted() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "indexer", "demo", "--seconds", "5", "--keep"),
        cwd=PROJECT,
        env=environment_without_settings(),
        stdout=PIPE,
    )
    try:
        assert process.stdout is not None
        address = None
        async with asyncio.timeout(100):
            while address is None:
                line = await process.stdout.readline()
                assert line, "the demo ended"
                address = re.search(r"Status page: (http://[\d.:]+/) \(Ctrl-C", line.decode())
        async with aiohttp.ClientSession(address[1]) as session, session.get("/status.json") as response:
            assert (await response.json())["ready"] is True
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(60):
            out, _ = await process.communicate()
        assert b"Look up an account: did:plc:" in out
        assert process.returncode == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
