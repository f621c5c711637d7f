import re
from itertools import count

import pytest
from rich.progress import Progress

from indexer.cli import output
from indexer.cli.output import progress_line, show_progress


@pytest.fixture
def short_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a line at each update."""
    monkeypatch.setattr(output, "LINE_SECONDS", 0.0)


def test_line_names_count_share_and_time_left() -> None:
    seconds = count(0, 10)
    bar = Progress(disable=True, get_time=lambda: next(seconds))
    task = bar.add_task("repos", total=1_000_000, note="")
    for completed in (10_000, 20_000):
        bar.update(task, completed=completed, note="3 added")
    assert re.fullmatch(
        r"repos: 20,000 of 1,000,000 \(2 %\), 3 added, .+ left",
        progress_line(bar.tasks[0]),
    )


def test_progress_without_a_terminal_is_plain_lines_on_stderr(
    short_interval: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with show_progress("repos", 9) as progress:
        progress.update(7)
    assert capsys.readouterr() == ("", "repos: 7 of 9 (78 %)\n")


def test_short_command_writes_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress("repos", 9) as progress:
        progress.update(9)
    assert capsys.readouterr() == ("", "")
