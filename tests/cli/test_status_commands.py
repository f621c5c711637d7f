import asyncio
import json
import os
import signal
import subprocess
import sys
from functools import partial

import asyncpg
import pytest

from indexer.atproto.cid import cid_text
from tests.cli.command_line import PROJECT, Session, error_line
from tests.cli.stored_account import CID, DID, HANDLE, REV

pytestmark = pytest.mark.usefixtures("short_samples")
RECORD = "com.example.note/one"


async def count_repos(address: str) -> object:
    connection = await asyncpg.connect(address)
    try:
        return await connection.fetchval("select count(*) from atproto.repos")
    finally:
        await connection.close()


@pytest.mark.usefixtures("stored_account")
def test_status_is_not_ready_without_a_daemon_although_events_are_recent(session: Session) -> None:
    result = session("status", "--json")
    assert (result.returncode, result.stderr) == (3, "")
    status = json.loads(result.stdout)
    assert status["ready"] is False
    assert status["reasons"] == [{"code": "no-daemon", "message": "no daemon with the role live runs", "value": 256}]
    assert "no daemon with the role live runs" in session("status").stdout
    assert status["repos"]["statuses"] == {"desynchronized": 0, "in-progress": 0, "synchronized": 1}
    (cursor,) = status["cursors"]
    assert (cursor["relay"], cursor["seq"]) == ("wss://one.example", 77)
    assert 0 < cursor["lag_seconds"] < 60
    assert asyncio.run(count_repos(status["database"])) == 1, "the shown address is usable"


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
        assert [json.loads(process.stdout.readline())["ready"] for _ in range(2)] == [False, False]
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130


@pytest.mark.usefixtures("stored_account")
def test_repo_and_record_are_shown_by_did_and_by_handle(session: Session) -> None:
    for account in (DID, f"@{HANDLE.upper()}"):
        result = session("repo", account, "--json")
        assert (result.returncode, result.stderr) == (0, "")
        expected = {"did": DID, "handle": HANDLE, "sync_status": "synchronized", "rev": REV, "records": 1}
        assert json.loads(result.stdout).items() >= (expected | {"visible": True}).items()
    for authority in (DID, HANDLE):
        record = json.loads(session("record", f"at://{authority}/{RECORD}", "--json").stdout)
        assert (record["cid"], record["rev"], record["value"]["text"]) == (cid_text(CID), REV, "\u202eé")
    text = session("record", f"at://{DID}/{RECORD}").stdout
    assert cid_text(CID) in text
    assert '"text": "\\u202eé"' in text  # only the character that could control the terminal is escaped


@pytest.mark.slow
def test_unknown_repo_or_record_has_exit_code_4(session: Session) -> None:
    for arguments in (["repo", DID], ["repo", HANDLE], ["record", f"at://{DID}/{RECORD}"]):
        result = session(*arguments)
        assert result.returncode == 4
        assert "is not in the database" in error_line(result)
