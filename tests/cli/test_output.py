import re

import pytest

from indexer.cli import output
from indexer.cli.output import CommandProgress


def test_a_short_command_without_a_terminal_writes_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with CommandProgress("repos", 9) as progress:
        progress.show(9)
    assert capsys.readouterr() == ("", "")


def test_progress_without_a_terminal_is_plain_lines_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "LINE_SECONDS", 0.0)
    with CommandProgress("repos", 1_000_000) as progress:
        for completed in (10_000, 20_000, 30_000):
            progress.show(completed, note="3 added")
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"repos: 30,000 of 1,000,000 \(3 %\), 3 added, .+ left", err.splitlines()[-1])


def test_progress_to_an_unknown_total_is_a_count(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "LINE_SECONDS", 0.0)
    with CommandProgress("records", None) as progress:
        progress.show(7)
    assert capsys.readouterr().err == "records: 7\n"
