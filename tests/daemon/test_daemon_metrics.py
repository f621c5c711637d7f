"""The metrics of a running daemon: complete, consistent with each other, and accepted by Prometheus' linter."""

import math
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.daemon.running_daemon import RunningDaemon, running_daemon
from tests.faulty_network import Fault
from tests.serve.prometheus_programs import needs_promtool
from tests.waiting import until


class Scrape:
    """One scrape of all metrics of a daemon."""

    def __init__(self, daemon: RunningDaemon) -> None:
        self.text = generate_latest(daemon.stages.metrics.registry).decode()
        self.samples = [sample for family in text_string_to_metric_families(self.text) for sample in family.samples]

    def total(self, name: str, labels: Mapping[str, str] | None = None) -> float:
        """Return the sum of all series of `name` with these labels; NaN if there is none."""
        wanted = (labels or {}).items()
        values = [sample.value for sample in self.samples if sample.name == name and sample.labels.items() >= wanted]
        return sum(values) if values else math.nan


def complaints(text: str) -> tuple[int, str]:
    """Return the exit code and the output of `promtool check metrics`."""
    result = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    return result.returncode, result.stdout + result.stderr


@pytest.mark.proof("browser")
@needs_promtool
async def test_linter_of_prometheus_has_no_complaint_about_a_running_daemon(database: str, tmp_path: Path) -> None:
    async with running_daemon(database, tmp_path) as daemon:
        daemon.create_account("ada.test")
        await daemon.wait_for_cursor()
        text = Scrape(daemon).text
    assert complaints(text) == (0, "")


@pytest.mark.slow
async def test_metrics_of_a_running_daemon(database: str, tmp_path: Path) -> None:
    """Received messages are the sum of outcomes and queued ones, each gauge has a value, a failing host is shown."""
    async with running_daemon(database, tmp_path) as daemon:
        account = daemon.create_account("ada.test", records=200)
        daemon.lose_commit(account)

        def is_conserved_and_settled() -> bool:
            scrape = Scrape(daemon)
            received = scrape.total("indexer_events_received_total")
            queued = scrape.total("indexer_queue_messages")
            missing = received - queued - scrape.total("indexer_events_total")
            assert missing in {0, 1}, "one message may wait for room in the queue"
            return received > 200 and queued == 0

        await until(is_conserved_and_settled)
        await until(lambda: Scrape(daemon).total("indexer_ready") == 1, daemon.stages.probe.not_ready)
        scrape = Scrape(daemon)
        definitions = daemon.stages.metrics.definitions.values()
        gauges = [metric.name for metric in definitions if metric.kind == "gauge" and not metric.labels]
        assert [name for name in gauges if math.isnan(scrape.total(name))] == []
        relay = {"relay": daemon.network.relay_url}
        assert scrape.total("indexer_relay_connected", relay) == 1
        assert 0 <= scrape.total("indexer_cursor_age_seconds", relay) < 60
        assert 0 < scrape.total("indexer_data_disk_free_bytes") < scrape.total("indexer_data_disk_size_bytes")
        daemon.network.plc.faults.append(Fault("", status=500, times=None))
        for number in range(10):
            daemon.create_account(f"a{number}.test", records=1)

        def is_shown() -> bool:
            scrape = Scrape(daemon)
            return (
                scrape.total("indexer_hosts_failing") == 1
                and scrape.total("indexer_host_consecutive_failures") >= 5
                and scrape.total("indexer_not_ready", {"code": "identity-lookups-failing"}) == 1
            )

        await until(is_shown, lambda: Scrape(daemon).text)
