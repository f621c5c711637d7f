import asyncio
import re
import threading
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.progress import Progress

from indexer.cli import progress_bars
from indexer.cli.main import main
from indexer.cli.output import progress_console
from indexer.cli.progress_bars import progress_line, rate_text, show_progress
from tests.cli.audit_world import POST, AuditWorld
from tests.cli.command_line import Session
from tests.waiting import until


@pytest.fixture
def short_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a line as often as possible."""
    monkeypatch.setattr(progress_bars, "FIRST_LINE_SECONDS", 0.002)
    monkeypatch.setattr(progress_bars, "LINE_SECONDS", 0.002)


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

    def written() -> bool:
        nonlocal shown
        output = capsys.readouterr()
        assert output.out == ""
        shown += output.err
        return "repos: 7 of 9 (78 %)" in shown

    with show_progress("repos", 9, progress_console()) as progress:
        progress.update(7)
        await until(written)
    assert "\x1b" not in shown


def test_short_command_writes_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress("repos", 9, progress_console()) as progress:
        progress.update(9)
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
async def test_first_line_without_a_terminal_comes_after_two_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    shown = ""

    def written() -> bool:
        nonlocal shown
        shown += capsys.readouterr().err
        return shown != ""

    with show_progress("repos", 9, progress_console()):
        await until(written)
    assert re.fullmatch(r"repos: 0 of 9 \(0 %\), \d+ s elapsed\n", shown)
    assert progress_bars.FIRST_LINE_SECONDS == 2


class AfterOneLine(threading.Event):
    """An event that is set only after its thread has written a line."""

    def __init__(self) -> None:
        super().__init__()
        self._timed_out = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        if super().wait(timeout):
            return True
        self._timed_out.set()
        return False

    def set(self) -> None:
        assert self._timed_out.wait(60)
        super().set()


@pytest.mark.slow
async def test_every_command_that_may_take_long_shows_progress(
    world: AuditWorld,
    tmp_path: Path,
    short_interval: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    threads = SimpleNamespace(Event=AfterOneLine, Thread=threading.Thread)
    monkeypatch.setattr(progress_bars, "threading", threads)
    ada = world.create_account("ada")
    await world.synchronize()
    monkeypatch.setattr("indexer.monitoring.log.configure_logging", lambda *_: None)
    for name, value in (world.environment() | {"INDEXER_RELAYS": world.network.relay_url}).items():
        monkeypatch.setenv(name, value)
    export, dids = tmp_path / "export.car", tmp_path / "dids"
    export.write_bytes(b"".join(ada.repo.export()))
    dids.write_text(ada.did)
    expected = {
        ("add", "--file", str(dids)): "repos",
        ("audit",): "repos",
        ("backup", str(tmp_path / "dump")): "bytes written",
        ("discover",): "all accounts of http://.*",
        ("doctor",): "checks",
        ("export", "--collection", POST): "records",
        ("inspect", str(export)): "bytes read",
        ("migrate",): "versions of the schema",
        ("resync", "--all"): "repos",
        ("sweep",): "accounts listed by the relay",
    }
    for arguments, counted in expected.items():
        capsys.readouterr()
        code = await asyncio.to_thread(main, arguments)
        shown = capsys.readouterr().err
        assert code == 0 or arguments == ("doctor",), shown
        assert re.search(rf"^{counted}: [\d,]+( of [\d,]+ \(\d+ %\))?, .*elapsed", shown, re.MULTILINE), arguments


@pytest.mark.slow
def test_migration_and_requests_of_all_repos_show_progress(
    session_without_database: Session, empty_database: str, short_interval: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_without_database
    monkeypatch.setenv("INDEXER_DATABASE_URL", empty_database)
    result = session("migrate")
    assert re.search(r"versions of the schema: \d+ of \d+ \(\d+ %\)", result.stderr)
    assert result.stdout.count("\n") == 1
    dids = [f"did:web:{number}.example" for number in range(1_500)]
    session("add", *dids)
    result = session("resync", "--all", "--json")
    assert result.stdout == '{"requested": 1500}\n'
    assert re.search(r"repos: 1,\d+ .*1,\d+ requested", result.stderr)
