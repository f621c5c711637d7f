"""`indexer doctor` on a sound system, and with each thing broken."""

import asyncio
import json
import resource
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from indexer.cli import doctor_checks
from indexer.cli.doctor_checks import (
    Finding,
    Level,
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
from indexer.errors import SettingsError
from indexer.interpreter import InterpreterBuild
from indexer.localnet.http_server import Fault
from indexer.localnet.local_network import LocalNetwork
from indexer.settings import Settings
from indexer.store import Store
from indexer.store.schema_version import SchemaState
from indexer.store.server_facts import ServerFacts, load_server_facts
from indexer.sync.events import InfoEvent, StreamError
from indexer.sync.plans import Batch, Cursor
from indexer.sync.shard import Placement
from tests.cli.command_line import PROJECT, environment_without_settings
from tests.daemon_harness import settings_for
from tests.native_module import native_module
from tests.store.test_migrate import role, with_user

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
CHECKS = {
    "settings",
    "interpreter",
    "core",
    "database",
    "schema",
    "fsync",
    "full_page_writes",
    "autovacuum",
    "synchronous_commit",
    "jit",
    "shared_buffers",
    "max_wal_size",
    "max_connections",
    "disk",
    "open files",
    "clock",
    "relay",
    "cursor",
    "directory",
    "dns",
    "dns txt",
}


@pytest.fixture
def hidden_native_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the import of the native core fail, as if it was not installed."""
    monkeypatch.setitem(sys.modules, "atproto_indexer_native", None)


@pytest.fixture
async def network() -> AsyncIterator[LocalNetwork]:
    async with LocalNetwork() as network:
        network.create_account("ada.test").create("com.example.note", {"text": "hello"})
        yield network


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "MESSAGE_TIMEOUT", 0.5)


async def findings(network: LocalNetwork, dsn: str, directory: Path, **changes: Any) -> dict[str, Finding]:
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


def facts(
    settings: Mapping[str, str] | None = None, placement: Placement = Placement.PLAIN, **sizes: int
) -> ServerFacts:
    all_sizes = {"shared_buffers": 2**30, "max_wal_size": 4 * 2**30} | sizes
    schema = SchemaState("0019", "0019", None)
    return ServerFacts("postgresql:///any", GOOD | dict(settings or {}), all_sizes, 0.0, schema, {}, placement)


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_doctor_finds_nothing_wrong_with_a_new_installation(network: LocalNetwork, tmp_path: Path) -> None:
    """The embedded Postgres, one JSON document on stdout, exit code 0; afterwards the text, with the relay stopped."""
    environment = environment_without_settings() | {
        "INDEXER_DATA_DIR": str(tmp_path),
        "INDEXER_RELAYS": network.relay_url,
        "INDEXER_PLC_URL": network.plc_url,
        "INDEXER_ALLOW_PRIVATE_HOSTS": "true",
        "INDEXER_HANDLE_RATE": "0",
    }

    async def doctor(*options: str) -> tuple[int | None, str]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "indexer", "doctor", *options,
            cwd=PROJECT, env=environment, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        output, _ = await asyncio.wait_for(process.communicate(), 200)
        return process.returncode, output.decode()

    code, output = await doctor("--json")
    report = json.loads(output)
    assert (code, report["ok"]) == (0, True), output
    levels = {check["check"]: check["level"] for check in report["checks"]}
    assert levels.keys() >= CHECKS
    assert {check for check, level in levels.items() if level != "ok"} <= {
        "contact", "private hosts", "schema", "jit", "disk", "shared_buffers", "interpreter", "core",
    }, output  # fmt: skip
    await network.relay.stop()
    code, output = await doctor()
    assert code == 1
    [line] = [line for line in output.splitlines() if line.startswith("fail")]
    assert line.startswith(f"fail  relay: {network.relay_url}: ")
    assert "Check INDEXER_RELAYS" in line
    assert "\x1b" not in output
    environment["INDEXER_RESYNC_WORKERS"] = "many"
    code, output = await doctor()
    assert code == 1
    assert output.startswith("fail  settings: INDEXER_RESYNC_WORKERS: 'many' is not allowed")


@pytest.mark.slow
async def test_doctor_reports_a_database_that_refuses_connections_once(network: LocalNetwork, tmp_path: Path) -> None:
    found = await findings(network, f"postgresql://{CLOSED_PORT}/none", tmp_path)
    assert found["database"].level is Level.FAIL
    assert "INDEXER_DATABASE_URL" in str(found["database"].action)
    assert [check for check, finding in found.items() if finding.level is Level.FAIL] == ["database"]
    assert found["relay"].level is Level.OK


@pytest.mark.slow
async def test_doctor_reports_a_missing_an_older_and_a_newer_schema(
    network: LocalNetwork, empty_database: str, database: str, tmp_path: Path
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
async def test_doctor_reports_a_role_without_privileges(network: LocalNetwork, database: str, tmp_path: Path) -> None:
    async with role(database) as name:
        found = await findings(network, with_user(database, name), tmp_path)
        assert found["database"].level is Level.FAIL
        assert "permission denied" in found["database"].found
        connection = await asyncpg.connect(database)
        await connection.execute(
            f"grant usage on schema indexer to {name}; grant select on all tables in schema indexer to {name}"
        )
        await connection.close()
        found = await findings(network, with_user(database, name), tmp_path)
    assert found["schema"].level is Level.FAIL
    assert "needs the privilege" in found["schema"].found


@pytest.mark.slow
async def test_doctor_reports_a_directory_and_a_relay_that_fail_or_hang(
    network: LocalNetwork, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network.plc.faults.append(Fault("", times=None, status=502))
    monkeypatch.setattr(doctor_checks, "CONNECT_TIMEOUT", 0.5)
    monkeypatch.setattr(doctor_checks, "TIMEOUT", 2.0)
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
    network: LocalNetwork, database: str, store: Store, tmp_path: Path
) -> None:
    await store.write(Batch(cursor=Cursor(network.relay_url, "0/1", network.relay.seq, None)))
    found = await findings(network, database, tmp_path)
    assert found["cursor"].level is Level.OK
    assert str(network.relay.seq) in found["cursor"].found
    await store.write(Batch(cursor=Cursor(network.relay_url, "0/1", network.relay.seq + 1_000, None)))
    found = await findings(network, database, tmp_path)
    assert found["cursor"].level is Level.WARN
    assert "FutureCursor" in found["cursor"].found


@pytest.mark.slow
async def test_doctor_compares_no_cursor_that_those_of_later_shards_have_replaced(
    network: LocalNetwork, database: str, store: Store
) -> None:
    """The row of the single shard stays when the number of shards is raised."""
    for shard, seq in (("0/1", 5), ("0/2", 90), ("1/2", 80)):
        await store.write(Batch(cursor=Cursor(network.relay_url, shard, seq, None)))
    assert (await load_server_facts(database)).cursors == {network.relay_url: 80}


@pytest.mark.slow
async def test_doctor_reports_name_servers_that_do_not_answer(
    network: LocalNetwork, database: str, tmp_path: Path
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


def test_relay_that_lost_messages_or_its_sequence_is_a_warning() -> None:
    relay = "wss://relay.example"
    outdated = cursor_finding(relay, 5, InfoEvent("OutdatedCursor", ""))
    refused = cursor_finding(relay, 5, StreamError("FutureCursor", ""))
    assert outdated.level is refused.level is Level.WARN
    assert "OutdatedCursor" in outdated.found


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [
        ("fsync", "off", Level.FAIL),
        ("full_page_writes", "off", Level.FAIL),
        ("autovacuum", "off", Level.FAIL),
        ("synchronous_commit", "off", Level.WARN),
        ("jit", "on", Level.WARN),
        ("max_connections", "12", Level.FAIL),
    ],
)
def test_setting_of_postgres_that_matters_is_reported_with_what_to_do(name: str, value: str, level: Level) -> None:
    found = {finding.check: finding for finding in database_setting_findings(facts({name: value}), Settings())}
    assert (found[name].level, found[name].action is None) == (level, False)
    assert {check for check, finding in found.items() if finding.level is not Level.OK} == {name}


def test_small_buffers_and_connections_for_all_shards_are_warnings() -> None:
    settings = Settings(shard="0/8")
    found = database_setting_findings(facts(shared_buffers=2**20, max_wal_size=2**20), settings)
    warnings = {finding.check for finding in found if finding.level is Level.WARN}
    assert warnings == {"shared_buffers", "max_wal_size", "max_connections"}


@pytest.mark.parametrize(
    ("status", "gibibytes", "levels"),
    [("off", 4, [Level.WARN]), ("on", 4, [Level.OK]), ("unknown", 4, [Level.OK]), ("off", 1, [])],
)
def test_huge_pages_are_recommended_for_large_buffers(status: str, gibibytes: int, levels: list[Level]) -> None:
    server = facts({"huge_pages_status": status}, shared_buffers=gibibytes * 2**30)
    found = database_setting_findings(server, Settings())
    assert [finding.level for finding in found if finding.check == "huge_pages_status"] == levels


@pytest.mark.parametrize(
    ("roles", "placement", "connections"),
    [
        ("live,resync", Placement.PLAIN, 16),
        ("resync", Placement.PLAIN, 14),
        ("live,resync,feed", Placement.PLAIN, 18),
        ("live,resync", Placement.DISTRIBUTED, 16),
        ("live,resync,feed", Placement.DISTRIBUTED, 18),
    ],
)
def test_needed_connections_depend_on_roles_and_placement(roles: str, placement: Placement, connections: int) -> None:
    def finding(allowed: int) -> Finding:
        limits = {"max_connections": str(allowed + 3), "superuser_reserved_connections": "3"}
        found = database_setting_findings(facts(limits, placement), Settings(roles=roles))
        return next(finding for finding in found if finding.check == "max_connections")

    assert finding(connections).level is Level.OK
    assert f"a process needs {connections}" in finding(connections).found
    assert finding(connections - 1).level is Level.FAIL


def test_interpreter_without_profile_guided_optimization_is_a_warning() -> None:
    build = InterpreterBuild("CPython 3.11.7", "GCC 12.2.0", profile_guided=False, link_time=False)
    finding = interpreter_finding(build)
    assert (finding.level, finding.action is None) == (Level.WARN, False)
    assert "up to 1.9 times slower" in finding.found
    for unknown_or_fast in (None, True):
        assert interpreter_finding(build._replace(profile_guided=unknown_or_fast)).level is Level.OK


@pytest.mark.usefixtures("hidden_native_core")
def test_missing_native_core_is_a_warning_unless_the_python_core_was_chosen() -> None:
    assert core_finding(Settings(core="python")).level is Level.OK
    finding = core_finding(Settings(core="auto", verify_threads=3))
    assert (finding.level, "[native]" in str(finding.action)) == (Level.WARN, True)
    with pytest.raises(SettingsError, match="not installed"):
        core_finding(Settings(core="native", verify_threads=3))


def test_native_core_is_reported_with_its_version_and_threads() -> None:
    version = native_module().__version__
    finding = core_finding(Settings(core="native", verify_threads=3))
    assert (finding.level, finding.found) == (Level.OK, f"native, version {version}; threads: 3")


def test_clocks_that_differ_are_reported() -> None:
    assert clock_finding("host", 1.0, 300.0).level is Level.OK
    assert clock_finding("host", -30.0, 300.0).level is Level.WARN
    assert clock_finding("host", 301.0, 300.0).level is Level.FAIL


def test_little_disk_space_and_a_directory_without_access_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels = []
    for free in (10**8, 5 * 10**9, 10**12):
        usage = shutil_usage(free)
        monkeypatch.setattr("shutil.disk_usage", lambda _, usage=usage: usage)
        levels.append(disk_finding(tmp_path / "not" / "there").level)
    assert levels == [Level.FAIL, Level.WARN, Level.OK]
    (tmp_path / "file").touch()
    with pytest.raises(PermissionError):
        disk_finding(tmp_path / "file" / "data")


def shutil_usage(free: int) -> Any:
    return type("usage", (), {"free": free, "total": 10**13})


def test_limit_of_open_files_below_the_need_of_a_process_is_reported() -> None:
    assert open_files_finding(256, Settings()).level is Level.FAIL
    assert open_files_finding(65_536, Settings()).level is Level.OK
    assert open_files_finding(resource.RLIM_INFINITY, Settings()).level is Level.OK
