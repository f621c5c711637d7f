"""The database, the directory, the relay or a PDS fails: readiness, health, metrics, and the number of log lines."""

import logging
from collections import Counter
from collections.abc import Iterable, MutableMapping
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.daemon.health_checks import health_checks
from tests.daemon.running_daemon import POST, RunningDaemon, post, running_daemon
from tests.database_proxy import DatabaseProxy
from tests.faulty_network import Fault
from tests.waiting import until

HANDFUL = 8
"""Log lines of an outage: when it begins, when it is over, and what follows from it."""


def metric(daemon: RunningDaemon, name: str, **labels: str) -> float:
    value = daemon.stages.metrics.registry.get_sample_value(name, labels)
    assert value is not None, (name, labels)
    return value


def shown(lines: Iterable[MutableMapping[str, Any]]) -> list[MutableMapping[str, Any]]:
    """Return the log lines that the default level shows."""
    return [line for line in lines if line["log_level"] != "debug"]


def events(lines: Iterable[MutableMapping[str, Any]]) -> Counter[tuple[str, str]]:
    """Count the log lines of the default level by event and condition."""
    return Counter((line["event"], line.get("condition", "")) for line in shown(lines))


@pytest.mark.slow
async def test_reason_that_rejects_most_messages_is_logged_and_prevents_readiness(
    database: str, tmp_path: Path
) -> None:
    """The URL of the stream names another host than the identities of its accounts."""
    with capture_logs() as lines:
        async with running_daemon(database, tmp_path, upstream="pds") as daemon, health_checks(daemon) as checks:
            account = daemon.create_account("ada.test", records=50)
            await daemon.wait_for_cursor()
            assert daemon.counter("rejected", reason="wrong-host") >= 50
            reason = await checks.wait_for_reason("wrong-host")
            assert (reason["code"], reason["value"]) == ("messages-rejected", 1.0)
            assert (await checks.get("/healthz"))[0] == 200
    [line] = [line for line in shown(lines) if line.get("condition") == "messages-rejected"]
    assert (line["event"], line["log_level"]) == ("condition.began", "warning")
    assert line["subject"] == "wrong-host"
    assert account.did in line["message"]
    assert "seq " in line["message"]


@pytest.mark.slow
async def test_hanging_database_and_lost_relay_are_named_by_readiness(database: str, tmp_path: Path) -> None:
    """No stage counts as stalled."""
    proxy = DatabaseProxy(database)
    async with proxy.serve(), running_daemon(proxy.dsn, tmp_path) as daemon, health_checks(daemon) as checks:
        account, relay = daemon.create_account("ada.test"), daemon.network.relay_url
        await daemon.wait_for_cursor()
        await checks.wait_until_ready()
        assert metric(daemon, "indexer_database_up") == 1
        proxy.hang()
        account.create(POST, post("while the database hangs"))
        reason = await checks.wait_for_reason("database")
        assert reason["code"] == "database-unavailable"
        assert (await checks.get("/healthz"))[0] == 200
        assert metric(daemon, "indexer_database_up") == 0
        assert metric(daemon, "indexer_firehose_lag_seconds") > 1, "nothing was written meanwhile"
        proxy.open()
        await daemon.wait_for_cursor()
        await checks.wait_until_ready()
        assert metric(daemon, "indexer_database_up") == 1
        assert metric(daemon, "indexer_relay_connected", relay=relay) == 1
        await daemon.network.relay.stop()
        await until(lambda: metric(daemon, "indexer_relay_connected", relay=relay) == 0)
        before = metric(daemon, "indexer_firehose_lag_seconds")
        await until(lambda: metric(daemon, "indexer_firehose_lag_seconds") > before + 1)
        assert metric(daemon, "indexer_seconds_since_last_message", relay=relay) > 1
        assert (await checks.get("/healthz"))[0] == 200


@pytest.mark.proof("daemon")
async def test_hanging_directory_prevents_readiness_and_is_logged_once(database: str, tmp_path: Path) -> None:
    with capture_logs() as lines:
        async with running_daemon(database, tmp_path) as daemon, health_checks(daemon) as checks:
            fault = Fault("", hang=True, times=None)
            daemon.network.plc.faults.append(fault)
            for number in range(30):
                daemon.create_account(f"a{number}.test", records=1)
            reason = await checks.wait_for_reason("identity lookups fail")
            assert fault.fired > 0
            assert (reason["code"], reason["value"]) == ("identity-lookups-failing", 1.0)
            assert "the last minute; last error:" in reason["message"]
            assert "timeout" in reason["message"]
            assert (await checks.get("/healthz"))[0] == 200
    assert events(lines)["condition.began", "identity-lookups-failing"] == 1


@pytest.mark.proof("daemon")
async def test_database_outage_is_a_handful_of_log_lines(
    database: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All stages retry for a while, and repos are being resynced when it begins."""
    proxy = DatabaseProxy(database)
    async with proxy.serve(), running_daemon(proxy.dsn, tmp_path) as daemon, health_checks(daemon) as checks:
        daemon.create_account("ada.test")
        await daemon.wait_for_cursor()
        await checks.wait_until_ready()
        with capture_logs() as lines:
            proxy.refuse()
            account = daemon.create_account("bob.test")
            await checks.wait_for_reason("database")
            retries = daemon.db.failed_operations
            await until(lambda: daemon.db.failed_operations > retries + 20)
            proxy.open()
            account.create(POST, post("after the outage"))
            await daemon.wait_for_cursor()
            await checks.wait_until_ready()
            found = events(lines)
        assert found["condition.began", "database-unavailable"] == 1
        assert found["condition.ended", "database-unavailable"] == 1
        assert found.total() <= HANDFUL, found
        assert not [line for line in shown(lines) if "exception" in line or "exc_info" in line]
        libraries = {record.name for record in caplog.records if record.levelno > logging.DEBUG}
        libraries = {name for name in libraries if not name.startswith("indexer.")}
        assert libraries <= {"asyncpg.pool"}, "`configure_logging` hides the pool's lines"
