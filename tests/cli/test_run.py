import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote, urlsplit

import asyncpg
import httpx
import pytest

from indexer.embedded import database as embedded_database
from tests.cli.command_line import PROJECT, Session, environment_without_settings, error_line
from tests.cli.stored_account import DID
from tests.database_checks import fetch

pytestmark = pytest.mark.slow

NO_DATABASE = "postgresql://me:hunter2@127.0.0.1:1/none"


@pytest.mark.usefixtures("short_samples")
def test_other_commands_require_the_schema_that_migrate_creates(
    session_without_database: Session, empty_database: str
) -> None:
    session = session_without_database
    session.configure(INDEXER_DATABASE_URL=empty_database)
    result = session("repo", DID)
    assert result.returncode == 2
    message = r"The database has no schema; this release needs \d{4}\. Run `indexer migrate`\."
    assert re.fullmatch(message, error_line(result))
    assert session("status").returncode == 3
    for _ in range(2):
        result = session("migrate")
        assert result.returncode == 0, result.stderr
    assert session("repo", DID).returncode == 4


def test_error_for_an_old_schema_names_both_versions(session_without_database: Session, database: str) -> None:
    asyncio.run(fetch(database, "update indexer.alembic_version set version_num = '0014'"))
    session_without_database.configure(INDEXER_DATABASE_URL=database)
    message = (
        r"The database schema is version 0014; this release needs 0\d\d\d\. "
        r"Versions before 0101 are of unreleased commits: use an empty database\."
    )
    for command in (
        ["migrate"],
        ["repo", DID],
        ["run"],
        ["run", "--no-migrate"],
        ["run", "--no-migrate", "--processes", "2"],
    ):
        result = session_without_database(*command)
        assert result.returncode == 2
        assert re.fullmatch(message, error_line(result))


def test_missing_native_core_that_the_settings_demand_is_reported_before_the_database_is_used(
    session_without_database: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "atproto_indexer_native", None)
    monkeypatch.delenv("INDEXER_DATABASE_URL")
    session_without_database.configure(
        INDEXER_TRACK="all", INDEXER_CORE="native", INDEXER_DATA_DIR=str(tmp_path / "data")
    )
    result = session_without_database("run")
    assert result.returncode == 2
    assert error_line(result).startswith("the native core is not installed: ")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("external", [True, False])
def test_data_directory_that_cannot_be_used_is_a_wrong_setting(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, external: bool
) -> None:
    data = tmp_path / "file"
    data.touch()
    if not external:
        monkeypatch.delenv("INDEXER_DATABASE_URL")
    session.configure(INDEXER_DATA_DIR=str(data), INDEXER_HTTP_BIND="127.0.0.1:0", INDEXER_TRACK="all")
    result = session("run")
    assert result.returncode == 2
    assert error_line(result).startswith("INDEXER_DATA_DIR: ")
    assert str(data) in result.stderr


def test_unreachable_database_is_reported_in_one_line(session_without_database: Session) -> None:
    session_without_database.configure(INDEXER_DATABASE_URL=NO_DATABASE)
    result = session_without_database("status")
    assert result.returncode == 1
    assert error_line(result).startswith("unreachable: the database postgresql://me@127.0.0.1:1/none is unavailable: ")
    assert "hunter2" not in result.stderr


@pytest.mark.parametrize("command", [("status",), ("migrate",), ("run",), ("run", "--processes", "2")], ids=" ".join)
def test_wrong_database_url_is_reported_in_one_line_that_names_setting_and_database(
    session_without_database: Session, command: tuple[str, ...], empty_database: str
) -> None:
    name = urlsplit(empty_database).path
    for url, reason in {
        "postgresql://me:hunter2@nowhere.invalid/mine": "its host name does not resolve",
        f"{empty_database}&foo=bar": 'unrecognized configuration parameter "foo"',
        empty_database.replace(name, "/mine"): 'database "mine" does not exist',
        empty_database.replace("//postgres@", "//nobody:hunter2@"): 'role "nobody" does not exist',
        f"{empty_database}&sslmode=maybe": "`sslmode` parameter must be one of",
    }.items():
        session_without_database.configure(INDEXER_DATABASE_URL=url)
        result = session_without_database(*command)
        assert result.returncode == 2
        address = url.replace(":hunter2", "")
        assert error_line(result).startswith(f"INDEXER_DATABASE_URL: cannot use the database {address}: {reason}")


@pytest.mark.parametrize("arguments", [[], pytest.param(["--processes", "2"], marks=pytest.mark.proof("daemon"))])
async def test_daemon_waits_for_a_database_that_is_down_until_a_signal(arguments: list[str]) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "indexer", "run", *arguments,
        env=environment_without_settings() | {"INDEXER_DATABASE_URL": NO_DATABASE},
        cwd=PROJECT, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        line = json.loads(await asyncio.wait_for(process.stderr.readline(), 60))
        assert (line["event"], line["level"]) == ("database.waiting", "warning")
        assert "postgresql://me@127.0.0.1:1/none" in line["error"]
        process.send_signal(signal.SIGTERM)
        rest = await asyncio.wait_for(process.stderr.read(), 60)
        assert await process.wait() == 0
        assert b"Traceback" not in rest
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def test_daemon_serves_health_checks_and_stops_on_a_signal(database: str, tmp_path: Path) -> None:
    settings = {
        "INDEXER_DATABASE_URL": database,
        "INDEXER_DATA_DIR": str(tmp_path),
        "INDEXER_TRACK": "all",
        "INDEXER_RELAYS": "ws://127.0.0.1:9",  # a port without a server
        "INDEXER_ALLOW_PRIVATE_HOSTS": "true",
        "INDEXER_HTTP_BIND": "127.0.0.1:0",
        "INDEXER_LOG_FORMAT": "json",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "indexer", "run"],
        cwd=PROJECT, env=environment_without_settings() | settings, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        health = next(line["health"] for line in map(json.loads, process.stderr) if line["event"] == "daemon.started")
        assert httpx.get(f"{health}/healthz").status_code == 200
        ready = httpx.get(f"{health}/readyz")
        assert (ready.status_code, "relay" in ready.json()["reason"]) == (503, True)
        assert "indexer_repos{" in httpx.get(f"{health}/metrics").text
        process.send_signal(signal.SIGTERM)
        *_, last = map(json.loads, process.stderr)
        assert process.wait(30) == 0
        assert last["event"] == "daemon.stopped"
        assert process.stdout.read() == ""


async def test_password_comes_from_the_url_or_from_a_variable_and_is_never_shown(
    session_without_database: Session, tmp_path: Path
) -> None:
    """The Compose files pass it in PGPASSWORD, so that the URL needs none."""
    session, password = session_without_database, "hunter2 /#@%"
    async with embedded_database(None, tmp_path) as dsn:
        connection = await asyncpg.connect(dsn)
        file = tmp_path / "postgres/data/pg_hba.conf"
        file.write_text(f"local all guarded scram-sha-256\n{file.read_text()}")
        await connection.execute(f"create role guarded login createrole password '{password}'")
        await connection.execute("grant create on database indexer to guarded; select pg_reload_conf()")
        await connection.close()
        session.configure(INDEXER_DATABASE_URL=dsn.replace("//postgres@", "//guarded:hunter2@"))
        refused = await session.run("migrate")
        assert refused.returncode == 2
        assert error_line(refused).endswith('password authentication failed for user "guarded"')
        assert "hunter2" not in refused.stderr
        session.configure(INDEXER_DATABASE_URL=dsn.replace("//postgres@", "//guarded@"), PGPASSWORD=password)
        migrated = await session.run("migrate")
        session.configure(INDEXER_DATABASE_URL=dsn.replace("//postgres@", f"//guarded:{quote(password, safe='')}@"))
        status = await session.run("status", "--json")
    assert migrated.returncode == 0, migrated.stderr
    assert "guarded" in json.loads(status.stdout)["database"]
    assert "hunter2" not in status.stdout


@pytest.mark.parametrize("options", [[], ["--processes", "2"]])
def test_port_in_use_is_found_before_the_schema_is_upgraded(
    session_without_database: Session, empty_database: str, tmp_path: Path, options: list[str]
) -> None:
    session_without_database.configure(INDEXER_DATABASE_URL=empty_database, INDEXER_DATA_DIR=str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        session_without_database.configure(INDEXER_HTTP_BIND=f"127.0.0.1:{port}", INDEXER_RELAYS="ws://127.0.0.1:9")
        result = session_without_database("run", *options)
    assert result.returncode == 2
    assert error_line(result).startswith(f"INDEXER_HTTP_BIND: cannot listen at 127.0.0.1:{port}: another process uses")
    [(table,)] = asyncio.run(fetch(empty_database, "select to_regclass('indexer.repo')"))
    assert table is None
