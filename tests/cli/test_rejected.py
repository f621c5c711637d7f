import json
from pathlib import Path

import pytest

from indexer.atproto.cid import cid_text
from indexer.db import Database
from indexer.db.tap_feed import DeliveryProgress, SetAside, SetAsideChanges
from indexer.demo.local_relay import message_frame
from indexer.reasons import Rejection
from indexer.sync.batch import DEAD_LETTER_BYTES
from indexer.sync.changes import Batch, DeadLetter
from tests.cli.command_line import Session, error_line
from tests.cli.stored_account import CID, DID, REV

pytestmark = pytest.mark.slow


@pytest.fixture
async def dead_letters(database: str) -> None:
    """Store three rejected messages. The second one contains control characters everywhere."""
    payload = {"did": DID, "seq": 8, "time": "now", "blocks": bytes(60), "rev": "x" * 400, "commit": CID}
    hostile = DeadLetter(
        "wss://one.example", None, "did:\x1b[2J", "\u202e", Rejection.FRAME_MALFORMED, "\x1b]0;\n", b"\xff\x1b"
    )
    frame = message_frame("#sync", payload | {"text": "\x1b[2J\u202e"})
    db = await Database.open(database, connections=1)
    try:
        for dead_letter in (
            DeadLetter("wss://one.example", 7, DID, "commit", Rejection.FUTURE_REV, REV, frame),
            hostile,
            DeadLetter("wss://two.example", 8, None, "", Rejection.FRAME_TOO_LARGE, "", bytes(DEAD_LETTER_BYTES)),
        ):
            await db.write(Batch(dead_letters=(dead_letter,)))
    finally:
        await db.close()


@pytest.mark.usefixtures("dead_letters")
def test_list_shows_the_newest_dead_letter_first(session: Session) -> None:
    result = session("rejected", "list", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    listed = [json.loads(line) for line in result.stdout.splitlines()]
    assert [dead_letter["id"] for dead_letter in listed] == [3, 2, 1]
    expected = {"relay": "wss://one.example", "seq": 7, "did": DID, "kind": "commit", "reason": "future-rev"}
    assert listed[-1].items() >= {**expected, "detail": REV, "complete": True}.items()
    assert listed[0]["complete"] is False
    assert session("rejected", "--json").stdout == result.stdout
    assert len(session("rejected", "list", "--limit", "2").stdout.splitlines()) == 5
    by_reason = session("rejected", "--reason", "future-rev").stdout
    assert f"  wss://one.example  7  {DID}  commit\n" in by_reason
    assert f"    future-rev: {Rejection.FUTURE_REV.text}\n    {REV}\n" in by_reason
    assert session("rejected", "list", "--did", DID).stdout == by_reason


async def test_events_that_clients_of_the_feed_refused_are_listed_and_sent_again(
    database: str, session: Session
) -> None:
    event = SetAside("refused", DID, "app.test", "one", REV, "create", 12, 1_700_000_000.0, "status \x1b422")
    db = await Database.open(database, connections=2)
    async with db.feed.session() as feed:
        await feed.begin()
        await feed.save(DeliveryProgress(7, 7), set_aside=SetAsideChanges([event]))
        listed = await session.run("rejected", "list", "--feed")
        assert f"  create  at://{DID}/app.test/one\n    sent 12 times: 'status \\x1b422'\n" in listed.stdout
        [line] = (await session.run("rejected", "--feed", "--json")).stdout.splitlines()
        assert json.loads(line)["uri"] == f"at://{DID}/app.test/one"
        other = ("--did", "did:plc:" + "z" * 24)
        nothing = await session.run("rejected", "list", "--feed", *other)
        assert (nothing.stdout, nothing.stderr) == ("", "No matching event.\n")
        for arguments, count in ((other, 0), ((), 1)):
            result = await session.run("rejected", "replay", "--feed", *arguments)
            assert (result.returncode, result.stdout) == (0, f"Events that are sent again: {count}\n")
            assert len(await feed.due(10)) == count
    await db.close()
    for wrong in (("replay", "7", "--feed"), ("replay", "--did", DID), ("list", "--feed", "--reason", "future-rev")):
        assert (await session.run("rejected", *wrong)).returncode == 2


def test_empty_list_is_reported(session: Session) -> None:
    for arguments in ([], ["list", "--did", DID], ["--reason", "future-rev", "--json"]):
        result = session("rejected", *arguments)
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "No matching dead letter.\n")
    assert session("rejected", "replay", "--reason", "future-rev").returncode == 0


@pytest.mark.usefixtures("dead_letters")
def test_show_prints_the_fields_of_the_message(session: Session) -> None:
    result = session("rejected", "show", "1", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    report = json.loads(result.stdout)
    assert report.items() >= {"id": 1, "seq": 7, "detail": REV, "header": {"op": 1, "t": "#sync"}}.items()
    assert report["payload"]["commit"] == {"$link": cid_text(CID)}
    assert report["payload"]["blocks"] == f"60 bytes: {'00' * 32}…"
    assert report["payload"]["rev"] == "x" * 300 + "…"
    text = session("rejected", "show", "1").stdout
    assert f"future-rev: {Rejection.FUTURE_REV.text}" in text
    assert f'"$link": "{cid_text(CID)}"' in text
    assert '"text": "\\u001b[2J\\u202e"' in text
    assert session("rejected", "show", "3").stdout.count(" bytes stored of a longer frame") == 1


@pytest.mark.usefixtures("dead_letters")
def test_control_characters_of_messages_are_escaped(session: Session) -> None:
    for arguments in (["list"], ["show", "2"], ["show", "1"]):
        assert "".join(session("rejected", *arguments).stdout.split("\n")).isprintable()
    assert "The message cannot be decoded: " in session("rejected", "show", "2").stdout


@pytest.mark.usefixtures("dead_letters")
def test_show_writes_the_bytes_of_the_message_to_a_file(session: Session, tmp_path: Path) -> None:
    result = session("rejected", "show", "2", "--frame", str(tmp_path / "frame"))
    assert (result.returncode, result.stdout, (tmp_path / "frame").read_bytes()) == (0, "", b"\xff\x1b")
    result = session("rejected", "show", "9", "--frame", str(tmp_path / "none"))
    assert (result.returncode, error_line(result)) == (4, "There is no dead letter 9.")
    assert not (tmp_path / "none").exists()


@pytest.mark.usefixtures("dead_letters")
def test_replay_reports_each_outcome_and_the_rest_that_remains(session: Session) -> None:
    result = session("rejected", "replay", "3", "2", "3")
    sentence = Rejection.FRAME_MALFORMED.text
    rejected, untried = result.stdout.splitlines()
    assert (result.returncode, result.stderr) == (1, "indexer: dead letters that remain: 2\n")
    assert rejected.startswith(f"2  rejected  frame-malformed: {sentence}  ")
    assert untried.startswith("3  untried  the stored frame is incomplete")
    result = session("rejected", "replay", "2", "9")
    assert (result.returncode, result.stderr) == (4, "indexer: IDs that do not exist: 1\n")
    assert result.stdout.splitlines()[1] == "9  unknown"
    result = session("rejected", "replay", "--reason", "future-rev")
    assert (result.returncode, result.stderr) == (1, "indexer: dead letters that remain: 1\n")
    assert result.stdout.endswith("(before: future-rev)\n")
    assert json.loads(session("rejected", "show", "1", "--json").stdout)["reason"] == "field-invalid"
