import re
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console, RenderableType

from indexer.cli.output import duration_text, fact_table
from indexer.cli.status_report import Sample, Status, status_of
from indexer.cli.status_tables import status_tables
from indexer.db import ConsumerState, Counts, LinkProgress
from indexer.db.process_reports import ProcessReport
from indexer.db.shard_lock import ShardSession
from indexer.reasons import FetchFailure, GapReason
from indexer.sync.identity import HostState
from indexer.sync.repo import SyncStatus
from indexer.sync.shard import Shard
from indexer.sync.stream import Cursor, Gap, OpenGap

RELAY = "wss://one.example"
NOON = 1_767_268_800.0  # 2026-01-01T12:00:00Z
OLD = "2026-01-01T11:58:00Z"
SHARD = Shard()
NOTHING = Counts(dict.fromkeys(SyncStatus, 0), {}, 0, 0, 0, [])


def cursor(
    seq: int = 1, event_time: str | None = "2026-01-01T12:00:00.000Z", relay: str = RELAY, shard: str = "0/1"
) -> Cursor:
    return Cursor(relay, shard, seq, event_time)


def repos(synchronized: int = 0, in_progress: int = 0, queued: int = 0, parked: int = 0) -> Counts:
    statuses = {
        SyncStatus.SYNCHRONIZED: synchronized,
        SyncStatus.IN_PROGRESS: in_progress,
        SyncStatus.DESYNCHRONIZED: queued + parked,
    }
    return replace(NOTHING, statuses=statuses, queued=queued, parked=parked)


def status(now: Counts, earlier: Counts | None = None, *, at: float = NOON, seconds: float = 2.0) -> Status:
    return status_of("postgresql:///any", Shard(), Sample(at - seconds, earlier or now), Sample(at, now))


def shown(renderable: RenderableType) -> str:
    console = Console(file=StringIO(), width=200)
    console.print(renderable)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_estimated_numbers_of_repos_are_shown_as_estimates() -> None:
    counted = replace(repos(synchronized=44_000_000, queued=900_000), counted_share=0.07)
    shown_status = shown(status_tables(status(counted)))
    assert "about 44,000,000" in shown_status
    assert shown_status.count("about 900,000") == 2, "as desynchronized, and in the queue"
    assert status(counted).to_dict()["counted_share"] == 0.07
    assert "about 44" not in shown(status_tables(status(repos(synchronized=44))))


LAG: dict[str, Any] = {"code": "lag", "message": "the newest stored event is 75 s old", "value": 75.0}
WAITS: dict[str, Any] = {"code": "shard-lock", "message": "another process holds the shard", "value": 3.0}
NO_DAEMON = ("no-daemon", "no daemon with the role live runs")


def report(
    *reasons: dict[str, Any], shard: Shard = SHARD, roles: str = "live,resync,feed", owns: bool = True, age: float = 1.0
) -> ProcessReport:
    return ProcessReport(roles.split(","), shard.positions, owns, reasons, age)


def owner(shard: Shard = SHARD) -> ShardSession:
    return ShardSession(7, (shard.positions[0], shard.positions[-1]), owns=True, client="127.0.0.1", since=NOON)


FIRST, SECOND = Shard(0, 2), Shard(1, 2)


@pytest.mark.parametrize(
    ("reports", "sessions", "expected"),
    [
        ([], [], [NO_DAEMON]),
        ([report()], [owner()], []),
        ([report(LAG)], [owner()], [("lag", "the newest stored event is 75 s old")]),
        ([report(), report(WAITS, owns=False)], [owner()], []),
        ([report(WAITS, owns=False)], [owner()], [("shard-lock", "another process holds the shard")]),
        ([report(age=42)], [owner()], [("not-reported", "the daemon has not reported its state for 42 s")]),
        (
            [],
            [owner()],
            [("not-reported", "a daemon runs, but has not reported its state; daemons of earlier releases do not")],
        ),
        ([report(shard=FIRST), report(shard=SECOND)], [], []),
        (
            [report(shard=FIRST), report(LAG, shard=SECOND)],
            [],
            [("lag", "daemon 1/2 (live,resync,feed): the newest stored event is 75 s old")],
        ),
        ([report(shard=FIRST)], [], [("no-daemon", f"{NO_DAEMON[1]} for 128 of 256 buckets of the shard")]),
        ([report(roles="resync")], [], [NO_DAEMON]),
        (
            [report(), report(LAG, roles="resync")],
            [],
            [("lag", "daemon 0/1 (resync): the newest stored event is 75 s old")],
        ),
    ],
)
def test_status_says_what_the_daemons_of_the_shard_report(
    reports: list[ProcessReport], sessions: list[ShardSession], expected: list[tuple[str, str]]
) -> None:
    result = status(replace(NOTHING, cursors=[cursor()], reports=reports, sessions=sessions))
    assert [(reason.code, reason.message) for reason in result.not_ready_reasons] == expected
    as_json = result.to_dict()
    assert (as_json["ready"], as_json["not_ready"]) == (not expected, expected[0][1] if expected else None)


def test_status_of_a_shard_does_not_depend_on_daemons_of_other_shards() -> None:
    sample = Sample(NOON, replace(NOTHING, reports=[report(shard=FIRST), report(LAG, shard=SECOND)]))
    first, second = (status_of("postgresql:///any", shard, sample, sample).not_ready for shard in (FIRST, SECOND))
    assert (first, second) == (None, LAG["message"])


def test_open_gap_is_shown() -> None:
    gap = Gap(RELAY, "1/2", GapReason.CURSOR_OUTDATED, first_seq=6)
    result = status(replace(NOTHING, gaps=[OpenGap(3, gap, NOON - 90)]))
    [shown_gap] = result.to_dict()["gaps"]
    assert (shown_gap["shard"], shown_gap["reason"], shown_gap["open_seconds"]) == ("1/2", "cursor-outdated", 90.0)
    assert "1 min 30 s" in shown(status_tables(result))


@pytest.mark.parametrize(
    ("event_time", "lag"),
    [("2026-01-01T12:59:30+01:00", 30.0), (OLD, 120.0), (None, None), ("yesterday", None)],
)
def test_lag_of_a_cursor_is_the_age_of_its_event(event_time: str | None, lag: float | None) -> None:
    assert status(replace(NOTHING, cursors=[cursor(event_time=event_time)])).cursors[0].lag_seconds == lag


def test_daemon_is_shown_with_its_shard() -> None:
    """Sessions of other programs may have any name, and so any positions."""
    shards = [Shard(index, count) for count in (1, 3, 256) for index in (0, count // 2, count - 1)]
    expected = {(shard.positions[0], shard.positions[-1]): str(shard) for shard in shards}
    expected |= {(3, 9): "positions 3-9", (9, 3): "positions 9-3", (300, 999): "positions 300-999"}
    sessions = [ShardSession(7, positions, owns=False, client="127.0.0.1", since=NOON) for positions in expected]
    daemons = status(replace(NOTHING, sessions=sessions)).daemons
    assert [daemon.shard for daemon in daemons] == list(expected.values())


def test_rates_are_averages_between_the_samples() -> None:
    earlier = replace(repos(synchronized=10, queued=90), cursors=[cursor(100)])
    now = replace(repos(synchronized=20, in_progress=5, queued=75), cursors=[cursor(160), cursor(9, shard="1/2")])
    result = status(replace(now, ended=10), earlier, seconds=2)
    assert (result.events_per_second, result.resyncs_per_second) == (30, 5)
    assert (result.progress, result.seconds_left) == (0.2, 16)


def test_repos_that_enter_the_queue_do_not_reduce_the_resync_rate() -> None:
    """They were desynchronized, parked or added meanwhile."""
    for earlier, now in (
        (repos(synchronized=60, queued=40), repos(synchronized=60, queued=40)),
        (repos(synchronized=60, queued=50), repos(synchronized=60, queued=40, parked=10)),
        (repos(synchronized=60, queued=10), repos(synchronized=70, queued=40)),
    ):
        result = status(replace(now, ended=10), earlier, seconds=2)
        assert (result.resyncs_per_second, result.seconds_left) == (5, 8)


def test_events_of_a_stream_are_counted_once_for_all_its_shards() -> None:
    other = "wss://two.example"
    earlier = replace(NOTHING, cursors=[cursor(100, shard="0/2"), cursor(90, shard="1/2"), cursor(5, relay=other)])
    now = replace(NOTHING, cursors=[cursor(160, shard="0/2"), cursor(160, shard="1/2"), cursor(15, relay=other)])
    assert status(now, earlier, seconds=2).events_per_second == 40


def test_progress_and_rates_at_their_limits() -> None:
    result = status(repos(synchronized=10, parked=4))
    assert (result.progress, result.seconds_left, result.parked) == (1, None, 4), "parked repos do not wait"
    assert status(NOTHING).progress is None
    assert status(repos(queued=5)).seconds_left is None
    after_reset = status(replace(NOTHING, cursors=[cursor(5)]), replace(NOTHING, cursors=[cursor(100)]))
    assert after_reset.events_per_second == 0


def test_duration_is_shown_in_its_two_largest_units() -> None:
    texts = {-3: "0 s", 59.6: "1 min", 65: "1 min 5 s", 3_600: "1 h", 90_061: "1 d 1 h", 86_405: "1 d 5 s"}
    assert {seconds: duration_text(seconds) for seconds in texts} == texts


BUSY = replace(
    repos(synchronized=1_234, in_progress=7, queued=2_993, parked=11),
    reasons={"new": 2_900, "chain-break": 93},
    failures={"timeout": 4, "repo-not-found": 12},
    unproven=1_030,
    records=56_789,
    cursors=[cursor(7_654_321)],
    ended=50,
    reports=[report()],
)


def test_json_and_tables_contain_the_same_values() -> None:
    result = status(BUSY, replace(BUSY, cursors=[cursor(7_654_021)]))
    as_json = result.to_dict()
    expected = {
        "ready": True,
        "repos": {"synchronized": 1_234, "in-progress": 7, "desynchronized": 3_004},
        "reasons": {"new": 2_900, "chain-break": 93},
        "failures": {"timeout": 4, "repo-not-found": 12},
        "records": 56_789,
        "resync_queue": 2_993,
        "parked": 11,
        "unproven": 1_030,
        "events_per_second": 150,
        "resyncs_per_second": 25,
        "progress": 1_234 / 4_234,
        "seconds_left": 120,
    }
    assert as_json.items() >= expected.items()
    assert [(cursor["relay"], cursor["seq"]) for cursor in as_json["cursors"]] == [(RELAY, 7_654_321)]
    shown_numbers = set(re.findall(r"[\d,.]+%?", shown(status_tables(result))))
    groups = (expected["repos"], expected["reasons"], expected["failures"])
    numbers = {f"{number:,}" for group in groups if isinstance(group, dict) for number in group.values()}
    numbers |= {"7,654,321", "56,789", "2,993", "11", "1,030", "150.0", "25.0", "29.1%"}
    assert numbers <= shown_numbers


def test_progress_is_shown_on_a_terminal_of_24_rows() -> None:
    """`--watch` leaves out what does not fit, which was the progress."""
    hosts = [HostState(f"h{n}.example", 7, 7, 6, NOON, FetchFailure.HOST_PAUSED, "timeout", None) for n in range(9)]
    lag = LAG | {"message": "identity lookups fail: 80% of 10 in the last minute; last error: " + "unreachable " * 5}
    busy = replace(BUSY, hosts=hosts, reports=[report(lag)], sessions=[owner()], ended=50)
    console = Console(file=StringIO(), width=80, height=24)
    console.print(status_tables(status(busy)))
    assert isinstance(console.file, StringIO)
    first_screen = "\n".join(console.file.getvalue().splitlines()[:23])
    for name in ("not ready", "resync queue", "resyncs per second", "progress", "time left"):
        assert name in first_screen


def test_markup_and_control_characters_are_shown_literally() -> None:
    text = shown(fact_table({"last_error": "[bold]no[/] \x1b[2J", "handle": None, "visible": True, "records": 1_000}))
    assert "[bold]no[/]" in text
    assert "\x1b[2J" not in text
    assert "1,000" in text


def test_paused_hosts_consumers_and_the_number_of_refused_events_are_shown() -> None:
    paused = HostState("\x1b[31mpds.example", 7, 7, 6, NOON + 90, FetchFailure.HOST_PAUSED, "timeout: 5 s", None)
    following = ConsumerState("search", 90, 10, NOON - 65, NOON - 5, cut_off=False)
    disconnected = ConsumerState("old", 3, 97, NOON - 90_061, NOON - 90_061, cut_off=True)
    counts = replace(NOTHING, hosts=[paused], consumers=[following, disconnected], set_aside_events=3)
    result = status(counts)
    assert result.paused_hosts[0].seconds_left == 90
    assert [(consumer.name, consumer.lag_seconds) for consumer in result.consumers] == [("search", 65), ("old", 90_061)]
    text = shown(status_tables(result))
    for part in (
        "pds.example",
        "1 min 30 s",
        "host-paused",
        "timeout: 5 s",
        "disconnected",
        "1 d 1 h ago",
        "3 refused",
    ):
        assert part in text
    assert "\x1b" not in text


def test_links_are_shown_with_their_progress_and_prevent_no_readiness() -> None:
    for links, text, progress, seconds_left in (
        (LinkProgress(), "off", None, None),
        (LinkProgress("complete", 1.0, 7, NOON, open_recounts=2), "complete; repos to recount: 2", 1.0, None),
        (LinkProgress("backfill", 0.25, 1_234, NOON - 600), "about 25.0% of the repos; time left: 30 min", 0.25, 1_800),
        (LinkProgress("backfill", 0.0, 0, NOON), "backfill: about 0.0% of the repos; time left: unknown", 0.0, None),
    ):
        result = status(replace(NOTHING, reports=[report()], links=links))
        assert text in shown(status_tables(result))
        as_json = result.to_dict()
        assert (as_json["links"]["state"], as_json["links"]["progress"]) == (links.state, progress)
        assert as_json["links"]["seconds_left"] == seconds_left
        assert as_json["ready"] is True, "records are up to date; only link_count waits"


def test_repos_that_wait_for_added_collections_are_shown_with_the_time_left() -> None:
    assert status(NOTHING).to_dict()["scope_backfill"]["waiting"] == 0
    result = status(replace(NOTHING, incomplete=1_200, ended=6), replace(NOTHING, incomplete=1_204))
    expected = {"waiting": 1_200, "repos_per_second": 2.0, "seconds_left": 600.0}
    assert result.to_dict()["scope_backfill"] == expected
    assert "1,200 repos wait for added collections; time left: 10 min" in shown(status_tables(result))
