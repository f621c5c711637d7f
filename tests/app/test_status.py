"""The document of the status page, from stages that a test controls."""

from collections.abc import Callable
from time import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import orjson
import pytest

from indexer.app.stages import all_stages
from indexer.app.status import MAX_SAMPLES, SampledHistory, StatusPage
from indexer.db.reports import MAX_ROWS
from indexer.resync.shares import Phase, Resync
from indexer.serve.status_document import MAX_TEXT_LENGTH, ReadinessReason, StatusDocument
from indexer.sync.repo import Repo
from indexer.telemetry.conditions import DATABASE_ERRORS, DEAD_ROWS_KEPT, HOST_FAILING, Conditions
from tests.app.fake_daemon import fake_daemon
from tests.serve.read_status import FakeDatabase

MAX_DOCUMENT_BYTES = 300_000
LONG = "x" * 10_000


def daemon_of(
    reasons: list[ReadinessReason] | None = None, **stages: Any
) -> tuple[Callable[[], StatusDocument], SampledHistory]:
    """Return the status and the history of an idle, connected daemon, with some attributes of stages replaced."""
    daemon = fake_daemon(("live", "resync"), **stages)
    daemon.history = SampledHistory(daemon.batch_writer, daemon.resync_pool)
    probe: Any = SimpleNamespace(not_ready=lambda: reasons or [])
    listed = all_stages(daemon, ())
    page = StatusPage(daemon.db, FakeDatabase().reader, probe, listed, daemon.history, "0/1", ("live", "resync"))
    return page.document, daemon.history


def document_of(reasons: list[ReadinessReason] | None = None, **stages: Any) -> StatusDocument:
    return daemon_of(reasons, **stages)[0]()


def process_of(**stages: Any) -> dict[str, Any]:
    process = document_of(**stages).process
    assert process is not None
    return process


def test_document_of_an_idle_daemon() -> None:
    document, process = document_of(), process_of()
    assert (document.reasons, process["shard"], process["roles"]) == ([], "0/1", ["live", "resync"])
    assert document.database is None, "the page tells nobody where the database is"
    stream = process["stream"]
    assert 2 <= stream.pop("silent_seconds") < 60
    assert stream == {
        "relay": "wss://one.example",
        "lag_seconds": 0.25,
        "unsettled_messages": 3,
        "unsettled_bytes": 4_096,
        "waiting_for_keys": 1,
        "reconciliation": None,
    }
    [row] = process["streams"]
    assert 2 <= row.pop("silent_seconds") < 60
    assert row == {
        "relay": "wss://one.example",
        "trouble": None,
        "seq": 7,
        "lag_seconds": 0.25,
        "compared": True,
        "missing_messages": 2,
    }
    assert process["conditions"] == []
    assert document.to_json()["process"]["history"]["times"] == []


def test_reasons_are_those_of_this_process() -> None:
    document = document_of([ReadinessReason("lag", "it is late", 75.0)])
    assert [reason.code for reason in document.reasons] == ["lag"]
    assert document.to_json()["ready"] is False


def sampled(*samples: tuple[float, float | None, int, int]) -> dict[str, Any]:
    """Return the history after samples of time, lag, settled messages and ended resyncs. All began at second 100."""
    writer: Any = SimpleNamespace(lag=None, totals=SimpleNamespace(settled=0))
    pool: Any = SimpleNamespace(ended=0)
    with patch("indexer.app.status.time", lambda: 100.0):
        history = SampledHistory(writer, pool)
    for now, writer.lag, writer.totals.settled, pool.ended in samples:
        history.sample(now)
    return history.columns


def test_history_has_the_mean_rates_since_the_previous_sample() -> None:
    history = sampled((110.0, None, 50, 2), (120.0, 0.0171, 450, 2))
    assert history == {
        "times": [110.0, 120.0],
        "lag_seconds": [None, 0.017],
        "messages_per_second": [5.0, 40.0],
        "resyncs_per_second": [0.2, 0.0],
    }


def test_only_the_newest_samples_are_retained() -> None:
    history = sampled(*((100.0 + number, 1.0, number, 0) for number in range(1, 3 * MAX_SAMPLES)))
    assert {len(column) for column in history.values()} == {MAX_SAMPLES}
    assert history["times"][-1] == 99 + 3 * MAX_SAMPLES


@pytest.mark.parametrize("now", [100.0, 40.0])
def test_clock_that_does_not_advance_adds_no_sample(now: float) -> None:
    assert sampled((now, 1.0, 5, 0))["times"] == []
    assert sampled((now, 1.0, 5, 0), (now + 10, 1.0, 25, 0))["messages_per_second"] == [2.0]


def test_running_resyncs_have_their_phase_bytes_and_times() -> None:
    now = time()
    download: Any = SimpleNamespace(received=5_000, rate=1_000.0)
    started, loading = Resync(Repo("did:plc:new"), now - 1), Resync(Repo("did:plc:old"), now - 60, "pds.example")
    loading.download, loading.phase, loading.phase_since = download, Phase.DOWNLOAD, now - 5
    running = [started, loading]
    resyncs = process_of(resync_pool={"shares": SimpleNamespace(running=running, free_workers=6)})["resyncs"]
    assert (resyncs["running"], resyncs["workers_free"]) == (2, 6)
    [old, new] = resyncs["longest"]
    assert 5 <= old.pop("phase_seconds") < 50 <= old.pop("seconds")
    assert old == {
        "did": "did:plc:old",
        "host": "pds.example",
        "phase": "download the export",
        "received_bytes": 5_000,
        "bytes_per_second": 1_000.0,
        "slot": "worker",
    }
    assert (new["phase"], new["received_bytes"], new["host"]) == ("look up the identity", None, "")


def test_document_stays_small_whatever_hosts_and_accounts_send() -> None:
    now, conditions = time(), Conditions()
    for number in range(1_000):
        conditions.report((HOST_FAILING, DEAD_ROWS_KEPT)[number % 2], f"{number}{LONG}", message=LONG)
    running = [Resync(Repo(f"did:plc:{n}{LONG}"), now, LONG) for n in range(1_000)]
    document, history = daemon_of(
        [ReadinessReason("lag", LONG, 1.0) for _ in range(1_000)],
        conditions={"active": conditions.active},
        resync_pool={"shares": SimpleNamespace(running=running, free_workers=6)},
        reconciliation={"progress": LONG},
        streams=[{"relay": LONG}],
    )
    for number in range(3 * MAX_SAMPLES):
        history.sample(now + number)
    shown = document().to_json()
    assert len(orjson.dumps(shown)) < MAX_DOCUMENT_BYTES
    resyncs = shown["process"]["resyncs"]
    assert (resyncs["running"], len(resyncs["longest"]), len(shown["reasons"])) == (1_000, MAX_ROWS, MAX_ROWS)
    assert longest_text(shown) <= MAX_TEXT_LENGTH


def longest_text(value: Any) -> int:
    match value:
        case str():
            return len(value)
        case dict():
            return max((longest_text(item) for pair in value.items() for item in pair), default=0)
        case list():
            return max(map(longest_text, value), default=0)
        case _:
            return 0


def test_secrets_in_messages_are_not_shown() -> None:
    conditions = Conditions()
    conditions.report(DATABASE_ERRORS, message="connect to postgresql://user:hunter2@db/x failed")
    conditions.report(HOST_FAILING, "pds.example", message="https://name:hunter2@pds.example/ fails")
    assert b"hunter2" not in orjson.dumps(document_of(conditions={"active": conditions.active}).to_json())
