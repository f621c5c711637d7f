"""The demo is self-contained: settings of the user do not change it."""

import asyncio
import json
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import aiohttp
import pytest

from tests.cli.command_line import PROJECT, environment_without_settings
from tests.telemetry.log_events import listed_events

SETTINGS_FILE = "collections = ['com.example.none']\nshard = '1/2'\n"
SETTINGS = {
    "INDEXER_CONFIG": "missing.toml", "INDEXER_DATABASE_URL": "postgresql://127.0.0.1:1/none",
    "INDEXER_RELAYS": "wss://relay.example,wss://other.example", "INDEXER_UPSTREAM": "pds",
    "INDEXER_COLLECTIONS": "app.bsky.actor.profile,com.example.*", "INDEXER_TRACK": "listed",
    "INDEXER_SHARD": "1/2", "INDEXER_ROLES": "resync", "INDEXER_RESYNC_WORKERS": "many", "INDEXER_UNKNOWN": "1",
    "INDEXER_DATA_DIR": "/dev/null/none", "INDEXER_HTTP_BIND": "192.0.2.1:1",
    "INDEXER_REPO_BYTES": "1", "INDEXER_STORE_VALUES": "false",
    "INDEXER_LOG_LEVEL": "debug", "INDEXER_LOG_FORMAT": "json",
}  # fmt: skip
"""Settings that have no effect, and those of the log, which have one."""


async def lines_until(process: Process, text: str) -> list[str]:
    """Return the lines on stdout up to the one that contains the text."""
    assert process.stdout is not None
    lines: list[str] = []
    async with asyncio.timeout(240):
        while not lines or text not in lines[-1]:
            line = await process.stdout.readline()
            assert line, lines
            lines.append(line.decode().strip())
    return lines


@pytest.mark.slow
async def test_demo_compares_its_own_network_and_keeps_running_whatever_the_settings_of_the_user_are(
    tmp_path: Path,
) -> None:
    file, log = tmp_path / "settings.toml", tmp_path / "log"
    file.write_text(SETTINGS_FILE)
    command = ("-m", "indexer", "demo", "--seconds", "5", "--keep", "--config", str(file))
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, cwd=PROJECT, env=environment_without_settings() | SETTINGS,
            stdout=PIPE, stderr=stderr,
        )  # fmt: skip
    try:
        text = "\n".join(await lines_until(process, "Look up an account: did:plc:"))
        assert "EQUAL" in text
        assert "DIFFERENT" not in text
        address = re.search(r"Status page: (http://[\d.:]+/) \(Ctrl-C", text)
        assert address
        async with aiohttp.ClientSession(address[1]) as session, session.get("/status.json") as response:
            assert (await response.json())["ready"] is True
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 60) == 0
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        events = {line["event"] for line in lines if line["level"] != "debug"}
        assert "relay.connected" in events
        assert events <= listed_events().keys(), "also events of libraries"
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
