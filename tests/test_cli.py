import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import asyncpg
import click
import httpx
import pytest

from indexer import __version__
from indexer.atproto.cid import cid_of, cid_text
from indexer.atproto.crypto import PrivateKey
from indexer.cli import _statuses, commands, main
from indexer.localnet import repo as signed
from indexer.localnet.relay import message_frame
from indexer.localnet.repo import Write
from indexer.reasons import Desync, Rejection
from indexer.store import Counts, Store
from indexer.sync.identity import HandleCheck, HandleClaim, StoredIdentity
from indexer.sync.plan import Batch, Cursor, DeadLetter, RecordChange, RepoWrite
from indexer.sync.repo import Head, Repo, SyncStatus
from indexer.sync.shard import Shard

ROOT = Path(__file__).parents[1]
DID = "did:plc:" + "a" * 24
KEY = PrivateKey.from_seed("k256", b"cli")
HANDLE = "someone.example"
REV = "3jzfcijpj2z2b"
NOTE = b"\xa1\x65$type\x70com.example.note"
CID = cid_of(NOTE)


def indexer(*arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """The program as a user runs it."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("INDEXER_")}
    return subprocess.run(
        [sys.executable, "-m", "indexer", *arguments],
        cwd=ROOT,
        env=inherited | environment,
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def complaint(result: subprocess.CompletedProcess[str]) -> str:
    """The one line on stderr, with nothing on stdout."""
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("indexer: ")
    return line.removeprefix("indexer: ")


@pytest.fixture
def export(tmp_path: Path) -> Path:
    repo = signed.Repo(DID, KEY, "3jzfcijpj2z2a")
    repo.write([Write.create("com.example.note/one", NOTE)], KEY, "3jzfcijpj2z2b")
    file = tmp_path / "repo.car"
    file.write_bytes(b"".join(repo.export()))
    return file


def test_the_program_and_every_command_have_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--help"]) == 0
    page = capsys.readouterr().out
    for name, command in commands.commands.items():
        assert name in page
        assert isinstance(command, click.Command)
        for words in ([name], *([name, inner] for inner in getattr(command, "commands", ()))):
            assert main([*words, "--help"]) == 0
            assert "--config" in capsys.readouterr().out


def test_the_version() -> None:
    result = indexer("--version")
    assert (result.returncode, result.stdout) == (0, f"indexer, version {__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "Missing command; see indexer --help"),
        (["fly"], "No such command 'fly'; see indexer --help"),
        (["run", "--fast"], "No such option '--fast'; see indexer run --help"),
        (["run", "now"], "Got unexpected extra argument (now); see indexer run --help"),
        (["inspect"], "Missing argument 'FILE.car'; see indexer inspect --help"),
        (["demo", "--seconds", "many"], "Invalid value for '--seconds': 'many' is not a valid float range; see"),
    ],
)
def test_a_bad_argument_costs_one_line(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.startswith(f"indexer: {expected}")
    assert written.err.count("\n") == 1


@pytest.mark.slow
def test_bad_settings_stop_every_command_with_one_line(export: Path, tmp_path: Path) -> None:
    result = indexer("inspect", str(export), INDEXER_RESYNC_WORKERS="many")
    assert result.returncode == 2
    assert (
        complaint(result) == "INDEXER_RESYNC_WORKERS: 'many' is not allowed; it must be a whole number from 1 to 1000"
    )
    (tmp_path / "bad.toml").write_text("shard = '9/4'")
    for arguments in (["--config", f"{tmp_path}/bad.toml", "run"], ["run", "--config", f"{tmp_path}/bad.toml"]):
        result = indexer(*arguments)
        assert result.returncode == 2
        assert complaint(result).startswith(f"'shard' in {tmp_path}/bad.toml: '9/4' is not allowed")


@pytest.mark.slow
def test_what_others_chose_cannot_forge_lines(tmp_path: Path) -> None:
    result = indexer("inspect", str(tmp_path / "a\n\x1b[2Jb.car"))
    assert result.returncode == 2
    assert complaint(result).isprintable()


@pytest.mark.slow
def test_inspect_lists_a_valid_export(export: Path) -> None:
    result = indexer("inspect", str(export), "--key", KEY.public.did_key())
    assert (result.returncode, result.stderr) == (0, "")
    head, _, listing = result.stdout.partition("\n\n")
    assert f"did        {DID}\n" in head
    assert head.endswith("signature  valid")
    assert listing == f"{cid_text(cid_of(NOTE))} com.example.note/one\n"


@pytest.mark.slow
def test_inspect_says_that_it_did_not_check_a_signature(export: Path) -> None:
    assert "signature  not checked" in indexer("inspect", str(export)).stdout


@pytest.mark.slow
def test_inspect_refuses_an_invalid_export_with_the_reason(export: Path) -> None:
    export.write_bytes(export.read_bytes()[:-1])
    result = indexer("inspect", str(export))
    assert result.returncode == 1
    assert complaint(result) == f"{export} is invalid: export-incomplete: cut inside a block"
    other = PrivateKey.from_seed("p256", b"other").public.did_key()
    export.write_bytes(b"")
    assert indexer("inspect", str(export), "--key", other).returncode == 1


@pytest.mark.slow
def test_inspect_tells_a_key_of_another_account(export: Path) -> None:
    other = PrivateKey.from_seed("p256", b"other").public.did_key()
    result = indexer("inspect", str(export), "--key", other)
    assert result.returncode == 1
    assert complaint(result) == f"{export} is invalid: signature-invalid"


@pytest.mark.slow
def test_inspect_refuses_what_is_no_key(export: Path) -> None:
    result = indexer("inspect", str(export), "--key", "did:key:nonsense")
    assert result.returncode == 2
    assert complaint(result).startswith("Invalid value for '--key': ")


@pytest.mark.slow
def test_a_reader_that_has_had_enough_is_no_error(export: Path) -> None:
    repo = signed.Repo(DID, KEY, "3jzfcijpj2z2a")
    repo.write([Write.create(f"com.example.note/{n}", NOTE) for n in range(3_000)], KEY, "3jzfcijpj2z2b")
    export.write_bytes(b"".join(repo.export()))
    process = subprocess.Popen(
        [sys.executable, "-m", "indexer", "inspect", str(export)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(30) == 1
        assert process.stderr.read() == b""


class Session:
    """Commands on one database, in this process but for logging, which is a process's own."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        self._capsys.readouterr()
        code = main(arguments)
        written = self._capsys.readouterr()
        return subprocess.CompletedProcess(arguments, code, written.out, written.err)


@pytest.fixture
def session(database: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Session:
    for name in os.environ:
        if name.startswith("INDEXER_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("INDEXER_DATABASE_URL", database)
    monkeypatch.setattr("indexer.cli.configure_logging", lambda *_: None)
    return Session(capsys)


@pytest.fixture
async def known(database: str) -> None:
    """An account with one record, read from a relay just now."""
    now = datetime.now(UTC)
    record = RecordChange(
        "create", "com.example.note", "one", REV, CID, '{"$type": "com.example.note", "text": "\u202eé"}'
    )
    repo = Repo(DID, 1, SyncStatus.SYNCHRONIZED, None, Head(REV, CID, CID), active=True)
    store = await Store.open(database, connections=1)
    try:
        cursor = Cursor("wss://one.example", "0/1", 77, (now - timedelta(seconds=5)).isoformat())
        await store.apply(Batch((RepoWrite(0, repo, (record,)),), cursor=cursor))
        await store.save([StoredIdentity(DID, HANDLE, "https://pds.example", None, now.timestamp())])
        await store.save_check(HandleCheck(HandleClaim(DID, HANDLE, None, 0), HANDLE, 0, now.timestamp()))
    finally:
        await store.close()


@pytest.mark.slow
def test_migrate_brings_the_schema_to_head_and_other_commands_want_it(empty_database: str) -> None:
    session = partial(indexer, INDEXER_DATABASE_URL=empty_database)
    result = session("repo", DID)
    assert result.returncode == 2
    assert complaint(result).endswith("run `indexer migrate`")
    assert session("status").returncode == 3
    for _ in range(2):
        assert session("migrate").returncode == 0
    assert session("repo", DID).returncode == 4


@pytest.mark.slow
def test_a_database_that_cannot_be_had_costs_one_line() -> None:
    result = indexer("status", INDEXER_DATABASE_URL="postgresql://me:hunter2@127.0.0.1:1/none")
    assert result.returncode == 1
    assert complaint(result).startswith("unreachable: ")
    assert "hunter2" not in result.stderr


@pytest.mark.usefixtures("known")
def test_status_is_ready_while_events_are_fresh(session: Session) -> None:
    result = session("status", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    status = json.loads(result.stdout)
    assert status["ready"] is True
    assert status["repos"] == {"desynchronized": 0, "in-progress": 0, "synchronized": 1}
    (cursor,) = status["cursors"]
    assert (cursor["relay"], cursor["seq"]) == ("wss://one.example", 77)
    assert 0 < cursor["lag_seconds"] < 60
    assert "ready" in session("status").stdout


@pytest.mark.usefixtures("known")
def test_status_says_what_to_connect_with(session: Session) -> None:
    async def count(address: str) -> int:
        connection = await asyncpg.connect(address)
        try:
            repos: int = await connection.fetchval("select count(*) from atproto.repos")
        finally:
            await connection.close()
        return repos

    assert asyncio.run(count(json.loads(session("status", "--json").stdout)["database"])) == 1


async def test_what_to_connect_with_has_no_password(database: str) -> None:
    store = await Store.open(f"{database}&user=postgres&password=hunter2")
    await store.close()
    assert "user=postgres" in store.address
    assert "hunter2" not in store.address
    other = Store(store._pool, 1, "postgresql://me:hunter2@db.example:5433/indexer?sslmode=require")
    assert other.address == "postgresql://me@db.example:5433/indexer?sslmode=require"


def test_status_is_not_ready_without_events(session: Session) -> None:
    result = session("status", "--json")
    assert result.returncode == 3
    assert json.loads(result.stdout)["not_ready"] == "no event has been saved yet"


class Backlog:
    """A store on whose queue work goes on by fits and starts; each look at it is a second after the one before."""

    address = "postgresql:///any"

    def __init__(self, ended: Mapping[int, int]) -> None:
        self._ended = ended  # in each second, how many
        self.now = 0

    async def counts(self, since: float = inf) -> Counts:
        ended = sum(count for second, count in self._ended.items() if since <= second < self.now)
        cursor = Cursor("wss://one.example", "0/1", 1_000 * self.now, None)
        self.now += 1
        return Counts(dict.fromkeys(SyncStatus, 0), {}, 600, 0, 0, [cursor], ended=ended)


async def test_rates_are_those_of_the_last_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ones are of a second, as those are that `status` shows once."""
    backlog = Backlog({0: 6, 30: 60})
    monkeypatch.setattr("indexer.cli.time", lambda: float(backlog.now))
    monkeypatch.setattr("indexer.cli.SAMPLE_SECONDS", 0.0)
    store: Any = backlog
    statuses = _statuses(store, Shard())
    shown = {second: await anext(statuses) for second in range(1, 100)}
    rates = {second: status.resyncs_per_second for second, status in shown.items()}
    assert [rates[second] for second in (1, 2, 30, 31, 60, 61, 90, 91)] == pytest.approx(
        [6, 3, 6 / 30, 66 / 31, 66 / 60, 60 / 60, 60 / 60, 0]
    )
    assert [shown[second].seconds_left for second in (2, 61, 90, 91)] == pytest.approx([200, 600, 600, None])
    assert {status.events_per_second for status in shown.values()} == {1_000}


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.usefixtures("known")
def test_status_is_watched_until_interrupted(database: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "indexer", "status", "--watch", "--json"],
        cwd=ROOT,
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


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("account", [DID, HANDLE, f"@{HANDLE.upper()}"])
def test_repo_tells_all_that_is_known(account: str, session: Session) -> None:
    result = session("repo", account, "--json")
    assert (result.returncode, result.stderr) == (0, "")
    report = json.loads(result.stdout)
    expected = {"did": DID, "handle": HANDLE, "sync_status": "synchronized", "rev": REV, "records": 1, "visible": True}
    assert report.items() >= expected.items()


def test_repo_says_the_reason_of_a_state_in_a_sentence(session: Session) -> None:
    assert session("add", DID).returncode == 0
    assert Desync.NEW.text in session("repo", DID).stdout


def test_unknown_repos_and_records(session: Session) -> None:
    for arguments in (["repo", DID], ["repo", HANDLE], ["record", f"at://{DID}/com.example.note/one"]):
        result = session(*arguments)
        assert result.returncode == 4
        assert "is not known here" in complaint(result)


@pytest.mark.parametrize(
    "arguments",
    [
        ["repo", "neither nor"],
        ["record", "https://example.com"],
        ["record", f"at://{DID}"],
        ["record", f"at://{DID}/com.example.note/.."],
        ["add"],
        ["add", DID, "--file", __file__],
        ["add", DID, "-"],
        ["add", "someone.example"],
        ["resync"],
        ["resync", DID, "--all"],
        ["resync", "someone.example"],
        ["rejected", "list", "--reason", "nonsense"],
        ["rejected", "--did", "someone.example"],
        ["rejected", "--limit", "0"],
        ["rejected", "lost"],
        ["rejected", "show"],
        ["rejected", "show", "one"],
        ["rejected", "show", str(2**63)],
        ["rejected", "replay"],
        ["rejected", "replay", "1", "--reason", "future-rev"],
    ],
)
def test_bad_arguments_of_commands_on_the_database(arguments: list[str], session: Session) -> None:
    result = session(*arguments)
    assert result.returncode == 2
    complaint(result)


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("authority", [DID, HANDLE])
def test_record_shows_cid_value_and_rev(authority: str, session: Session) -> None:
    uri = f"at://{authority}/com.example.note/one"
    result = session("record", uri, "--json")
    assert (result.returncode, result.stderr) == (0, "")
    record = json.loads(result.stdout)
    assert (record["cid"], record["rev"], record["value"]["text"]) == (cid_text(CID), REV, "\u202eé")
    shown = session("record", uri).stdout
    assert cid_text(CID) in shown
    assert '"text": "\\u202eé"' in shown  # as it is, but for what could steer a terminal


def test_add_takes_dids_from_everywhere_once(session: Session, tmp_path: Path) -> None:
    first, second, third = (f"did:web:{name}.example" for name in ("one", "two", "three"))
    assert session("add", first, second).stdout == "2 added, 0 known before\n"
    (tmp_path / "dids").write_text(f"# ours\n{second}\n\n  {third}\r\n")
    assert session("add", "--file", str(tmp_path / "dids")).stdout == "1 added, 1 known before\n"
    assert json.loads(session("repo", third, "--json").stdout)["sync_status"] == "desynchronized"
    from_stdin = partial(indexer, "add", "-", INDEXER_DATABASE_URL=os.environ["INDEXER_DATABASE_URL"])
    assert from_stdin(stdin=f"{first}\n{third}").stdout == "0 added, 2 known before\n"
    result = from_stdin(stdin=f"{first}\nnobody\n")
    assert result.returncode == 2
    assert "'nobody' on line 2 of <stdin> is not a DID" in complaint(result)


@pytest.mark.usefixtures("known")
def test_a_takedown_hides_and_its_reverse_shows(session: Session) -> None:
    assert session("takedown", DID).stdout == f"{DID} is hidden\n"
    assert json.loads(session("repo", DID, "--json").stdout)["visible"] is False
    assert session("takedown", DID, "--reverse").stdout == f"{DID} is shown again\n"
    assert json.loads(session("repo", DID, "--json").stdout)["visible"] is True
    result = session("takedown", "did:web:nobody.example")
    assert (result.returncode, result.stderr) == (4, "indexer: did:web:nobody.example is not known here\n")


@pytest.mark.usefixtures("known")
def test_resync_marks(session: Session) -> None:
    assert session("resync", "--errored").stdout == "0 marked\n"
    assert session("resync", DID).stdout == "1 marked\n"
    report = json.loads(session("repo", DID, "--json").stdout)
    assert (report["sync_status"], report["sync_reason"]) == ("desynchronized", "requested")
    assert session("resync", "--all").stdout == "1 marked\n"
    result = session("resync", DID, "did:web:nobody.example")
    assert (result.returncode, result.stdout) == (4, "1 marked\n")
    assert result.stderr == "indexer: 1 of them are not known here\n"


@pytest.fixture
async def letters(database: str) -> None:
    """Three messages that were refused, the second as nasty as can be."""
    payload = {"did": DID, "seq": 8, "time": "now", "blocks": bytes(60), "rev": "x" * 400, "commit": CID}
    nasty = DeadLetter(
        "wss://one.example", None, "did:\x1b[2J", "\u202e", Rejection.FRAME_MALFORMED, "\x1b]0;\n", b"\xff\x1b"
    )
    sound = message_frame("#sync", payload | {"text": "\x1b[2J\u202e"})
    store = await Store.open(database, connections=1)
    try:
        for letter in (
            DeadLetter("wss://one.example", 7, DID, "commit", Rejection.FUTURE_REV, REV, sound),
            nasty,
            DeadLetter("wss://two.example", 8, None, "", Rejection.FRAME_TOO_LARGE, "", b""),
        ):
            await store.apply(Batch(dead_letters=(letter,)))
    finally:
        await store.close()


@pytest.mark.usefixtures("letters")
def test_rejected_lists_the_newest_first(session: Session) -> None:
    result = session("rejected", "list", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    listed = [json.loads(line) for line in result.stdout.splitlines()]
    assert [letter["id"] for letter in listed] == [3, 2, 1]
    expected = {
        "relay": "wss://one.example",
        "seq": 7,
        "did": DID,
        "kind": "commit",
        "reason": "future-rev",
        "detail": REV,
    }
    assert listed[-1].items() >= {**expected, "meaning": Rejection.FUTURE_REV.text, "whole": True}.items()
    assert listed[0]["whole"] is False
    assert session("rejected", "--json").stdout == result.stdout
    assert len(session("rejected", "list", "--limit", "2").stdout.splitlines()) == 5
    shown = session("rejected", "--reason", "future-rev").stdout
    assert f"  wss://one.example  7  {DID}  commit\n" in shown
    assert f"    future-rev: {Rejection.FUTURE_REV.text}\n    {REV}\n" in shown
    assert session("rejected", "list", "--did", DID).stdout == shown


def test_rejected_says_that_there_is_nothing(session: Session) -> None:
    for arguments in ([], ["list", "--did", DID], ["--reason", "future-rev", "--json"]):
        result = session("rejected", *arguments)
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "No such message is kept.\n")
    assert session("rejected", "replay", "--reason", "future-rev").returncode == 0


def test_rejected_names_the_reasons_that_there_are(session: Session) -> None:
    assert ", ".join(Rejection) in complaint(session("rejected", "--reason", "future"))


@pytest.mark.usefixtures("letters")
def test_rejected_shows_a_message_by_field(session: Session) -> None:
    result = session("rejected", "show", "1", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    report = json.loads(result.stdout)
    assert report.items() >= {"id": 1, "seq": 7, "detail": REV, "header": {"op": 1, "t": "#sync"}}.items()
    assert report["payload"]["commit"] == {"$link": cid_text(CID)}
    assert report["payload"]["blocks"] == f"60 bytes: {'00' * 32}…"
    assert report["payload"]["rev"] == "x" * 300 + "…"
    shown = session("rejected", "show", "1").stdout
    assert f"future-rev: {Rejection.FUTURE_REV.text}" in shown
    assert f'"$link": "{cid_text(CID)}"' in shown
    assert '"text": "\\u001b[2J\\u202e"' in shown
    assert session("rejected", "show", "3").stdout.count("0 bytes kept of more") == 1


@pytest.mark.usefixtures("letters")
def test_what_was_refused_cannot_steer_a_terminal(session: Session) -> None:
    for arguments in (["list"], ["show", "2"], ["show", "1"]):
        assert "".join(session("rejected", *arguments).stdout.split("\n")).isprintable()
    assert "bytes that are not CBOR" in session("rejected", "show", "2").stdout


@pytest.mark.usefixtures("letters")
def test_rejected_gives_the_bytes(session: Session, tmp_path: Path) -> None:
    result = session("rejected", "show", "2", "--frame", str(tmp_path / "frame"))
    assert (result.returncode, result.stdout, (tmp_path / "frame").read_bytes()) == (0, "", b"\xff\x1b")
    result = session("rejected", "show", "9", "--frame", str(tmp_path / "none"))
    assert (result.returncode, complaint(result)) == (4, "9 is not known here")
    assert not (tmp_path / "none").exists()


@pytest.mark.usefixtures("letters")
def test_replays_tell_of_each(session: Session) -> None:
    result = session("rejected", "replay", "3", "2", "3")
    sentence = Rejection.FRAME_MALFORMED.text
    refused, untried = result.stdout.splitlines()
    assert (result.returncode, result.stderr) == (1, "indexer: 2 of them stay\n")
    assert refused.startswith(f"2  rejected  frame-malformed: {sentence}  ")
    assert untried.startswith("3  untried  the frame is not kept whole")
    result = session("rejected", "replay", "2", "9")
    assert (result.returncode, result.stderr) == (4, "indexer: 1 of them are not known here\n")
    assert result.stdout.splitlines()[1] == "9  unknown"
    result = session("rejected", "replay", "--reason", "future-rev")
    assert (result.returncode, result.stderr) == (1, "indexer: 1 of them stay\n")
    assert result.stdout.endswith("(before: future-rev)\n")
    assert json.loads(session("rejected", "show", "1", "--json").stdout)["reason"] == "field-invalid"


@pytest.mark.slow
@pytest.mark.slow
def test_the_daemon_serves_its_health_and_ends_cleanly_on_a_signal(database: str, tmp_path: Path) -> None:
    settings = {
        "INDEXER_DATABASE_URL": database,
        "INDEXER_DATA_DIR": str(tmp_path),
        "INDEXER_RELAYS": "ws://127.0.0.1:9",  # nobody listens there
        "INDEXER_ALLOW_PRIVATE_HOSTS": "true",
        "INDEXER_HTTP_BIND": "127.0.0.1:0",
        "INDEXER_LOG_FORMAT": "json",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "indexer", "run"],
        cwd=ROOT,
        env=os.environ | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        health = next(line["health"] for line in map(json.loads, process.stderr) if line["event"] == "daemon.started")
        assert httpx.get(f"{health}/healthz").status_code == 200
        ready = httpx.get(f"{health}/readyz")
        assert (ready.status_code, "relay" in ready.json()["reason"]) == (503, True)
        assert "indexer_repos{" in httpx.get(f"{health}/metrics").text
        process.send_signal(signal.SIGTERM)
        *_, last = map(json.loads, process.stderr)
        assert process.wait(30) == 0
        assert last["event"] == "daemon.stopped"
        assert process.stdout.read() == ""
