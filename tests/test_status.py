import re
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console, RenderableType

from indexer.outbound import HostState
from indexer.reasons import FetchFailure
from indexer.status import Sample, Status, duration, facts_table, status_of, status_picture
from indexer.store import Counts
from indexer.sync.plan import Cursor
from indexer.sync.repo import SyncStatus
from indexer.sync.shard import Shard

RELAY = "wss://one.example"
NOON = 1_767_268_800.0  # 2026-01-01T12:00:00Z
OLD = "2026-01-01T11:58:00Z"
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


@pytest.mark.parametrize(
    ("cursors", "reason"),
    [
        ([], "no event has been saved yet"),
        ([cursor(shard="1/2")], "no event has been saved yet of some of the shards"),
        ([cursor(shard="0/2"), cursor(shard="1/2")], None),
        ([cursor(shard="0/2"), cursor(event_time=OLD, shard="1/2")], "the newest saved event is 2 min old"),
        ([cursor(event_time=OLD), cursor(shard="0/2"), cursor(shard="1/2")], None),
        ([cursor(), cursor(event_time=OLD, shard="0/2"), cursor(event_time=OLD, shard="1/2")], None),
        ([cursor()], None),
        ([cursor(event_time="2026-01-01T12:59:30+01:00")], None),
        ([cursor(event_time=OLD)], "the newest saved event is 2 min old"),
        ([cursor(event_time="2020-01-01T00:00:00Z"), cursor(relay="wss://two.example")], None),
        ([cursor(event_time=None)], "the relay's events have no time that can be read"),
        ([cursor(event_time="yesterday")], "the relay's events have no time that can be read"),
    ],
)
def test_ready_is_a_fresh_cursor_of_every_bucket(cursors: list[Cursor], reason: str | None) -> None:
    result = status(replace(NOTHING, cursors=cursors))
    assert result.not_ready == reason
    assert result.to_json()["ready"] is (reason is None)


def test_rates_are_those_between_the_samples() -> None:
    earlier = replace(repos(synchronized=10, queued=90), cursors=[cursor(100)])
    now = replace(repos(synchronized=20, in_progress=5, queued=75), cursors=[cursor(160), cursor(9, shard="1/2")])
    result = status(replace(now, ended=10), earlier, seconds=2)
    assert (result.events_per_second, result.resyncs_per_second) == (30, 5)
    assert (result.progress, result.seconds_left) == (0.2, 16)


@pytest.mark.parametrize(
    ("earlier", "now"),
    [
        (repos(synchronized=60, queued=40), repos(synchronized=60, queued=40)),  # as many broke as were done
        (repos(synchronized=60, queued=50), repos(synchronized=60, queued=40, parked=10)),
        (repos(synchronized=60, queued=10), repos(synchronized=70, queued=40)),  # more were added meanwhile
    ],
    ids=["breaks", "parked", "added"],
)
def test_what_leaves_the_queue_is_progress_whatever_comes_into_it(earlier: Counts, now: Counts) -> None:
    result = status(replace(now, ended=10), earlier, seconds=2)
    assert (result.resyncs_per_second, result.seconds_left) == (5, 8)


def test_shards_that_read_the_same_stream_count_once() -> None:
    other = "wss://two.example"
    earlier = replace(NOTHING, cursors=[cursor(100, shard="0/2"), cursor(90, shard="1/2"), cursor(5, relay=other)])
    now = replace(NOTHING, cursors=[cursor(160, shard="0/2"), cursor(160, shard="1/2"), cursor(15, relay=other)])
    assert status(now, earlier, seconds=2).events_per_second == 40


def test_parked_repos_are_no_part_of_the_work_left() -> None:
    result = status(repos(synchronized=10, parked=4))
    assert (result.progress, result.seconds_left, result.parked) == (1, None, 4)


def test_nothing_to_do_has_no_progress_and_no_motion_no_end() -> None:
    assert status(NOTHING).progress is None
    assert status(repos(queued=5)).seconds_left is None


def test_a_cursor_that_went_back_is_no_negative_rate() -> None:
    result = status(replace(NOTHING, cursors=[cursor(5)]), replace(NOTHING, cursors=[cursor(100)]))
    assert result.events_per_second == 0


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"),
        (-3, "0 s"),
        (59.6, "1 min"),
        (65, "1 min 5 s"),
        (3_600, "1 h"),
        (90_061, "1 d 1 h"),
        (86_405, "1 d 5 s"),
    ],
)
def test_durations_in_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words


AT_WORK = replace(
    repos(synchronized=1_234, in_progress=7, queued=2_993, parked=11),
    reasons={"new": 2_900, "chain-break": 93},
    failures={"timeout": 4, "repo-not-found": 12},
    records=56_789,
    cursors=[cursor(7_654_321)],
    ended=50,
)


def test_the_picture_shows_what_is_known() -> None:
    text = shown(status_picture(status(AT_WORK, replace(AT_WORK, cursors=[cursor(7_654_021)]))))
    rows = [re.split("[│ ]{2,}", line.strip("│ ")) for line in text.splitlines()]
    expected = [
        ["ready"],
        [RELAY, "0/1", "7,654,321", "0 s"],
        ["synchronized", "1,234"],
        ["in-progress", "7"],
        ["desynchronized", "3,004"],
        ["because new", "2,900"],
        ["because chain-break", "93"],
        ["last try: timeout", "4"],
        ["last try: repo-not-found", "12"],
        ["records", "about 56,789"],
        ["resync queue", "2,993"],
        ["parked", "11"],
        ["events a second", "150.0"],
        ["resyncs a second", "25.0"],
        ["progress", "29.1%"],
        ["time left", "2 min"],
    ]
    assert [row for row in expected if row not in rows] == []


def test_all_of_it_is_in_the_json() -> None:
    result = status(AT_WORK, replace(AT_WORK, cursors=[cursor(7_654_021)])).to_json()
    expected = {
        "ready": True,
        "repos": {"synchronized": 1_234, "in-progress": 7, "desynchronized": 3_004},
        "reasons": {"new": 2_900, "chain-break": 93},
        "failures": {"timeout": 4, "repo-not-found": 12},
        "records": 56_789,
        "resync_queue": 2_993,
        "parked": 11,
        "events_per_second": 150,
        "resyncs_per_second": 25,
        "progress": 1_234 / 4_234,
        "seconds_left": 120,
    }
    assert result.items() >= expected.items()
    assert [(place["relay"], place["seq"]) for place in result["cursors"]] == [(RELAY, 7_654_321)]


def test_what_others_wrote_is_shown_literally() -> None:
    text = shown(facts_table({"last_error": "[bold]no[/] \x1b[2J", "handle": None, "visible": True, "records": 1_000}))
    assert "[bold]no[/]" in text
    assert "\x1b[2J" not in text
    assert "1,000" in text


def test_paused_hosts_are_shown_with_the_reason_and_the_time_left() -> None:
    paused = HostState("\x1b[31mpds.example", 7, 7, 6, NOON + 90, FetchFailure.HOST_PAUSED, "timeout: 5 s", None)
    result = status(replace(NOTHING, hosts=[paused]))
    assert result.paused_hosts[0].seconds_left == 90
    text = shown(status_picture(result))
    assert all(words in text for words in ("pds.example", "1 min 30 s", "host-paused", "6", "timeout: 5 s"))
    assert "\x1b" not in text
    assert "host-paused" not in shown(status_picture(status(NOTHING)))
