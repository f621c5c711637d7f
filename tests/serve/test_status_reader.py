from dataclasses import replace
from math import inf
from typing import Any

import orjson
import pytest

from indexer.db.process_reports import ProcessReport
from indexer.db.reports import MAX_ROWS, Counts
from indexer.serve.status_document import MAX_TEXT_LENGTH
from indexer.serve.status_reader import RATE_SECONDS
from indexer.sync.hints import JETSTREAM
from indexer.sync.shard import Shard
from tests.serve.read_status import NOTHING, SHARD, FakeDatabase, document_of, repos, state_of

RELAY = "wss://one.example"
LAG: dict[str, Any] = {"code": "lag", "message": "the newest stored event is 75 s old", "value": 75.0}
WAITS: dict[str, Any] = {"code": "shard-lock", "message": "another process holds the shard", "value": 3.0}
NO_DAEMON = ("no-daemon", "no daemon with the role live runs")
FIRST, SECOND = Shard(0, 2), Shard(1, 2)


def cursor(seq: int = 1, relay: str = RELAY, shard: str = "0/1") -> dict[str, Any]:
    return {"relay": relay, "shard": shard, "seq": seq}


def backfill(waiting: int, rate: float | None, seconds_left: float | None) -> dict[str, Any]:
    return {"waiting": waiting, "repos_per_second": rate, "seconds_left": seconds_left}


def report(
    *reasons: dict[str, Any], shard: Shard = SHARD, roles: str = "live,resync,feed", owns: bool = True, age: float = 1.0
) -> ProcessReport:
    return ProcessReport(roles.split(","), shard.positions, owns, reasons, age)


async def test_document_says_what_is_not_known_before_the_first_read() -> None:
    document = FakeDatabase().document().to_json()
    for name in ("read_seconds_ago", "events_per_second", "repos", "links", "process"):
        assert document[name] is None
    assert document["cursors"] == document["gaps"] == document["consumers"] == []


async def test_counts_have_their_age_and_share() -> None:
    database = FakeDatabase()
    await database.read(None, repos(synchronized=44_000_000, queued=900_000, records=9_000, counted_share=0.07))
    database.now += 30
    document = database.document()
    assert document.repos is not None
    assert (document.read_seconds_ago, document.repos["counted_seconds_ago"], document.repos["counted_share"]) == (
        30.0, 30.0, 0.07,
    )  # fmt: skip
    assert document.repos["statuses"] == {"desynchronized": 900_000, "in-progress": 0, "synchronized": 44_000_000}
    assert document.repos["records"] == 9_000


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([], [NO_DAEMON]),
        ([report()], []),
        ([report(LAG)], [("lag", "the newest stored event is 75 s old")]),
        ([report(), report(WAITS, owns=False)], []),
        ([report(WAITS, owns=False)], [("shard-lock", "another process holds the shard")]),
        ([report(age=42)], [("not-reported", "the daemon has not reported its state for 42 s")]),
        ([report(shard=FIRST), report(shard=SECOND)], []),
        (
            [report(shard=FIRST), report(LAG, shard=SECOND)],
            [("lag", "daemon 1/2 (live,resync,feed): the newest stored event is 75 s old")],
        ),
        ([report(shard=FIRST)], [("no-daemon", f"{NO_DAEMON[1]} for 128 of 256 buckets of the shard")]),
        ([report(roles="resync")], [NO_DAEMON]),
        (
            [report(), report(LAG, roles="resync")],
            [("lag", "daemon 0/1 (resync): the newest stored event is 75 s old")],
        ),
    ],
)
async def test_reasons_are_those_that_the_daemons_of_the_shard_report(
    reports: list[ProcessReport], expected: list[tuple[str, str]]
) -> None:
    document = await document_of(state_of(cursors=[cursor()], reports=reports))
    assert [(reason.code, reason.message) for reason in document.reasons] == expected
    assert document.to_json()["ready"] is not bool(expected)


async def test_reasons_of_a_shard_do_not_depend_on_daemons_of_other_shards() -> None:
    state = state_of(reports=[report(shard=FIRST), report(LAG, shard=SECOND)])
    first, second = [(await document_of(state, shard=shard)).reasons for shard in (FIRST, SECOND)]
    assert ([reason.message for reason in first], [reason.message for reason in second]) == ([], [LAG["message"]])


async def test_daemon_is_shown_with_its_shard() -> None:
    shards = [Shard(index, count) for count in (1, 3, 256) for index in (0, count // 2, count - 1)]
    reports = [report(shard=shard, owns=False) for shard in shards]
    daemons = (await document_of(state_of([*reports, report(roles="resync")]))).daemons
    assert [(daemon["shard"], daemon["state"]) for daemon in daemons] == [(str(shard), "waits") for shard in shards]


async def test_rates_are_averages_between_two_reads() -> None:
    earlier = (state_of(cursors=[cursor(100)]), repos(synchronized=10, queued=90))
    now = state_of(cursors=[cursor(160), cursor(9, shard="1/2")])
    document = await document_of(now, repos(synchronized=20, in_progress=5, queued=75, ended=10), earlier)
    assert document.events_per_second == 30
    assert document.repos is not None
    assert (document.repos["progress"], document.repos["backfill"]) == (0.2, backfill(80, 5.0, 16.0))


async def test_events_of_a_stream_are_counted_once_for_all_its_shards() -> None:
    other = "wss://two.example"
    earlier = [cursor(100, shard="0/2"), cursor(90, shard="1/2"), cursor(5, relay=other)]
    now = [cursor(160, shard="0/2"), cursor(160, shard="1/2"), cursor(15, relay=other)]
    document = await document_of(state_of(cursors=now), None, (state_of(cursors=earlier), None))
    assert document.events_per_second == 40
    after_reset = (state_of(cursors=[cursor(100)]), None)
    assert (await document_of(state_of(cursors=[cursor(5)]), None, after_reset)).events_per_second == 0


async def test_cursor_of_a_jetstream_is_a_time_and_gives_no_rate() -> None:
    earlier, now = (state_of(cursors=[cursor(seq, relay=JETSTREAM)]) for seq in (10**15, 10**15 + 2_000_000))
    assert (await document_of(now, None, (earlier, None))).events_per_second is None


async def backfill_of(counts: Counts) -> tuple[float | None, dict[str, Any]]:
    found = (await document_of(None, counts)).repos
    assert found is not None
    return found["progress"], found["backfill"]


async def test_progress_and_time_left_at_their_limits() -> None:
    assert await backfill_of(repos(synchronized=10, parked=4)) == (1, backfill(0, 0.0, None)), (
        "parked repos do not wait"
    )
    assert await backfill_of(NOTHING) == (None, backfill(0, 0.0, None))
    assert await backfill_of(repos(queued=5)) == (0.0, backfill(5, 0.0, None))


async def test_rate_is_unknown_until_the_second_count() -> None:
    database = FakeDatabase()
    await database.read(None, repos(synchronized=60, queued=36, in_progress=4))
    first = database.document().repos
    assert first is not None
    assert (database.reports.since, first["progress"], first["backfill"]) == (inf, 0.6, backfill(40, None, None))
    assert first["scope_backfill"] == backfill(0, None, None)


async def test_rates_are_averages_over_the_last_minute() -> None:
    database = FakeDatabase(now=0.0)
    for second in range(101):
        database.now = float(second)
        await database.read(state_of(cursors=[cursor(1_000 * second)]), repos(queued=600, ended=60))
        assert second - database.reports.since <= RATE_SECONDS
    document = database.document()
    assert document.events_per_second == 1_000
    assert document.repos is not None
    assert (database.reports.since, document.repos["backfill"]) == (40.0, backfill(600, 1.0, 600.0))


async def test_time_between_two_seldom_counts_is_used_if_it_is_longer() -> None:
    database = FakeDatabase(now=0.0)
    for _ in range(3):
        await database.read(None, repos(queued=600, ended=3_000))
        database.now += 50 * RATE_SECONDS
    document = database.document()
    assert document.repos is not None
    assert document.repos["backfill"] == backfill(600, 1.0, 600.0)


async def scope_of(*numbers: int, ended: int) -> dict[str, Any]:
    """Return the backfill after counts every ten seconds, in which so many repos waited for added collections."""
    database = FakeDatabase(now=0.0)
    for incomplete in numbers:
        await database.read(None, repos(incomplete=incomplete, ended=ended))
        database.now += 10.0
    found = database.document().repos
    assert found is not None
    scope_backfill: dict[str, Any] = found["scope_backfill"]
    return scope_backfill


async def test_rate_of_added_collections_is_that_at_which_their_repos_become_fewer() -> None:
    assert await scope_of(500, ended=0) == backfill(500, None, None)
    assert await scope_of(500, 480, 460, ended=100) == backfill(460, 2.0, 230.0)
    assert await scope_of(500, 500, ended=100) == backfill(500, 0.0, None)
    assert await scope_of(0, 0, 900, ended=100) == backfill(900, 0.0, None), "the scope has just changed"
    limited = await scope_of(1_000_000, 5_000, ended=50)  # a list completes many repos at once
    assert limited == backfill(5_000, 5.0, 1_000.0), "it is limited by the resyncs"


async def test_texts_of_others_are_bounded_and_have_no_secrets() -> None:
    long = "x" * 10_000
    state = state_of(consumers=[{"name": long}], hosts=[{"host": long, "last_error": "postgresql://u:hunter2@db/x"}])
    document = await document_of(state, replace(NOTHING, failures={f"{n}{long}": 1 for n in range(1_000)}))
    body = orjson.dumps(document.to_json())
    assert document.repos is not None
    assert len(document.repos["failures"]) == MAX_ROWS
    assert b"x" * MAX_TEXT_LENGTH not in body
    assert b"hunter2" not in body
