import re
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console, RenderableType

from indexer.cli.output import duration_text, fact_table
from indexer.cli.status_commands import status_tables
from indexer.db.process_reports import ProcessReport
from tests.serve.read_status import SHARD, State, document_of, repos, state_of

READY = ProcessReport(["live"], SHARD.positions, owns=True, reasons=(), age=1.0)


def shown(renderable: RenderableType, *, width: int = 200) -> str:
    console = Console(file=StringIO(), width=width)
    console.print(renderable)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


async def test_estimated_numbers_of_repos_are_shown_as_estimates() -> None:
    estimated = shown(status_tables(await document_of(None, repos(44_000_000, queued=900_000, counted_share=0.07))))
    assert "about 44,000,000" in estimated
    assert estimated.count("about 900,000") == 2, "as desynchronized, and in the queue"
    assert "about 44" not in shown(status_tables(await document_of(None, repos(synchronized=44))))


def test_duration_is_shown_in_its_two_largest_units() -> None:
    texts = {-3: "0 s", 59.6: "1 min", 65: "1 min 5 s", 3_600: "1 h", 90_061: "1 d 1 h", 86_405: "1 d 5 s"}
    assert {seconds: duration_text(seconds) for seconds in texts} == texts


BUSY = repos(
    synchronized=1_234, in_progress=7, queued=2_993, parked=11, reasons={"new": 2_900, "chain-break": 93},
    failures={"timeout": 4, "repo-not-found": 12}, unproven=1_030, records=56_789, ended=50,
)  # fmt: skip


def at(seq: int, **fields: Any) -> State:
    cursor = {"relay": "wss://one.example", "shard": "0/1", "seq": seq, "lag_seconds": None}
    return state_of([READY], cursors=[cursor], **fields)


def paused(host: str) -> dict[str, Any]:
    return {
        "host": host, "reason": "host-paused", "seconds_left": 90.0, "failures_in_a_row": 6,
        "last_error": "timeout: 5 s",
    }  # fmt: skip


def consumer(name: str, seconds: float, *, cut_off: bool) -> dict[str, Any]:
    return {"name": name, "seq": 90, "behind": 10, "lag_seconds": seconds, "silent_seconds": 5.0, "cut_off": cut_off}


async def test_tables_contain_the_values_of_the_document() -> None:
    document = await document_of(at(7_654_321), BUSY, (at(7_654_021), BUSY))
    assert document.repos is not None
    shown_numbers = set(re.findall(r"[\d,.]+%?", shown(status_tables(document))))
    groups = [document.repos[name] for name in ("statuses", "reasons", "failures")]
    numbers = {f"{number:,}" for group in groups for number in group.values()}
    assert numbers | {"7,654,321", "56,789", "2,993", "11", "1,030", "150.0", "25.0", "29.1%"} <= shown_numbers


async def test_progress_is_shown_on_a_terminal_of_24_rows() -> None:
    """`--watch` leaves out what does not fit, which was the progress."""
    message = "identity lookups fail: 80% of 10 in the last minute; last error: " + "unreachable " * 5
    lag: dict[str, Any] = {"code": "lag", "message": message, "value": 75.0}
    fields, _ = at(7_654_321, hosts=[paused(f"h{n}.example") for n in range(9)])
    busy = fields, [replace(READY, reasons=[lag])]
    text = shown(status_tables(await document_of(busy, BUSY)), width=80)
    first_screen = "\n".join(text.splitlines()[:23])
    for name in ("not ready", "resync queue", "resyncs per second", "progress", "time left"):
        assert name in first_screen


def test_markup_and_control_characters_are_shown_literally() -> None:
    text = shown(fact_table({"last_error": "[bold]no[/] \x1b[2J", "handle": None, "visible": True, "records": 1_000}))
    assert "[bold]no[/]" in text
    assert "\x1b[2J" not in text
    assert "1,000" in text


async def test_gaps_paused_hosts_consumers_and_the_number_of_refused_events_are_shown() -> None:
    gap = {
        "relay": "wss://one.example", "shard": "1/2", "reason": "cursor-outdated", "first_seq": 6, "last_seq": None,
        "open_seconds": 3_700.0,
    }  # fmt: skip
    consumers = [consumer("search", 65.0, cut_off=False), consumer("old", 90_061.0, cut_off=True)]
    state = state_of(hosts=[paused("\x1b[31mpds.example")], consumers=consumers, set_aside_events=3, gaps=[gap])
    text = shown(status_tables(await document_of(state)))
    for part in (
        "pds.example", "1 min 30 s", "host-paused", "timeout: 5 s", "yes", "1 d 1 h",
        "3 refused", "cursor-outdated", "1 h 1 min",
    ):  # fmt: skip
        assert part in text
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("links", "text"),
    [
        (("off", None, None, 0), "off"),
        (("complete", 1.0, None, 2), "complete; repos to recount: 2"),
        (("backfill", 0.25, 1_800.0, 0), "about 25.0% of the repos; time left: 30 min"),
        (("backfill", 0.0, None, 0), "backfill: about 0.0% of the repos; time left: unknown"),
    ],
)
async def test_links_are_shown_with_their_progress(links: tuple[Any, ...], text: str) -> None:
    fields = dict(zip(("state", "progress", "seconds_left", "open_recounts"), links, strict=True))
    assert text in shown(status_tables(await document_of(state_of(links=fields))))


async def test_repos_that_wait_for_added_collections_are_shown_with_the_time_left() -> None:
    document = await document_of(None, repos(incomplete=1_200, ended=6), (None, repos(incomplete=1_204)))
    assert "1,200 repos wait for added collections; time left: 10 min" in shown(status_tables(document))
    assert "scope backfill      complete" in shown(status_tables(await document_of()))


async def test_lists_of_repos_that_were_not_read_are_no_complete_backfill() -> None:
    text = shown(status_tables(await document_of(None, repos(unlisted=2))))
    assert "scope backfill      the relay's lists of 2 signal collections are not read; the log says why" in text
