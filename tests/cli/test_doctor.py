"""`indexer doctor` on a sound system, and with each thing broken."""

import asyncio
import json
import resource
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import asyncpg
import pytest

from indexer.app.interpreter import InterpreterBuild
from indexer.app.settings import Settings
from indexer.cli.doctor import (
    Finding,
    Level,
    Timeouts,
    clock_finding,
    core_finding,
    cursor_finding,
    database_setting_findings,
    disk_finding,
    interpreter_finding,
    one_is_enough,
    open_files_finding,
    run_checks,
)
from indexer.db import Database
from indexer.db.requirements import DatabaseFacts, SchemaState, load_database_facts
from indexer.errors import SettingsError
from indexer.sync.changes import Batch
from indexer.sync.events import InfoEvent, StreamError
from indexer.sync.shard import PLAIN, Layout
from indexer.sync.stream import Cursor
from tests.cli.command_line import Session
from tests.daemon_harness import settings_for
from tests.faulty_network import Fault, FaultyNetwork

CLOSED_PORT = "127.0.0.1:1"
GOOD = {
    "server_version": "18.1",
    "fsync": "on",
    "full_page_writes": "on",
    "autovacuum": "on",
    "synchronous_commit": "on",
    "jit": "off",
    "huge_pages_status": "on",
    "max_connections": "100",
    "superuser_reserved_connections": "3",
}
SHORT = Timeouts(check=2.0, database=20.0, connect=0.5, message=0.5)


@pytest.fixture
async def network() -> AsyncIterator[FaultyNetwork]:
    async with FaultyNetwork() as network:
        network.create_account("ada.test").create("com.example.note", {"text": "hello"})
        yield network


async def findings(network: FaultyNetwork, dsn: str, directory: Path, **changes: Any) -> dict[str, Finding]:
    """Return the last finding of each check."""
    given = {"relays": network.relay_url, "plc_url": network.plc_url, "database_url": dsn} | changes
    relay, plc = given.pop("relays"), given.pop("plc_url")
    settings = settings_for(relay, plc, directory, contact="https://example.com", **given)
    return {finding.check: finding for finding in await run_checks(settings, timeouts=SHORT)}


@asynccontextmanager
async def silent_server() -> AsyncIterator[str]:
    """Accept connections, and send nothing."""
    connections: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: connections.append(writer), "127.0.0.1", 0)
    async with server:
        yield f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for connection in connections:
            connection.close()


def facts(settings: Mapping[str, str] | None = None, layout: Layout = PLAIN, **sizes: Any) -> DatabaseFacts:
    all_sizes = {"shared_buffers": 2**30, "max_wal_size": 4 * 2**30} | sizes
    schema = SchemaState("0019", "0019", is_usable=True)
    return DatabaseFacts("postgresql:///any", GOOD | dict(settings or {}), all_sizes, 0.0, schema, None, {}, layout)


@pytest.mark.slow
async def test_doctor_finds_nothing_wrong_with_a_new_installation(
    network: FaultyNetwork, session_without_database: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the embedded Postgres; then with a wrong setting."""
    monkeypatch.delenv("INDEXER_DATABASE_URL")
    session_without_database.configure(
        INDEXER_DATA_DIR=str(tmp_path),
        INDEXER_RELAYS=network.relay_url,
        INDEXER_PLC_URL=network.plc_url,
        INDEXER_ALLOW_PRIVATE_HOSTS="true",
        INDEXER_HANDLE_RATE="0",
    )
    result = await session_without_database.run("doctor", "--json")
    report = json.loads(result.stdout)
    assert (result.returncode, report["ok"]) == (0, True), result.stdout
    levels = {check["check"]: check["level"] for check in report["checks"]}
    assert len(levels) > 20
    assert {check for check, level in levels.items() if level != "ok"} <= {
        "contact", "private hosts", "schema", "jit", "disk", "shared_buffers", "interpreter", "core",
    }, result.stdout  # fmt: skip
    session_without_database.configure(INDEXER_RESYNC_WORKERS="many")
    result = await session_without_database.run("doctor")
    assert result.returncode == 1
    assert result.stdout.startswith("fail  settings: INDEXER_RESYNC_WORKERS: 'many' is not allowed")


@pytest.mark.slow
async def test_doctor_reports_a_database_that_refuses_connections_once(network: FaultyNetwork, tmp_path: Path) -> None:
    found = await findings(network, f"postgresql://{CLOSED_PORT}/none", tmp_path)
    assert found["database"].level is Level.FAIL
    assert "INDEXER_DATABASE_URL" in str(found["database"].action)
    assert [check for check, finding in found.items() if finding.level is Level.FAIL] == ["database"]
    assert found["relay"].level is Level.OK


@pytest.mark.slow
async def test_doctor_reports_a_missing_an_older_and_a_newer_schema(
    network: FaultyNetwork, empty_database: str, database: str, tmp_path: Path
) -> None:
    found = await findings(network, empty_database, tmp_path)
    assert found["schema"].level is Level.WARN
    assert "indexer migrate" in str(found["schema"].action)
    connection = await asyncpg.connect(database)
    await connection.execute("update indexer.alembic_version set version_num = '9999'")
    found = await findings(network, database, tmp_path)
    assert found["schema"].level is Level.WARN
    assert "which this release can use" in found["schema"].found
    await connection.execute("insert into indexer.stored_setting values ('oldest_compatible_schema', '9999')")
    await connection.close()
    found = await findings(network, database, tmp_path)
    assert found["schema"].level is Level.FAIL
    assert "version 9999" in found["schema"].found


@pytest.mark.slow
async def test_doctor_reports_a_directory_and_a_relay_that_fail_or_hang(
    network: FaultyNetwork, database: str, tmp_path: Path
) -> None:
    network.plc.faults.append(Fault("", times=None, status=502))
    async with silent_server() as relay:
        found = await findings(network, database, tmp_path, relays=relay)
    assert found["directory"].level is Level.FAIL
    assert "502" in found["directory"].found
    assert found["relay"].level is Level.FAIL
    assert relay in found["relay"].found
    assert network.plc.faults[0].fired
    found = await findings(network, database, tmp_path, relays=network.plc_url.replace("http", "ws"))
    assert "HTTP 404" in found["relay"].found
    found = await findings(network, database, tmp_path, plc_url=f"{network.plc_url},{network.pdses[0].url}")
    assert found["directory"].level is Level.OK, "another directory answers"


@pytest.mark.slow
async def test_doctor_compares_the_stored_cursor_with_the_relay(
    network: FaultyNetwork, database: str, db: Database, tmp_path: Path
) -> None:
    await db.write(Batch(cursor=Cursor(network.relay_url, "0/1", network.relay.seq, None)))
    found = await findings(network, database, tmp_path)
    assert found["cursor"].level is Level.OK
    assert str(network.relay.seq) in found["cursor"].found
    await db.write(Batch(cursor=Cursor(network.relay_url, "0/1", network.relay.seq + 1_000, None)))
    found = await findings(network, database, tmp_path)
    assert found["cursor"].level is Level.WARN
    assert "FutureCursor" in found["cursor"].found
    for shard, seq in (("0/2", 9_000), ("1/2", 8_000)):  # the row of the single shard stays when there are more shards
        await db.write(Batch(cursor=Cursor(network.relay_url, shard, seq, None)))
    assert (await load_database_facts(database)).cursors == {network.relay_url: 8_000}


@pytest.mark.slow
async def test_doctor_reports_name_servers_that_do_not_answer(
    network: FaultyNetwork, database: str, tmp_path: Path
) -> None:
    found = await findings(
        network,
        database,
        tmp_path,
        allow_private_hosts="false",
        relays="wss://relay.example",
        plc_url="https://plc.example",
        dns_servers=CLOSED_PORT,
        handle_rate="1",
    )
    assert found["dns"].level is Level.FAIL
    assert found["dns txt"].level is Level.WARN
    assert found["directory"].level is Level.FAIL


def test_host_that_fails_is_a_warning_while_another_one_works() -> None:
    good, bad = Finding("relay", Level.OK, "one"), Finding("relay", Level.FAIL, "two", "Check it.")
    assert [finding.level for finding in one_is_enough([good, bad])] == [Level.OK, Level.WARN]
    assert [finding.level for finding in one_is_enough([bad])] == [Level.FAIL]


def test_what_may_lose_messages_or_be_slow_is_reported_with_what_to_do() -> None:
    slow = InterpreterBuild("CPython 3.11.7", "GCC 12.2.0", profile_guided=False, link_time=False)
    expected = [
        (cursor_finding("wss://relay.example", 5, InfoEvent("OutdatedCursor", "")), Level.WARN),
        (cursor_finding("wss://relay.example", 5, StreamError("FutureCursor", "")), Level.WARN),
        (cursor_finding("wss://relay.example", 5, None), Level.OK),
        (clock_finding("host", 1.0, 300.0), Level.OK),
        (clock_finding("host", -30.0, 300.0), Level.WARN),
        (clock_finding("host", 301.0, 300.0), Level.FAIL),
        (open_files_finding(256, Settings()), Level.FAIL),
        (open_files_finding(65_536, Settings()), Level.OK),
        (open_files_finding(resource.RLIM_INFINITY, Settings()), Level.OK),
        (interpreter_finding(slow), Level.WARN),
        (interpreter_finding(slow._replace(profile_guided=None)), Level.OK),
        (interpreter_finding(slow._replace(profile_guided=True)), Level.OK),
        (core_finding(Settings(core="python")), Level.OK),
    ]
    assert [finding.level for finding, _ in expected] == [level for _, level in expected]
    assert all((finding.action is None) == (finding.level is Level.OK) for finding, _ in expected)


@pytest.mark.parametrize(
    ("changes", "sizes", "shard", "levels"),
    [
        ({"fsync": "off"}, {}, "0/1", {"fsync": Level.FAIL}),
        ({"full_page_writes": "off"}, {}, "0/1", {"full_page_writes": Level.FAIL}),
        ({"autovacuum": "off"}, {}, "0/1", {"autovacuum": Level.FAIL}),
        ({"synchronous_commit": "off", "jit": "on"}, {}, "0/1", {"synchronous_commit": Level.WARN, "jit": Level.WARN}),
        ({"max_connections": "12"}, {}, "0/1", {"max_connections": Level.FAIL}),
        ({}, {}, "0/8", {"max_connections": Level.WARN}),
        ({}, {"shared_buffers": 2**20, "max_wal_size": 2**20}, "0/1",
         {"shared_buffers": Level.WARN, "max_wal_size": Level.WARN}),
        ({"huge_pages_status": "off"}, {"shared_buffers": 4 * 2**30}, "0/1", {"huge_pages_status": Level.WARN}),
        ({"huge_pages_status": "off"}, {}, "0/1", {}),
    ],
)  # fmt: skip
def test_setting_of_postgres_that_matters_is_reported(
    changes: dict[str, str], sizes: dict[str, Any], shard: str, levels: dict[str, Level]
) -> None:
    found = database_setting_findings(facts(changes, **sizes), Settings(shard=shard))
    bad = {finding.check: finding for finding in found if finding.level is not Level.OK}
    assert {check: finding.level for check, finding in bad.items()} == levels
    assert all(finding.action for finding in bad.values())


@pytest.mark.parametrize(
    ("roles", "layout", "connections"),
    [
        ("live,resync", PLAIN, 15),
        ("resync", PLAIN, 14),
        ("live,resync,feed", Layout(parts=8, commit_numbers=False), 18),
    ],
)
def test_needed_connections_depend_on_roles_and_layout(roles: str, layout: Layout, connections: int) -> None:
    levels = []
    for allowed in (connections, connections - 1):
        limits = {"max_connections": str(allowed + 3), "superuser_reserved_connections": "3"}
        found = database_setting_findings(facts(limits, layout), Settings(roles=roles))
        levels += [finding.level for finding in found if finding.check == "max_connections"]
    assert levels == [Level.OK, Level.FAIL]


def test_core_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "atproto_indexer_native", None)  # as if it was not installed
    finding = core_finding(Settings(core="auto", verify_threads=3))
    assert (finding.level, "[native]" in str(finding.action)) == (Level.WARN, True)
    with pytest.raises(SettingsError, match="not installed"):
        core_finding(Settings(core="native", verify_threads=3))


def test_little_disk_space_and_a_directory_without_access_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels = []
    for free in (10**8, 5 * 10**9, 10**12):
        monkeypatch.setattr("shutil.disk_usage", lambda _, free=free: SimpleNamespace(free=free, total=10**13))
        levels.append(disk_finding(tmp_path / "not" / "there").level)
    assert levels == [Level.FAIL, Level.WARN, Level.OK]
    (tmp_path / "file").touch()
    with pytest.raises(PermissionError):
        disk_finding(tmp_path / "file" / "data")
