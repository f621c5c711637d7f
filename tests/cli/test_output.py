import re
from itertools import count

import pytest
from rich.progress import Progress

from indexer.cli import output
from indexer.cli.output import progress_line, rate_text, show_progress
from tests.waiting import until


@pytest.fixture
def short_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a line as often as possible."""
    monkeypatch.setattr(output, "FIRST_LINE_SECONDS", 0.002)
    monkeypatch.setattr(output, "LINE_SECONDS", 0.002)


def test_line_names_count_share_rate_and_time_left() -> None:
    seconds = count(0, 10)
    bar = Progress(disable=True, get_time=lambda: next(seconds))
    task = bar.add_task("repos", total=1_000_000, note="")
    for completed in (10_000, 20_000):
        bar.update(task, completed=completed, note="3 added")
    assert re.fullmatch(
        r"repos: 20,000 of 1,000,000 \(2 %\), 3 added, [\d,]+ per second, .+ elapsed, .+ left",
        progress_line(bar.tasks[0]),
    )
    assert [rate_text(rate) for rate in (0.25, 9.96, 1_234.5)] == ["0.2", "10.0", "1,234"]


async def test_progress_without_a_terminal_is_plain_lines_on_stderr(
    short_interval: None, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = ""

    def is_shown() -> bool:
        nonlocal shown
        written = capsys.readouterr()
        assert written.out == ""
        shown += written.err
        return "repos: 7 of 9 (78 %)" in shown

    with show_progress("repos", 9) as progress:
        progress.update(7)
        await until(is_shown)
    assert "\x1b" not in shown


def test_short_command_writes_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress("repos", 9) as progress:
        progress.update(9)
    assert capsys.readouterr() == ("", "")
