"""`indexer doctor` on a sound system, and with each thing broken."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from indexer.app.settings import Settings
from indexer.cli.doctor import (
    Finding,
    Level,
    check_disk,
    clock_finding,
    database_setting_findings,
    one_is_enough,
    run_checks,
)
from indexer.db.requirements import DatabaseFacts, SchemaState
from indexer.demo.local_plc import LocalPlc
from indexer.net.http.checked_connector import DnsResolver
from tests.cli.command_line import Session
from tests.daemon_harness import settings_for
from tests.database_checks import fetch
from tests.db.change_log_helpers import connected
from tests.faulty_network import Fault, FaultyNetwork
from tests.local_jetstream import local_jetstream
from tests.net.identity.name_server import NameServer

CLOSED_PORT = "127.0.0.1:1"
GOOD = {
    "server_version": "18.1",
    "fsync": "on",
    "full_page_writes": "on",
    "autovacuum": "on",
    "synchronous_commit": "on",
    "max_connections": "100",
    "superuser_reserved_connections": "3",
}
SHORT = {"CHECK_SECONDS": 2.0, "DATABASE_SECONDS": 20.0, "CONNECT_SECONDS": 0.5, "MESSAGE_SECONDS": 0.5}


@pytest.fixture
async def network(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FaultyNetwork]:
    """Run a network, and let the checks wait a short time."""
    for name, seconds in SHORT.items():
        monkeypatch.setattr(f"indexer.cli.doctor.{name}", seconds)
    async with FaultyNetwork() as network:
        network.create_account("ada.test").create("com.example.note", {"text": "hello"})
        yield network


async def findings(network: FaultyNetwork, dsn: str, directory: Path, **changes: Any) -> dict[str, Finding]:
    """Return the last finding of each check."""
    given = {"relays": network.relay_url, "plc_url": network.plc_url, "database_url": dsn} | changes
    relay, plc = given.pop("relays"), given.pop("plc_url")
    settings = settings_for(relay, plc, directory, contact="https://example.com", **given)
    return {finding.check: finding for finding in await run_checks(settings)}


@asynccontextmanager
async def silent_server() -> AsyncIterator[str]:
    """Accept connections, and send nothing."""
    connections: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: connections.append(writer), "127.0.0.1", 0)
    async with server:
        yield f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for connection in connections:
            connection.close()


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
    )
    async with NameServer() as server:
        session_without_database.configure(INDEXER_DNS_SERVERS="{}:{}".format(*server.address))
        with capture_logs():  # a command within the test process logs to stdout
            result = await session_without_database.run("doctor", "--json")
    report = json.loads(result.stdout)
    assert (result.returncode, report["ok"]) == (0, True), result.stdout
    levels = {check["check"]: check["level"] for check in report["checks"]}
    assert levels.keys() >= {"settings", "database", "schema", "disk", "clock", "relay", "directory", "dns"}
    bad = {check for check, level in levels.items() if level != "ok"}
    assert bad <= {"contact", "private hosts", "schema", "disk"}, result.stdout
    session_without_database.configure(INDEXER_RESYNC_WORKERS="many")
    result = await session_without_database.run("doctor")
    assert result.returncode == 1
    assert result.stdout.startswith("fail  settings: INDEXER_RESYNC_WORKERS: 'many' is not allowed")


@pytest.mark.slow
async def test_doctor_reports_a_database_that_refuses_connections_once(network: FaultyNetwork, tmp_path: Path) -> None:
    found = await findings(network, f"postgresql://{CLOSED_PORT}/none", tmp_path)
    assert found["database"].level is Level.FAIL
    assert "INDEXER_DATABASE_URL" in found["database"].action
    assert [check for check, finding in found.items() if finding.level is Level.FAIL] == ["database"]
    assert found["relay"].level is Level.OK


@pytest.mark.slow
async def test_doctor_reports_a_missing_an_older_and_a_newer_schema(
    network: FaultyNetwork, empty_database: str, database: str, tmp_path: Path
) -> None:
    found = await findings(network, empty_database, tmp_path)
    assert found["schema"].level is Level.WARN
    assert "indexer migrate" in found["schema"].action
    await fetch(database, "update indexer.alembic_version set version_num = '9999'")
    found = await findings(network, database, tmp_path)
    assert found["schema"].level is Level.WARN
    assert "and can use it" in found["schema"].found
    await fetch(database, "insert into indexer.stored_setting values ('oldest_compatible_schema', '9999')")
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
    other, no_directory = LocalPlc(), network.pdses[0].url
    await other.start()
    found = await findings(network, database, tmp_path, plc_url=f"{no_directory},{other.url}")
    assert found["directory"].level is Level.OK, "another directory answers"
    await other.stop()
    found = await findings(network, database, tmp_path, plc_url=no_directory)
    assert f"404 from {no_directory}" in found["directory"].found


@pytest.mark.slow
async def test_doctor_checks_jetstreams_in_place_of_relays(
    network: FaultyNetwork, database: str, tmp_path: Path
) -> None:
    async with local_jetstream(network) as jetstream:
        urls = f"{network.plc_url},{jetstream.ws_url}"
        found = await findings(network, database, tmp_path, upstream="jetstream", jetstreams=urls)
    assert "relay" not in found
    assert found["jetstream"].level is Level.OK, "one of them opened the stream"
    assert jetstream.queries
    for settings in ({"upstream": "jetstream"}, {"start": "live"}):  # then as its cursor says
        found = await findings(network, database, tmp_path, jetstreams=network.plc_url, **settings)
        assert (found["jetstream"].level, "HTTP 404" in found["jetstream"].found) == (Level.FAIL, True)
        assert "relay" not in found
        async with connected(database) as connection:
            insert = "insert into indexer.cursor (relay, shard, seq) values ('jetstream', '0/1', 1)"
            await connection.execute(f"{insert} on conflict do nothing")


@pytest.mark.slow
async def test_doctor_reports_name_servers_that_do_not_answer(
    network: FaultyNetwork, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indexer.cli.doctor.DnsResolver", partial(DnsResolver, timeout=0.5))
    found = await findings(
        network,
        database,
        tmp_path,
        allow_private_hosts="false",
        relays="wss://relay.example",
        plc_url="https://plc.example",
        dns_servers=CLOSED_PORT,
    )
    assert found["dns"].level is Level.FAIL
    assert found["directory"].level is Level.FAIL
    async with NameServer() as server:
        servers, server.failing["TXT"] = "{}:{}".format(*server.address), None
        found = await findings(network, database, tmp_path, dns_servers=servers)
        assert (found["dns"].level, "INDEXER_DNS_SERVERS" in found["dns"].action) == (Level.FAIL, True)
        server.failing = {}
        assert (await findings(network, database, tmp_path, dns_servers=servers))["dns"].level is Level.OK


@pytest.mark.parametrize(
    ("changes", "shard", "levels"),
    [
        ({}, "0/1", {}),
        ({"fsync": "off"}, "0/1", {"fsync": Level.FAIL}),
        ({"full_page_writes": "off"}, "0/1", {"full_page_writes": Level.FAIL}),
        ({"autovacuum": "off"}, "0/1", {"autovacuum": Level.FAIL}),
        ({"synchronous_commit": "off"}, "0/1", {"synchronous_commit": Level.WARN}),
        ({"max_connections": "12"}, "0/1", {"max_connections": Level.WARN}),
        ({}, "0/8", {"max_connections": Level.WARN}),
    ],
)
def test_setting_of_postgres_that_may_lose_data_is_reported(
    changes: dict[str, str], shard: str, levels: dict[str, Level]
) -> None:
    schema = SchemaState("0019", "0019", is_usable=True)
    facts = DatabaseFacts("postgresql:///any", GOOD | changes, 0.0, schema, None)
    found = database_setting_findings(facts, Settings(shard=shard))
    assert {finding.check: finding.level for finding in found} == levels
    assert all(finding.action for finding in found)


def test_clock_that_differs_is_reported() -> None:
    found = [clock_finding("host", ahead, 300.0) for ahead in (1.0, -30.0, 301.0)]
    assert [finding.level for finding in found] == [Level.OK, Level.WARN, Level.FAIL]
    assert [bool(finding.action) for finding in found] == [False, True, True]


def test_host_that_fails_is_a_warning_while_another_one_works() -> None:
    good, bad = Finding("relay", Level.OK, "one"), Finding("relay", Level.FAIL, "two", "Check it.")
    assert [finding.level for finding in one_is_enough([good, bad])] == [Level.OK, Level.WARN]
    assert [finding.level for finding in one_is_enough([bad])] == [Level.FAIL]


def test_little_disk_space_and_a_directory_without_access_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels = []
    for free in (10**8, 5 * 10**9, 10**12):
        monkeypatch.setattr("shutil.disk_usage", lambda _, free=free: SimpleNamespace(free=free, total=10**13))
        levels.append(check_disk(tmp_path / "not" / "there")[0].level)
    assert levels == [Level.FAIL, Level.WARN, Level.OK]
    (tmp_path / "file").touch()
    with pytest.raises(PermissionError):
        check_disk(tmp_path / "file" / "data")
