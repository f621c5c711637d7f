import pytest

from indexer.cli.output import CommandProgress


def test_command_without_a_terminal_writes_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with CommandProgress("repos", 9) as progress:
        progress.show(9)
    assert capsys.readouterr() == ("", "")
