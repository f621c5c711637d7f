import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from math import inf
from typing import Any

import asyncpg
import pytest

from indexer.atproto.cid import cid_text
from indexer.cli.status_commands import sample_statuses
from indexer.reasons import Desync
from indexer.store import Counts, Store
from indexer.store.database_errors import without_password
from indexer.sync.plans import Cursor
from indexer.sync.repo_state import SyncStatus
from indexer.sync.shard import Shard
from tests.cli.command_line import PROJECT, Session, error_line
from tests.cli.stored_account import CID, DID, HANDLE, REV


@pytest.fixture(autouse=True)
def short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("indexer.cli.status_commands.SAMPLE_SECONDS", 0.01)


@pytest.mark.usefixtures("stored_account")
def test_status_is_ready_while_events_are_recent(session: Session) -> None:
    result = session("status", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    status = json.loads(result.stdout)
    assert status["ready"] is True
    assert status["repos"] == {"desynchronized": 0, "in-progress": 0, "synchronized": 1}
    (cursor,) = status["cursors"]
    assert (cursor["relay"], cursor["seq"]) == ("wss://one.example", 77)
    assert 0 < cursor["lag_seconds"] < 60
    assert "ready" in session("status").stdout


def test_status_is_not_ready_without_events(session: Session) -> None:
    result = session("status", "--json")
    assert result.returncode == 3
    status = json.loads(result.stdout)
    assert status["not_ready"] == "no event is stored yet"
    reason = {"code": "nothing-stored", "message": "no event is stored yet", "value": 256}
    assert status["not_ready_reasons"] == [reason]


@pytest.mark.usefixtures("stored_account")
def test_status_shows_the_address_of_the_database(session: Session) -> None:
    async def count_repos(address: str) -> int:
        connection = await asyncpg.connect(address)
        try:
            repos: int = await connection.fetchval("select count(*) from atproto.repos")
        finally:
            await connection.close()
        return repos

    assert asyncio.run(count_repos(json.loads(session("status", "--json").stdout)["database"])) == 1


async def test_address_of_the_database_has_no_password(database: str) -> None:
    store = await Store.open(f"{database}&user=postgres&password=hunter2")
    await store.close()
    assert "user=postgres" in store.address
    assert "hunter2" not in store.address
    dsn = "postgresql://me:hunter2@db.example:5433/indexer?sslmode=require"
    assert without_password(dsn) == "postgresql://me@db.example:5433/indexer?sslmode=require"


class FakeStore:
    """A store with a resync queue. Each call of `counts` happens one second after the previous one."""

    address = "postgresql:///any"

    def __init__(self, ended_by_second: Mapping[int, int]) -> None:
        self._ended_by_second = ended_by_second
        self.now = 0

    async def counts(self, since: float = inf) -> Counts:
        ended = sum(count for second, count in self._ended_by_second.items() if since <= second < self.now)
        cursor = Cursor("wss://one.example", "0/1", 1_000 * self.now, None)
        self.now += 1
        return Counts(dict.fromkeys(SyncStatus, 0), {}, 600, 0, 0, [cursor], ended=ended)


async def test_rates_are_averages_over_the_last_minute() -> None:
    fake = FakeStore({0: 6, 30: 60})
    store: Any = fake
    statuses = sample_statuses(store, Shard(), interval=0.0, clock=lambda: float(fake.now))
    by_second = {second: await anext(statuses) for second in range(1, 100)}
    rates = {second: status.resyncs_per_second for second, status in by_second.items()}
    assert [rates[second] for second in (1, 2, 30, 31, 60, 61, 90, 91)] == pytest.approx(
        [6, 3, 6 / 30, 66 / 31, 66 / 60, 60 / 60, 60 / 60, 0]
    )
    assert [by_second[second].seconds_left for second in (2, 61, 90, 91)] == pytest.approx([200, 600, 600, None])
    assert {status.events_per_second for status in by_second.values()} == {1_000}


@pytest.mark.slow
@pytest.mark.usefixtures("stored_account")
def test_watched_status_is_printed_until_interrupted(database: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "indexer", "status", "--watch", "--json"],
        cwd=PROJECT,
        env=os.environ | {"INDEXER_DATABASE_URL": database},
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - ignored in the background
    )
    with process:
        assert process.stdout is not None
        assert [json.loads(process.stdout.readline())["ready"] for _ in range(2)] == [True, True]
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130


@pytest.mark.usefixtures("stored_account")
@pytest.mark.parametrize("account", [DID, HANDLE, f"@{HANDLE.upper()}"])
def test_repo_is_shown_by_did_and_by_handle(account: str, session: Session) -> None:
    result = session("repo", account, "--json")
    assert (result.returncode, result.stderr) == (0, "")
    report = json.loads(result.stdout)
    expected = {"did": DID, "handle": HANDLE, "sync_status": "synchronized", "rev": REV, "records": 1, "visible": True}
    assert report.items() >= expected.items()


def test_repo_shows_the_sentence_of_the_reason(session: Session) -> None:
    assert session("add", DID).returncode == 0
    assert Desync.NEW.text in session("repo", DID).stdout


@pytest.mark.parametrize("arguments", [["repo", DID], ["repo", HANDLE], ["record", f"at://{DID}/com.example.note/one"]])
def test_unknown_repo_or_record_has_exit_code_4(arguments: list[str], session: Session) -> None:
    result = session(*arguments)
    assert result.returncode == 4
    assert "is not in the database" in error_line(result)


@pytest.mark.usefixtures("stored_account")
@pytest.mark.parametrize("authority", [DID, HANDLE])
def test_record_is_shown_with_cid_value_and_rev(authority: str, session: Session) -> None:
    uri = f"at://{authority}/com.example.note/one"
    result = session("record", uri, "--json")
    assert (result.returncode, result.stderr) == (0, "")
    record = json.loads(result.stdout)
    assert (record["cid"], record["rev"], record["value"]["text"]) == (cid_text(CID), REV, "\u202eé")
    text = session("record", uri).stdout
    assert cid_text(CID) in text
    assert '"text": "\\u202eé"' in text  # only the character that could control the terminal is escaped


@pytest.mark.parametrize(
    "arguments",
    [
        ["repo", "neither nor"],
        ["record", "https://example.com"],
        ["record", f"at://{DID}"],
        ["record", f"at://{DID}/com.example.note/.."],
    ],
)
def test_bad_argument_has_exit_code_2(arguments: list[str], session_without_database: Session) -> None:
    result = session_without_database(*arguments)
    assert result.returncode == 2
    error_line(result)
