"""The document of the status page, from stages that a test controls."""

from collections.abc import Sized
from time import monotonic, time
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from indexer.app.stages import all_stages
from indexer.app.status import SampledHistory, StatusReader
from indexer.db import ConsumerState, Counts, DatabaseError, DeliveryState, RejectionSummary
from indexer.reasons import FetchFailure, GapReason, Rejection
from indexer.resync.shares import Phase, Resync
from indexer.serve.backfill import RepoCounts
from indexer.serve.readiness import ReadinessReason
from indexer.serve.status_document import MAX_ROWS, MAX_TEXT_LENGTH, StatusDocument
from indexer.serve.status_samples import MAX_SAMPLES
from indexer.sync.identity import HostState
from indexer.sync.repo import Repo, SyncStatus
from indexer.sync.stream import Gap, OpenGap
from indexer.telemetry.conditions import DATABASE_ERRORS, DEAD_ROWS_KEPT, HOST_FAILING, Conditions
from tests.app.fake_daemon import fake_daemon

MAX_DOCUMENT_BYTES = 300_000
LONG = "x" * 10_000


class FakeDatabase:
    def __init__(self) -> None:
        self.reports = self
        self.state = DeliveryState([], [])
        self.reads = 0
        self.error: DatabaseError | None = None

    async def delivery_state(self) -> DeliveryState:
        self.reads += 1
        if self.error is not None:
            raise self.error
        return self.state


def daemon_of(
    db: FakeDatabase | None = None, reasons: list[ReadinessReason] | None = None, **stages: Any
) -> tuple[StatusReader, SampledHistory]:
    """Return the status and the history of an idle, connected daemon, with some attributes of stages replaced."""
    daemon, database = fake_daemon(("live", "resync"), **stages), db or FakeDatabase()
    daemon.history = SampledHistory(daemon.batch_writer, daemon.resync_pool)
    listed = [stage for stage in all_stages(daemon, ()) if stage.role in {None, "live", "resync"}]
    probe: Any = SimpleNamespace(stalled=lambda: reasons or [], ready=list)
    roles = ("live", "resync")
    return StatusReader(database, listed, probe, daemon.database_monitor, "0/1", roles), daemon.history  # type: ignore[arg-type]


def status_of(
    db: FakeDatabase | None = None, reasons: list[ReadinessReason] | None = None, **stages: Any
) -> StatusReader:
    return daemon_of(db, reasons, **stages)[0]


def host(name: str = "pds.example", **changes: Any) -> HostState:
    state = HostState(name, 1, 1, 6, time() + 60, FetchFailure.HOST_PAUSED, "timeout", time() - 30)
    return HostState(**{field: getattr(state, field) for field in HostState.__dataclass_fields__} | changes)


async def test_document_of_an_idle_daemon() -> None:
    document = await status_of().document()
    assert (document.ready, document.reasons, document.shard, document.roles) == (True, [], "0/1", ["live", "resync"])
    stream = document.stream
    assert (stream.relay, stream.seq, stream.lag_seconds) == ("wss://one.example", 7, 0.25)
    assert (stream.unsettled_messages, stream.unsettled_bytes, stream.waiting_for_keys) == (3, 4_096, 1)
    assert stream.silent_seconds is not None
    assert 2 <= stream.silent_seconds < 60
    assert document.repos is None, "the repos were not counted yet"
    assert (document.hosts, document.conditions, document.gaps, document.gaps_open) == ([], [], [], 0)
    assert orjson.loads(orjson.dumps(document))["history"]["times"] == []


async def test_samples_become_the_history_and_the_present_rates() -> None:
    totals = SimpleNamespace(settled=1_000_000)
    status, history = daemon_of(batch_writer={"totals": totals}, resync_pool={"ended": 1_000_000})
    history.sample()
    document = await status.document()
    assert document.history.lag_seconds == [0.25]
    assert document.stream.messages_per_second == document.history.messages_per_second[0] > 0
    assert document.resyncs.resyncs_per_second == document.history.resyncs_per_second[0] > 0


async def test_repos_have_their_counts_and_the_progress_of_the_backfill() -> None:
    counted, now = RepoCounts(), time()
    statuses = {SyncStatus.SYNCHRONIZED: 75, SyncStatus.IN_PROGRESS: 5, SyncStatus.DESYNCHRONIZED: 20}
    counts = Counts(statuses, {"new": 20}, 20, 0, 9_000, [], {"timeout": 2}, ended=50, counted_share=0.5)
    counted.set(counts, now - 100, now)
    repos = (await status_of(repo_counts=counted).document()).repos
    assert repos is not None
    assert repos.counted_share == 0.5
    assert repos.statuses == {"synchronized": 75, "in-progress": 5, "desynchronized": 20}
    assert (repos.reasons, repos.failures, repos.records) == ({"new": 20}, {"timeout": 2}, 9_000)
    assert (repos.backfill.progress, repos.backfill.repos_per_second, repos.backfill.seconds_left) == (0.75, 0.5, 50.0)


async def test_running_resyncs_have_their_phase_bytes_and_times() -> None:
    now = time()
    download: Any = SimpleNamespace(received=5_000, rate=1_000.0)
    started, loading = Resync(Repo("did:plc:new"), now - 1), Resync(Repo("did:plc:old"), now - 60, "pds.example")
    loading.download, loading.phase, loading.phase_since = download, Phase.DOWNLOAD, now - 5
    running = [started, loading]
    document = await status_of(resync_pool={"running": running, "free_workers": 6}).document()
    assert (document.resyncs.running, document.resyncs.workers_free) == (2, 6)
    [old, new] = document.resyncs.longest
    assert (old.did, old.host, old.phase, old.slot) == ("did:plc:old", "pds.example", "download the export", "worker")
    assert (old.received_bytes, old.bytes_per_second) == (5_000, 1_000.0)
    assert 5 <= old.phase_seconds < 50 <= old.seconds
    assert (new.phase, new.received_bytes, new.host) == ("look up the identity", None, "")


async def test_hosts_that_are_paused_or_fail_are_listed_once_with_their_last_error() -> None:
    paused, failing = host(), host("other.example", consecutive_failures=9, paused_until=None, pause_reason=None)
    stages = {"paused": lambda: [paused], "failing": lambda: [failing, paused]}
    document = await status_of(hosts=stages).document()
    assert [entry.host for entry in document.hosts] == ["other.example", "pds.example"]
    [other, first] = document.hosts
    assert (other.pause_reason, other.pause_seconds_left, other.failures_in_a_row) == (None, None, 9)
    assert (first.pause_reason, first.last_error) == ("host-paused", "timeout")
    assert first.pause_seconds_left is not None
    assert 0 < first.pause_seconds_left <= 60


async def test_database_that_does_not_answer_is_not_read_and_the_last_state_is_shown() -> None:
    db = FakeDatabase()
    db.state = DeliveryState([], [ConsumerState("one", 5, 2, time() - 60, time(), cut_off=False)])
    monitor: dict[str, Any] = {"answering_since": monotonic()}
    status = status_of(db, database_monitor=monitor, change_log_retention={"lagging": ["one"]})
    delivery = (await status.document()).delivery
    assert ([consumer.name for consumer in delivery.consumers], delivery.lagging) == (["one"], ["one"])
    down = status_of(db, database_monitor={"answering_since": None})
    delivery = (await down.document()).delivery
    assert (delivery.error, delivery.read_seconds_ago, db.reads) == ("the database does not answer", None, 1)
    db.error = DatabaseError(FetchFailure.TIMEOUT, "canceling statement due to statement timeout")
    assert "statement timeout" in ((await status_of(db).document()).delivery.error or "")


@pytest.mark.slow
async def test_document_stays_small_whatever_hosts_and_accounts_send() -> None:
    now, db, conditions = time(), FakeDatabase(), Conditions()
    reasons = list(Rejection) * 10
    db.state = DeliveryState(
        [RejectionSummary(str(reason), 1, 1, now, LONG, 1, LONG, LONG) for reason in reasons],
        [ConsumerState(f"{number}{LONG}", 1, 1, now, now, cut_off=False) for number in range(1_000)],
    )
    for number in range(1_000):
        conditions.report((HOST_FAILING, DEAD_ROWS_KEPT)[number % 2], f"{number}{LONG}", message=LONG)
    counted = RepoCounts()
    counted.set(Counts(dict.fromkeys(SyncStatus, 1), {}, 1, 1, 1, [], {f"{n}{LONG}": 1 for n in range(999)}), 0.0, now)
    hosts = [host(f"{number}{LONG}", last_error=LONG) for number in range(1_000)]
    gaps = [OpenGap(n, Gap(LONG, "0/1", GapReason.NO_CURSOR), now) for n in range(1_000)]
    running = [Resync(Repo(f"did:plc:{n}{LONG}"), now, LONG) for n in range(1_000)]
    status, history = daemon_of(
        db,
        [ReadinessReason("lag", LONG, 1.0) for _ in range(1_000)],
        hosts={"paused": lambda: hosts, "failing": list},
        conditions={"active": conditions.active},
        repo_counts=counted,
        resync_pool={"running": running},
        open_gaps={"gaps": gaps},
        change_log_retention={"lagging": [LONG] * 1_000},
        reconciliation={"progress": LONG},
        subscription={"connection": SimpleNamespace(relay=LONG)},
    )
    for _ in range(3 * MAX_SAMPLES):
        history.sample()
    document = await status.document()
    assert (document.hosts_in_trouble, document.gaps_open, document.resyncs.running) == (1_000, 1_000, 1_000)
    assert_bounded(document)


def assert_bounded(document: StatusDocument) -> None:
    body = orjson.dumps(document)
    assert len(body) < MAX_DOCUMENT_BYTES
    delivery, resyncs = document.delivery, document.resyncs
    lists: list[Sized] = [document.hosts, document.gaps, resyncs.longest, delivery.consumers, document.reasons]
    assert [len(rows) for rows in lists] == [MAX_ROWS] * len(lists)
    assert longest_text(orjson.loads(body)) <= MAX_TEXT_LENGTH


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


async def test_secrets_in_messages_are_not_shown() -> None:
    conditions = Conditions()
    conditions.report(DATABASE_ERRORS, message="connect to postgresql://user:hunter2@db/x failed")
    conditions.report(HOST_FAILING, "pds.example", message="https://name:hunter2@pds.example/ fails")
    document = await status_of(conditions={"active": conditions.active}).document()
    assert b"hunter2" not in orjson.dumps(document)
